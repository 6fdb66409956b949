"""The end of a process whose work is done: a library that does not return keeps neither the GPU nor the exit code.

    work done ─> destroy process groups ─> join threads ─> exit handlers, the first registered last ─> os._exit(exit code)
             └─> after the deadline, in a thread: print the stack of the main thread ─> os._exit(exit code)

Destructors of libraries, which run after all Python code and could hang unseen, do not run.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:  # modules that take longer to import than this one are imported where they are used
    import threading
    from collections.abc import Callable, Iterator
    from typing import NoReturn

SECONDS_TO_LEAVE = 20.0
_STACK_LINES = 6


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run a program, and end the process with its exit code after the exit handlers of all libraries.

    Call it before other imports: exit handlers run in the reverse order of their registration.
    """
    exit_codes: list[int] = []

    def end() -> None:
        if exit_codes:  # otherwise an exception ends the process
            _exit(exit_codes[0])

    atexit.register(end)
    exit_codes.append(main())
    _start_timer(exit_codes[0], SECONDS_TO_LEAVE)
    sys.exit(exit_codes[0])


@contextmanager
def exit_deadline(exit_code: int, seconds: float = SECONDS_TO_LEAVE) -> Iterator[None]:
    """End this process with `exit_code` if the context takes longer than `seconds`; print where it hangs."""
    timer = _start_timer(exit_code, seconds)
    try:
        yield
    finally:
        timer.cancel()


def _start_timer(exit_code: int, seconds: float) -> threading.Timer:
    import threading  # noqa: PLC0415

    timer = threading.Timer(seconds, _end_hanging, (exit_code, seconds))
    timer.name, timer.daemon = "exit-deadline", True
    timer.start()
    return timer


def _end_hanging(exit_code: int, seconds: float) -> None:
    import threading  # noqa: PLC0415
    import traceback  # noqa: PLC0415

    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 (the documented way)
    stack = traceback.format_list(reversed(traceback.extract_stack(frame)[-_STACK_LINES:]))
    print(
        f"process {os.getpid()} is done (exit code {exit_code}), but has not ended for {seconds:.0f} s: it ends now."
        f" Its main thread was here, innermost call first:\n{''.join(stack).rstrip()}",
        file=sys.stderr,
        flush=True,
    )
    _exit(exit_code)


def _exit(exit_code: int) -> NoReturn:
    """End the process at once, after what was printed is written."""
    import ctypes  # noqa: PLC0415

    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries printed
    os._exit(exit_code)
