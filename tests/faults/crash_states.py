"""Class E: the disk after a power failure at any point of a save.

Each scenario saves and removes checkpoints on a recording disk. From every prefix of its operations states of the disk are rebuilt,
in which operations that were not synced are kept, lost, torn or reordered. Expected of each state:

    the checkpoint that loads is the newest acknowledged one or one that was being saved, as a whole
    every folder that looks committed is intact, and no acknowledged checkpoint is missing
    the next save succeeds and leaves no files of interrupted saves
"""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint_helpers import a_save, build_ranks, run_ranks, save, small_spec

from faults.case import (
    Cases,
    Seeds,
    judge,
    raises_checkpoint_error,
    require,
    require_intact,
    unexpected_names,
)
from faults.power import CONTENT_MODES, Operation, Record, Recorder, read_log
from megatrain.checkpoint.background import BackgroundWriter
from megatrain.checkpoint.retention import Retention, remove_older
from megatrain.config.errors import NoCheckpointError
from megatrain.parallel.rank_lists import GridShape

_ROOT = Path(__file__).parents[2]
SAVE = Path("runs/save")
"""The `--save` folder, below the recorded folder: it does not exist before the first save."""
_SAVES_AFTER = 4
"""One of so many states is saved into again, and all of the scenarios with leftovers."""
_NEXT_ITERATION, _NEXT_SEED = 90, 5
_RECORDING_WRITER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from faults.power import FileRecorder
from megatrain.checkpoint.writer_process import serve
serve(FileRecorder(Path({root!r}), Path({log!r})))
"""
Scenario = Callable[[Path, Seeds], Sequence[Operation]]


@dataclass(frozen=True)
class Expected:
    """The checkpoints that a state may have: iteration and seed."""

    acknowledged: dict[int, int]
    in_progress: dict[int, int]

    @classmethod
    def after(cls, operations: Sequence[Operation]) -> Expected:
        found = cls({}, {})
        for operation in operations:
            if operation.note is None:
                continue
            what, iteration, seed = operation.note
            if what == "begin":
                found.in_progress[iteration] = seed
            elif what == "acknowledge":
                found.acknowledged[iteration] = found.in_progress.pop(iteration)
            elif what == "retire":
                found.acknowledged.pop(iteration)
        return found

    @property
    def newest(self) -> int:
        return max(self.acknowledged, default=0)

    def allows(self, iteration: int, seed: int) -> bool:
        return iteration >= self.newest and seed in (
            self.acknowledged.get(iteration),
            self.in_progress.get(iteration),
        )


def crash_states(count: int, folder: Path, seed: int = 0) -> Cases:
    """Yield `count` states; all prefixes of all scenarios are among the first thousand."""
    chance = random.Random(seed)
    seeds = Seeds([1, 2, 3, _NEXT_SEED])
    records = {
        name: Record(scenario(folder / "recorded" / name, seeds)) for name, scenario in SCENARIOS.items()
    }
    for number, (name, stop, content, is_reordered) in enumerate(_states(records, count, chance)):
        own = random.Random(chance.random()) if is_reordered else None
        order = "reordered" if is_reordered else "in order"
        work = functools.partial(
            check_state,
            folder / "state",
            seeds,
            records[name],
            stop,
            content,
            own,
            is_saved_again=number % _SAVES_AFTER == 0 or name in ("replaced", "after failures"),
        )
        yield judge("E", f"{name}: {stop} operations, names {order}, other content {content}", work)
        shutil.rmtree(folder / "state", ignore_errors=True)


def _states(
    records: dict[str, Record], count: int, chance: random.Random
) -> Iterator[tuple[str, int, str, bool]]:
    """Yield scenario, number of operations, content mode, and whether names are reordered."""
    prefixes = [
        (name, stop)
        for name, record in records.items()
        for stop in range(_first(record, name), len(record.operations) + 1)
    ]
    num_yielded = turn = 0
    while num_yielded < count:
        chance.shuffle(prefixes)
        for number, (name, stop) in enumerate(prefixes[: count - num_yielded]):
            content = CONTENT_MODES[(number + turn) % len(CONTENT_MODES)]
            yield name, stop, content, (number // len(CONTENT_MODES) + turn) % 3 > 0
            num_yielded += 1
        turn += 1


def _first(record: Record, name: str) -> int:
    """Return the smallest number of operations: the first save is cut in one scenario only, the others are alike."""
    if name == "two saves":
        return 0
    return next(n for n, operation in enumerate(record.operations) if operation.name == "note" and n > 0)


def check_state(
    target: Path,
    seeds: Seeds,
    record: Record,
    stop: int,
    content: str,
    chance: random.Random | None,
    *,
    is_saved_again: bool,
) -> str:
    """Rebuild a state and check it; return what loads."""
    record.rebuild(stop, target, content, chance)
    target = target / SAVE
    expected = Expected.after(record.operations[:stop])
    require_intact(target, expected.acknowledged)
    try:
        loaded, seed = seeds.load(target)
    except NoCheckpointError as error:
        require(error.exit_code == 3, f"exit code {error.exit_code}")
        require(not expected.acknowledged, f"nothing loads, {expected.acknowledged} is acknowledged: {error}")
        outcome = "nothing was committed: exit code 3"
    else:
        number = loaded.iteration
        require(expected.allows(number, seed), f"iteration {number} of seed {seed} loads: {expected}")
        is_new = expected.in_progress.get(number) == seed
        outcome = "the new checkpoint loads" if is_new else "the acknowledged checkpoint loads"
    if is_saved_again:
        save(target, seeds.ranks[_NEXT_SEED], _NEXT_ITERATION)
        require(not unexpected_names(target), f"the next save leaves {unexpected_names(target)}")
        require(seeds.load(target)[0].iteration == _NEXT_ITERATION, "the next save does not load")
        require_intact(target, expected.acknowledged)
    return outcome


# ---- scenarios


def _saved(disk: Recorder, seeds: Seeds, iteration: int, seed: int) -> None:
    disk.note("begin", iteration, seed)
    save(disk.root / SAVE, seeds.ranks[seed], iteration, disk=disk)
    disk.note("acknowledge", iteration)


def two_saves(root: Path, seeds: Seeds) -> Sequence[Operation]:
    disk = Recorder(root)
    _saved(disk, seeds, 10, 1)
    _saved(disk, seeds, 20, 2)
    return disk.operations


def replaced(root: Path, seeds: Seeds) -> Sequence[Operation]:
    """Save an iteration again, as a run does that resumed from an older checkpoint."""
    disk = Recorder(root)
    _saved(disk, seeds, 10, 1)
    _saved(disk, seeds, 20, 2)
    _saved(disk, seeds, 20, 3)
    return disk.operations


def pruned(root: Path, seeds: Seeds) -> Sequence[Operation]:
    disk = Recorder(root)
    for iteration, seed in ((10, 1), (20, 2), (30, 3)):
        _saved(disk, seeds, iteration, seed)
    disk.note("retire", 10)
    remove_older(root / SAVE, 30, Retention(keep_last=2), disk)
    return disk.operations


def two_ranks(root: Path, seeds: Seeds) -> Sequence[Operation]:
    """Save from two ranks, whose operations are interleaved."""
    disk = Recorder(root)
    ranks = build_ranks(GridShape(dp=2), small_spec(tied=False, vocab=29, padded=32, num_layers=1))
    for iteration, seed in ((10, 1), (20, 2)):
        for rank in ranks:
            rank.set_values(seed)
        disk.note("begin", iteration, seed)
        for answer in run_ranks(ranks, lambda rank, n=iteration: save(root / SAVE, rank, n, disk=disk)):
            if isinstance(answer, Exception):
                raise answer
        disk.note("acknowledge", iteration)
    return disk.operations


def in_background(root: Path, seeds: Seeds) -> Sequence[Operation]:
    """Save in the background; the writer process records its operations in a file."""
    disk, log = Recorder(root), root.with_name("writer.log")
    program = _RECORDING_WRITER.format(tests=str(_ROOT / "tests"), root=str(root), log=str(log))
    for iteration, seed in ((10, 1), (20, 2)):
        rank = seeds.ranks[seed]
        writer = BackgroundWriter(rank.optimizer, rank.grid, rank.optimizer.kinds, program=program)
        try:
            disk.note("begin", iteration, seed)
            writer.begin(a_save(root / SAVE, rank, iteration, disk=disk))
            while not writer.is_ready:
                pass
            disk.operations += read_log(log)
            writer.commit()
            disk.note("acknowledge", iteration)
        finally:
            writer.close()
    return disk.operations


class _FailsOnce(Recorder):
    """Fails at one write."""

    writes_left = 10**6

    def write(self, file: object, data: bytes | memoryview) -> None:
        self.writes_left -= 1
        if self.writes_left == 0:
            raise OSError(28, "No space left on device")
        super().write(file, data)


def after_failures(root: Path, seeds: Seeds) -> Sequence[Operation]:
    """Save after a save that failed and one that was killed."""
    disk = _FailsOnce(root)
    _saved(disk, seeds, 10, 1)
    disk.writes_left = 12
    disk.note("begin", 20, 2)
    with raises_checkpoint_error("errno 28"):
        save(root / SAVE, seeds.ranks[2], 20, disk=disk)
    killed = root / SAVE / "iter_0000020.tmp-0123abcd"
    disk.make_folder(killed)
    with disk.create(killed / "shard_00000.safetensors") as file:
        disk.write(file, b"half")
    _saved(disk, seeds, 30, 3)
    return disk.operations


SCENARIOS: dict[str, Scenario] = {
    "two saves": two_saves,
    "replaced": replaced,
    "pruned": pruned,
    "two ranks": two_ranks,
    "in background": in_background,
    "after failures": after_failures,
}
