"""Class S: the storage fails while a checkpoint is saved or loaded.

Expected of a save that fails: an error with path and errno, and on a full disk with the needed and the free bytes; older checkpoints
are intact; no temporary files stay, if the storage lets them be removed; the next good save leaves no files of failed ones.
"""

from __future__ import annotations

import errno
import functools
import itertools
import math
import os
import random
import shutil
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from checkpoint_helpers import FaultyDisk, Rank, a_save, build_ranks, run_ranks, save, small_spec

from faults.case import (
    Cases,
    Seeds,
    judge,
    manifests_in_parts,
    raises_checkpoint_error,
    require,
    unexpected_names,
)
from faults.failed_saves import Kind, Work, after_failure, background, words
from faults.faulty_runs import check_failing_run, failing_runs
from faults.killing_disk import KillPlan
from faults.kills import Chain
from faults.limited_storage import failing_reads, forbidden_folders, full_of_files, full_volumes, limits
from megatrain.checkpoint.background import BackgroundWriter
from megatrain.checkpoint.errors import CheckpointError
from megatrain.checkpoint.retention import Retention, remove_older
from megatrain.parallel.rank_lists import GridShape
from megatrain.storage.disk import Disk

_SECONDS = 240.0
"""Limit of a case; this process only waits for a run."""
_ERRORS = ("ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES", "EFBIG", "EMFILE", "ENOENT", "ESTALE", "ETIMEDOUT")


class FailingDisk(FaultyDisk):
    """One operation fails, or all from one on."""

    def __init__(self, at: int, error: str, *, stays: bool = False) -> None:
        super().__init__(at)
        self.error, self.stays = getattr(errno, error), stays

    def fault(self) -> None:
        if self.stays:
            self.at = self.count + 1
        raise OSError(self.error, os.strerror(self.error))


def storage_faults(count: int, folder: Path, seed: int = 0, part: tuple[int, int] = (0, 1)) -> Cases:
    """Yield all kinds of faults, `count` in all.

    Args:
        part: number of this part, and number of parts that share the cases.
    """
    seeds = Seeds([1, 2, 3])
    base = folder / "base"
    save(base, seeds.ranks[1], 10)
    kinds = []
    for number, kind in enumerate(KINDS):
        own = random.Random(f"{seed} {number}")  # so that all parts draw the same cases
        kinds.append(itertools.islice(kind(seeds, own, folder), part[0], None, part[1]))
    num_yielded = 0
    while kinds and num_yielded < count:
        for kind in list(kinds):
            found = next(kind, None)
            if found is None:
                kinds.remove(kind)
                continue
            name, work = found
            where = folder / "case"
            shutil.copytree(base, where)
            yield judge("S", name, functools.partial(work, where), limit_seconds=_SECONDS)
            _remove(where)
            num_yielded += 1
            if num_yielded == count:
                break


def failing_operations(seeds: Seeds, chance: random.Random, folder: Path) -> Kind:
    """Every disk operation of a save fails, once or from then on, with each error."""
    counter = FaultyDisk()
    save(folder / "counted", seeds.ranks[1], 10)
    save(folder / "counted", seeds.ranks[2], 20, disk=counter)
    places = list(itertools.product(range(1, counter.count + 1), _ERRORS, (False, True)))
    chance.shuffle(places)
    for at, error, stays in places:

        def work(where: Path, at: int = at, error: str = error, stays: bool = stays) -> str:
            with raises_checkpoint_error(str(where), *words(error)):
                save(where, seeds.ranks[2], 20, disk=FailingDisk(at, error, stays=stays))
            after_failure(where, seeds, is_cleaned=not stays)
            return "reported, older checkpoints intact"

        yield f"{error} {'from' if stays else 'at'} operation {at}", work


def failing_removals(seeds: Seeds, chance: random.Random, folder: Path) -> Kind:
    """Files of interrupted saves cannot be removed after the commit: the next save does it."""
    for error, number in itertools.product(_ERRORS, (0, 1, 2)):

        def work(where: Path, error: str = error, number: int = number) -> str:
            class NoRemoval(Disk):
                def remove(self, path: Path) -> None:
                    if path.name.endswith(f"-{number}"):
                        raise OSError(getattr(errno, error), "planted")
                    super().remove(path)

            for name in range(3):
                (where / f"iter_0000020.tmp-{name}").mkdir()
            save(where, seeds.ranks[2], 20, disk=NoRemoval())
            left = unexpected_names(where)
            require(left == [f"iter_0000020.tmp-{number}"], f"one folder cannot be removed, {left} stay")
            after_failure(where, seeds, is_cleaned=False)
            return "the next save removes the rest"

        yield f"{error} when leftover {number} is removed", work


