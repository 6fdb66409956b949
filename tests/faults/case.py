"""A case of the fault bench and its verdict.

work() ─> outcome, such as "fell back"             the case passes
       ─> WrongError, any other exception, a hang  the case fails, with the problem
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from checkpoint_helpers import Rank, build_rank, load, small_spec

from megatrain.checkpoint import save as saving
from megatrain.checkpoint.errors import CheckpointError
from megatrain.checkpoint.find import TRACKER_NAME, Candidate, find_checkpoints
from megatrain.checkpoint.load import Loaded
from megatrain.checkpoint.reader import verify
from megatrain.config.errors import MegatrainError
from megatrain.config.model_spec.model import ModelSpec
from megatrain.parallel.rank_lists import GridShape

SECONDS_PER_CASE = 60.0
_BUSY_SHARE = 0.01
"""A process that waits gets less than this share of a core."""
FILES_OF_A_RUN = ("config.yaml", "metrics.jsonl", "status.json", "run.lock", "restarts.jsonl")


@contextlib.contextmanager
def manifests_in_parts() -> Iterator[None]:
    """Let few ranks save a manifest in parts, as many do."""
    with mock.patch.object(saving, "MAX_RANKS_OF_WHOLE", 0):
        yield


@dataclass(frozen=True, kw_only=True)
class Case:
    """The result of one case."""

    kind: str
    """Class of the bench: K, E, C, S, T, X, R or J."""
    name: str
    outcome: str
    """Short text that is the same for cases that end alike; empty if the case fails."""
    problem: str | None
    """The difference from what was expected; None: there is none."""
    seconds: float


Cases = Iterator[Case]
PASSED: dict[tuple[str, str], Case] = {}
"""Cases that an earlier run of the bench has judged, by class and name; they do not run again."""


class WrongError(Exception):
    """The program did not do what it promises."""


class SkippedError(Exception):
    """The case cannot run here, for this reason."""


class HangError(BaseException):
    """The time of a case is over. Not an `Exception`, so that the program under test does not catch it."""


def judge(kind: str, name: str, work: Callable[[], str], *, limit_seconds: float = SECONDS_PER_CASE) -> Case:
    """Run a case; `work` returns its outcome or raises an error."""
    if (kind, name) in PASSED:
        return PASSED[kind, name]
    start, outcome, problem = time.perf_counter(), "", None
    try:
        with _limit(limit_seconds):
            outcome = work()
    except SkippedError as error:
        outcome = f"skipped: {error}"
    except WrongError as error:
        problem = str(error)
    except HangError:
        problem = f"a hang: no end within {limit_seconds:g} s"
    except MegatrainError as error:
        problem = f"an unexpected error: {error.problems[0].text}"
    except Exception as error:  # noqa: BLE001 (a traceback is a verdict)
        where = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"a traceback: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    return Case(kind=kind, name=name, outcome=outcome, problem=problem, seconds=time.perf_counter() - start)


def require(is_right: object, problem: str) -> None:
    if not is_right:
        raise WrongError(problem)


def bits_of(rank: Rank) -> list[bytes]:
    return [values.numpy().tobytes() for values in rank.values()]


def unexpected_names(folder: Path) -> list[str]:
    """Return the names in a `--save` folder that are neither checkpoints nor files of a run: leftovers."""
    known = {TRACKER_NAME, *FILES_OF_A_RUN}
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in known and not (path.name.startswith("iter_") and "." not in path.name)
    )


class Seeds:
    """Ranks whose state follows from a seed, and a rank into which checkpoints are loaded."""

    def __init__(self, seeds: Iterable[int], spec: ModelSpec | None = None) -> None:
        torch.set_num_threads(1)
        spec = spec or small_spec(tied=False, vocab=29, padded=32, num_layers=1)
        self.ranks = {seed: build_rank(GridShape(), 0, spec) for seed in seeds}
        for seed, rank in self.ranks.items():
            rank.set_values(seed)
        self.bits = {seed: bits_of(rank) for seed, rank in self.ranks.items()}
        self.reader = build_rank(GridShape(), 0, spec)

    def load(self, folder: Path) -> tuple[Loaded, int]:
        """Load the newest intact checkpoint; return it and the seed that all of its values have.

        Raises:
            WrongError: the values are not those of one save.
        """
        self.reader.clear()
        loaded = load(folder, self.reader)
        seed = self.reader.optimizer.step_count  # as `Rank.set_values` leaves it
        require(seed in self.bits, f"iteration {loaded.iteration} loads with a step count of {seed}")
        require(bits_of(self.reader) == self.bits[seed], f"iteration {loaded.iteration} loads wrong values")
        require(
            loaded.state["seen"] == loaded.iteration,
            f"iteration {loaded.iteration} has the state of iteration {loaded.state['seen']}",
        )
        return loaded, seed


def problems_of(candidate: Candidate) -> list[str]:
    """Return the problems that `megatrain checkpoint verify` prints."""
    return [candidate.problem] if candidate.problem else verify(candidate.path)


def require_intact(folder: Path, iterations: Iterable[int]) -> None:
    """Check that every checkpoint that a folder lists is intact, and that these are listed."""
    listed = set()
    for candidate in find_checkpoints(folder):
        problems = problems_of(candidate)
        require(not problems, f"{candidate.path.name} looks committed and is damaged: {problems}")
        listed.add(candidate.iteration)
    lost = sorted(set(iterations) - listed)
    require(not lost, f"committed checkpoints are lost: {lost}")


@contextlib.contextmanager
def raises_checkpoint_error(*words: str) -> Iterator[None]:
    """Check that the block fails with a message that has these words."""
    try:
        yield
    except CheckpointError as error:
        missing = [word for word in words if word not in str(error)]
        require(not missing, f"the message lacks {missing}: {error}")
    else:
        raise WrongError("the failure is not reported")


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise HangError after this time; on a busy machine, work that computes gets as much time of a core."""
    start, start_cpu = time.monotonic(), time.process_time()

    def hang(number: int, frame: object) -> None:
        cpu_seconds = time.process_time() - start_cpu
        if _BUSY_SHARE * (time.monotonic() - start) < cpu_seconds < seconds:
            signal.setitimer(signal.ITIMER_REAL, seconds / 4)
        else:
            raise HangError

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def other_user() -> Iterator[None]:
    """Act as a user without special rights, if this process is root's."""
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        yield
    finally:
        if is_root:
            os.seteuid(0)
