"""`megatrain parity`: the same model under every layout, against one process.

Tiny models train three steps on batches with an uneven loss mask. In fp64, compared are the loss and the gradient norm
of each step, every gradient of the first, and every weight of the last: the largest difference over the tensor's largest
value must stay within 1e-10. A layout that passes computes the same mathematics. In fp32 and bf16 differences are
measured against the noise of rounding (parity_narrow.py). Rows come from parity_rows.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megatrain.config import ConfigError
from megatrain.tools.covering import pairs_of
from megatrain.tools.parity_faults import FAULTS
from megatrain.tools.parity_judge import TOLERANCE, Distance, judge
from megatrain.tools.parity_measure import (
    NUM_STEPS,
    Implementation,
    Job,
    Measured,
    Precision,
    measure,
    plan_of,
)
from megatrain.tools.parity_narrow import ROWS as NARROW_ROWS
from megatrain.tools.parity_narrow import TIMES, NarrowComparer, NarrowVerdict, of_any_micro_batch
from megatrain.tools.parity_results import Results
from megatrain.tools.parity_rows import (
    MAX_RANKS,
    QUICK_ROWS,
    WITHOUT_EXPERTS,
    Layout,
    all_pairs,
    is_row,
    pairwise_rows,
    product_rows,
)
from megatrain.tools.worker_pool import WorkerPool

Row = tuple[Precision, Layout]


@dataclass
class Comparer:
    """Compares layouts with one process in fp64; what that finds is kept, since many layouts share it."""

    pool: WorkerPool
    references: dict[Layout, Measured] = field(default_factory=dict)

    def compare(self, layout: Layout, *, fault: str | None = None) -> Distance:
        """Run a layout, and one process beside it; with a planted fault in the layout's ranks, if one is named."""
        alone, device = layout.alone, self.pool.device
        if alone not in self.references:
            self.references[alone], *_ = self.pool.run(alone.world_size, measure, Job(alone, device=device))
        answers = self.pool.run(layout.world_size, measure, Job(layout, device=device, fault=fault))
        return judge(self.references[alone], answers)


