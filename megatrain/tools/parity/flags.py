"""Flags of `megatrain parity`. This module does not import torch."""

from __future__ import annotations

import argparse
from typing import Any

from megatrain.tools.subcommands import add_command


def add_flags(commands: Any) -> None:
    """Add `megatrain parity`."""
    parity = add_command(
        commands,
        "parity",
        help="check that every parallel layout computes the same as one process",
        description="Train tiny models under each layout and compare losses, gradients and weights with one process."
        " Without flags: rows that cover every pair of options' values, in fp64, and some rows in fp32, bf16 and fp16.",
    )
    parity.add_argument(
        "--layouts",
        nargs="+",
        default=[],
        metavar="WORD",
        help="only the layout of these words, such as `tp2 sp`; with --quick or --full, only their rows with all of these words",
    )
    which = parity.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="the 32 rows that cover most pairs, in fp64")
    which.add_argument("--full", action="store_true", help="every combination of many options; takes hours")
    which.add_argument("--self-test", action="store_true", help=argparse.SUPPRESS)  # answered by an error
    which.add_argument(
        "--spec",
        nargs="+",
        metavar="FILE:FUNCTION",
        help="a model with these layers of your own, in fp64 under each kind of parallelism, or under --layouts",
    )
    which.add_argument(
        "--runs",
        action="store_true",
        help="whole runs: sampler, evaluation, save and resume, dry run; in fp64 on a CPU",
    )
    which.add_argument(
        "--random",
        type=int,
        metavar="N",
        help="N drawn configurations of whole runs; what differs is shrunk to a minimal pair of commands",
    )
    parity.add_argument("--seed", type=int, default=0, help="seed of --random (default: 0)")
    parity.add_argument(
        "--minutes",
        type=float,
        help="time after which --random draws no further configuration (default: no limit)",
    )
    parity.add_argument(
        "--output",
        metavar="FOLDER",
        help="folder of the datasets and whole runs (default: a new one in the temporary folder)",
    )
    parity.add_argument("--slice", metavar="I/N", help="only every Nth row, starting with row I")
    parity.add_argument(
        "--results",
        metavar="FILE",
        help="record results in FILE, and skip rows that have passed there with the same code",
    )
    parity.add_argument(
        "--precision", choices=("fp64", "fp32", "bf16", "fp16"), help="run all rows in this precision"
    )
    parity.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device; on cuda each rank has a GPU of its own (default: cpu)",
    )
    parity.add_argument(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        default="local",
        help="implementation of the layers in rows that support it; compared with `local` in bf16 (default: local)",
    )
