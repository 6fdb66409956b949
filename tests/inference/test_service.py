"""The thread that serves requests: each one ends with one event, pauses are confirmed, failures reach all requests."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_cached_models import tiny_model

from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.build import load_tokenizer
from megatrain.inference.sampling import Sampling
from megatrain.inference.service import Event, Service, UnavailableError
from megatrain.inference.texts import TextEngine, plan_cache

CPU = torch.device("cpu")
LONG = Sampling(max_new_tokens=20, ends_at_eod=False)


class Gate:
    """Holds the engine before its passes, and lets single ones through."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step, self.error = step, None
        self.changed = threading.Condition()
        self.num_entered, self.num_allowed = 0, 1 << 30

    def __call__(self) -> Any:
        with self.changed:
            self.num_entered += 1
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.num_entered <= self.num_allowed, 30)
        if self.error is not None:
            raise self.error
        return self.step()

    def hold(self, num_passes: int) -> None:
        """Let only so many passes through, counted from the first one."""
        with self.changed:
            self.num_allowed = num_passes
            self.changed.notify_all()

    def open(self) -> None:
        with self.changed:
            self.num_allowed = 1 << 30
            self.changed.notify_all()

    def wait_until_held(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_entered > self.num_allowed, 30)


class Served:
    """A service whose passes can be stopped, and the events of its requests."""

    def __init__(self, max_waiting: int = 100) -> None:
        model = tiny_model("llama")
        plan = plan_cache(model, dtype=torch.float64, max_tokens=25, num_sequences=2, limit_bytes=1 << 30)
        tokenizer = load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=97))
        self.engine = TextEngine(model, tokenizer, plan, CPU, end_ids=())
        self.gate = Gate(self.engine.step)
        self.engine.step = self.gate  # type: ignore[method-assign]
        self.failures: list[BaseException] = []
        self.ends: dict[int, list[str]] = {}
        self.ended = threading.Condition()
        self.service = Service(self.engine, max_waiting=max_waiting, on_failure=self.failures.append)

    def submit(self, number: int, sampling: Sampling = LONG) -> Any:
        def on_event(event: Event) -> None:
            with self.ended:
                self.ends.setdefault(number, [])
                if event.end:
                    self.ends[number].append(event.end)
                self.ended.notify_all()

        return self.service.submit([number + 1], sampling, on_event)

    def wait_for_ends(self, count: int) -> dict[int, list[str]]:
        with self.ended:
            assert self.ended.wait_for(lambda: sum(map(len, self.ends.values())) >= count, 30)
        return self.ends

    def submit_and_hold(self, count: int) -> list[Any]:
        """Submit requests; return when the engine has all of them and is held before its second pass."""
        self.gate.hold(0)
        tickets = [self.submit(number) for number in range(count)]
        self.gate.wait_until_held()
        self.gate.hold(1)
        self.gate.wait_until_held()
        return tickets


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.gate.open()
    made.service.begin_stop(0)
    assert made.service.join(30)
    assert made.service.status.is_memory_free


def test_requests_end_once(served: Served) -> None:
    for number in range(7):
        served.submit(number)
    assert served.wait_for_ends(7) == {number: ["length"] for number in range(7)}
    assert served.service.status.is_memory_free


def test_a_pause_is_confirmed_after_the_pass(served: Served) -> None:
    served.submit_and_hold(1)
    assert not served.service.pause(0.05)
    assert served.service.status.state == "pausing"
    assert served.service.status.seconds_in_pass > 0
    served.gate.open()
    assert served.service.pause(30)
    num_passes = served.gate.num_entered
    served.submit(1)
    time.sleep(0.1)
    assert served.gate.num_entered == num_passes
    assert served.service.status.state == "paused"
    assert served.service.resume(30)
    served.wait_for_ends(2)


def test_cancelled_requests_end_before_the_next_pass(served: Served) -> None:
    tickets = served.submit_and_hold(4)
    assert (served.service.status.running, served.service.status.waiting) == (2, 2)
    for ticket in tickets:
        served.service.cancel(ticket)
        served.service.cancel(ticket)
    served.gate.open()
    assert served.wait_for_ends(4) == {number: ["cancelled"] for number in range(4)}
    assert served.service.status.is_memory_free


def test_a_stop_ends_what_is_not_finished_in_time(served: Served) -> None:
    served.submit_and_hold(3)
    served.service.begin_stop(0)
    with pytest.raises(UnavailableError, match="stopping"):
        served.submit(3)
    assert not served.service.pause(0)
    served.gate.open()
    assert served.wait_for_ends(3) == {number: ["stopped"] for number in range(3)}


def test_a_stop_lets_requests_finish_in_time(served: Served) -> None:
    for number in range(3):
        served.submit(number)
    served.service.begin_stop(60)
    assert served.wait_for_ends(3) == {number: ["length"] for number in range(3)}
    assert served.service.join(30)


def test_a_stop_while_paused_runs_no_pass(served: Served) -> None:
    assert served.service.pause(30)
    served.submit(0)
    served.service.begin_stop(60)
    assert served.wait_for_ends(1) == {0: ["stopped"]}
    assert served.gate.num_entered == 0


def test_a_failure_ends_all_requests(served: Served) -> None:
    served.submit_and_hold(3)
    served.gate.error = error = RuntimeError("no device")
    served.gate.open()
    assert served.wait_for_ends(3) == {number: ["failed"] for number in range(3)}
    assert served.service.join(30)
    assert served.failures == [error]
    with pytest.raises(UnavailableError, match="failed"):
        served.submit(3)


def test_a_full_queue_refuses() -> None:
    served = Served(max_waiting=2)
    assert served.service.pause(30)
    served.submit(0)
    served.submit(1)
    with pytest.raises(UnavailableError, match="2 requests are waiting"):
        served.submit(2)
    served.service.begin_stop(0)
    assert served.service.join(30)
