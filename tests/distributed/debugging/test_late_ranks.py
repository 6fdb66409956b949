"""A rank that makes no progress: one report with its host, process, phase and stack, and the end of all processes."""

import ctypes
import dataclasses
import os
import re
import signal
import time
from pathlib import Path

import pytest
from everyday import one_in
from forked_job import ForkedJob, at_step
from run_here import MODEL

import megatrain
from megatrain.config.environment import LaunchEnvironment
from megatrain.data.samples.loader import BatchLoader
from megatrain.training.liveness.heartbeat import Heartbeat
from megatrain.training.liveness.late_ranks import LateSearch
from megatrain.training.liveness.position import _PHASES, Position, checked_position
from megatrain.training.liveness.watch_server import WatchServer

LIMIT = 2
FLAGS = [*MODEL, "--train-iters", "100000", "--eval-iters", "0", "--no-eval-at-start"]
FLAGS += ["--distributed-timeout-seconds-after-init", str(LIMIT)]


def hangs_in_step():
    at_step(3, lambda: time.sleep(600))


def is_stopped():
    """The signal may stop the process a moment after the call returns."""
    at_step(3, lambda: (os.kill(os.getpid(), signal.SIGSTOP), time.sleep(600)))


def holds_the_lock():
    at_step(3, lambda: ctypes.PyDLL(None).sleep(600))


def waits_for_its_loader():
    fill = BatchLoader._fill

    def stuck(loader, block, step, number):
        if step.consumed_samples >= 24:
            time.sleep(600)
        fill(loader, block, step, number)

    BatchLoader._fill = stuck


@pytest.mark.parametrize(
    ("hangs", "culprit", "words"),
    one_in(
        8,
        [
            (
                hangs_in_step,
                1,
                r"iteration 3, step\n      tests/distributed/debugging/test_late_ranks.py:\d+ in <lambda>\n",
            ),
            (
                is_stopped,
                1,
                r"iteration 3, step, stopped by a signal\n      tests/distributed/debugging/test_late_ranks.py",
            ),
            (
                holds_the_lock,
                1,
                r"iteration 3, step, does not answer\n      tests/distributed/debugging/test_late_ranks.py",
            ),
            (
                holds_the_lock,
                0,
                r"iteration 3, step, does not answer\n      tests/distributed/debugging/test_late_ranks.py",
            ),
            (waits_for_its_loader, 1, r"iteration \d, data\n"),
            (
                hangs_in_step,
                0,
                r"iteration 3, step\n      tests/distributed/debugging/test_late_ranks.py:\d+ in <lambda>\n",
            ),
        ],
    ),
)
def test_one_report_names_the_late_rank(tmp_path: Path, hangs, culprit: int, words: str) -> None:
    save = tmp_path / "run"
    job = ForkedJob(
        [*FLAGS, "--save", str(save), "--global-batch-size", "8"],
        2,
        tmp_path,
        lambda rank: hangs() if rank == culprit else None,
    )
    began = time.monotonic()
    seconds = job.wait(to_end_seconds=60)
    assert seconds < 10
    assert time.monotonic() - began < 30
    assert set(job.exit_codes.values()) <= {1, -signal.SIGKILL}
    shown = job.output(0) + job.output(1)
    assert shown.count(" is late: no progress for ") == 1
    assert re.search(
        rf"rank {culprit} of 2 is late: no progress for [234] s|rank {culprit} of 2 are late", shown
    )
    assert re.search(rf"\n  rank {culprit} on \S+ \(process {job.pids[culprit]}\): {words}", shown), shown
    assert "Traceback" not in shown
    traces = sorted(path.name for path in (save / "flight_recorder").iterdir())
    assert (
        traces == ["rank-0.json", "rank-1.json"] if hangs in (hangs_in_step, waits_for_its_loader) else traces
    )


def search(**positions: Position) -> LateSearch:
    """Return a search with answers of `r0`, `r1` ...; two ranks per host."""
    ranks = {int(name[1:]): position for name, position in positions.items()}
    locations = {
        rank: {
            "rank": rank,
            "world_size": 4,
            "local_rank": rank % 2,
            "host": f"h{rank // 2}",
            "pid": 100 + rank,
        }
        for rank in range(4)
    }
    found = LateSearch(locations, 600.0)
    for rank, position in ranks.items():
        found.add(rank, None, position)
    return found


WAITS = Position(
    iteration=5,
    phase="backward",
    is_waiting=True,
    stack=["megatrain/parallel/collectives.py:32 in wait"],
    calls={"tp of ranks 0 to 1": 7},
)
WORKS = Position(
    iteration=5,
    phase="data",
    is_waiting=False,
    stack=["megatrain/data/samples/loader.py:158 in _read"],
    calls={"tp of ranks 0 to 1": 6},
)


