"""`megatrain data`: the data that a run reads, without running it.

inspect, merge     dataset prefixes
sample, index      the flags of a run ─> facts about its data ─> plan ─> the samples that the run itself would build
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config import Facts, Plan, Request, parse
from megatrain.config.cli.help_text import field_help
from megatrain.config.derive.datasets import SPLIT_NAMES
from megatrain.config.errors import ConfigError, MegatrainError
from megatrain.data.files import log_to_stderr
from megatrain.data.indexed.merge import merge
from megatrain.data.preprocess.flags import add_tokenizer_flags
from megatrain.data.samples.build import BuiltIndex, SplitDatasets
from megatrain.data.samples.dataset import FamilySample, Sample, SampleDataset, TokenSpan
from megatrain.data.samples.index_cache import NotCachedError, Share
from megatrain.data.tokenizers.build import Tokenizer, load_tokenizer
from megatrain.tools.data.images import SUFFIXES, described_images, inspect_rows
from megatrain.tools.data.inspect import inspect, printable, shown_ids
from megatrain.tools.data.masked import described_masked
from megatrain.tools.subcommands import CommandParser, add_command
from megatrain.training.batches import build_samples
from megatrain.training.launch.facts import gather_data_facts, plan_on_any_device


def add_flags(commands: Any) -> None:
    """Add `megatrain data ...`."""
    texts = field_help()
    data = add_command(
        commands, "data", description="A dataset is named by its prefix: the path without .bin and .idx."
    )
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION")

    _add_inspect(actions, texts)
    sample = add_command(
        actions,
        "sample",
        run_sample,
        takes_run_flags=True,
        help="show one sample exactly as training reads it",
        usage="%(prog)s FLAGS --of {train,valid,test} --index K [--set NAME] [--picture FILE] [--world-size N] [--json]",
    )
    sample.add("--of", "the split", choices=("train", "valid", "test"), required=True)
    sample.add("--index K", "number of the sample, counted from 0", of=int, required=True)
    sample.add("--picture FILE", "write the images of a sample, with its text, as PNG")
    sample.add("--set NAME", "name of one of --multiple-validation-sets")
    sample.add("--json", "print one JSON object")

    index = add_command(
        actions,
        "index",
        run_index,
        takes_run_flags=True,
        help="build the index caches of a run in advance",
        usage="%(prog)s FLAGS [--world-size N]",
    )
    for parser in (sample, index):
        parser.add(
            "--world-size N",
            "ranks of the run (default: the smallest number for its layout); it changes the order of samples only"
            " without --global-batch-size",
            of=int,
            at_least=1,
        )

    merge = add_command(actions, "merge", run_merge, help="merge datasets into one")
    merge.add("prefixes PREFIX ...", "paths or URLs without .bin and .idx")
    merge.add("--output-prefix OUT", "path of the new dataset", required=True)
    _add_index_cache(merge, texts)


def _add_inspect(actions: Any, texts: Mapping[str, str]) -> None:
    dataset = add_command(
        actions,
        "inspect",
        run_inspect,
        help="count documents and tokens of a dataset, and check its description",
    )
    dataset.add(
        "prefix PREFIX", "path or URL without .bin and .idx, or a source of --image-data-path (.jsonl, .tar)"
    )
    dataset.add("--document K", "show document or row K, counted from 0", of=int)
    dataset.add("--picture FILE", "write the images of row K, with its text, as PNG")
    dataset.add("--json", "print one JSON object")
    _add_index_cache(dataset, texts)
    group = dataset.add_argument_group("tokenizer", "to decode documents and to know their end token")
    add_tokenizer_flags(group, texts)


def _add_index_cache(parser: CommandParser, texts: Mapping[str, str]) -> None:
    text = texts.get("data.object_storage_cache_path", "")
    parser.add("--object-storage-cache-path FOLDER", text)


def run_inspect(arguments: argparse.Namespace) -> None:
    """Count documents and tokens of a dataset, and compare them with its description PREFIX.json."""
    if arguments.prefix.endswith(SUFFIXES):
        inspect_rows(arguments.prefix, arguments.document, arguments.picture, as_json=arguments.json)
    else:
        inspect(arguments)


def run_merge(arguments: argparse.Namespace) -> None:
    """Write one dataset with the documents of several, in the order of the arguments."""
    merge(arguments.prefixes, arguments.output_prefix, index_cache=arguments.object_storage_cache_path)


def run_sample(arguments: argparse.Namespace) -> None:
    """Show one sample of a run."""
    plan, facts = _planned(arguments)
    samples = _chosen(
        build_samples(_only(plan, arguments.of), facts, log_to_stderr), arguments.of, arguments.set
    )
    if not 0 <= arguments.index < len(samples):
        raise ConfigError(
            f"--index {arguments.index}: there are {len(samples)} {arguments.of} samples",
            fix=f"give a number from 0 to {len(samples) - 1}" if len(samples) else "use more data",
        )
    sample, spans = samples[arguments.index], samples.spans(arguments.index)
    if arguments.json:
        arrays = sample.arrays if isinstance(sample, FamilySample) else vars(sample)
        print(json.dumps({name: values.tolist() for name, values in arrays.items()}))
        return
    print(_headline(plan, arguments.of, arguments.index, len(samples)))
    kind = plan.config.tokenizer.tokenizer_type
    tokenizer = None if kind in (None, "NullTokenizer") else load_tokenizer(plan.config.tokenizer)
    if isinstance(sample, FamilySample) and "images" in sample.arrays:
        print(described_images(sample, plan, tokenizer, arguments.picture))
        return
    if isinstance(sample, FamilySample):
        assert tokenizer is not None, "a rule refuses others"
        print(described_masked(sample, spans, tokenizer))
        return
    print(_described(sample))
    _print_spans(sample, spans, tokenizer)


def run_index(arguments: argparse.Namespace) -> None:
    """Build the sample indices of a run in its cache folder."""
    plan, facts = _planned(arguments)
    folder = plan.config.data.data_cache_path
    if folder is None:
        raise ConfigError(
            "indices cannot be stored: --data-cache-path is not set",
            fix="give --data-cache-path FOLDER, here and in training",
        )
    _require_writable(Path(folder))
    heading = ("split", "seed", "sequences", "tokens", "epochs", "samples", "seconds", "", "dataset")
    print(_ROW.format(*heading), flush=True)
    num_processes = _num_processes(facts)
    num_built, outcomes = _build_shares(plan, facts, num_processes), list[str]()

    def report(built: BuiltIndex) -> None:
        outcomes.append(built.outcome)
        if num_processes == 1 or built.outcome != "found":
            print(_row(built), flush=True)

    build_samples(plan, facts, log_to_stderr, report)
    found = Counter(outcomes)
    found["built"] += num_built
    found["found"] -= num_built
    counts = ", ".join(f"{found[name]} {words}" for name, words in _OUTCOMES.items() if found[name] > 0)
    files = [path.stat().st_size for path in Path(folder).glob("*.index")]
    print(f"\n{counts}\n{folder}: {len(files)} files, {sum(files) / 1e6:,.1f} MB")


def _num_processes(facts: Facts) -> int:
    """Return how many processes build indices: no more than there are cores, datasets, and work for."""
    work = sum(dataset.num_sequences for dataset in facts.datasets) // _SEQUENCES_OF_A_PROCESS
    return max(1, min(len(os.sched_getaffinity(0)), len(facts.datasets), work))


def _build_shares(plan: Plan, facts: Facts, num_processes: int) -> int:
    """Build what is missing of single datasets in several processes, which print it; return how many indices they built."""
    if num_processes == 1:
        return 0
    context = multiprocessing.get_context("fork")  # no other thread runs in a tool
    count = context.Value("q")

    def build(number: int) -> None:
        def report(built: BuiltIndex) -> None:
            if built.outcome == "built":
                with count:
                    count.value += 1
                    print(_row(built), flush=True)

        # Another process builds the rest; errors are raised again by the caller, which builds all.
        with contextlib.suppress(NotCachedError, MegatrainError):
            build_samples(plan, facts, log_to_stderr, report, share=Share(number, num_processes))

    processes = [context.Process(target=build, args=(number,)) for number in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return int(count.value)


_SEQUENCES_OF_A_PROCESS: Final = 1 << 20
"""An index of so many is built in a fifth of a second."""
_ROW: Final = "{:<5} {:>6} {:>13} {:>17} {:>6} {:>15} {:>8}  {:<5}  {}"
_OUTCOMES: Final = {
    "built": "built",
    "found": "found",
    "small": "too small to cache: rebuilt at each start",
}


def _planned(arguments: argparse.Namespace) -> tuple[Plan, Facts]:
    """Return the plan of the run with these flags, and its facts."""
    request = parse(arguments.run_flags, program="megatrain data")
    world_size = _world_size(request, arguments.world_size)
    facts = gather_data_facts(request, world_size=world_size, log=log_to_stderr)
    # Samples are the same on GPUs and CPUs, so flags for either are accepted on any host.
    plan = plan_on_any_device(request, facts)
    if facts.untokenized:
        facts = gather_data_facts(request, world_size=world_size, log=log_to_stderr, tokenizes=True)
        plan = plan_on_any_device(request, facts)
    return plan, facts


def _world_size(request: Request, given: int | None) -> int:
    if given is not None:
        return given
    taken = request.fewest_ranks()
    if request.known("training.global_batch_size") is None:
        log_to_stderr(
            f"--global-batch-size is not set and depends on the number of ranks: assuming {taken}; set --world-size to"
            " change it"
        )
    return taken


def _only(plan: Plan, split: str) -> Plan:
    """Return the plan without the samples of other splits, so that they are not built."""
    others: dict[str, Any] = {f"{name}_plan": (0,) for name in SPLIT_NAMES if name != split}
    return dataclasses.replace(plan, derived=dataclasses.replace(plan.derived, **others))


def _chosen(splits: SplitDatasets, split: str, name: str | None) -> SampleDataset:
    """Return the samples of a split, or of one of several validation sets."""
    named = splits.named_valid if split == "valid" else {}
    if name is None and len(named) == 1:
        return next(iter(named.values()))
    if named and name not in named:
        problem = f"--set {name} is not one of the" if name is not None else "--set is missing: there are"
        raise ConfigError(
            f"{problem} {len(named)} validation sets", fix=f"give --set with one of {', '.join(named)}"
        )
    if name is not None and not named:
        raise ConfigError(
            f"--set {name}: the {split} data is one set",
            fix="leave --set out; only --of valid with --multiple-validation-sets has several sets",
        )
    samples = named[name] if name is not None else getattr(splits, split)
    if samples is None:
        raise ConfigError(
            f"--of {split}: the run reads no {split} samples",
            fix="give it a share in --split or its own data, and let the run read it (--eval-iters above 0, no"
            " --skip-train)",
        )
    chosen: SampleDataset = samples
    return chosen


def _headline(plan: Plan, split: str, number: int, count: int) -> str:
    requested = getattr(plan.derived, f"requested_{split}_samples")
    read = "all" if requested is None else f"{requested:,}"
    lines = [f"{split} sample {number:,} of {count:,}; the run reads {read}"]
    plans = getattr(plan.derived, f"{split}_plan")
    if len(plans) > 1:
        lines.append(f"plans: {plan.origins[f'derived.{split}_plan'].detail}")
    return "\n".join(lines)


def _described(sample: Sample) -> str:
    length, counted = len(sample.tokens), int(sample.loss_mask.sum())
    masked = f"; masked: {_ranges(np.flatnonzero(sample.loss_mask == 0))}" if counted < length else ""
    lines = [f"tokens         {length:,}; loss on {counted:,}{masked}"]
    lines.append(f"attention      {_spans(sample.document_starts, length)}")
    lines.append(f"positions      {_spans(np.flatnonzero(sample.position_ids == 0), length)}")
    return "\n".join(lines)


def _spans(starts: npt.NDArray[np.int64], length: int) -> str:
    if len(starts) == 1:
        return f"one span of {length:,}"
    return f"{len(starts)} spans, starting at {', '.join(map(str, starts.tolist()))}"


def _ranges(numbers: npt.NDArray[np.int64]) -> str:
    """Format ascending numbers such as `3, 7 to 9`."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _print_spans(sample: Sample, spans: list[TokenSpan], tokenizer: Tokenizer | None) -> None:
    """Print each stored span of a sample: its position in the sample and in its file, and its text."""
    position = 0
    for span in spans:
        ids = sample.tokens[position : position + span.length].tolist()
        end = position + len(ids) - 1
        where = f"tokens {position} to {end}" if ids else "the last label"
        label = " and the last label" if ids and len(ids) < span.length else ""
        prefix = span.source.removesuffix(".bin")
        print(
            f"\n{where}{label}: {prefix}, document {span.document}, sequence {span.sequence},"
            f" from token {span.offset} on"
        )
        if ids:
            print(printable(tokenizer.decode(ids)) if tokenizer is not None else f"    {shown_ids(ids)}")
        position += span.length


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
    """Raise ConfigError before any work if indices cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{folder}: indices cannot be written: {error.strerror}",
            fix="give --data-cache-path a writable folder, here and in training",
        ) from error
