"""`megatrain plan`: its flags; print the layouts of a run.

flags of a run, GPUs ─> search ─> table: the fastest layouts that fit, and the layout of the flags
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatrain.config.errors import ConfigError
from megatrain.tools.plan import failures, pipeline
from megatrain.tools.plan.hardware import Cluster
from megatrain.tools.plan.layouts import Layout, Workload
from megatrain.tools.plan.memory import planned_bytes
from megatrain.tools.plan.search import Found, Run, best_layouts, evaluate
from megatrain.tools.subcommands import add_command
from megatrain.training.planning.gpus import GPUS
from megatrain.training.planning.memory_limit import TIGHT


def add_flags(commands: Any) -> None:
    """Add `megatrain plan`."""
    plan = add_command(commands, "plan", description="Without WHAT: layouts.")
    actions = plan.add_subparsers(dest="action", required=True, metavar="WHAT")
    _add_layouts(actions)
    _add_pipeline(actions)


def _add_layouts(actions: Any) -> None:
    """Add `megatrain plan layouts`."""
    layouts = add_command(
        actions,
        "layouts",
        run,
        takes_run_flags=True,
        help="find the layouts of a run that fit, with predicted time and memory",
        usage="%(prog)s FLAGS --world-size N [--gpu NAME] [--memory-gb GB] [--gpus-per-node N] [--network-gbits G]"
        " [--top N] [--search] [--json] [--failures]",
    )
    layouts.add("--world-size N", "GPUs of the run", of=int, required=True, at_least=1)
    layouts.add("--gpu", "GPU, SXM", "H100", choices=tuple(GPUS))
    layouts.add(
        "--memory-gb GB",
        "memory of a GPU for tensors, in 10^9 bytes (default: the GPU's, less 4 for CUDA, NCCL and fragmentation)",
        of=float,
        above=0,
    )
    layouts.add("--gpus-per-node N", "GPUs that NVLink connects", 8, at_least=1)
    layouts.add(
        "--network-gbits G",
        "Gbit/s of the network between nodes for each GPU (default: 400, with the A100 200)",
        of=float,
        above=0,
    )
    layouts.add("--top N", "layouts to print", 5, at_least=1)
    layouts.add("--search", "search other layouts than that of the flags, and list it with them")
    layouts.add("--json", "print one JSON object")
    failures.add_flags(layouts)


def _add_pipeline(actions: Any) -> None:
    """Add `megatrain plan pipeline`."""
    plan = add_command(
        actions, "pipeline", pipeline.run, help="find the best pipeline schedule and split for given times"
    )
    plan.add("--ranks P", "pipeline ranks", of=int, required=True, at_least=1)
    plan.add("--layers L", "layers of the model", of=int, required=True, at_least=1)
    plan.add("--microbatches M", "micro-batches of a step", of=int, required=True, at_least=1)
    plan.add("--forward T", "time of a layer's forward pass", 1.0, at_least=0)
    plan.add("--backward T", "time of the gradients of a layer's input", 1.0, at_least=0)
    plan.add("--weight-gradient T", "time of a layer's weight gradients", 1.0, at_least=0)
    plan.add("--head T", "cost of the head, as a multiple of a layer's", 0.0, at_least=0)
    plan.add("--transfer T", "time of a message between ranks", 0.0, at_least=0)
    plan.add(
        "--combined T",
        "time of a forward and a backward pass that run together, as a fraction of both",
        1.0,
        at_least=0,
    )
    plan.add("--schedule NAME", "only this value of --pipeline-schedule (default: all)")
    plan.add("--output FILE", "SVG file for the timeline of the fastest", of=Path)


def run(arguments: argparse.Namespace) -> None:
    """Predict step time, MFU and memory of the layouts of a run that fit, and print the fastest with their flags. Layout
    flags on the command line are kept without --search, layout flags of a --config file are not.
    """
    cluster = _cluster(arguments)
    limit = arguments.memory_gb * 1e9 if arguments.memory_gb is not None else cluster.gpu.usable_bytes
    one_run = dataclasses.replace(Run.of(arguments.run_flags, cluster), keeps_layout=not arguments.search)
    workload = one_run.workload()
    found = best_layouts(one_run, workload, limit, arguments.top)
    if not found:
        raise ConfigError(
            f"no layout of {cluster.num_gpus} x {cluster.gpu.name} fits into {limit / 1e9:.1f} GB a GPU and divides the model,"
            f" {workload.global_batch:,} samples and {workload.seq_length:,} tokens",
            fix="use another number of GPUs, a larger --memory-gb, or fewer layout flags; --global-batch-size must be a multiple of"
            " the data-parallel size",
        )
    given = given_layout(one_run, workload)
    lost = _losses(arguments, one_run, found[0] if isinstance(given, str) else given)
    if arguments.json:
        more = {} if lost is None else {"failures": failures.to_dict(lost)}
        print(json.dumps(_to_dict(found, given, limit) | more))
    else:
        lines = [*_text(one_run, workload, found, given, limit), *(failures.text(lost) if lost else ())]
        print("\n".join(lines))


def _losses(arguments: argparse.Namespace, one_run: Run, layout: Found) -> failures.Losses | None:
    """Return what failures cost with --failures, with the step of a layout."""
    if not arguments.failures:
        return None
    return failures.losses(
        arguments,
        num_gpus=one_run.cluster.num_gpus,
        step=layout.time.total,
        save_interval=one_run.request.known("checkpoint.save_interval"),
        save=one_run.request.known("checkpoint.save"),
    )


def _cluster(arguments: argparse.Namespace) -> Cluster:
    gpu, gbits = GPUS[arguments.gpu], arguments.network_gbits
    return Cluster(
        gpu=gpu,
        num_gpus=arguments.world_size,
        gpus_per_node=arguments.gpus_per_node,
        network_rate=gpu.network_rate if gbits is None else gbits * 1e9 / 8,
    )


def given_layout(one_run: Run, workload: Workload) -> Found | str:
    """Return the layout of the flags and the YAML file, or why the run would not start with it on these GPUs."""
    try:
        plan = one_run.plan()
    except ConfigError as error:
        return error.problems[0].text
    layout = Layout.of(plan)
    return evaluate(one_run, workload, layout, planned_bytes(workload, layout, plan))


def _to_dict(found: Sequence[Found], given: Found | str, limit: float) -> dict[str, Any]:
    def one(entry: Found) -> dict[str, Any]:
        seconds = dataclasses.asdict(entry.time) | {"total": entry.time.total}
        return dataclasses.asdict(entry) | {"time": seconds}

    return {
        "limit_bytes": limit,
        "layouts": [one(entry) for entry in found],
        "given": one(given) if isinstance(given, Found) else None,
    }


_TITLES = ("step", "MFU", "memory", "layout", "bubble", "data par.", "flags")


def _text(
    one_run: Run, workload: Workload, found: Sequence[Found], given: Found | str, limit: float
) -> Iterator[str]:
    cluster = one_run.cluster
    yield (
        f"{cluster.num_gpus:,} x {cluster.gpu.name}, {cluster.gpus_per_node} a node, {cluster.network_rate * 8 / 1e9:.0f} Gbit/s"
        f" a GPU; {limit / 1e9:.1f} GB for tensors"
    )
    yield f"global batch {workload.global_batch:,} x {workload.seq_length:,} tokens"
    rows = [_TITLES, *(_row(one) for one in found)]
    if isinstance(given, Found):
        rows.append((*_row(given)[:-1], f"as given{_fit(given, limit)}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield f"  {'  '.join([*cells, row[-1]])}"
    if isinstance(given, str):
        yield f"  the flags' own layout does not start on these GPUs: {given}"
    yield from _fp8_text(one_run, workload)
    yield "predicted; not included: launches of many small kernels, stragglers, uneven loads of experts"


def _fit(given: Found, limit: float) -> str:
    share = given.memory_bytes / limit
    if share > 1:
        return " (does not fit)"
    return f" (takes {share:.0%} of the memory: it may not fit)" if share > TIGHT else ""


def _fp8_text(one_run: Run, workload: Workload) -> Iterator[str]:
    """Yield the FP8 recipe of the predictions."""
    precision = workload.plan.config.precision
    if precision.fp8_format is None:
        return
    is_default = one_run.request.origins["precision.fp8_recipe"].kind == "default"
    count = len(workload.all_layers)
    yield (
        f"FP8: --fp8-format {precision.fp8_format} --fp8-recipe {precision.fp8_recipe}{' (the default)' if is_default else ''},"
        f" {len(workload.plan.derived.fp8_layers)} of {count} layers; the output layer is in bf16"
        + ("; rates of mxfp8 are assumed" if precision.fp8_recipe == "mxfp8" else "")
        + ("; as if all linear layers of these had this recipe" if workload.plan.derived.fp8_modules else "")
    )


def _row(one: Found) -> tuple[str, ...]:
    layout, time = one.layout, one.time
    sizes = [
        f"{name} {getattr(layout, name)}"
        for name in ("tp", "cp", "pp", "ep", "dp")
        if getattr(layout, name) > 1
    ]
    return (
        f"{time.total * 1e3:,.0f} ms",
        f"{one.mfu:.1%}",
        f"{one.memory_bytes / 1e9:.1f} GB",
        ", ".join(sizes) or "one GPU",
        f"{time.bubble / time.total:.1%}",
        f"{time.data_parallel / time.total:.1%}",
        one.flags,
    )