def failing_ranks(seeds: Seeds, chance: random.Random, folder: Path) -> Kind:
    """The disk of one of several ranks fails: all ranks report it."""
    ranks = build_ranks(GridShape(dp=3), small_spec(tied=False, vocab=29, padded=32, num_layers=1))
    for rank in ranks:
        rank.set_values(2)
    for culprit, error in itertools.product(range(3), _ERRORS):
        at = chance.randint(3, 9)

        def work(where: Path, culprit: int = culprit, error: str = error, at: int = at) -> str:
            def save_rank(rank: Rank) -> None:
                save(where, rank, 20, disk=FailingDisk(at if rank.grid.rank == culprit else -1, error))

            answers = run_ranks(ranks, save_rank)
            require(all(isinstance(answer, CheckpointError) for answer in answers), f"{answers}")
            require(len({str(answer) for answer in answers}) == 1, "the ranks report different errors")
            missing = [word for word in (f"rank {culprit}: ", *words(error)) if word not in str(answers[0])]
            require(not missing, f"the message lacks {missing}: {answers[0]}")
            after_failure(where, seeds, is_cleaned=True)
            return "reported on all ranks"

        yield f"{error} at operation {at} of rank {culprit}", work


def failing_writers(seeds: Seeds, chance: random.Random, folder: Path) -> Kind:
    """The disk of the writer process of a background save fails, or that process dies."""
    places = list(itertools.product(("create", "write", "sync"), (*_ERRORS, "SIGKILL")))
    chance.shuffle(places)
    for operation, error in places:
        plan = KillPlan(
            iteration=20,
            in_writer=True,
            targets=("writer",),
            operation=operation,
            occurrence=chance.randint(1, 30) if operation == "write" else 1,
            place=chance.choice(["before", "inside"]),
            errno=getattr(errno, error, None),
        )

        def work(where: Path, plan: KillPlan = plan, error: str = error) -> str:
            expected = ("killed by SIGKILL",) if error == "SIGKILL" else words(error)
            with (
                background(seeds.ranks[2], plan, where) as writer,
                raises_checkpoint_error(str(where), *expected),
            ):
                writer.begin(a_save(where, seeds.ranks[2], 20))
                writer.commit()
            after_failure(where, seeds, is_cleaned=True)
            return "reported, older checkpoints intact"

        yield f"{error} in the writer process, {operation} {plan.occurrence}", work


def vanishing_folders(seeds: Seeds, chance: random.Random, folder: Path) -> Kind:
    """The folder disappears while a background save is written; a file may take its place."""
    for is_replaced, name in itertools.product((False, True), ("", "iter_0000020.tmp-")):

        def work(where: Path, is_replaced: bool = is_replaced, name: str = name) -> str:
            with background(seeds.ranks[2], None, where) as writer:
                writer.begin(a_save(where, seeds.ranks[2], 20))
                gone = next(where.glob(f"{name}*")) if name else where
                shutil.rmtree(gone, ignore_errors=True)
                while gone.exists():  # the writer process was faster with its next file
                    shutil.rmtree(gone, ignore_errors=True)
                if is_replaced:
                    gone.write_bytes(b"a file")
                with raises_checkpoint_error(str(where), "errno"):
                    writer.commit()
            if name:
                after_failure(where, seeds, is_cleaned=True)
                return "reported, older checkpoints intact"
            where.unlink(missing_ok=True) if where.is_file() else None
            save(where, seeds.ranks[3], 30)
            require(seeds.load(where)[0].iteration == 30, "the next save does not load")
            return "reported; the next save creates the folder"

        yield f"{name or 'the save folder'} {'is replaced by a file' if is_replaced else 'is removed'}", work


class _ShortWrites(FileIO):
    """Writes few bytes at a time, as system calls may."""

    def write(self, data: bytes | memoryview, /) -> int:
        return super().write(memoryview(data)[:1000])


