"""Flags of `megatrain doctor`. This module does not import torch."""

from __future__ import annotations

from typing import Any

from megatrain.tools.subcommands import add_command


def add_flags(commands: Any) -> None:
    """Add `megatrain doctor`."""
    doctor = add_command(
        commands,
        "doctor",
        takes_run_flags=True,
        help="check hosts, GPUs, disks and network before a run",
        usage="%(prog)s [FLAGS] [--nodes N] [--json]",
        description="Check what a run needs, in less than a minute: versions, driver, GPUs, limits, shared memory, the disk of"
        " --save, the rendezvous; under torchrun or srun also the speed of each rank and of the links between them. FLAGS are"
        " the flags of pretrain.py, which may be left out. Exit code: 0 without errors, else 1.",
    )
    doctor.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="nodes of the launch line (default: 1)"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