def test_a_rank_that_works_is_late_if_others_wait() -> None:
    failure = search(r0=WAITS, r1=WORKS, r2=WAITS, r3=WAITS).conclude()
    assert (failure.rank, failure.exit_code) == (1, 1)
    assert (
        str(failure)
        == "rank 1 of 4 is late: no progress for 600 s, and 3 others wait; rank 1: iteration 5, data"
    )
    assert failure.details.splitlines() == [
        "  rank 1 on h0 (process 101): iteration 5, data",
        "      megatrain/data/samples/loader.py:158 in _read",
        "  ranks 0, 2, 3: iteration 5, backward, waits for other ranks; megatrain/parallel/collectives.py:32 in wait",
    ]


def test_a_rank_in_another_collective_is_late() -> None:
    other = dataclasses.replace(WAITS, calls={"tp of ranks 0 to 1": 6, "dp of ranks 0 to 2": 3})
    found = search(r0=WAITS, r1=other, r2=WAITS, r3=WAITS)
    assert found.late_ranks() == [1]
    assert found.conclude().summary.endswith("rank 1: iteration 5, backward, waits for other ranks")


def test_no_rank_is_late_if_all_wait_for_the_same_collective() -> None:
    found = search(r0=WAITS, r1=WAITS, r2=WAITS, r3=WAITS)
    assert found.late_ranks() == []
    assert "no rank is late: all wait" in str(found.conclude())
    assert "  ranks 0, 1, 2, 3: iteration 5" in found.conclude().details


@pytest.mark.parametrize(("stalled", "is_excused"), [((0,), True), ((0, 1), False), ((1,), False)])
def test_a_rank_that_saves_is_excused_unless_it_reports_a_stall(
    stalled: tuple[int, ...], *, is_excused: bool
) -> None:
    """All ranks of a save that hangs report at about the same time: the second report comes during the search."""
    server = WatchServer(LaunchEnvironment(world_size=2))
    server.start()
    try:
        for rank in stalled:
            server._begin_search(600.0, rank)
        found = server._search
        found.add(0, None, dataclasses.replace(WAITS, phase="checkpoint save"))
        found.add(1, None, dataclasses.replace(WORKS, phase="checkpoint save"))
        assert found.late_ranks() == [1]
        assert found.is_excused == is_excused
    finally:
        server.close()


def test_silent_ranks_are_late_and_are_looked_at_from_their_host() -> None:
    found = search(r0=WAITS, r3=WAITS)
    found.begin()
    assert not found.is_step_due
    found.next_step = 0.0
    assert dict(found.to_look_at()) == {1: 0, 2: 3}
    found.add(0, 1, dataclasses.replace(WORKS, remark="stopped by a signal"))
    found.add(1, None, WAITS)  # a look made it continue
    assert found.late_ranks() == [1, 2]
    assert found.reporters() == [0, 3]
    assert found.conclude().details.splitlines()[:3] == [
        "  rank 1 on h0 (process 101): iteration 5, data, stopped by a signal",
        "      megatrain/data/samples/loader.py:158 in _read",
        "  rank 2 on h1 (process 102): does not answer",
    ]


def test_a_position_from_another_rank_is_checked() -> None:
    good = dataclasses.asdict(WAITS)
    assert checked_position(good) == WAITS
    for name, value in {"iteration": -1, "stack": ["x"] * 1000, "phase": 3, "calls": {"tp": "x"}}.items():
        with pytest.raises(ValueError, match=name):
            checked_position({**good, name: value})


def test_phases_have_limits_of_their_own() -> None:
    beat = Heartbeat(lambda: "loading the checkpoint")
    beat.start_seconds, beat.training_seconds = 100.0, 10.0
    try:
        position = beat.position()
        assert (position.phase, position.is_waiting) == ("start: loading the checkpoint", False)
        assert "test_late_ranks.py" in position.stack[2]
        assert beat.limit_seconds(position.phase) == 100.0
        beat.iteration = 3
        assert beat.limit_seconds(beat.position().phase) == 10.0
        assert beat.limit_seconds("checkpoint save") == 100.0
    finally:
        beat.close()


def test_each_phase_is_in_the_program() -> None:
    """A phase whose file or function has another name would never be reported."""
    for path, function, _ in _PHASES:
        place = Path(megatrain.__file__).parent / path
        assert place.is_dir() or not function or f"def {function}(" in place.read_text()
        assert place.exists()