def lying_disks(seeds: Seeds, chance: random.Random, folder: Path) -> Kind:
    """The disk loses or changes what it has acknowledged."""

    class Changing(Disk):
        def sync(self, file: FileIO) -> None:
            os.pwrite(file.fileno(), b"?", math.ceil(os.fstat(file.fileno()).st_size * 0.7))
            super().sync(file)

    class InPieces(Disk):
        def create(self, path: Path) -> FileIO:
            return _ShortWrites(path, "x")

    def is_written_in_pieces(where: Path) -> str:
        save(where, seeds.ranks[2], 20, disk=InPieces())
        require(seeds.load(where)[1] == 2, "the save does not load")
        return "saved"

    def is_read_again(where: Path) -> str:
        with raises_checkpoint_error(str(where), "--verify-saves"):
            save(where, seeds.ranks[2], 20, disk=Changing(), verifies=True)
        after_failure(where, seeds, is_cleaned=True)
        return "found by --verify-saves"

    def is_found_by_the_load(where: Path) -> str:
        save(where, seeds.ranks[2], 20, disk=Changing())
        require(seeds.load(where)[0].iteration == 10, "a changed checkpoint loads")
        return "the older one loads, with the reason"

    def older_ones_stay(where: Path) -> str:
        save(where, seeds.ranks[2], 20)
        save(where, seeds.ranks[3], 30)
        shard = where / "iter_0000030" / "shard_00000.safetensors"
        os.truncate(shard, shard.stat().st_size // 2)
        (line,) = remove_older(where, 30, Retention(keep_last=2), Disk())
        require("no older checkpoint is removed" in line, line)
        require(seeds.load(where)[0].iteration == 20, "the older checkpoint is gone")
        require((where / "iter_0000010").exists(), "an older checkpoint was removed")
        return "nothing is removed while the newest is damaged"

    for work in (is_written_in_pieces, is_read_again, is_found_by_the_load, older_ones_stay):
        yield work.__name__.replace("_", " "), work


def refused_saves(seeds: Seeds, chance: random.Random, folder: Path) -> Kind:
    """Saves that must not begin: too little space, and state that is not finite."""

    class SmallDisk(Disk):
        def free_bytes(self, folder: Path) -> int:
            return 1000

    def too_little_space(where: Path) -> str:
        with raises_checkpoint_error(str(where), "needs", "1,000 bytes are free"):
            save(where, seeds.ranks[2], 20, disk=SmallDisk())
        after_failure(where, seeds, is_cleaned=True)
        return "too little space is found before writing"

    def not_finite(where: Path) -> str:
        for kind, value in (("weight", math.nan), ("exp_avg", math.inf), ("exp_avg_sq", -1.0)):
            rank = Seeds([2]).ranks[2]
            rank.optimizer.state(kind)[0][5] = value
            with raises_checkpoint_error(str(where), kind, "1 values"):
                save(where, rank, 20)
        after_failure(where, seeds, is_cleaned=True)
        return "state that is not finite is not committed"

    for work in (too_little_space, not_finite):
        yield work.__name__.replace("_", " "), work


def slow_disks(seeds: Seeds, chance: random.Random, folder: Path) -> Kind:
    """A slow disk delays a background save, and not the training."""
    program = (
        "import time\nfrom megatrain.storage.disk import Disk\nfrom megatrain.checkpoint.writer_process import serve\n"
        "class Slow(Disk):\n    def write(self, file, data):\n        time.sleep({seconds})\n        super().write(file, data)\n"
        "serve(Slow())\n"
    )
    for seconds in (0.02, 0.05):

        def work(where: Path, seconds: float = seconds) -> str:
            rank = seeds.ranks[2]
            writer = BackgroundWriter(
                rank.optimizer, rank.grid, rank.optimizer.kinds, program=program.format(seconds=seconds)
            )
            try:
                start = time.perf_counter()
                writer.begin(a_save(where, seeds.ranks[2], 20))
                stall = time.perf_counter() - start
                writer.commit()
                total = time.perf_counter() - start
            finally:
                writer.close()
            require(stall < total / 2, f"training waits {stall:.2f} s of {total:.2f} s")
            require(seeds.load(where)[1] == 2, "the save does not load")
            return "saved, training does not wait"

        yield f"{seconds} s per write", work


def failing_run(seeds: Seeds, chance: random.Random, folder: Path) -> Kind:
    """The storage fails while a run saves."""
    for name, chain, plan, policy in failing_runs(chance, folder):

        def work(where: Path, chain: Chain = chain, plan: KillPlan = plan, policy: str = policy) -> str:
            return check_failing_run(chain, plan, policy)

        yield name, work


def in_parts(
    kind: Callable[[Seeds, random.Random, Path], Kind],
) -> Callable[[Seeds, random.Random, Path], Kind]:
    """Return the same faults of saves whose manifest is in parts, as with many ranks; older checkpoints have whole ones."""

    def of_parts(seeds: Seeds, chance: random.Random, folder: Path) -> Kind:
        with manifests_in_parts():
            cases = list(kind(seeds, chance, folder / "parts"))
        for name, work in cases:

            def in_context(where: Path, work: Work = work) -> str:
                with manifests_in_parts():
                    return work(where)

            yield f"{name}, manifest in parts", in_context

    return of_parts


KINDS = (
    failing_operations,
    in_parts(failing_operations),
    failing_removals,
    failing_ranks,
    in_parts(failing_ranks),
    failing_writers,
    vanishing_folders,
    full_volumes,
    full_of_files,
    forbidden_folders,
    limits,
    failing_reads,
    lying_disks,
    refused_saves,
    slow_disks,
    failing_run,
)


def _remove(folder: Path) -> None:
    if folder.is_dir():
        folder.chmod(0o755)
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)
