"""Ends this rank when its launcher dies, even by SIGKILL: otherwise it would wait for other ranks, and keep its GPU.

    torchrun or a supervisor is killed          the kernel kills its ranks, also a stopped one or one that is still starting
    the parent under srun or mpirun is killed   a thread of each rank notices that it has another parent, and exits

A single process and ranks that were started by hand continue, as with nohup when the terminal is closed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from megatrain.config.environment import LaunchEnvironment

RESTARTED = 76
"""Exit code of a process whose supervisor starts another one (--inprocess-restart)."""
_PR_SET_PDEATHSIG = 1
_SECONDS_BETWEEN_LOOKS = 1.0
_INIT = 1
"""Process id of the parent of orphans."""


def end_with_launcher(environment: LaunchEnvironment) -> None:
    """Make this process end with its launcher from now on; exit at once if the launcher is gone."""
    is_supervised = environment.supervisor is not None
    if environment.launcher in (None, "hand") and not is_supervised:
        return
    parent = os.getppid()
    # The kernel's signal follows the thread that forked: torchrun forks in its main thread, others may not.
    if environment.launcher == "torchrun" or is_supervised:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent == _INIT and not _is_python(_INIT):
            _exit(environment)
    threading.Thread(target=_watch, args=(environment, parent), name="launcher-watch", daemon=True).start()


def _watch(environment: LaunchEnvironment, parent: int) -> None:
    """Exit when this process has another parent: main function of a thread."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    _exit(environment)


def _is_python(pid: int) -> bool:
    """Return whether a process runs Python, as torchrun does, also as the first process of a container."""
    name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return name.startswith(("python", "torchrun", "pt_"))


def _exit(environment: LaunchEnvironment) -> None:
    print(
        f"rank {environment.rank} of {environment.world_size} ends: its launcher ({environment.launcher}) is gone",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)  # the main thread may be blocked in a collective
