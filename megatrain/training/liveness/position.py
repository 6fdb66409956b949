"""The position of a rank: iteration, phase and stack. It is taken from its main thread when it is asked for, so that a step costs nothing.

frames of the main thread ─> innermost first: file, line, function ─> phase; waiting for other ranks, or not
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import megatrain
from megatrain.storage.untrusted_json import Check, flag, integer, list_of, map_of, record, text

_ROOT: Final = str(Path(megatrain.__file__).parent.parent) + "/"
_PHASES: Final = (
    ("training/saving.py", "", "checkpoint save"),
    ("training/checkpoints.py", "", "checkpoint load"),
    ("training/evaluation.py", "", "evaluation"),
    ("training/debugging/replicas.py", "", "comparison of weights"),
    ("data/", "", "data"),
    ("parallel/pipeline/executor.py", "_forward", "forward"),
    ("parallel/pipeline/executor.py", "_backward", "backward"),
    ("parallel/pipeline/executor.py", "_weights", "backward"),
    ("parallel/pipeline/executor.py", "run", "pipeline messages"),
    ("parallel/data_parallel.py", "finish_gradients", "gradient reduction"),
    ("optim/", "", "optimizer"),
    ("training/step_report.py", "read", "report of the step"),
    ("training/logging/", "", "logging"),
    ("training/iterations.py", "", "step"),
)
"""File below megatrain/, function, and phase; the first one that is on the stack counts."""
_COMPILATION: Final = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/compile_fx.py",
    "/triton/compiler/compiler.py",
)
"""Files that are on the stack while a compiler runs."""
SLOW_PHASES: Final = ("checkpoint save", "checkpoint load", "start", "compilation")
"""Phases that may take as long as a start: they wait for disks or compilers."""
_WAITING: Final = (".wait(", "_store.", ".synchronize(", ".item(", ".tolist(")
"""Text of a line that waits for other ranks, or for the device, which may wait for other ranks."""
_TURNS: Final = "/parallel/pipeline/interleave.py"
_MAX_LINES: Final = 12
_MAX_CHARACTERS: Final = 300
_DUMPED: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)

Frames = list[tuple[str, int, str]]
"""File, line and function, innermost first."""

POSITION: Final[dict[str, Check]] = {
    "iteration": integer(),
    "phase": text(max_characters=_MAX_CHARACTERS),
    "is_waiting": flag,
    "stack": list_of(text(max_characters=_MAX_CHARACTERS), most=_MAX_LINES),
    "calls": map_of(integer()),
    "remark": text(max_characters=_MAX_CHARACTERS),
}


@dataclass(frozen=True, kw_only=True)
class Position:
    """The position of one rank."""

    iteration: int
    """The iteration that it computes; 0 before the first."""
    phase: str
    is_waiting: bool
    """It waits for other ranks."""
    stack: list[str] = field(default_factory=list)
    """Innermost lines first."""
    calls: dict[str, int] = field(default_factory=dict)
    """Number of collectives called so far, by group."""
    remark: str = ""
    """State of a process that does not answer."""

    def __str__(self) -> str:
        where = f"iteration {self.iteration}, {self.phase}" if self.iteration else self.phase
        return ", ".join(filter(None, (where, "waits for other ranks" * self.is_waiting, self.remark)))


def checked_position(values: Any) -> Position:
    """Build a position from a message. Raises ValueError."""
    record(POSITION)(values, "position")
    return Position(**{name: values[name] for name in POSITION})


def main_thread_frames() -> Frames:
    """Return the stack of this process's main thread, or of the backward pass that has its turn."""
    # No variable holds a frame: a cycle through this one would keep the tensors of all threads until the next garbage collection.
    stacks = {thread: _frames(frame) for thread, frame in sys._current_frames().items()}  # noqa: SLF001 (the documented way)
    main = stacks.pop(threading.main_thread().ident or 0, [])
    return _with_turn([*stacks.values(), main])


def _frames(top: FrameType) -> Frames:
    frames: Frames = []
    frame: FrameType | None = top
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def dumped_frames(dump: str) -> Frames:
    """Return the same stack among those that faulthandler has written, the main thread's last."""
    return _with_turn(
        [
            [(file, int(line), function) for file, line, function in _DUMPED.findall(thread)]
            for thread in dump.split("hread 0x")
        ]
    )


def _with_turn(stacks: list[Frames]) -> Frames:
    """Return the last stack, the main thread's; if its pass has given up its turn, the stack of the other pass."""
    main = stacks[-1]
    own = next((file for file, _, _ in main if file.startswith(_ROOT + "megatrain/")), "")
    if not own.endswith(_TURNS):
        return main
    return next((one for one in stacks[:-1] if any(file.endswith(_TURNS) for file, _, _ in one)), main)


def phase_of(frames: Frames, otherwise: str) -> str:
    """Return the phase of a stack; `otherwise`: of one outside the training loop."""
    if any(file.endswith(_COMPILATION) for file, _, _ in frames):
        return "compilation"
    for path, function, phase in _PHASES:
        for file, _, name in frames:
            if f"/megatrain/{path}" in file and function in ("", name):
                return phase
    return otherwise


def is_waiting(frames: Frames) -> bool:
    """Return whether a stack ends in a wait for other ranks."""
    if not frames:
        return False
    file, line, _ = frames[0]
    is_ours = file.startswith(_ROOT + "megatrain/")
    return "/torch/distributed/" in file or (
        is_ours and any(words in linecache.getline(file, line) for words in _WAITING)
    )


def stack_lines(frames: Frames) -> list[str]:
    """Return the innermost lines as text."""
    return [
        f"{file.removeprefix(_ROOT)}:{line} in {function}"[-_MAX_CHARACTERS:]
        for file, line, function in frames[:_MAX_LINES]
    ]
