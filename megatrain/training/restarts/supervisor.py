"""Supervisor of one training process: the launcher starts it in place of a rank, and it starts the process again when that dies.

    torchrun, srun ─> supervisor ─> training process: killed, crashed, or the cause of a hang ─> another one
                          └─> any other exit code ─> the supervisor ends with it

The launcher sees no failure, so it leaves the other ranks alone. This module does not import torch.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Final, TextIO

from megatrain.config import Request
from megatrain.config.environment import LaunchEnvironment, supervised
from megatrain.config.subjects.run import signal_number
from megatrain.process.signals import STOPPED_EARLY, Signals
from megatrain.training.liveness.launcher_watch import RESTARTED
from megatrain.training.restarts.rendezvous import Rendezvous

_SECONDS_OF_A_QUICK_END: Final = 10.0
_MOST_QUICK_ENDS: Final = 5


def supervise(request: Request, environment: LaunchEnvironment, signals: Signals) -> int:
    """Run the same command in a process, again after each failure of it; return the exit code of its last one."""
    rendezvous = Rendezvous(environment, request.known, _say) if environment.rank == 0 else None
    children: list[subprocess.Popen[bytes]] = []

    def forward(_text: str) -> None:
        for child in children[-1:]:
            child.send_signal(signals.number)

    also = signal_number(request.known("resilience.exit_signal") or "") or signal.SIGTERM
    signals.become_requests(forward, before_exit=lambda _code, _reason: None, also=also)
    port, quick_ends = 0 if rendezvous is None else rendezvous.port, 0
    while True:
        started = time.monotonic()
        children[:] = [start_process(supervised(port))]
        code = children[0].wait()
        is_quick = time.monotonic() - started < _SECONDS_OF_A_QUICK_END
        quick_ends = quick_ends + 1 if is_quick else 0
        if signals.number or not (code < 0 or code == RESTARTED) or quick_ends == _MOST_QUICK_ENDS:
            break
        how = f"was ended by signal {-code}" if code < 0 else "ended after a failure"
        _say(
            f"> launch rank {environment.rank}: process {children[0].pid} {how}; another one starts",
            sys.stderr,
        )
    if code in (RESTARTED, -signal.SIGTERM, -signal.SIGINT):
        code = STOPPED_EARLY if signals.number else 1
    code = code if code >= 0 else 128 - code
    if rendezvous is not None:
        rendezvous.end(code)
    return code


def start_process(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start this program again, with the same command line."""
    return subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment)


def _say(text: str, stream: TextIO | None = None) -> None:
    print(text, file=stream, flush=True)
