"""Heartbeat of a rank: a thread that notices when the main thread makes no progress.

    every half second:  same iteration and same stack as before?  ─> for as long as the phase may take ─> report a stall

Only seconds in which this process runs count: a suspended job is not late when it continues. Other processes of the host can read
iteration and phase of one that does not run, and make it write its stack (`UnresponsiveRank`), through two files in memory without names.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatrain.training.liveness.position import (
    SLOW_PHASES,
    Position,
    dumped_frames,
    is_waiting,
    main_thread_frames,
    phase_of,
    stack_lines,
)

SECONDS_BETWEEN_BEATS: Final = 0.5
SECONDS_OF_START: Final = 3600.0
"""Limit of phases before the first iteration, as long as there is no plan."""
_SECONDS_TO_DUMP: Final = 0.5
_SECONDS_BETWEEN_POLLS: Final = 0.005
_POLLS_OF_COMPLETE_DUMP: Final = 8
_ITERATION_BYTES: Final = 8
_PHASE_BYTES: Final = 120
_STATES: Final = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "blocked in the kernel",
    "Z": "dead",
}
_DUMP_SIGNAL: Final = signal.SIGRTMAX - 1


class Heartbeat:
    """Progress of this rank.

    Args:
        start_phase: returns the current phase of the start, or of any work outside the training loop.
        on_stall: called in the thread of the heartbeat, with the seconds without progress, whenever these reach the limit of the
            phase again.
    """

    def __init__(
        self, start_phase: Callable[[], str], on_stall: Callable[[float], None] = lambda _: None
    ) -> None:
        self.start_phase, self.on_stall = start_phase, on_stall
        self.start_seconds, self.training_seconds = SECONDS_OF_START, SECONDS_OF_START
        self.hang_seconds = SECONDS_OF_START
        """Another limit of training: a smaller one than the timeout of collectives."""
        self.on_trained: Callable[[], None] = lambda: None
        """Called after the first iteration."""
        self.collective_calls: Callable[[], Mapping[str, int]] = dict
        """Returns the number of collectives that this rank has called, by group."""
        self.stalled_seconds = 0.0
        self._ended = threading.Event()
        self._memory_file, self._dump_file = os.memfd_create("heartbeat"), os.memfd_create("stack")
        os.truncate(self._memory_file, _ITERATION_BYTES + _PHASE_BYTES)
        self._memory = mmap.mmap(self._memory_file, _ITERATION_BYTES + _PHASE_BYTES)
        faulthandler.register(_DUMP_SIGNAL, file=self._dump_file)  # any thread may receive the signal
        self._cells = memoryview(self._memory)[:_ITERATION_BYTES].cast("q")

    @property
    def files(self) -> tuple[int, int]:
        """File descriptors of the memory and of the stack, for an `UnresponsiveRank`."""
        return self._memory_file, self._dump_file

    @property
    def iteration(self) -> int:
        """The iteration that this rank computes."""
        return self._cells[0]

    @iteration.setter
    def iteration(self, number: int) -> None:
        self._cells[0] = number

    @property
    def has_trained(self) -> bool:
        """This rank has completed an iteration: the limits are those of training."""
        return self.training_seconds != SECONDS_OF_START

    def begin_training(self, seconds: float) -> None:
        """Set the limit of training, after the first iteration."""
        self.training_seconds = seconds
        self.on_trained()

    def start(self) -> None:
        """Begin to beat."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """Stop beating, and close the files."""
        self._ended.set()
        faulthandler.unregister(_DUMP_SIGNAL)
        for file in self.files:
            os.close(file)

    def position(self) -> Position:
        """Return where this rank is."""
        frames = main_thread_frames()
        calls: Mapping[str, int] = {}
        with contextlib.suppress(RuntimeError):  # the groups are being destroyed
            calls = self.collective_calls()
        return Position(
            iteration=self.iteration,
            phase=phase_of(frames, self._outside()),
            is_waiting=is_waiting(frames),
            stack=stack_lines(frames),
            calls=dict(calls),
        )

    def _outside(self) -> str:
        return f"start: {self.start_phase()}" if not self.iteration else self.start_phase()

    def limit_seconds(self, phase: str) -> float:
        """Return how long a rank may stay at one place in a phase."""
        is_slow = phase.startswith(SLOW_PHASES)
        if is_slow or not self.has_trained:
            return self.start_seconds if is_slow else self.training_seconds
        return min(self.training_seconds, self.hang_seconds)

    def _beat(self) -> None:
        """Compare positions until `close` is called: main function of the thread."""
        before, last, num_reports = None, time.monotonic(), 0
        while not self._ended.wait(SECONDS_BETWEEN_BEATS):
            frames, now = main_thread_frames(), time.monotonic()
            phase = phase_of(frames, self._outside())
            self._memory[_ITERATION_BYTES:] = phase.encode()[:_PHASE_BYTES].ljust(_PHASE_BYTES)
            seconds, last = min(now - last, 2 * SECONDS_BETWEEN_BEATS), now
            here = (self.iteration, frames)
            self.stalled_seconds = self.stalled_seconds + seconds if here == before else 0.0
            before, num_reports = here, num_reports if self.stalled_seconds else 0
            if self.stalled_seconds >= self.limit_seconds(phase) * (num_reports + 1):
                num_reports += 1
                self.on_stall(self.stalled_seconds)


@dataclass(frozen=True)
class UnresponsiveRank:
    """View of another process of this host that does not answer."""

    pid: int
    files: tuple[int, ...]
    """`Heartbeat.files` of the process."""

    def position(self) -> Position:
        """Return where the process is, as far as it can be found out. Afterwards the process is stopped, to be killed."""
        (iteration, phase), state = self._read_memory(), self._state()
        frames = dumped_frames(self._dump(is_stopped=state == "T"))
        remark = _STATES.get(
            state, "does not answer" if frames else f"does not answer, in state {state or 'unknown'}"
        )
        return Position(
            iteration=iteration,
            phase=phase_of(frames, phase) if frames else phase,
            is_waiting=False,
            stack=stack_lines(frames),
            remark=remark,
        )

    def _file(self, index: int) -> Path:
        return Path(f"/proc/{self.pid}/fd/{self.files[index]}")

    def _read_memory(self) -> tuple[int, str]:
        try:
            content = self._file(0).read_bytes()
        except OSError:  # it is gone, or in another container
            return 0, "unknown phase"
        number = int.from_bytes(content[:_ITERATION_BYTES], "little")
        return number, content[_ITERATION_BYTES:].strip(b"\0 ").decode(errors="replace")

    def _state(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def _dump(self, *, is_stopped: bool) -> str:
        """Make the process write its stack, which needs no lock of Python's; return it, or an empty text."""
        try:
            if not self._file(1).exists():
                return ""  # a process without this file may not catch the signal
            os.kill(self.pid, _DUMP_SIGNAL)
            if is_stopped:
                os.kill(self.pid, signal.SIGCONT)  # the pending signal comes first
            deadline, text, num_same = time.monotonic() + _SECONDS_TO_DUMP, "", 0
            while time.monotonic() < deadline and num_same < _POLLS_OF_COMPLETE_DUMP:
                before, text = text, self._file(1).read_text(encoding="utf-8", errors="replace")
                num_same = num_same + 1 if text and text == before else 0
                time.sleep(_SECONDS_BETWEEN_POLLS)
            os.kill(self.pid, signal.SIGSTOP)  # it will be killed, and must not act on the end of a wait
        except OSError:
            return ""
        return text
