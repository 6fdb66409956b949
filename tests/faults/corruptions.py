"""Class C: files of the newest checkpoint are changed.

Expected of each: the older checkpoint loads, and the reason names the changed file; or, if there is no older one, exit code 3 with that
reason. A change of nothing that is read, such as an additional file, is reported by `megatrain checkpoint verify`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint_helpers import build_ranks, save, save_all, small_spec
from hostile_manifests import signed

from faults.case import Cases, Seeds, judge, other_user, problems_of, require
from megatrain.checkpoint.find import find_checkpoints
from megatrain.checkpoint.manifest import MANIFEST_NAME
from megatrain.config.errors import NoCheckpointError
from megatrain.parallel.rank_lists import GridShape
from megatrain.tools.main import main as megatrain

OLD, NEW = "iter_0000010", "iter_0000020"
_LARGE_EVERY, _COMMAND_EVERY = 10, 50
_PAGE = 4096


@dataclass(frozen=True)
class Subject:
    """A `--save` folder with iterations 10 and 20, of seeds 1 and 2, that is changed and restored."""

    folder: Path
    seeds: Seeds
    files: dict[str, bytes]
    """Content of the files of the newest checkpoint."""
    has_older: bool

    @property
    def new(self) -> Path:
        return self.folder / NEW

    @property
    def shards(self) -> list[str]:
        return sorted(name for name in self.files if name != MANIFEST_NAME)

    def restore(self) -> None:
        if self.new.is_symlink() or self.new.is_file():
            self.new.unlink()
        self.new.mkdir(exist_ok=True)
        for path in self.new.iterdir():
            if path.name not in self.files or path.is_symlink() or not path.is_file():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for name, content in self.files.items():
            path = self.new / name
            if not path.exists() or path.stat().st_size != len(content) or path.read_bytes() != content:
                path.write_bytes(content)
            path.chmod(0o644)

    @classmethod
    def make(cls, folder: Path, *, is_large: bool, has_older: bool, in_parts: bool) -> Subject:
        """Save three shards of a small model, or one shard whose chunks have several blocks; or a manifest in parts."""
        spec = _LARGE if is_large else _SMALL
        seeds = Seeds([1, 2], spec)
        ranks = build_ranks(GridShape() if is_large else GridShape(dp=3), spec)
        for seed in (1, 2) if has_older else (2,):
            for rank in ranks:
                rank.set_values(seed)
            if is_large:
                save(folder, ranks[0], 10 * seed)
            else:
                save_all(folder, ranks, 10 * seed, in_parts=in_parts)
        files = {path.name: path.read_bytes() for path in (folder / NEW).iterdir()}
        return cls(folder, seeds, files, has_older)


_LARGE = small_spec(tied=True, vocab=40_000, padded=40_064, num_layers=1)
_SMALL = small_spec(tied=False, vocab=29, padded=32, num_layers=1)
Corruption = Callable[[Subject, random.Random], str]
"""Changes the newest checkpoint; returns the name that the reason must have, or `""` if the change harms no load."""


def corruptions(count: int, folder: Path, seed: int = 0) -> Cases:
    """Yield `count` changed checkpoints."""
    chance = random.Random(seed)
    folder.chmod(0o755)  # also read as another user
    subjects = {
        (is_large, has_older, in_parts): Subject.make(
            folder / f"{is_large}-{has_older}-{in_parts}",
            is_large=is_large,
            has_older=has_older,
            in_parts=in_parts,
        )
        for is_large, in_parts in ((False, False), (False, True), (True, False))
        for has_older in (False, True)
    }
    weights = [weight for weight, _ in CORRUPTIONS]
    for number in range(count):
        ((_, corrupt),) = chance.choices(CORRUPTIONS, weights)
        has_older = number % 3 > 0 or corrupt in NEED_OLDER
        is_large = number % _LARGE_EVERY == 0 and corrupt not in NEED_SHARDS
        in_parts = number % 4 == 1 and not is_large and corrupt not in NEED_WHOLE
        subject = subjects[is_large, has_older, in_parts]
        where = " of a large file" * is_large + " of a manifest in parts" * in_parts
        name = f"{corrupt.__name__}{where}{'' if has_older else ', no older checkpoint'}"
        is_command_run = number % _COMMAND_EVERY == 0
        own = random.Random(chance.random())
        work = functools.partial(check, subject, corrupt, own, is_command_run=is_command_run)
        yield judge("C", name.replace("_", " "), work)
        subject.restore()


def check(subject: Subject, corrupt: Corruption, chance: random.Random, *, is_command_run: bool) -> str:
    """Change a checkpoint, load and verify; return what happens."""
    named = corrupt(subject, chance)
    user = other_user if corrupt is permission else contextlib.nullcontext
    with user():
        outcome = _loaded(subject, named)
        problems = problems_of(find_checkpoints(subject.new)[0])
    require(problems, "verify finds nothing")
    require(any(named in problem for problem in problems), f"verify does not name {named}: {problems}")
    if is_command_run and user is contextlib.nullcontext:
        code = run_command("verify", str(subject.new))
        require(code == 3, f"megatrain checkpoint verify ends with exit code {code}")
    return outcome


def _loaded(subject: Subject, named: str) -> str:
    try:
        loaded, seed = subject.seeds.load(subject.folder)
    except NoCheckpointError as error:
        require(not subject.has_older, f"the older checkpoint does not load: {error}")
        require(error.exit_code == 3, f"exit code {error.exit_code}")
        require(named and named in str(error), f"the reason lacks {named}: {error}")
        return "exit code 3 with the reason"
    require(10 * seed == loaded.iteration, f"iteration {loaded.iteration} has the values of seed {seed}")
    if loaded.iteration == 20:
        require(not named, "the change is not noticed")
        return "loads, verify reports it"
    (skipped,) = loaded.skipped
    require(named and named in skipped, f"the reason lacks {named}: {skipped}")
    require(skipped.endswith("10 iterations are lost"), skipped)
    return "the older one loads, with the reason"


def run_command(*words: str) -> int:
    """Run `megatrain checkpoint`; return the exit code. Its output is dropped."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return megatrain(["checkpoint", *words]) or 0
        except SystemExit as ended:
            return int(ended.code or 0)


