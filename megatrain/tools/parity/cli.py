"""`megatrain parity`: the same model under every layout, against one process.

Tiny models train two steps on batches with an uneven loss mask. In fp64 the loss and gradient norm of each step, every
gradient of the first step and every weight after the last step are compared: the largest difference, relative to the
tensor's largest value, must be at most 1e-10. In fp32, bf16 and fp16 the differences are compared with measured rounding
noise (low_precision.py). choice.py selects the rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatrain.config import ConfigError
from megatrain.tools.parity.choice import Row, chosen_rows
from megatrain.tools.parity.compare import TOLERANCE, Distance, judge, names_without_gradient
from megatrain.tools.parity.low_precision import TIMES, LowPrecisionComparer, LowPrecisionVerdict
from megatrain.tools.parity.measure import (
    LOW_PRECISIONS,
    NUM_STEPS,
    Implementation,
    Job,
    Measured,
    RunOfRank,
    measure,
    plan_of,
)
from megatrain.tools.parity.results import Results
from megatrain.tools.parity.rows import MAX_RANKS, Layout
from megatrain.tools.parity.runs.table import run_random, run_rows
from megatrain.tools.subcommands import add_command
from megatrain.tools.worker_pool import WorkerPool

_SPEC_LAYOUTS = ("dp2", "tp2", "tp2 sp", "pp2", "cp2", "dp2 tp2 pp2")
"""Layouts for layers of the user's own."""
_WIDEST_NAME = 60
"""Characters of the table's first column; a longer name has a line of its own."""


@dataclass
class Comparer:
    """Compares layouts with one process in fp64. Keeps the references, since many layouts share them."""

    pool: WorkerPool
    spec: tuple[str, ...] = ()
    """Words of --spec: layers of the user's own."""
    references: dict[Layout, Measured] = field(default_factory=dict)

    def compare(self, layout: Layout, *, run: RunOfRank = measure) -> Distance:
        """Run a layout and its one-process reference; the layout's ranks call `run`."""
        alone, device = layout.alone, self.pool.device
        if alone not in self.references:
            self.references[alone], *_ = self.pool.run(
                alone.world_size, measure, Job(alone, device=device, spec=self.spec)
            )
        answers = self.pool.run(layout.world_size, run, Job(layout, device=device, spec=self.spec))
        return judge(self.references[alone], answers)


def add_flags(commands: Any) -> None:
    """Add `megatrain parity`."""
    parity = add_command(commands, "parity", run)
    parity.add(
        "--layouts WORD ...",
        "only the layout of these words, such as `tp2 sp`; with --quick or --full, only their rows with all of these words",
        (),
    )
    which = parity.add_mutually_exclusive_group()
    parity.add("--quick", "the 32 rows that cover most pairs, in fp64", group=which)
    parity.add(
        "--full", "the rows without flags, and every combination of many options; takes hours", group=which
    )
    parity.add(
        "--spec FILE:FUNCTION ...",
        "a model with these layers of your own, in fp64 under each kind of parallelism, or under --layouts",
        group=which,
    )
    parity.add(
        "--runs", "whole runs: sampler, evaluation, save and resume, dry run; in fp64 on a CPU", group=which
    )
    parity.add(
        "--random N",
        "N drawn configurations of whole runs; what differs is shrunk to a minimal pair of commands",
        of=int,
        at_least=1,
        group=which,
    )
    parity.add("--seed", "seed of --random", 0)
    parity.add(
        "--minutes MINUTES",
        "time after which --random draws no further configuration (default: no limit)",
        of=float,
    )
    parity.add(
        "--output FOLDER",
        "folder of the datasets and whole runs (default: a new one in the temporary folder)",
    )
    parity.add("--slice I/N", "only every Nth row, starting with row I")
    parity.add(
        "--results FILE", "record results in FILE, and skip rows that have passed there with the same code"
    )
    parity.add("--precision", "run all rows in this precision", choices=("fp64", "fp32", "bf16", "fp16"))
    parity.add("--device", "device; on cuda each rank has a GPU of its own", "cpu", choices=("cpu", "cuda"))
    parity.add(
        "--transformer-impl",
        "implementation of the layers in rows that support it; compared with `local` in bf16",
        "local",
        choices=("local", "transformer_engine"),
    )


