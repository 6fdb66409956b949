"""Fixtures of the data tests. Pytest adds this folder to `sys.path`, so that all subfolders can import its helper modules."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_SECONDS = 120
"""Far above what a loaded machine needs: only a test that blocks waits so long."""


@pytest.fixture
def ends_soon() -> Iterator[None]:
    """Fail a test that blocks on bad data."""

    def fail(*_: object) -> NoReturn:
        pytest.fail(f"still running after {LIMIT_SECONDS} s")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.alarm(LIMIT_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync in tests with thousands of writes: a killed process, unlike a power failure, loses no written data."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
