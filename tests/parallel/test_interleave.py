"""Two passes run in turn, and the error of one ends both."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.parallel.pipeline.interleave import Turns
from megatrain.training.liveness.position import main_thread_frames


def has_backward_thread() -> bool:
    """Return whether the thread of a backward pass lives; threads of earlier tests may live too."""
    return any(thread.name == "backward pass" for thread in threading.enumerate())


def pass_of(turns: Turns, name: str, events: list[str], count: int = 3) -> Callable[[], None]:
    def run() -> None:
        for number in range(count):
            events.append(f"{name}{number}")
            turns.give()

    return run


@pytest.mark.parametrize(
    ("backward", "expected"), [(3, "b0 f0 b1 f1 b2 f2"), (1, "b0 f0 f1 f2"), (0, "f0 f1 f2")]
)
def test_passes_run_in_turn_and_the_longer_one_to_its_end(backward: int, expected: str) -> None:
    turns, events = Turns(), list[str]()
    turns.run(pass_of(turns, "b", events, backward), pass_of(turns, "f", events))
    assert " ".join(events) == expected
    turns.give()  # outside of `run` it returns at once


@pytest.mark.parametrize("failing", ["b", "f"])
def test_the_error_of_a_pass_ends_both(failing: str) -> None:
    turns, events = Turns(), list[str]()

    def fail() -> None:
        turns.give()
        raise ValueError(failing)

    passes = {name: fail if name == failing else pass_of(turns, name, events) for name in "bf"}
    with pytest.raises(ValueError, match=failing):
        turns.run(passes["b"], passes["f"])
    assert events == (["f0"] if failing == "b" else ["b0", "b1"])
    assert not has_backward_thread()
    turns.run(pass_of(turns, "b", events), pass_of(turns, "f", events))


def test_an_interrupt_of_the_waiting_main_thread_ends_both() -> None:
    turns, events = Turns(), list[str]()

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        for _ in range(1000):
            pass_of(turns, "b", events)()

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            turns.run(interrupted, pass_of(turns, "f", events, 10_000))
    finally:
        signal.signal(signal.SIGINT, former)
    assert not has_backward_thread()


def test_the_position_of_a_rank_is_that_of_the_pass_that_has_the_turn() -> None:
    turns, found = Turns(), list[str]()

    def look() -> None:
        found.append(main_thread_frames()[2][2])  # below `main_thread_frames` and its comprehension

    def of_backward() -> None:
        turns.give()
        look()

    def of_forward() -> None:
        look()
        turns.give()

    turns.run(of_backward, of_forward)
    assert found == ["of_forward", "of_backward"]


def test_dispatch_modes_see_both_passes() -> None:
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Counting() as mode:
        Turns().run(lambda: torch.zeros(1).add_(1), lambda: torch.zeros(1).add_(1))
    assert mode.count == 4