def run(arguments: argparse.Namespace) -> int:
    """Train tiny models under each layout and compare losses, gradients and weights with one process. Without flags: rows
    that cover every pair of options' values, in fp64, and some rows in fp32, bf16 and fp16.
    """
    began = time.perf_counter()
    torch.set_num_threads(1)
    if arguments.spec or arguments.runs or arguments.random is not None:
        _check_flags(arguments)
    if arguments.runs or arguments.random is not None:
        is_good = run_rows(arguments) if arguments.runs else run_random(arguments)
        return _end(began, is_good=is_good)
    if arguments.spec:
        return _end(began, is_good=_spec_table(tuple(arguments.spec), arguments.layouts))
    max_ranks = _num_ranks(arguments.device)
    rows = chosen_rows(arguments, max_ranks)
    results = Results.read(
        arguments.results, implementation=arguments.transformer_impl, device=arguments.device
    )
    seconds = 120 if arguments.device == "cpu" else 600  # on GPUs the first job compiles kernels
    with WorkerPool(max_ranks, device=arguments.device, timeout_seconds=seconds) as pool:
        is_good = _print_table(pool, rows, results, arguments.transformer_impl)
    return _end(began, is_good=is_good)


def _end(began: float, *, is_good: bool) -> int:
    """Print the result; return the exit code."""
    print(f"{'passed' if is_good else 'FAILED'} in {time.perf_counter() - began:.0f} s")
    return 0 if is_good else 1


