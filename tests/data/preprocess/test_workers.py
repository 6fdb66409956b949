"""Worker processes: results in order, and no waiting for dead processes."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time

import pytest

from megatrain.config.errors import InputError, MegatrainError
from megatrain.data.preprocess.workers import IN_FLIGHT, Workers


def make_work(kind):
    return functools.partial(work, kind)


def make_failure():
    raise InputError("tokenizer.json: is missing", fix="find it")


def work(kind, item):
    if kind == "slow" and not item % 3:
        time.sleep(0.02)
    if kind == "large":
        return item * 2
    if item == 5:
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exits":
            os._exit(7)
        if kind == "fails":
            raise ZeroDivisionError("five")
        if kind == "rejects":
            raise InputError("data:5: is five", fix="use six")
    return item * item


@pytest.mark.parametrize("num_workers", [1, 3])
def test_results_are_in_order(num_workers):
    with Workers(num_workers, functools.partial(make_work, "slow")) as workers:
        assert list(workers.map(range(20))) == [item * item for item in range(20)]
        assert list(workers.map([])) == []


def test_items_larger_than_a_pipe_do_not_block():
    items = [bytes([number]) * 3_000_000 for number in range(8)]
    with Workers(2, functools.partial(make_work, "large")) as workers:
        assert list(workers.map(items)) == [item * 2 for item in items]


def test_items_are_consumed_on_demand():
    taken = itertools.count()
    with Workers(2, functools.partial(make_work, "plain")) as workers:
        results = workers.map(next(taken) for _ in range(1000))
        for _ in range(3):
            next(results)
    assert next(taken) <= 2 * IN_FLIGHT + 3


@pytest.mark.parametrize("num_workers", [1, 3])
def test_items_in_flight_are_bounded_in_bytes(num_workers):
    taken, sizes = itertools.count(), [1, 1, 100, 1, 1, 60, 60, 1, 1, 1, 200]
    with Workers(num_workers, functools.partial(make_work, "plain")) as workers:
        in_flight = []

        def items():
            for size in sizes:
                in_flight.append(size)
                next(taken)
                yield size

        done = 0
        for result in workers.map(items(), size=int, max_bytes=100):
            assert result == sizes[done] ** 2
            assert sum(in_flight[done:-1]) <= 100 + max(sizes), "one more may be waiting"
            done += 1
    assert done == len(sizes)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("killed", r"worker 1 .*SIGKILL\n  fix: .*--workers"),
        ("exits", "worker 1 .*exit code 7"),
        ("fails", r"(?s)a worker failed:.*ZeroDivisionError: five"),
        ("rejects", "data:5: is five\n  fix: use six"),
    ],
)
def test_a_worker_that_ends_or_fails_is_an_error(kind, message):
    start = time.monotonic()
    with (
        pytest.raises(MegatrainError, match=message),
        Workers(2, functools.partial(make_work, kind)) as workers,
    ):
        list(workers.map(range(20)))
    assert time.monotonic() - start < 30


def test_a_worker_that_cannot_start_is_an_error():
    with (
        pytest.raises(MegatrainError, match=r"tokenizer\.json: is missing"),
        Workers(2, make_failure) as workers,
    ):
        list(workers.map(range(20)))


def test_a_worker_that_cannot_start_is_an_error_also_when_its_pipe_is_closed_first():
    with Workers(1, make_failure) as workers:
        workers._processes[0].join(30)
        with pytest.raises(MegatrainError, match=r"tokenizer\.json: is missing"):
            list(workers.map([bytes(1_000_000)] * 3))
