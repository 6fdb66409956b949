"""Start bash so that a script computes and has no other effect: the kernel refuses or feigns what would have one.

    open a file        nothing is opened; the result is descriptor 0, /dev/null: redirections go nowhere
    look for a file    there is none: `[ -f x ]` is false, and no PATH leads to a program
    change the folder  succeeds and does nothing
    run a program, connect, signal, change files, leave the process group     refused

The seccomp filter holds for every process of the script, and no process can lift it. The C library's own files are opened
with O_CLOEXEC, which bash never uses for a redirection; they are opened for reading only. bash itself starts with `execveat`,
which bash cannot call.
"""

import contextlib
import ctypes
import os
import platform
import resource
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from errno import EACCES, ENOENT
from typing import Final

from megatrain.config import InputError


@dataclass(frozen=True)
class _Calls:
    """Numbers of the system calls of an architecture."""

    audit_arch: int
    close: int
    open: Mapping[int, int]
    """Calls that open a file, and the argument with their flags."""
    stat: Mapping[int, int]
    """Calls that may name a file or a descriptor, and the argument with their flags."""
    missing: Sequence[int]
    """stat, lstat, access, faccessat, faccessat2"""
    feigned: Sequence[int]
    """chdir, fchdir"""
    refused: Sequence[int]
    """execve, socket, socketpair, creat, openat2, kill, tkill, tgkill, pidfd_send_signal, setpgid, setsid, ptrace,
    process_vm_writev, io_uring_setup, and all that rename, make, link, remove, truncate or change the rights of files."""
    execveat: int


_CALLS: Final = {
    "x86_64": _Calls(
        audit_arch=0xC000003E,
        close=3,
        open={2: 1, 257: 2},
        stat={262: 3, 332: 2},
        missing=(4, 6, 21, 269, 439),
        feigned=(80, 81),
        refused=(
            *(59, 41, 53, 85, 437, 62, 200, 234, 424, 109, 112, 101, 311, 425),
            *(82, 83, 84, 86, 87, 88, 90, 91, 92, 93, 94, 76, 77, 133),
            *(258, 259, 260, 263, 264, 265, 266, 268, 316, 452),
        ),
        execveat=322,
    ),
    "aarch64": _Calls(
        audit_arch=0xC00000B7,
        close=57,
        open={56: 2},
        stat={79: 3, 291: 2},
        missing=(48, 439),
        feigned=(49, 50),
        refused=(
            *(221, 198, 199, 437, 129, 130, 131, 424, 154, 157, 117, 271, 425),
            *(33, 34, 35, 36, 37, 38, 45, 46, 52, 53, 54, 55, 276, 452),
        ),
        execveat=281,
    ),
}
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _RESULT, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_CALL_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_AT_EMPTY_PATH: Final = 0x1000
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_CPU_SECONDS, _MEMORY_BYTES, _PROCESSES = 10, 1 << 30, 4096


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _filter(calls: _Calls) -> Iterator[bytes]:
    """Yield the instructions of the seccomp filter (classic BPF)."""
    allow, succeed = _instruction(_RETURN, _ALLOW), _instruction(_RETURN, _RESULT)
    missing, refuse = _instruction(_RETURN, _RESULT | ENOENT), _instruction(_RETURN, _RESULT | EACCES)
    rules = {
        **{call: [missing] for call in calls.missing},
        **{call: [succeed] for call in calls.feigned},
        **{call: [refuse] for call in calls.refused},
        # Descriptor 0 is what an open file has; it stays /dev/null.
        calls.close: [_argument(0), _instruction(_IF_EQUAL, 0, 0, 1), succeed, allow],
    }
    for call, flags in calls.open.items():
        for_library = _instruction(_IF_ANY_BIT, os.O_CLOEXEC, 0, 1)
        rules[call] = [
            _argument(flags),
            _instruction(_IF_ANY_BIT, _WRITES, 2, 0),
            for_library,
            allow,
            succeed,
        ]
    for call, flags in calls.stat.items():
        rules[call] = [_argument(flags), _instruction(_IF_ANY_BIT, _AT_EMPTY_PATH, 0, 1), allow, missing]
    yield _instruction(_LOAD, _ARCH)
    yield _instruction(_IF_EQUAL, calls.audit_arch, 1, 0)
    yield _instruction(_RETURN, _KILL)
    yield _instruction(_LOAD, _CALL_NUMBER)
    for call, body in rules.items():
        yield _instruction(_IF_EQUAL, call, 0, len(body))
        yield from body
    yield allow


def _argument(number: int) -> bytes:
    return _instruction(_LOAD, _FIRST_ARGUMENT + 8 * number)


def start_bash(
    text: str, arguments: Sequence[str], descriptors: Mapping[int, int]
) -> subprocess.Popen[bytes]:
    """Start `bash -c TEXT ARGUMENTS`, in a process group of its own; its errors are piped.

    Args:
        descriptors: what the script has of this process's open descriptors, by the script's number.
    """
    calls, bash = _CALLS.get(platform.machine()), shutil.which("bash")
    if platform.system() != "Linux" or calls is None or bash is None:
        raise InputError(
            f"a script is evaluated by bash under a seccomp filter, which {platform.system()} on"
            f" {platform.machine()} {'has not' if bash else 'cannot start without bash'}",
            fix="run `megatrain port` on a Linux machine (x86-64 or 64-bit ARM) with bash",
        )
    instructions = list(_filter(calls))
    code = ctypes.create_string_buffer(b"".join(instructions))
    filter_ = _Filter(len(instructions), ctypes.addressof(code))
    words = [b"bash", b"--norc", b"--noprofile", b"-c", text.encode(), *map(os.fsencode, arguments)]
    argv, environment = (ctypes.c_char_p * (len(words) + 1))(*words, None), (ctypes.c_char_p * 1)(None)
    libc, program = ctypes.CDLL(None, use_errno=True), os.open(bash, os.O_RDONLY)

    def become_bash() -> None:
        for number, source in descriptors.items():
            os.dup2(source, number)
        for limit, value in (
            (resource.RLIMIT_CPU, _CPU_SECONDS),
            (resource.RLIMIT_AS, _MEMORY_BYTES),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NPROC, _PROCESSES),
        ):
            hard = resource.getrlimit(limit)[1]
            least = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (least, least))
        if libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(
            _SET_SECCOMP, _FILTER_MODE, ctypes.byref(filter_), 0, 0
        ):
            raise OSError(ctypes.get_errno(), "seccomp")
        libc.syscall(calls.execveat, program, b"", argv, environment, _AT_EMPTY_PATH)
        raise OSError(ctypes.get_errno(), "execveat")

    try:
        with open(os.devnull, "r+b") as nowhere:  # noqa: PTH123 (a device, not a path)
            return subprocess.Popen(
                [bash],
                stdin=nowhere,
                stdout=nowhere,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=become_bash,  # noqa: PLW1509 (this program has one thread)
            )
    except subprocess.SubprocessError:
        raise InputError(
            "this kernel has no seccomp filters, under which bash evaluates a script",
            fix="run `megatrain port` on a Linux machine with seccomp",
        ) from None
    finally:
        os.close(program)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the processes of a script."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
