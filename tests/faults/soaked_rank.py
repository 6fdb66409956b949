"""The program of one rank of the soak: `pretrain.py`, with a pause before each step and the faults that a file requests.

The folder in SOAK_FOLDER has `rank-N.pid` for each rank, and `fault`, a line `NAME RANK`, which that rank removes and obeys.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import pretrain
from megatrain.storage.disk import Disk
from megatrain.training.engine import Engine


def main() -> int:
    """Train with the flags of the command line; return the exit code."""
    folder, pause, rank = Path(os.environ["SOAK_FOLDER"]), float(os.environ["SOAK_PAUSE"]), os.environ["RANK"]
    (folder / f"rank-{rank}.pid").write_text(str(os.getpid()))
    request, begin = folder / "fault", Engine.begin_step

    def disturbed(engine: Engine, *arguments: Any, **more: Any) -> Any:
        time.sleep(pause)
        if request.exists():
            name, culprit = request.read_text().split()
            if culprit == rank:
                request.unlink()
                print(f"FAULT {name} of rank {rank}", flush=True)
                fail(name, engine)
        return begin(engine, *arguments, **more)

    Engine.begin_step = disturbed  # type: ignore[method-assign]
    return pretrain.main(sys.argv[1:])


def fail(name: str, engine: Engine) -> None:
    """Plant the fault of this name, now or in the next save."""
    if name == "exception":
        raise ValueError("planted")
    if name == "exit":
        os._exit(5)
    if name == "segmentation-fault":
        ctypes.string_at(0)
    if name == "hang":
        time.sleep(3600)
    if name == "lock":
        ctypes.PyDLL(None).sleep(3600)
    if name == "nan":
        *_, (_, head) = engine.data_parallel.gathered_buckets()
        head[0] = math.nan
    if name == "bit-flip":
        next(engine.data_parallel.gathered_buckets())[1].view(torch.int32)[3] ^= 1 << 20
    if name == "full-disk":
        Disk.write = _no_space  # type: ignore[method-assign]


def _no_space(*_: object) -> None:
    raise OSError(28, os.strerror(28))


if __name__ == "__main__":
    sys.exit(main())