# ---- corruptions


def _write(subject: Subject, name: str, content: bytes) -> str:
    assert content != subject.files[name]
    (subject.new / name).write_bytes(content)
    return name


def bit_flip(subject: Subject, chance: random.Random) -> str:
    name = chance.choice(sorted(subject.files))
    content = bytearray(subject.files[name])
    end = len(content) if chance.random() < 0.8 else min(len(content), 3000)  # headers are at the begin
    content[chance.randrange(end)] ^= 1 << chance.randrange(8)
    return _write(subject, name, bytes(content))


def truncated(subject: Subject, chance: random.Random) -> str:
    name = chance.choice(sorted(subject.files))
    content = subject.files[name]
    cut = chance.choice([0, 1, 7, 8, 9, len(content) - 1, chance.randrange(len(content))])
    return _write(subject, name, content[:cut])


def extended(subject: Subject, chance: random.Random) -> str:
    name = chance.choice(subject.shards)
    return _write(subject, name, subject.files[name] + bytes(chance.randrange(1, _PAGE)))


def zeroed_page(subject: Subject, chance: random.Random) -> str:
    while True:
        name = chance.choice(sorted(subject.files))
        content = bytearray(subject.files[name])
        size = chance.choice([512, _PAGE])
        start = chance.randrange(0, len(content), size)
        page = content[start : start + size]
        if any(page):
            content[start : start + size] = bytes(len(page))
            return _write(subject, name, bytes(content))


def moved_page(subject: Subject, chance: random.Random) -> str:
    """A page of a file has the content of another page."""
    while True:
        name = chance.choice(subject.shards)
        content = bytearray(subject.files[name])
        one, other = (chance.randrange(0, len(content) - 512, 512) for _ in range(2))
        content[one : one + 512] = content[other : other + 512]
        if content != subject.files[name]:
            return _write(subject, name, bytes(content))


def edited_manifest(subject: Subject, chance: random.Random) -> str:
    """A digit, a letter or a line of the manifest is changed, and its checksum is not."""
    text = subject.files[MANIFEST_NAME]
    while True:
        at = chance.randrange(len(text))
        piece = text[at : at + 1]
        if piece.isdigit():
            edited = text[:at] + b"%d" % ((int(piece) + chance.randrange(1, 10)) % 10) + text[at + 1 :]
        else:
            edited = chance.choice([text[:at] + text[at + 1 :], text[:at] + piece + text[at:]])
        if edited != text:
            return _write(subject, MANIFEST_NAME, edited)


