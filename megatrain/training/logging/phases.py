"""The parts of a run that take their time, each with a name: a user always knows what is going on.

    > loading the checkpoint, 10 s so far          while it lasts, when nothing was printed for ten seconds
    > loading the checkpoint took 12.3 s           when it has ended, if it took more than a moment
    > started in 15.1 s: ... loading the checkpoint 12.3 s, ...      all phases of the start, once

Phases do not nest. Only the main rank has a voice; the others time theirs all the same.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from megatrain.training.logging.console import Console

SECONDS_OF_SILENCE = 10.0
SECONDS_OF_A_MOMENT = 1.0


class Phases:
    """Times phases and speaks up in long ones."""

    def __init__(self, console: Console, *, seconds_of_silence: float = SECONDS_OF_SILENCE) -> None:
        self.console = console
        self.seconds: dict[str, float] = {}
        """Of each phase so far; phases of one name are added up."""
        self._seconds_of_silence = seconds_of_silence

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the start, such as `loading the checkpoint`."""
        began = time.monotonic()
        try:
            with self.watch(name):
                yield
        finally:
            seconds = time.monotonic() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if seconds > SECONDS_OF_A_MOMENT:
            self.console.say(f"> {name} took {seconds:.1f} s")

    @contextlib.contextmanager
    def watch(self, name: str, *, patience_seconds: float = 0.0) -> Iterator[None]:
        """Anything that may last, such as an iteration; it is not told of sooner than after `patience_seconds`."""
        ended = threading.Event()
        silence = max(self._seconds_of_silence, patience_seconds)
        teller = threading.Thread(target=self._tell, args=(name, silence, ended), daemon=True)
        if not self.console.is_quiet:
            teller.start()
        try:
            yield
        finally:
            ended.set()

    def start_summary(self) -> str:
        """All phases up to now, in one line."""
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        return f"> started in {sum(self.seconds.values()):.1f} s: {parts}"

    def _tell(self, name: str, allowed_silence: float, ended: threading.Event) -> None:
        began = time.monotonic()
        wait = allowed_silence
        while not ended.wait(max(wait, 0.01)):
            now = time.monotonic()
            silence = now - max(self.console.said_at, began)
            if silence >= allowed_silence:
                self.console.say(f"> {name}, {now - began:.0f} s so far")
                silence = 0.0
            wait = allowed_silence - silence
