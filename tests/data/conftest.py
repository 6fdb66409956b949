"""What tests of damaged data have in common."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_SECONDS = 10


@pytest.fixture
def ends_soon() -> Iterator[None]:
    """Bad data must not make a run wait for ever."""

    def fail(*_: object) -> NoReturn:
        pytest.fail(f"still running after {LIMIT_SECONDS} s")

    former = signal.signal(signal.SIGALRM, fail)
    signal.alarm(LIMIT_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)