def _check_flags(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if flags are given that --spec, --runs or --random ignores: they have their own rows, in fp64."""
    given = {
        f"--slice {arguments.slice}": arguments.slice is not None,
        f"--results {arguments.results}": arguments.results is not None,
        f"--precision {arguments.precision}": arguments.precision not in (None, "fp64"),
        f"--transformer-impl {arguments.transformer_impl}": arguments.transformer_impl != "local",
        f"--device {arguments.device}": arguments.device != "cpu",
    }
    mode = "--spec" if arguments.spec else "--runs" if arguments.runs else "--random"
    without_effect = [flag for flag, is_given in given.items() if is_given]
    if without_effect:
        raise ConfigError(
            f"{mode} runs on a CPU, in fp64 and in --transformer-impl local: {' '.join(without_effect)} has no effect",
            fix=f"leave {' '.join(without_effect)} out, or {mode}",
        )


def _num_ranks(device: str) -> int:
    """Return the largest number of ranks: eight on a CPU, else the number of GPUs."""
    if device == "cpu":
        return MAX_RANKS
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: no GPU was found", fix="use --device cpu, or check `nvidia-smi`")
    return min(MAX_RANKS, torch.cuda.device_count())


def _print_table(
    pool: WorkerPool, rows: Sequence[Row], results: Results, implementation: Implementation
) -> bool:
    todo = [row for row in rows if not results.has_passed(*row)]
    if len(todo) < len(rows):
        print(f"{len(rows) - len(todo)} of them have passed already according to {results.path}")
    if results.num_of_others:
        print(
            f"{results.num_of_others} rows in {results.path} do not count: they come from other code, libraries or devices"
        )
    in_fp64 = [layout for precision, layout in todo if precision == "fp64"]
    is_good = all(_fp64_rows(Comparer(pool), in_fp64, results))
    answers: dict[Job, list[Measured]] = {}
    for precision in LOW_PRECISIONS:
        layouts = [layout for known, layout in todo if known == precision]
        comparer = LowPrecisionComparer(pool, precision, implementation, answers)
        is_good &= all(_low_precision_rows(comparer, layouts, results))
    return is_good


def _fp64_rows(comparer: Comparer, layouts: Sequence[Layout], results: Results) -> list[bool]:
    if not layouts:
        return []
    width = min(_WIDEST_NAME, max(len(layout.name) for layout in layouts))
    print(
        f"against one process in fp64, {NUM_STEPS} steps; largest relative difference, at most {TOLERANCE:g} passes"
    )
    print(f"{'layout':<{width}}  ranks  loss     norm     gradient weight           seconds")
    verdicts = []
    for layout in layouts:
        began = time.perf_counter()
        found = comparer.compare(layout)
        seconds = time.perf_counter() - began
        words = "pass" if found.is_good else f"FAIL  {found.names}"
        numbers = "  ".join(f"{number:.1e}" for number in found.numbers)
        name = layout.name if len(layout.name) <= width else f"{layout.name}\n{'':<{width}}"
        print(f"{name:<{width}}  {layout.world_size:5d}  {numbers}  {seconds:7.1f}  {words}", flush=True)
        results.add("fp64", layout, is_good=found.is_good, numbers=found.numbers, seconds=seconds)
        verdicts.append(found.is_good)
    return verdicts


def _spec_table(spec: tuple[str, ...], words: Sequence[str]) -> bool:
    """Compare layouts of a model with the user's layers in fp64; a layout that a rule refuses is named with the reason."""
    layouts = [Layout.of(text) for text in ([" ".join(words)] if words else _SPEC_LAYOUTS)]
    plan_of(Job(Layout.of(""), spec=spec), 1)
    found = []
    for layout in layouts:
        try:
            plan_of(Job(layout, spec=spec), layout.world_size)
            found.append(layout)
        except ConfigError as error:
            print(f"{layout.name}: refused\n{error}\n")
    with WorkerPool(max((one.world_size for one in found), default=1), device="cpu") as pool:
        results = Results.read(None, implementation="local", device="cpu")
        comparer = Comparer(pool, spec)
        is_good = bool(found) and all(_fp64_rows(comparer, found, results))
    idle = sorted(set().union(*(names_without_gradient(one) for one in comparer.references.values())))
    for name in idle:
        print(f"FAIL  {name} has no gradient: its module must read it with `weight_of`, and use it")
    return is_good and not idle


def _low_precision_rows(
    comparer: LowPrecisionComparer, layouts: Sequence[Layout], results: Results
) -> list[bool]:
    if not layouts:
        return []
    print(
        f"{comparer.implementation} in {comparer.precision}: loss, norm, gradient, weight, each followed by its rounding noise;"
        f" at most {TIMES:g} times the noise passes"
    )
    verdicts = []
    for layout in layouts:
        began = time.perf_counter()
        verdict = comparer.compare(layout)
        seconds = time.perf_counter() - began
        print(f"{layout.name}  ({layout.world_size} ranks, {seconds:.1f} s)")
        for line in _lines_of(verdict):
            print(line, flush=True)
        results.add(
            comparer.precision,
            layout,
            is_good=verdict.is_good,
            numbers=verdict.exact.numbers,
            seconds=seconds,
        )
        verdicts.append(verdict.is_good)
    return verdicts


def _lines_of(verdict: LowPrecisionVerdict) -> Iterator[str]:
    kinds = [("exact", verdict.exact, verdict.exact_noise)]
    if verdict.order is not None:
        kinds.append(("order", verdict.order, verdict.order_noise))
    for number, (name, distance, noise) in enumerate(kinds, 1):
        pairs = "   ".join(
            f"{far:.1e} ({near:.1e})" for far, near in zip(distance.numbers, noise, strict=True)
        )
        words = "" if number < len(kinds) else "pass" if verdict.is_good else f"FAIL  {distance.names}"
        yield f"  {name}  {pairs}  {words}".rstrip()
