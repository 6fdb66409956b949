"""Class X: checkpoints that were made to do harm, with valid checksums where the format has them.

Expected: no code runs, nothing outside the folder changes, time and memory are bounded, and the load falls back, or loads the right values
if the change harms nothing. The tools of `megatrain checkpoint` end with exit code 0, 2 or 3.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import resource
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_helpers import save
from hostile_manifests import HostileManifest, hostile_manifests, nested, rename_file, signed
from test_hostile_manifests import FLAGS, STATE, outcome

from faults.case import Cases, Seeds, judge, require
from faults.corruptions import NEW, Subject, run_command
from megatrain.checkpoint.errors import MismatchError
from megatrain.checkpoint.find import TRACKER_NAME
from megatrain.checkpoint.manifest import MANIFEST_NAME
from megatrain.config import Facts, parse, resolve

SHARD = "shard_00000.safetensors"
_SECONDS, _MORE_MEGABYTES = 20.0, 600
Harm = Callable[[Subject], str | None]
"""Changes the newest checkpoint or its folder; returns words of the reason, or None if the newest may still load."""


def hostile_files(count: int, folder: Path, seed: int = 0, part: tuple[int, int] = (0, 1)) -> Cases:
    """Yield all hostile files and `count` cases in all, the rest of them hostile manifests.

    Args:
        part: number of this part, and number of parts that share the cases.
    """
    chance = random.Random(seed)
    request, facts = parse(FLAGS), Facts(device="cpu", vocab_size=29, eod_id=28)
    seeds = Seeds([1, 2])
    save_folder = folder / "runs" / "save"
    config = resolve(request, facts).config.to_dict()
    for number in (1, 2):
        save(save_folder, seeds.ranks[number], 10 * number, state=STATE, config=config)
    new = save_folder / NEW
    subject = Subject(save_folder, seeds, {path.name: path.read_bytes() for path in new.iterdir()}, True)
    outside = _listing(folder, save_folder)
    content = json.loads(subject.files[MANIFEST_NAME])
    del content["state"]["seen"]  # not a value that any program reads
    manifests = list(hostile_manifests(content))
    chance.shuffle(manifests)
    own = slice(part[0], None, part[1])
    files, rest = iter(list(HARMS.items())[own]), iter(manifests[own])
    for number in range(count):
        found = next(files, None) if number % 2 == 0 else None
        if found is not None:
            name, harm = found
            work = functools.partial(check_file, subject, harm, outside, folder)
        else:
            manifest = next(rest, None)
            if manifest is None:
                return
            name = f"manifest: {manifest.name}"
            work = functools.partial(check_manifest, subject, manifest, (request, facts), number)
        yield judge("X", name, work, limit_seconds=_SECONDS)
        _restore(subject)


def check_manifest(
    subject: Subject, case: HostileManifest, request_and_facts: tuple[Any, Facts], number: int
) -> str:
    """Read a manifest, plan a run from it and load it."""
    found = outcome(subject.new / MANIFEST_NAME, case, request_and_facts)
    require(not case.is_refused or found in ("damaged", "another version"), f"accepted: {found}")
    if found != "another version" and "state.seen" not in case.name:
        content = json.loads(case.text) if found != "damaged" else None
        if content is not None:  # `Seeds.load` compares it
            content["state"]["seen"] = content["iteration"]
            (subject.new / MANIFEST_NAME).write_bytes(signed(content))
        loaded = _loads(subject)
        require(found != "damaged" or loaded == 10, f"iteration {loaded} loads")
    if number % 20 == 0:
        _require_exit_codes(subject)
    return f"manifest: {found}"


def check_file(subject: Subject, harm: Harm, outside: dict[str, int], folder: Path) -> str:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reason = harm(subject)
    try:
        loaded, _ = subject.seeds.load(subject.folder)
    except MismatchError:
        return "another version or model: exit code 2"
    if reason is not None:
        require(loaded.iteration == 10, f"iteration {loaded.iteration} loads")
        require(len(loaded.skipped) == 1, f"the reasons are {loaded.skipped}")
        is_named = reason in loaded.skipped[0] and len(loaded.skipped[0]) < 2000
        require(is_named, f"the reason lacks {reason}: {loaded.skipped[0][:500]}")
        loaded.skipped[0].encode()
    _require_exit_codes(subject)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    require(growth < _MORE_MEGABYTES, f"{growth} MB of memory")
    require(_listing(folder, subject.folder) == outside, "a file outside the folder has changed")
    return "harmless: the newest loads" if loaded.iteration == 20 else "the older one loads, with the reason"


def _loads(subject: Subject) -> int:
    try:
        return subject.seeds.load(subject.folder)[0].iteration
    except MismatchError:  # an entry of another model
        return 10


def _require_exit_codes(subject: Subject) -> None:
    for command, path in itertools.product(("ls", "verify", "inspect"), (subject.folder, subject.new)):
        code = run_command(command, str(path))
        require(code in (0, 2, 3), f"megatrain checkpoint {command} {path.name} ends with exit code {code}")


def _listing(folder: Path, but: Path) -> dict[str, int]:
    """Return name and size of the files in a folder, except for those in one."""
    return {
        str(path): path.lstat().st_size
        for path in folder.rglob("*")
        if not path.is_relative_to(but) and path.is_file()
    }


def _restore(subject: Subject) -> None:
    for path in subject.folder.iterdir():
        if path.name not in ("iter_0000010", NEW):
            _remove(path)
    subject.restore()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            _remove(inner)
        path.rmdir()
    else:
        path.unlink()


# ---- harms


def _file(name: str, content: bytes) -> Harm:
    def harm(subject: Subject) -> str:
        (subject.new / name).write_bytes(content)
        return name

    return harm


def _edit(reason: str, edit: Callable[[dict[str, Any]], Any]) -> Harm:
    """Edit the manifest; its checksum is right."""

    def harm(subject: Subject) -> str:
        content = json.loads(subject.files[MANIFEST_NAME])
        edit(content)
        (subject.new / MANIFEST_NAME).write_bytes(signed(content))
        return reason

    return harm


def _named(name: str) -> Harm:
    """Let the manifest name another file for all chunks of a shard."""
    return _edit(MANIFEST_NAME, rename_file(name))


def _header(header: bytes, num_bytes: int | None = None) -> Harm:
    """Replace the header of a shard, with the right checksum and size in the manifest."""

    def harm(subject: Subject) -> str:
        old = subject.files[SHARD]
        data = old[8 + int.from_bytes(old[:8], "little") :]
        size = (len(header) if num_bytes is None else num_bytes).to_bytes(8, "little")
        (subject.new / SHARD).write_bytes(size + header + data)
        content = json.loads(subject.files[MANIFEST_NAME])
        entry = {"bytes": 8 + len(header) + len(data), "header_crc32": zlib.crc32(size + header)}
        content["files"][SHARD] = entry
        (subject.new / MANIFEST_NAME).write_bytes(signed(content))
        return SHARD

    return harm


def _offsets(start: object, stop: object) -> Harm:
    """Replace the offsets of all chunks in the header of a shard."""

    def harm(subject: Subject) -> str:
        old = subject.files[SHARD]
        entries = json.loads(old[8 : 8 + int.from_bytes(old[:8], "little")])
        header = {key: entry | {"data_offsets": [start, stop]} for key, entry in entries.items()}
        return str(_header(json.dumps(header).encode())(subject))

    return harm


def _link(name: str, target: str) -> Harm:
    def harm(subject: Subject) -> str:
        (subject.new / name).unlink()
        (subject.new / name).symlink_to(target)
        return name

    return harm


def _made(name: str, make: Callable[[Path], object]) -> Harm:
    """Put something else in place of a file."""

    def harm(subject: Subject) -> str:
        (subject.new / name).unlink()
        make(subject.new / name)
        return name

    return harm


def _beside(name: str | bytes, make: Callable[[Path], object]) -> Harm:
    """Put something into the `--save` folder; the newest checkpoint still loads."""

    def harm(subject: Subject) -> None:
        text = os.fsdecode(name)
        make(subject.folder / text)

    return harm


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is at most 108 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def _shape(shape: list[Any]) -> Harm:
    def edit(content: dict[str, Any]) -> None:
        next(iter(content["tensors"].values()))["shape"] = shape

    return _edit(MANIFEST_NAME, edit)


def _box(box: list[Any]) -> Harm:
    def edit(content: dict[str, Any]) -> None:
        next(iter(content["tensors"].values()))["kinds"]["weight"]["chunks"][0]["box"] = box

    return _edit(MANIFEST_NAME, edit)


def _many_chunks(content: dict[str, Any]) -> None:
    kind = next(iter(content["tensors"].values()))["kinds"]["weight"]
    kind["chunks"] = kind["chunks"] * 20_000


def _petabyte(content: dict[str, Any]) -> None:
    content["files"][SHARD]["bytes"] = 1 << 50
    for tensor in content["tensors"].values():
        tensor["shape"] = [1 << 27]
        for kind in tensor["kinds"].values():
            kind["chunks"] = [kind["chunks"][0] | {"box": [[0, 1 << 27]], "checksums": "0" * 8 * 512}]


def _ignored(_: object) -> None:
    """Return None: the newest checkpoint still loads."""


_PICKLE = b"cos\nsystem\n(S'touch /tmp/fault-bench-was-here'\ntR."
_NAMES = (
    "../iter_0000010/shard_00000.safetensors",
    "/etc/passwd",
    "/etc/passwd.safetensors",
    "..safetensors",
    "a/b.safetensors",
    "a\\..\\b.safetensors",
    "a\x00.safetensors",
    "",
    ".",
    "\u2025.safetensors",
    "x" * 300 + ".safetensors",
    "a\n.safetensors",
    "manifest.json",
    "-rf.safetensors",
)
_TEXTS = {
    "nothing": b"",
    "spaces": b" " * 1000,
    "null": b"null",
    "a list": b"[]",
    "an empty object": b"{}",
    "NaN": b'{"iteration": NaN}',
    "1e999": b'{"iteration": 1e999}',
    "a number of 100,000 digits": b'{"iteration": ' + b"9" * 100_000 + b"}",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep closed lists": b"[" * 50_000 + b"]" * 50_000,
    "no UTF-8": b'{"\xff\xfe": 1}',
    "UTF-16": '{"iteration": 20}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "NUL bytes": bytes(1000),
    "half a surrogate pair": b'{"a": "\\ud800"}',
    "a pickle": _PICKLE,
    "a zip file": b"PK\x03\x04" + bytes(200),
    "30 MB of objects": b"[" + b"{}," * 10_000_000 + b"0]",
    "30 MB of numbers": b"[" + b"1," * 15_000_000 + b"0]",
    "JSON of nothing after it": b"{} trailing",
}
_HEADERS = {name: text for name, text in _TEXTS.items() if "30 MB" not in name}
_SLOTS = (MANIFEST_NAME, SHARD)
HARMS: dict[str, Harm] = {
    **{f"manifest.json has {name}": _file(MANIFEST_NAME, text) for name, text in _TEXTS.items()},
    **{f"the header of a shard has {name}": _header(text) for name, text in _HEADERS.items()},
    **{f"a shard is {name}": _file(SHARD, text) for name, text in _HEADERS.items()},
    **{f"a header of {size} bytes": _header(b"{}", size) for size in (3, 10**6, 1 << 40, (1 << 64) - 1)},
    **{
        f"offsets {one!r} and {other!r}": _offsets(one, other)
        for one, other in (
            (-4, 4),
            (0, 1 << 62),
            (1 << 62, 1 << 63),
            (0.0, 64.0),
            ("0", "64"),
            (None, None),
            (True, 65),
            (64, 0),
        )
    },
    **{f"the file name {name[:40]!r}": _named(name) for name in _NAMES},
    **{
        f"{slot} is a link to {target}": _link(slot, target)
        for slot in _SLOTS
        for target in (
            "/etc/passwd",
            "/dev/zero",
            "/dev/stdin",
            "/proc/self/mem",
            "../iter_0000010/" + slot,
            slot,
            "nothing",
            ".",
        )
    },
    **{f"{slot} is a pipe": _made(slot, os.mkfifo) for slot in _SLOTS},
    **{f"{slot} is a folder": _made(slot, Path.mkdir) for slot in _SLOTS},
    **{f"{slot} is a socket": _made(slot, _socket) for slot in _SLOTS},
    **{f"{slot} has 4 TB of zeros": _made(slot, _sparse) for slot in _SLOTS},
    **{
        f"the shape {shape}": _shape(shape)
        for shape in (
            [1 << 50],
            [1 << 60, 1 << 60],
            [1] * 9,
            [],
            [0],
            [-29, -16],
            [29.0, 16],
            [True, 16],
            ["a"],
        )
    },
    **{
        f"the box {box}": _box(box)
        for box in (
            [[0, 1 << 62], [0, 16]],
            [[-1, 29], [0, 16]],
            [[0, 29]],
            [],
            [[29, 0], [16, 0]],
            [[0, 29], [0]],
        )
    },
    "20,000 chunks": _edit(MANIFEST_NAME, _many_chunks),
    "a petabyte of chunks": _edit(SHARD, _petabyte),
    "deep nesting in a state": _edit(MANIFEST_NAME, lambda c: c["state"].update(seen=nested(800))),
    **{
        f"{TRACKER_NAME} has {name}": _beside(TRACKER_NAME, lambda path, text=text: path.write_bytes(text))
        for name, text in {
            "letters": b"release",
            "no ASCII": b"\xff\xfe",
            "other digits": "\u0662\u0660".encode(),
            "a path": b"../../etc",
            "5,000 digits": b"9" * 5000,
            "a minus": b"-20",
            "a pickle": _PICKLE,
        }.items()
    },
    f"{TRACKER_NAME} is a link": _beside(TRACKER_NAME, lambda path: path.symlink_to("/dev/zero")),
    f"{TRACKER_NAME} is a pipe": _beside(TRACKER_NAME, os.mkfifo),
    f"{TRACKER_NAME} is a folder": _beside(TRACKER_NAME, Path.mkdir),
    **{
        f"a folder {name!r}": _beside(name, Path.mkdir)
        for name in (
            b"iter_\xff\xfe",
            "iter_00000\u0663\u0660",
            "iter_00000030",
            "iter_0000030x",
            "iter_0000030.tmp-",
            "iter_0000030\n",
            "iter_-000030",
            "..iter_0000030",
        )
    },
    "a pickle of Megatron-LM": _beside(".metadata", lambda path: path.write_bytes(_PICKLE)),
    "a pickle as common.pt": lambda subject: _ignored((subject.new / "common.pt").write_bytes(_PICKLE)),
}
