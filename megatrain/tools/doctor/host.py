"""Checks of this host: versions, limits, shared memory, the disk of --save, the rendezvous.

A check reads one property of the host with a function of its own (`read_...`), and turns it into findings.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from megatrain.config.environment import LaunchEnvironment
from megatrain.tools.doctor import gpus
from megatrain.tools.doctor.finding import Finding
from megatrain.training.launch.facts import library_versions

_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 (no file is created there)
MIN_SHARED_MEMORY: Final = 1 << 30
"""Bytes of /dev/shm: NCCL takes about 10 MB for each pair of GPUs, and a container has 64 MB by default."""
MIN_OPEN_FILES: Final = 4096
"""NCCL and gloo open sockets to many ranks, a blend opens two files for each dataset."""
MIN_DISK_RATE: Final = 200e6
"""Bytes per second below which a checkpoint of 8 billion parameters takes more than eight minutes on one node."""
BYTES_PER_PARAMETER: Final = 12
"""Master weights and two moments in fp32 (54.5 GB for the 4.54 billion parameters of case A1)."""
_PROBE_BYTES, _PROBE_SECONDS = 1 << 28, 10.0
_CONNECT_SECONDS = 5.0


def check_versions() -> Iterator[Finding]:
    """Report Python, PyTorch, CUDA, NCCL and optional libraries."""
    text = (
        f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    )
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        text += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    others = [f"{name} {version}" for name, version in library_versions().items() if name != "torch"]
    yield Finding.ok("versions", ", ".join([text, *others]))
    if gpus.torch_has_gpus() and importlib.util.find_spec("triton") is None:
        yield Finding.error(
            "versions",
            "Triton is not installed: GPU kernels cannot be compiled",
            "install the triton version that this torch requires",
        )


def read_shared_memory() -> int | None:
    """Return the size of /dev/shm in bytes; None: there is none."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def check_shared_memory() -> Iterator[Finding]:
    size = read_shared_memory()
    if size is None or size < MIN_SHARED_MEMORY:
        shown = "missing" if size is None else f"of {size / 2**20:.0f} MiB"
        yield Finding.error(
            "shared memory",
            f"{_SHARED_MEMORY} is {shown}: NCCL and workers of the loader share memory there",
            "start the container with --ipc=host or --shm-size=16g; in Kubernetes mount an emptyDir of medium Memory",
        )
    else:
        yield Finding.ok("shared memory", f"{_SHARED_MEMORY} has {size / 2**30:.1f} GiB")


def read_limit(kind: int) -> int:
    """Return a soft limit of this process (`resource.RLIMIT_...`); -1: unlimited."""
    return resource.getrlimit(kind)[0]


def has_infiniband() -> bool:
    """Return whether this host has InfiniBand or RoCE adapters."""
    return Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir())


def check_limits(open_files: int = 0) -> Iterator[Finding]:
    """Check open files and locked memory. `open_files`: files that this process needs."""
    files = read_limit(resource.RLIMIT_NOFILE)
    needed = max(MIN_OPEN_FILES, open_files)
    if 0 <= files < needed:
        yield Finding.error(
            "open files",
            f"the limit is {files:,}, and {needed:,} are needed: large runs end with `Too many open files`",
            f"ulimit -n {max(65536, needed)} before the launch, or LimitNOFILE of the service that starts the ranks",
        )
    else:
        yield Finding.ok("open files", "unlimited" if files < 0 else f"{files:,}")
    locked = read_limit(resource.RLIMIT_MEMLOCK)
    if locked >= 0 and has_infiniband():
        yield Finding.error(
            "locked memory",
            f"the limit is {locked >> 10:,} KiB: InfiniBand cannot register NCCL's buffers",
            "ulimit -l unlimited, --ulimit memlock=-1 of the container, or LimitMEMLOCK=infinity of slurmd",
        )


def read_free_bytes(folder: Path) -> int:
    """Return the free bytes of the file system of a folder."""
    return shutil.disk_usage(folder).free


def read_write_rate(folder: Path) -> float:
    """Return the bytes per second of a file written with fsync. Raises OSError."""
    block, written = os.urandom(1 << 22), 0
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".megatrain-doctor-") as file:
        start = time.monotonic()
        while written < _PROBE_BYTES and time.monotonic() - start < _PROBE_SECONDS:
            file.write(block)
            written += len(block)
        file.flush()
        os.fsync(file.fileno())
        return written / (time.monotonic() - start)


def check_disk(save: str | None, num_parameters: float | None) -> Iterator[Finding]:
    """Check that --save can be written, has space for two checkpoints, and is fast.

    Args:
        num_parameters: of the whole model; None: not known.
    """
    if save is None:
        yield Finding.ok("disk", "not checked: no --save")
        return
    folder = Path(save)
    try:
        while not folder.exists():
            folder = folder.parent
        free, rate = read_free_bytes(folder), read_write_rate(folder)
    except OSError as error:
        yield Finding.error("disk", f"--save {save}: {error}", "name a folder that this user may write to")
        return
    size = None if num_parameters is None else BYTES_PER_PARAMETER * num_parameters
    checkpoint = "" if size is None else f"; a checkpoint has {size / 1e9:.1f} GB"
    text = f"{free / 1e9:,.0f} GB free, writes {rate / 1e6:,.0f} MB/s{checkpoint}"
    if size is not None and free < 2 * size:
        yield Finding.error(
            "disk",
            f"--save {save}: {text}: less than two, and the next one is written before the last is removed",
            "free space, name another folder, or limit what is kept with --keep-last",
        )
    elif rate < MIN_DISK_RATE:
        yield Finding.warning(
            "disk", f"--save {save}: {text}", "use a faster or a parallel file system, and --async-save"
        )
    else:
        yield Finding.ok("disk", f"--save {save}: {text}")


def resolve_host(host: str) -> str:
    """Return the address of a host. Raises OSError."""
    found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    return str(found[0][4][0])


def connect(host: str, port: int) -> bool:
    """Return whether something listens there; raise OSError if the host does not answer."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return True
    except ConnectionRefusedError:
        return False  # the host answers, and the run has not started yet


def is_local(address: str) -> bool:
    """Return whether this host has the address."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe,
    ):
        probe.bind((address, 0))
        return True
    return False


def check_rendezvous(environment: LaunchEnvironment) -> Iterator[Finding]:
    """Check the launcher's variables, and that host and port of rank 0 can be used."""
    for problem in environment.problems:
        yield Finding.error("rendezvous", problem.text, problem.fix)
    if environment.problems:
        return
    host, port = environment.host, environment.port
    where = f"{host}:{port}"
    try:
        address = resolve_host(host)
    except OSError as error:
        yield Finding.error(
            "rendezvous",
            f"{host} is not a known host: {error}",
            "set MASTER_ADDR to an address of rank 0's host",
        )
        return
    try:
        is_taken = connect(address, port)
    except OSError as error:
        yield Finding.error(
            "rendezvous",
            f"{where} does not answer: {error}",
            "open the port in the firewall between the hosts, or set MASTER_ADDR to an address that all hosts reach",
        )
        return
    # Other ranks may find rank 0, which listens there once its own checks are done.
    if is_taken and is_local(address) and environment.rank == 0 and environment.launcher != "torchrun":
        yield Finding.error(
            "rendezvous", f"{where} is in use by another program", "set MASTER_PORT to a free port"
        )
    else:
        yield Finding.ok("rendezvous", f"{where} answers" if is_taken else f"{where} can be reached")
