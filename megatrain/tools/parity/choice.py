"""The rows that `megatrain parity` runs, selected by its flags.

--quick, --full, neither, --precision  ->  a table
--quick or --full, with --layouts      ->  the rows of that table with these words     ->  --slice: a part of the rows
--layouts alone                        ->  the layout of these words, in each precision
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from megatrain.config import ConfigError
from megatrain.tools.parity.covering_array import pairs_of
from megatrain.tools.parity.low_precision import is_supported_in, of_any_micro_batch, of_equal_tokens, rows_in
from megatrain.tools.parity.measure import LOW_PRECISIONS, Job, Precision, plan_of
from megatrain.tools.parity.rows import MAX_RANKS, WORDS, Layout
from megatrain.tools.parity.tables import (
    QUICK_ROWS,
    all_pairs,
    is_row,
    packed_rows,
    pairwise_rows,
    product_rows,
)

Row = tuple[Precision, Layout]


def chosen_rows(arguments: argparse.Namespace, max_ranks: int = MAX_RANKS) -> list[Row]:
    """Return the selected rows.

    Raises:
        ConfigError: no row is selected.
    """
    number, slices = _slice_of(arguments)
    if arguments.layouts and not (arguments.quick or arguments.full):
        rows = _own_rows(arguments, max_ranks)
    else:
        rows = [row for row in _table(arguments, max_ranks) if all(map(row[1].has, arguments.layouts))]
        if not rows:
            raise ConfigError(
                f"--layouts {' '.join(arguments.layouts)}: no row of the table has these words",
                fix="leave out --quick and --full: the layout of these words itself then runs",
            )
    rows = rows[number - 1 :: slices]
    pairs = all_pairs(max_ranks)
    covered = {pair for _, layout in rows for pair in pairs_of(layout.table_words)} & pairs
    print(
        f"{len(rows)} {'row' if len(rows) == 1 else 'rows'}, covering {len(covered)} of {len(pairs)} pairs of option values",
        flush=True,
    )
    return rows


def _own_rows(arguments: argparse.Namespace, max_ranks: int) -> list[Row]:
    """Return the layout that --layouts names, in each precision that supports it.

    Raises:
        ConfigError: the words form no layout, there are too few ranks, or a rule of `resolve` refuses it.
    """
    text = " ".join(arguments.layouts)
    unknown = [word for word in arguments.layouts if word not in WORDS]
    if unknown:
        raise ConfigError(
            f"--layouts {text}: unknown: {' '.join(unknown)}",
            fix=f"use the words {', '.join(sorted(WORDS))}",
        )
    layout = Layout.of(text)
    if not all(map(layout.has, arguments.layouts)) or not is_row(layout.words):
        raise ConfigError(
            f"--layouts {text}: these words form no layout",
            fix="leave out words that exclude each other, as tp2 and tp4 do, and add those that a word needs, as sp needs tp2",
        )
    if layout.world_size > max_ranks:
        raise ConfigError(
            f"--layouts {text} needs {layout.world_size} ranks, but only {max_ranks} are available",
            fix="use --device cpu, or more GPUs",
        )
    precisions = _precisions_of(arguments)
    job = Job(layout, device=arguments.device, implementation=arguments.transformer_impl)
    rows = [(one, layout if one == "fp64" else of_any_micro_batch(layout)) for one in precisions]
    rows = [
        (one, own) for one, own in rows if all(map(own.has, arguments.layouts)) and is_supported_in(one, own)
    ]
    if not rows:
        raise ConfigError(
            f"--layouts {text} cannot run with --precision {' or '.join(precisions)}",
            fix="leave out --precision: the layout then runs in every precision that supports it",
        )
    for precision, own in rows:
        plan_of(replace(job, layout=own, precision=precision), own.world_size)
    return rows


def _precisions_of(arguments: argparse.Namespace) -> tuple[Precision, ...]:
    """Return the precisions for the layout that --layouts names."""
    if arguments.transformer_impl != "local":
        return (_precision_of_implementation(arguments),)
    return ("fp64", "fp32", "bf16") if arguments.precision is None else (arguments.precision,)


def _table(arguments: argparse.Namespace, max_ranks: int) -> list[Row]:
    precision = arguments.precision
    if arguments.transformer_impl != "local":
        own = _precision_of_implementation(arguments)
        is_table = precision is not None or arguments.quick or arguments.full
        layouts = _layouts(arguments, max_ranks) if is_table else _implementation_rows(max_ranks)
        return [(own, layout) for layout in dict.fromkeys(map(of_equal_tokens, layouts))]
    layouts = _layouts(arguments, max_ranks)
    if precision not in (None, "fp64"):
        more = () if arguments.quick else rows_in(precision, max_ranks)
        return [(precision, layout) for layout in dict.fromkeys([*map(of_any_micro_batch, layouts), *more])]
    rows: list[Row] = [("fp64", layout) for layout in _with_packs(arguments, layouts, max_ranks)]
    if not arguments.quick:
        all_of: tuple[Precision, ...] = ("fp64",) if precision == "fp64" else ("fp64", *LOW_PRECISIONS)
        rows += [(one, layout) for one in all_of for layout in rows_in(one, max_ranks)]
    return rows


def _layouts(arguments: argparse.Namespace, max_ranks: int) -> Sequence[Layout]:
    if arguments.quick:
        return pairwise_rows(max_ranks, QUICK_ROWS)
    more = product_rows(max_ranks) if arguments.full else ()
    return tuple(dict.fromkeys((*pairwise_rows(max_ranks), *more)))


def _with_packs(arguments: argparse.Namespace, layouts: Sequence[Layout], max_ranks: int) -> Sequence[Layout]:
    """Add the rows with packs; in the quick table the first of them replaces the last row."""
    if arguments.device != "cpu":  # kernels of GPUs need longer documents
        return layouts
    packed = packed_rows(max_ranks)
    return (*layouts[: QUICK_ROWS - 1], *packed[:1]) if arguments.quick else (*layouts, *packed)


def _implementation_rows(max_ranks: int) -> list[Layout]:
    """Return the default rows of another implementation; mup has norms and biases, which llama lacks."""
    narrow = rows_in("bf16", max_ranks)
    return [Layout.of(""), Layout.of("documents"), *narrow, *(layout.but("mup") for layout in narrow)]


def _precision_of_implementation(arguments: argparse.Namespace) -> Precision:
    """Return the precision of rows for another implementation than `local`: bf16 by default.

    Raises:
        ConfigError: `local` would supply all layers.
    """
    precision: Precision = arguments.precision or "bf16"
    job = Job(Layout.of("tokens"), precision, arguments.device, arguments.transformer_impl)
    plan = plan_of(job, 1)
    if plan.derived.transformer_impl != arguments.transformer_impl:
        raise ConfigError(
            plan.origins["derived.transformer_impl"].detail,
            fix="use --transformer-impl local, or a machine where the library runs",
        )
    return precision


def _slice_of(arguments: argparse.Namespace) -> tuple[int, int]:
    """Return (number, total) of --slice; numbers start at 1."""
    number, _, slices = (arguments.slice or "1/1").partition("/")
    if not (number.isdecimal() and slices.isdecimal() and 1 <= int(number) <= int(slices)):
        raise ConfigError(
            f"--slice {arguments.slice} is not of the form K/N with 1 <= K <= N",
            fix="use for example --slice 1/4",
        )
    return int(number), int(slices)
