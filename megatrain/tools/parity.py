"""`megatrain parity`: the same model under every layout, against one process.

A tiny model in fp64 trains three steps on batches with an uneven loss mask. Compared are the loss and the gradient
norm of each step, every gradient of the first, and every weight of the last: the largest difference over the
tensor's largest value must stay within 1e-10. A layout that passes computes the same mathematics.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatrain.config import ConfigError
from megatrain.tools.covering import pairs_of
from megatrain.tools.parity_faults import FAULTS
from megatrain.tools.parity_judge import TOLERANCE, Verdict, judge
from megatrain.tools.parity_measure import NUM_STEPS, Measured, measure
from megatrain.tools.parity_rows import MAX_RANKS, QUICK_ROWS, Layout, all_pairs, pairwise_rows
from megatrain.tools.worker_pool import WorkerPool


@dataclass
class Comparer:
    """Compares layouts with one process; what that finds is kept, since many layouts share it."""

    pool: WorkerPool
    references: dict[Layout, Measured] = field(default_factory=dict)

    def compare(self, layout: Layout, *, fault: str | None = None) -> Verdict:
        """Run a layout, and one process beside it; with a planted fault in the layout's ranks, if one is named."""
        alone = layout.alone
        if alone not in self.references:
            (self.references[alone],) = self.pool.run(1, measure, alone, None)
        answers = self.pool.run(layout.world_size, measure, layout, fault)
        return judge(self.references[alone], answers)


def run(arguments: argparse.Namespace) -> int:
    """The subcommand: prints the table; 0 if every row passes."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    rows = () if arguments.self_test else chosen_rows(arguments)
    with WorkerPool(MAX_RANKS) as pool:
        comparer = Comparer(pool)
        is_good = _self_test(comparer) if arguments.self_test else _print_table(comparer, rows)
    print(f"{'passed' if is_good else 'FAILED'} in {time.perf_counter() - began:.0f} s")
    return 0 if is_good else 1


def chosen_rows(arguments: argparse.Namespace) -> Sequence[Layout]:
    """The rows that are asked for. Raises ConfigError if there are none."""
    table = pairwise_rows()[: QUICK_ROWS if arguments.quick else None]
    rows = [layout for layout in table if all(layout.has(word) for word in arguments.layouts)]
    if not rows:
        known = sorted({word for layout in table for word in layout.words})
        raise ConfigError(
            f"--layouts {' '.join(arguments.layouts)}: no layout has all of these words",
            fix=f"the words are {', '.join(known)}",
        )
    met = {pair for layout in rows for pair in pairs_of(layout.words)}
    print(f"{len(rows)} layouts, in which {len(met)} of {len(all_pairs())} pairs of options' values meet")
    return rows


def _print_table(comparer: Comparer, layouts: Sequence[Layout]) -> bool:
    width = max(len(layout.name) for layout in layouts)
    print(
        f"against one process in fp64, {NUM_STEPS} steps; largest relative difference, at most {TOLERANCE:g} passes"
    )
    print(f"{'layout':<{width}}  ranks  loss     norm     gradient weight           seconds")
    is_good = True
    for layout in layouts:
        began = time.perf_counter()
        verdict = comparer.compare(layout)
        is_good &= verdict.is_good
        seconds = time.perf_counter() - began
        words = (
            "pass"
            if verdict.is_good
            else f"FAIL  gradient {verdict.gradient_name}, weight {verdict.weight_name}"
        )
        print(
            f"{layout.name:<{width}}  {layout.world_size:5d}  {verdict.loss:.1e}  {verdict.norm:.1e}  "
            f"{verdict.gradient:.1e}  {verdict.weight:.1e}  {seconds:7.1f}  {words}",
            flush=True,
        )
    return is_good


def _self_test(comparer: Comparer) -> bool:
    """Plant each known fault, which the comparison must find."""
    print("planted faults: each must be found")
    is_good = True
    width = max(map(len, FAULTS))
    for name, fault in FAULTS.items():
        verdict = comparer.compare(Layout.of(fault.layout), fault=name)
        is_good &= not verdict.is_good
        print(
            f"{name:<{width}} {fault.layout:<24} {'found' if not verdict.is_good else 'MISSED'}", flush=True
        )
    return is_good
