"""Faulty copies of the program, each with one mistake in how checkpoints are saved, loaded or removed: the bench must catch every one.

    megatrain/ ─> copy, with the edits of a mutant ─> forked process that imports the copy ─> cases of one class, until one fails

This module imports neither megatrain nor torch, so that a forked process can import the copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_COUNTS = {"K": 14, "E": 1000, "C": 800, "S": 240, "X": 400, "J": 8}
"""Cases of each class until a mutant counts as not caught."""


@dataclass(frozen=True)
class Mutant:
    """A mistake: pieces of text of files in `megatrain/`, and what replaces them."""

    name: str
    kind: str
    """Class of the bench that must catch it."""
    edits: tuple[tuple[str, str, str], ...]
    """File, text that occurs in it, and the text that replaces each occurrence."""


@dataclass(frozen=True, kw_only=True)
class Caught:
    """The verdict on a mutant."""

    mutant: str
    kind: str
    num_cases: int
    case: str
    """Name of the first case that failed; empty: the mutant is not caught."""
    problem: str
    seconds: float


def check_mutants(folder: Path, mutants: Sequence[Mutant], num_jobs: int = 1) -> Iterator[Caught]:
    """Yield the verdict on each mutant, in the order of their ends.

    Raises:
        AssertionError: a mutant does not fit the code.
    """
    import numpy.random  # noqa: F401 (libraries are imported once, before the forks)
    import torch

    torch.set_num_threads(1)
    waiting = list(mutants)
    copies = {mutant.name: _copy(mutant, folder / str(number)) for number, mutant in enumerate(waiting)}
    running: dict[int, Path] = {}
    while waiting or running:
        while waiting and len(running) < num_jobs:
            mutant = waiting.pop(0)
            answer = copies[mutant.name] / "answer"
            pid = os.fork()
            if pid == 0:
                _serve(mutant, copies[mutant.name], answer)
            running[pid] = answer
        pid, status = os.wait()
        answer = running.pop(pid)
        assert status == 0, f"{answer}: the process ended with status {status}"
        name, kind, num_cases, case, problem, seconds = answer.read_text().split("\0")
        yield Caught(
            mutant=name,
            kind=kind,
            num_cases=int(num_cases),
            case=case,
            problem=problem,
            seconds=float(seconds),
        )
        shutil.rmtree(answer.parent)


def _copy(mutant: Mutant, folder: Path) -> Path:
    shutil.copytree(ROOT / "megatrain", folder / "megatrain", ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in mutant.edits:
        path = folder / "megatrain" / name
        text = path.read_text()
        assert old in text, f"the mutant '{mutant.name}' does not fit megatrain/{name}: there is no {old!r}"
        path.write_text(text.replace(old, new))
    return folder


def _serve(mutant: Mutant, copy: Path, answer: Path) -> None:
    """Run the cases in this forked process."""
    start, num_cases, case, problem = time.monotonic(), 0, "", ""
    try:
        with contextlib.suppress(BrokenPipeError):
            sys.path[:0] = [str(copy), str(ROOT / "tests")]
            where = copy / "cases"
            where.mkdir()
            num_cases, case, problem = _first_failure(mutant.kind, where)
        text = "\0".join(
            [mutant.name, mutant.kind, str(num_cases), case, problem, str(time.monotonic() - start)]
        )
        answer.write_text(text)
        os._exit(0)
    except BaseException:  # noqa: BLE001 (the parent sees the exit code)
        traceback.print_exc()
    finally:
        os._exit(1)


def _first_failure(kind: str, folder: Path) -> tuple[int, str, str]:
    import megatrain
    from faults.classes import CLASSES

    assert Path(megatrain.__file__).is_relative_to(folder.parent), "the copy is not imported"
    make: Callable[..., Iterator[object]] = CLASSES[kind]
    number = 0
    try:
        for number, found in enumerate(make(_COUNTS[kind], folder), 1):
            if found.problem:
                return number, found.name, found.problem
    except Exception as error:  # noqa: BLE001 (the unchanged program shows no error)
        return number, "the set-up of the class", f"{type(error).__name__}: {error}"
    return number, "", ""


def _one(name: str, kind: str, file: str, old: str, new: str = "") -> Mutant:
    return Mutant(name, kind, ((file, old, new),))


_SAVE, _DISK, _LOAD, _FIND = (
    "checkpoint/save.py",
    "storage/disk.py",
    "checkpoint/load.py",
    "checkpoint/find.py",
)
_RETENTION, _BACKGROUND, _MANIFEST = (
    "checkpoint/retention.py",
    "checkpoint/background.py",
    "checkpoint/manifest.py",
)
MUTANTS = [
    _one(
        "ranks that stay wait for those that are lost",
        "J",
        "training/restarts/member.py",
        "            shut_connections(opened_before=self._opened_before)\n",
    ),
    _one(
        "shards are not synced",
        "E",
        "checkpoint/shard_file.py",
        "            found.append(checksums.result())\n        disk.sync(file)\n",
        "            found.append(checksums.result())\n",
    ),
    _one(
        "manifest and tracker are not synced",
        "E",
        _DISK,
        "        disk.write(file, data)\n        disk.sync(file)\n",
        "        disk.write(file, data)\n",
    ),
    _one("names of shards are not synced", "E", _SAVE, "    disk.sync_folder(temporary)\n"),
    _one("the new name is not synced", "E", _SAVE, "    disk.sync_folder(final.parent)\n"),
    _one(
        "the --save folder's name is not synced",
        "E",
        _SAVE,
        "    for path in new:\n        disk.sync_folder(path.parent)\n",
    ),
    Mutant(
        "rename before the manifest",
        "E",
        (
            (
                _SAVE,
                "    write_file(disk, temporary / MANIFEST_NAME, encode(manifest))\n    disk.sync_folder(temporary)\n",
                "",
            ),
            (
                _SAVE,
                "    disk.rename(temporary, final)\n",
                (
                    "    disk.rename(temporary, final)\n    write_file(disk, final / MANIFEST_NAME, encode(manifest))\n"
                    "    disk.sync_folder(final)\n"
                ),
            ),
        ),
    ),
    _one(
        "a checkpoint is removed before its replacement is there",
        "E",
        _SAVE,
        'disk.rename(final, final.with_name(f"{final.name}.{kind}-{_save_id(temporary)}"))',
        "disk.remove(final)",
    ),
    _one(
        "a checkpoint whose replacement was interrupted is removed",
        "E",
        _SAVE,
        "elif final.exists():",
        "elif str(final):",
    ),
    _one(
        "leftovers stay",
        "E",
        _SAVE,
        '                if final == path or ".tmp-" in path.name:\n                    disk.remove(path)\n',
        '                if final == path or ".tmp-" in path.name:\n                    continue\n',
    ),
    _one(
        "old checkpoints are deleted under their names",
        "E",
        _RETENTION,
        "    disk.remove(away)\n",
        "    disk.rename(away, path)\n    disk.remove(path)\n",
    ),
    _one(
        "oldest first",
        "E",
        _FIND,
        "key=lambda candidate: (-candidate.iteration,",
        "key=lambda candidate: (candidate.iteration,",
    ),
    _one(
        "the step count is not loaded",
        "E",
        _LOAD,
        "optimizer.step_count = reader.manifest.optimizer_step_count",
        "pass",
    ),
    _one(
        "moments are not loaded",
        "E",
        _LOAD,
        "    for kind in optimizer.kinds if with_optimizer else (WEIGHT,):\n        source =",
        "    for kind in (WEIGHT,):\n        source =",
    ),
    _one(
        "checksums of chunks are not compared",
        "C",
        "checkpoint/tensor_file.py",
        "if not blocks.matches(number, block, checksums):",
        "if blocks.checksum(block) < 0:",
    ),
    _one(
        "only the first block of a range is compared",
        "C",
        "checkpoint/tensor_file.py",
        "if not blocks.matches(number, block, checksums):",
        "if number == first and not blocks.matches(number, block, checksums):",
    ),
    _one(
        "the checksum of the manifest is not compared",
        "C",
        _MANIFEST,
        "if checksum != zlib.crc32(canonical(content)):",
        "if checksum < 0:",
    ),
    _one(
        "sizes are not compared",
        "C",
        "checkpoint/tensor_file.py",
        "if num_bytes != written:",
        "if num_bytes < 0:",
    ),
    _one(
        "the manifest's iteration is not compared",
        "C",
        _FIND,
        "if manifest.iteration != iteration:",
        "if iteration < 0:",
    ),
    _one(
        "no older checkpoint is tried",
        "C",
        _LOAD,
        "            skipped.append((candidate, error.problems[0].text))\n            continue\n",
        "            raise\n",
    ),
    _one(
        "reasons of a fallback are lost",
        "C",
        _LOAD,
        "for bad, reason in skipped\n",
        "for bad, reason in skipped[:0]\n",
    ),
    _one(
        "links are followed",
        "C",
        "checkpoint/checked_files.py",
        "open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)",
        "open_regular(path, os.O_RDONLY)",
    ),
    _one(
        "pipes are opened",
        "X",
        "checkpoint/checked_files.py",
        'FileIO(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "r")',
        'FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "r")',
    ),
    _one(
        "file names lead out of the folder",
        "X",
        _MANIFEST,
        "if not _FILE_NAME.fullmatch(name)",
        "if not name",
    ),
    _one(
        "dense JSON is parsed",
        "X",
        "storage/untrusted_json.py",
        "if is_dense and num_values > _FREE_VALUES:",
        "if is_dense and num_values < 0:",
    ),
    _one(
        "stored values are not checked",
        "X",
        _MANIFEST,
        "    check_stored_values(content)\n    return Manifest(",
        "    return Manifest(",
    ),
    _one(
        "the newest is not verified before older ones are removed",
        "S",
        _RETENTION,
        "        check_folder(folder / folder_name(newest), newest)\n",
    ),
    _one(
        "a failed save leaves its files",
        "S",
        _SAVE,
        "        with contextlib.suppress(OSError):\n            disk.remove(path)\n",
        "        pass\n",
    ),
    _one("free space is not compared", "S", _SAVE, "    if needed > free:\n", "    if free < 0:\n"),
    _one(
        "failures of other ranks are ignored",
        "S",
        "checkpoint/errors.py",
        'if answer["failure"]]',
        'if answer["failure"] and not rank]',
    ),
    _one(
        "state that is not finite is committed",
        "S",
        _SAVE,
        "        check_finite((chunk.name, chunk.kind, chunk.values) for chunk in plan)\n",
    ),
    _one(
        "a short write counts as whole",
        "S",
        _DISK,
        "            rest = rest[count:]\n",
        "            rest = rest[_PIECE:]\n",
    ),
    _one(
        "--verify-saves compares nothing",
        "S",
        "checkpoint/shard_file.py",
        "            if BLOCKS.checksums(data) != checksums:\n",
        "            if not checksums:\n",
    ),
    _one(
        "a failed save is forgotten",
        "S",
        "training/saving.py",
        "            self.failure = error.problems[0].text\n            is_fatal",
        "            return\n            is_fatal",
    ),
    Mutant(
        "the copy is made after later steps",
        "K",
        (
            (_BACKGROUND, "        copied = self._copy(plan, offsets)\n", "        copied = None\n"),
            (
                _BACKGROUND,
                "            self._writer.begin(request, verifies=self.verifies)\n        else:",
                "            self._late = request\n        else:",
            ),
            (
                _BACKGROUND,
                "        written = self._writer.result()\n",
                (
                    "        self._copy(self._plan, _offsets(self._plan))\n        self._writer.begin(self._late, verifies=self.verifies)\n"
                    "        written = self._writer.result()\n"
                ),
            ),
            (
                _BACKGROUND,
                "return self.pending is None or (self._sender_is_done and self._writer.has_result())",
                "return False",
            ),
        ),
    ),
    _one(
        "consumed samples are not restored",
        "K",
        "training/checkpoints.py",
        "    progress.consumed_train_samples = loaded.consumed_train_samples\n",
    ),
    _one(
        "a commit is logged before it is made",
        "K",
        "training/saving.py",
        '            start = time.perf_counter()\n            with self._stalling("committing',
        '            self.ranks.console.print(f"> committed iteration {save.iteration} to {save.final}")\n'
        '            start = time.perf_counter()\n            with self._stalling("committing',
    ),
]
