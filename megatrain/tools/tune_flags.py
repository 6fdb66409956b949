"""Flags of `megatrain tune`. This module does not import torch."""

from __future__ import annotations

from typing import Any

from megatrain.tools.subcommands import add_command


def add_flags(commands: Any) -> None:
    """Add `megatrain tune`."""
    tune = add_command(
        commands,
        "tune",
        takes_run_flags=True,
        help="measure cuBLASLt's algorithms for the matrix products of a run, for --product-algorithms",
        usage="%(prog)s --output FILE [--rounds N] [--min-gain PERCENT] [--variants N] FLAGS",
        description="Find the bf16 products of a run, measure torch's choice and cuBLASLt's algorithms for each on this GPU,"
        " and write those that are faster. FLAGS are the flags of pretrain.py; --world-size N stands for N ranks.",
    )
    tune.add_argument(
        "--output", required=True, metavar="FILE", help="file to write, for --product-algorithms"
    )
    tune.add_argument(
        "--rounds",
        type=int,
        default=40,
        metavar="N",
        help="measurements of each finalist (default: %(default)s)",
    )
    tune.add_argument(
        "--min-gain", type=float, default=1.5, metavar="PERCENT",
        help="smallest gain over torch's choice of an entry (default: %(default)s)",
    )  # fmt: skip
    tune.add_argument(
        "--variants", type=int, default=0, metavar="N",
        help="also try up to N other tiles, stages, clusters and orders of tiles of the best algorithms (default: %(default)s)",
    )  # fmt: skip
