"""`megatrain data`: what a run reads, without running it.

inspect, merge     prefixes of datasets
sample, index      a run's flags ─> facts about its data ─> plan ─> the samples that the run itself would build
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config import Facts, Plan, Request, parse, resolve
from megatrain.config.derive.datasets import SPLIT_NAMES
from megatrain.config.errors import ConfigError
from megatrain.data.indexed.merge import merge
from megatrain.data.samples.build import BuiltIndex, SplitDatasets
from megatrain.data.samples.dataset import Sample, SampleDataset, TokenSpan
from megatrain.data.tokenizers.build import Tokenizer, load_tokenizer
from megatrain.tools.data.inspect import inspect, printable, shown_ids
from megatrain.training.batches import build_samples
from megatrain.training.launch.facts import gather_data_facts


def run(arguments: argparse.Namespace) -> int:
    """The subcommand."""
    try:
        exit_code = _ACTIONS[arguments.action](arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads, such as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return exit_code


def _merge(arguments: argparse.Namespace) -> int:
    merge(arguments.prefixes, arguments.output_prefix)
    return 0


def _sample(arguments: argparse.Namespace) -> int:
    plan, facts = _planned(arguments)
    samples = _chosen(build_samples(_only(plan, arguments.of), facts, _say), arguments.of, arguments.set)
    if not 0 <= arguments.index < len(samples):
        raise ConfigError(
            f"--index {arguments.index}: there are {len(samples)} {arguments.of} samples",
            fix=f"give a number from 0 to {len(samples) - 1}" if len(samples) else "use more data",
        )
    sample, origin = samples[arguments.index], samples.spans(arguments.index)
    if arguments.json:
        print(json.dumps({name: values.tolist() for name, values in vars(sample).items()}))
        return 0
    print(_headline(plan, arguments.of, arguments.index, len(samples)))
    print(_described(sample))
    kind = plan.config.tokenizer.tokenizer_type
    tokenizer = None if kind in (None, "NullTokenizer") else load_tokenizer(plan.config.tokenizer)
    _print_pieces(sample, origin, tokenizer)
    return 0


def _index(arguments: argparse.Namespace) -> int:
    plan, facts = _planned(arguments)
    folder = plan.config.data.data_cache_path
    if folder is None:
        raise ConfigError(
            "there is no place to keep indices: --data-cache-path is not set",
            fix="give --data-cache-path FOLDER, here and in training",
        )
    _require_writable(Path(folder))
    print(_ROW.format("split", "seed", "sequences", "tokens", "epochs", "samples", "seconds", "", "dataset"))
    outcomes = []

    def tell(built: BuiltIndex) -> None:
        outcomes.append(built.outcome)
        print(_row(built), flush=True)

    build_samples(plan, facts, _say, tell)
    counts = ", ".join(
        f"{outcomes.count(name)} {words}" for name, words in _OUTCOMES.items() if name in outcomes
    )
    files = [path.stat().st_size for path in Path(folder).glob("*.index")]
    print(f"\n{counts}\n{folder}: {len(files)} files, {sum(files) / 1e6:,.1f} MB")
    return 0


_ACTIONS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "inspect": inspect,
    "sample": _sample,
    "index": _index,
    "merge": _merge,
}
_ROW: Final = "{:<5} {:>6} {:>13} {:>17} {:>6} {:>15} {:>8}  {:<5}  {}"
_OUTCOMES: Final = {
    "built": "built",
    "found": "found",
    "small": "too small to be worth a file: each start builds them",
}


def _say(text: str) -> None:
    """Results alone belong to stdout."""
    print(text, file=sys.stderr, flush=True)


def _planned(arguments: argparse.Namespace) -> tuple[Plan, Facts]:
    """The plan of the run that these flags are for, and what it rests on."""
    request = parse(arguments.run_flags, program="megatrain data")
    facts = gather_data_facts(request, world_size=_world_size(request, arguments.world_size), say=_say)
    return _plan_on_any_device(request, facts), facts


def _world_size(request: Request, given: int | None) -> int:
    if given is not None and given < 1:
        raise ConfigError(f"--world-size {given} leaves no rank", fix="give the number of ranks of the run")
    if given is not None:
        return given
    taken = request.fewest_ranks()
    if request.known("training.global_batch_size") is None:
        _say(
            f"--global-batch-size is left open, so that it depends on the number of ranks: taken as {taken}, which"
            " --world-size changes"
        )
    return taken


def _plan_on_any_device(request: Request, facts: Facts) -> Plan:
    """Samples are the same on all devices: flags for GPUs are good on a host without, and those for a CPU beside one."""
    errors = []
    for device in ("cuda", "cpu"):
        try:
            return resolve(request, dataclasses.replace(facts, device=device))
        except ConfigError as error:
            errors.append(error)
    raise min(errors, key=lambda error: len(error.problems))


def _only(plan: Plan, split: str) -> Plan:
    """The plan without the samples of other splits, which need not be built."""
    others: dict[str, Any] = {f"{name}_plan": (0,) for name in SPLIT_NAMES if name != split}
    return dataclasses.replace(plan, derived=dataclasses.replace(plan.derived, **others))


def _chosen(splits: SplitDatasets, split: str, name: str | None) -> SampleDataset:
    """The samples of a split, or those of one of several validation sets."""
    named = splits.named_valid if split == "valid" else {}
    if name is None and len(named) == 1:
        return next(iter(named.values()))
    if named and name not in named:
        said = f"--set {name} is none of" if name is not None else "--set is missing: there are"
        raise ConfigError(
            f"{said} {len(named)} validation sets", fix=f"give --set with one of {', '.join(named)}"
        )
    if name is not None and not named:
        raise ConfigError(
            f"--set {name}: the {split} data is one set",
            fix="leave --set out; only --of valid with --multiple-validation-sets has several",
        )
    samples = named[name] if name is not None else getattr(splits, split)
    if samples is None:
        raise ConfigError(
            f"--of {split}: the run reads no {split} samples",
            fix="give it a share in --split or data of its own, and let the run read it (--eval-iters above 0, and"
            " no --skip-train)",
        )
    chosen: SampleDataset = samples
    return chosen


def _headline(plan: Plan, split: str, number: int, count: int) -> str:
    requested = getattr(plan.derived, f"requested_{split}_samples")
    read = "reads all of them" if requested is None else f"reads {requested:,}"
    lines = [f"{split} sample {number:,} of {count:,}, of which the run {read}"]
    plans = getattr(plan.derived, f"{split}_plan")
    if len(plans) > 1:
        lines.append(f"plans: {plan.origins[f'derived.{split}_plan'].detail}")
    return "\n".join(lines)


def _described(sample: Sample) -> str:
    length, counted = len(sample.tokens), int(sample.loss_mask.sum())
    left_out = f"; without loss: {_ranges(np.flatnonzero(sample.loss_mask == 0))}" if counted < length else ""
    lines = [f"tokens         {length:,}, of which {counted:,} have a loss{left_out}"]
    lines.append(f"attention      {_stretches(sample.document_starts, length)}")
    lines.append(f"positions      {_stretches(np.flatnonzero(sample.position_ids == 0), length)}")
    return "\n".join(lines)


def _stretches(starts: npt.NDArray[np.int64], length: int) -> str:
    if len(starts) == 1:
        return f"one stretch of {length:,}"
    return f"{len(starts)} stretches, from {', '.join(map(str, starts.tolist()))}"


def _ranges(numbers: npt.NDArray[np.int64]) -> str:
    """Such as `3, 7 to 9`."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _print_pieces(sample: Sample, origin: list[TokenSpan], tokenizer: Tokenizer | None) -> None:
    """Each stored piece of a sample: where it is in the sample and in which file, and what it says."""
    place = 0
    for piece in origin:
        ids = sample.tokens[place : place + piece.length].tolist()
        end = place + len(ids) - 1
        where = f"tokens {place} to {end}" if ids else "the last label"
        label = " and the last label" if ids and len(ids) < piece.length else ""
        prefix = piece.source.removesuffix(".bin")
        print(
            f"\n{where}{label}: {prefix}, document {piece.document}, sequence {piece.sequence},"
            f" from its token {piece.offset} on"
        )
        if ids:
            print(printable(tokenizer.decode(ids)) if tokenizer is not None else f"    {shown_ids(ids)}")
        place += piece.length


def _row(built: BuiltIndex) -> str:
    def number(value: int | None) -> str:
        return "" if value is None else f"{value:,}"

    return _ROW.format(
        built.split,
        built.seed,
        number(built.num_sequences),
        number(built.num_tokens),
        number(built.num_epochs),
        number(built.num_samples),
        f"{built.seconds:.2f}",
        built.outcome,
        built.source.removesuffix(".bin"),
    )


def _require_writable(folder: Path) -> None:
    """Before hours of work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{folder}: indices cannot be kept here: {error.strerror}",
            fix="give --data-cache-path a folder that can be written, here and in training",
        ) from error