def signed_manifest(subject: Subject, chance: random.Random) -> str:
    """An entry of the manifest does not fit the files, and the checksum of the manifest is right."""
    content = json.loads(subject.files[MANIFEST_NAME])
    kinds = chance.choice(list(content["tensors"].values()))["kinds"]
    chunk = chance.choice(chance.choice(list(kinds.values()))["chunks"])
    other = chance.choice(
        [
            found
            for tensor in content["tensors"].values()
            for kind in tensor["kinds"].values()
            for found in kind["chunks"]
            if found["checksums"] != chunk["checksums"]
        ]
    )
    edit = chance.choice(["checksums", "key", "file", "box", "size", "header", "iteration"])
    named = chunk["file"]
    if edit == "checksums":
        digits = list(chunk["checksums"])
        at = chance.randrange(len(digits))
        digits[at] = f"{(int(digits[at], 16) + 1) % 16:x}"
        chunk["checksums"] = "".join(digits)
    elif edit == "key":
        chunk["key"] = other["key"] if other["file"] == named else "none"
    elif edit == "file" and len(content["files"]) > 1:
        chunk["file"] = next(name for name in content["files"] if name != named)
        named = ".safetensors"
    elif edit in ("box", "file"):
        chunk["box"][0][1] += 1
        named = MANIFEST_NAME
    elif edit == "size":
        content["files"][named]["bytes"] += chance.choice([-1, 1])
    elif edit == "header":
        content["files"][named]["header_crc32"] ^= 1 << chance.randrange(32)
    else:
        content["iteration"] -= 10
        named = NEW
    _write(subject, MANIFEST_NAME, signed(content))
    return named


def swapped_shards(subject: Subject, chance: random.Random) -> str:
    one, other = chance.sample(subject.shards, 2)
    _write(subject, one, subject.files[other])
    _write(subject, other, subject.files[one])
    return ".safetensors"


def stale_shard(subject: Subject, chance: random.Random) -> str:
    name = chance.choice(subject.shards)
    return _write(subject, name, (subject.folder / OLD / name).read_bytes())


def stale_checkpoint(subject: Subject, chance: random.Random) -> str:
    """The newest folder has the files of an older checkpoint."""
    for name in subject.files:
        _write(subject, name, (subject.folder / OLD / name).read_bytes())
    return NEW


def stale_manifest(subject: Subject, chance: random.Random) -> str:
    _write(subject, MANIFEST_NAME, (subject.folder / OLD / MANIFEST_NAME).read_bytes())
    return NEW


def stale_shards(subject: Subject, chance: random.Random) -> str:
    """All shards are of an older step; the manifest is not."""
    for name in subject.shards:
        _write(subject, name, (subject.folder / OLD / name).read_bytes())
    return ".safetensors"


def missing_file(subject: Subject, chance: random.Random) -> str:
    name = chance.choice(sorted(subject.files))
    (subject.new / name).unlink()
    return name


def additional_file(subject: Subject, chance: random.Random) -> str:
    shutil.copy(subject.new / subject.shards[0], subject.new / "shard_00077.safetensors")
    return ""


def folder_for_file(subject: Subject, chance: random.Random) -> str:
    name = chance.choice(sorted(subject.files))
    (subject.new / name).unlink()
    (subject.new / name).mkdir()
    return name


def link_for_file(subject: Subject, chance: random.Random) -> str:
    """A file is a link to its content elsewhere, to itself or to nothing."""
    name = chance.choice(sorted(subject.files))
    elsewhere = subject.folder.with_name("elsewhere")
    elsewhere.write_bytes(subject.files[name])
    (subject.new / name).unlink()
    (subject.new / name).symlink_to(chance.choice([elsewhere, Path(name), Path("nothing")]))
    return name


def pipe_for_file(subject: Subject, chance: random.Random) -> str:
    name = chance.choice(sorted(subject.files))
    (subject.new / name).unlink()
    os.mkfifo(subject.new / name)
    return name


def link_for_folder(subject: Subject, chance: random.Random) -> str:
    elsewhere = subject.folder.with_name("elsewhere-folder")
    shutil.rmtree(elsewhere, ignore_errors=True)
    subject.new.rename(elsewhere)
    subject.new.symlink_to(elsewhere)
    return NEW


def file_for_folder(subject: Subject, chance: random.Random) -> str:
    shutil.rmtree(subject.new)
    subject.new.write_bytes(b"a file")
    return NEW


def permission(subject: Subject, chance: random.Random) -> str:
    """A file cannot be read by this user."""
    name = chance.choice(sorted(subject.files))
    (subject.new / name).chmod(0)
    return name


CORRUPTIONS: list[tuple[int, Any]] = [
    (40, bit_flip),
    (12, truncated),
    (3, extended),
    (12, zeroed_page),
    (3, moved_page),
    (8, edited_manifest),
    (7, signed_manifest),
    (2, swapped_shards),
    (2, stale_shard),
    (1, stale_shards),
    (1, stale_manifest),
    (1, stale_checkpoint),
    (2, missing_file),
    (1, additional_file),
    (1, folder_for_file),
    (2, link_for_file),
    (1, pipe_for_file),
    (1, link_for_folder),
    (1, file_for_folder),
    (1, permission),
]
"""Each with its weight."""
NEED_OLDER = (stale_shard, stale_shards, stale_manifest, stale_checkpoint)
NEED_SHARDS = (swapped_shards,)
NEED_WHOLE = (signed_manifest, swapped_shards, stale_shards)
