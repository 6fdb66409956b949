"""What all cases of storage faults share: the check of what a failed save leaves, and writer processes with a faulty disk."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from checkpoint_helpers import Rank, save

from faults.case import Seeds, require, require_intact, unexpected_names
from faults.killing_disk import KillPlan
from megatrain.checkpoint.background import BackgroundWriter

_TESTS = Path(__file__).parents[1]
_FAULTY_WRITER = """
import sys
sys.path.insert(0, {tests!r})
from faults.killing_disk import serve_killing
serve_killing({plan!r}, {pid_file!r})
"""


Work = Callable[[Path], str]
Kind = Iterator[tuple[str, Work]]


def after_failure(folder: Path, seeds: Seeds, *, is_cleaned: bool, older: int = 10) -> None:
    """Check what a failed save of iteration 20 with seed 2 leaves, and that the next save succeeds and cleans up."""
    require_intact(folder, [older])
    if is_cleaned:
        left = [name for name in unexpected_names(folder) if ".tmp-" in name]
        require(not left, f"the failed save leaves {left}")
    loaded, seed = seeds.load(folder)
    require((loaded.iteration, seed) in ((older, 1), (20, 2)), f"iteration {loaded.iteration} of seed {seed}")
    save(folder, seeds.ranks[3], 30)
    require(not unexpected_names(folder), f"the next save leaves {unexpected_names(folder)}")
    require(seeds.load(folder)[0].iteration == 30, "the next save does not load")
    require_intact(folder, [older, 30])


def words(error: str) -> tuple[str, ...]:
    """Return what the message of an error must have."""
    found = (f"(errno {getattr(errno, error)})", os.strerror(getattr(errno, error)))
    return (*found, "bytes needed", "bytes free") if error in ("ENOSPC", "EDQUOT") else found


@contextlib.contextmanager
def background(rank: Rank, plan: KillPlan | None, folder: Path) -> Iterator[BackgroundWriter]:
    """Yield the background writer of a rank, whose disk has the fault of `plan`."""
    text, pid_file = plan.to_text() if plan else "", str(folder.with_name("writer.pid"))
    program = _FAULTY_WRITER.format(tests=str(_TESTS), plan=text, pid_file=pid_file)
    writer = BackgroundWriter(rank.optimizer, rank.grid, rank.optimizer.kinds, program=program)
    try:
        yield writer
    finally:
        writer.close()