def run(arguments: argparse.Namespace) -> int:
    """The subcommand: prints the table; 0 if every row passes."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    if arguments.self_test and arguments.transformer_impl != "local":
        raise ConfigError(
            f"--self-test plants faults in --transformer-impl local, not in {arguments.transformer_impl}",
            fix="leave one of them out",
        )
    max_ranks = _num_ranks(arguments.device)
    rows = [] if arguments.self_test else chosen_rows(arguments, max_ranks)
    seconds = 120 if arguments.device == "cpu" else 600  # on GPUs the first job compiles kernels
    with WorkerPool(max_ranks, device=arguments.device, timeout_seconds=seconds) as pool:
        implementation, results = arguments.transformer_impl, arguments.results
        is_good = (
            _self_test(pool) if arguments.self_test else _print_table(pool, rows, results, implementation)
        )
    print(f"{'passed' if is_good else 'FAILED'} in {time.perf_counter() - began:.0f} s")
    return 0 if is_good else 1


def _num_ranks(device: str) -> int:
    """Of the largest layout: eight on a CPU, else as many as there are GPUs."""
    if device == "cpu":
        return MAX_RANKS
    if not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda is asked for, and no GPU was found", fix="use --device cpu, or check `nvidia-smi`"
        )
    return min(MAX_RANKS, torch.cuda.device_count())


def chosen_rows(arguments: argparse.Namespace, max_ranks: int = MAX_RANKS) -> list[Row]:
    """The rows that are asked for. Raises ConfigError if there are none."""
    table = _table(arguments, max_ranks)
    rows = [row for row in table if all(row[1].has(word) for word in arguments.layouts)]
    if not rows:
        known = sorted({word for _, layout in table for word in layout.words})
        raise ConfigError(
            f"--layouts {' '.join(arguments.layouts)}: no layout has all of these words",
            fix=f"the words are {', '.join(known)}",
        )
    number, slices = _slice_of(arguments)
    rows = rows[number - 1 :: slices]
    pairs = all_pairs(max_ranks)
    met = {pair for _, layout in rows for pair in pairs_of(layout.words)} & pairs
    print(f"{len(rows)} rows, in which {len(met)} of {len(pairs)} pairs of options' values meet")
    return rows


def _table(arguments: argparse.Namespace, max_ranks: int) -> list[Row]:
    most = QUICK_ROWS if arguments.quick else None
    layouts = product_rows(max_ranks) if arguments.full else pairwise_rows(max_ranks, most)
    precision = arguments.precision
    if arguments.transformer_impl != "local":
        is_table = precision is not None or arguments.quick or arguments.full
        return _rows_of(arguments, layouts if is_table else _some_of_another(max_ranks))
    if precision not in (None, "fp64"):
        return [(precision, layout) for layout in dict.fromkeys(map(of_any_micro_batch, layouts))]
    rows: list[Row] = [("fp64", layout) for layout in layouts]
    if precision is None and not (arguments.quick or arguments.full):
        fitting = [layout for layout in NARROW_ROWS if is_row(layout.words, max_ranks=max_ranks)]
        rows += [("fp32", layout) for layout in fitting] + [("bf16", layout) for layout in fitting]
    return rows


def _some_of_another(max_ranks: int) -> list[Layout]:
    """What is run of another implementation where no table is asked for: mup has norms and biases that llama has not."""
    narrow = [layout for layout in NARROW_ROWS if is_row(layout.words, max_ranks=max_ranks)]
    return [Layout.of(""), Layout.of("documents"), *narrow, *(layout.but("mup") for layout in narrow)]


def _rows_of(arguments: argparse.Namespace, layouts: Sequence[Layout]) -> list[Row]:
    """Of these layouts, the rows in bf16 that another implementation than `local` computes.

    Raises:
        ConfigError: it computes none.
    """
    precision: Precision = arguments.precision or "bf16"

    def job(layout: Layout) -> Job:
        return Job(layout, precision, arguments.device, arguments.transformer_impl)

    def is_computed(layout: Layout) -> bool:
        try:
            plan_of(job(layout), layout.world_size)
        except ConfigError:
            return False  # a rule says what this implementation lacks
        return True

    plan_of(job(Layout.of("tokens")), 1)
    plain = f"tokens {WITHOUT_EXPERTS}"  # none of them computes experts
    asked = list(dict.fromkeys(one.but(plain) for one in layouts))
    found = [layout for layout in asked if is_computed(layout)]
    print(
        f"{arguments.transformer_impl} computes {len(found)} of {len(asked)} rows; the others have what it lacks"
    )
    return [(precision, layout) for layout in found]


def _slice_of(arguments: argparse.Namespace) -> tuple[int, int]:
    """Which of how many parts of the table, from 1 on."""
    number, _, slices = (arguments.slice or "1/1").partition("/")
    if not (number.isdecimal() and slices.isdecimal() and 1 <= int(number) <= int(slices)):
        raise ConfigError(
            f"--slice {arguments.slice} is no part of a whole", fix="use --slice 1/4, for example"
        )
    return int(number), int(slices)


def _print_table(
    pool: WorkerPool, rows: Sequence[Row], results_file: str | None, implementation: Implementation
) -> bool:
    results = Results.read(results_file, implementation)
    todo = [row for row in rows if not results.has_passed(*row)]
    if len(todo) < len(rows):
        print(f"{len(rows) - len(todo)} of them have passed already, as {results_file} says")
    wide = [layout for precision, layout in todo if precision == "fp64"]
    is_good = all(_wide_rows(Comparer(pool), wide, results))
    for precision in ("fp32", "bf16"):
        layouts = [layout for known, layout in todo if known == precision]
        comparer = NarrowComparer(pool, precision, implementation)
        is_good &= all(_narrow_rows(comparer, layouts, results))
    return is_good


def _wide_rows(comparer: Comparer, layouts: Sequence[Layout], results: Results) -> list[bool]:
    if not layouts:
        return []
    width = max(len(layout.name) for layout in layouts)
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
        print(
            f"{layout.name:<{width}}  {layout.world_size:5d}  {numbers}  {seconds:7.1f}  {words}", flush=True
        )
        results.add("fp64", layout, is_good=found.is_good, numbers=found.numbers, seconds=seconds)
        verdicts.append(found.is_good)
    return verdicts


def _narrow_rows(comparer: NarrowComparer, layouts: Sequence[Layout], results: Results) -> list[bool]:
    if not layouts:
        return []
    print(
        f"{comparer.implementation} in {comparer.precision}: loss, norm, gradient, weight, each with the noise of rounding behind it;"
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


def _lines_of(verdict: NarrowVerdict) -> Iterator[str]:
    kinds = [("exact", verdict.exact, verdict.exact_noise)]
    if verdict.order is not None:
        kinds.append(("order", verdict.order, verdict.order_noise))
    for number, (name, distance, noise) in enumerate(kinds, 1):
        pairs = "   ".join(
            f"{far:.1e} ({near:.1e})" for far, near in zip(distance.numbers, noise, strict=True)
        )
        words = "" if number < len(kinds) else "pass" if verdict.is_good else f"FAIL  {distance.names}"
        yield f"  {name}  {pairs}  {words}".rstrip()


def _self_test(pool: WorkerPool) -> bool:
    """Plant each known fault, which the comparison must find."""
    print("planted faults: each must be found")
    comparer, is_good, width = Comparer(pool), True, max(map(len, FAULTS))
    for name, fault in FAULTS.items():
        layout = Layout.of(fault.layout)
        if layout.world_size > pool.size:
            print(f"{name:<{width}} {fault.layout:<29} needs {layout.world_size} ranks", flush=True)
            continue
        found = not comparer.compare(layout, fault=name).is_good
        is_good &= found
        print(f"{name:<{width}} {fault.layout:<29} {'found' if found else 'MISSED'}", flush=True)
    return is_good
