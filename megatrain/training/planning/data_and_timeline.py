"""Datasets and timeline of a dry run: epochs per dataset, learning rate and batch size over time, evaluations, checkpoints.

Only the headers of data files are read, no index is built. The tokens of a split are estimated from its fraction of the
sequences, as if all sequences had the same length; so epochs are estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatrain.config import Facts, Plan
from megatrain.config.derive.batch_sizes import BatchSizes, batch_sizes
from megatrain.config.derive.data_plans import evaluations, samples_of_phases
from megatrain.config.derive.datasets import SPLIT_NAMES, split_fractions
from megatrain.config.facts import DatasetFacts
from megatrain.config.plan import continues_optimizer
from megatrain.data.samples.blend import blend_counts, normalized
from megatrain.data.samples.mock import MOCK_SPLIT
from megatrain.training.build import build_schedules


@dataclass(frozen=True, kw_only=True)
class DatasetUse:
    """One dataset in one split."""

    split: str
    dataset: str
    """Path prefix, or `mock data`."""
    samples: int | None
    """Requested samples; None: one epoch."""
    plans: tuple[int | None, ...]
    """Samples of the whole split, by data plan."""
    tokens: int | None
    """Tokens of the dataset in this split, estimated from its fraction of the sequences; None: unknown."""
    epochs: float | None
    """None: unknown."""


def dataset_uses(plan: Plan, facts: Facts) -> Iterator[DatasetUse]:
    """Yield every dataset in every split that uses it."""
    for number, split in enumerate(SPLIT_NAMES):
        requested = getattr(plan.derived, f"requested_{split}_samples")
        if requested == 0 or (split == "train" and plan.config.training.only_evaluates):
            continue
        if not facts.datasets:
            if split_fractions(MOCK_SPLIT)[number]:
                plans = getattr(plan.derived, f"{split}_plan")
                yield DatasetUse(
                    split=split, dataset="mock data", samples=requested, plans=plans, tokens=None, epochs=None
                )
            continue
        phases = [(0, requested, getattr(plan.derived, f"{split}_plan"))]
        for start, samples, plans in samples_of_phases(plan) if split == "train" else phases:
            read = [
                one for one in facts.datasets if one.split in (split, "all") and one.from_iteration == start
            ]
            fractions = [
                split_fractions(plan.config.data.split)[number] if one.split == "all" else 1.0 for one in read
            ]
            if any(fractions):
                yield from _uses(plan, split, read, fractions, samples, plans)


def _uses(
    plan: Plan,
    split: str,
    read: Sequence[DatasetFacts],
    fractions: Sequence[float],
    requested: int | None,
    plans: tuple[int | None, ...],
) -> Iterator[DatasetUse]:
    """Yield the datasets that one split reads in one phase, each with its fraction."""
    tokens = [round(one.num_tokens * fraction) for one, fraction in zip(read, fractions, strict=True)]
    samples = _samples(read, tokens, requested, plan.config.data.seq_length)
    for dataset, size, count in zip(read, tokens, samples, strict=True):
        epochs = 1.0 if count is None else count * plan.config.data.seq_length / max(1, size)
        yield DatasetUse(
            split=split, dataset=dataset.prefix, samples=count, plans=plans, tokens=size, epochs=epochs
        )


def _samples(
    read: Sequence[DatasetFacts], tokens: Sequence[int], requested: int | None, seq_length: int
) -> list[int | None]:
    """Return the samples per dataset, by weight. Without weights: at most one epoch each, in proportion to size."""
    if requested is None:
        return [None] * len(read)
    if len(read) == 1:
        return [requested]
    if any(one.weight is None for one in read):
        requested = min(requested, sum(size // seq_length for size in tokens))
        return list(blend_counts(normalized([max(1, size) for size in tokens]), requested))
    return list(blend_counts(normalized([one.weight or 0.0 for one in read]), requested))


@dataclass(frozen=True, kw_only=True)
class Landmark:
    """An iteration at which the learning rate or the batch size enters another phase."""

    what: str
    iteration: int
    """Counted from 1, as in the log."""
    consumed_samples: int
    """Samples consumed before the iteration."""
    lr: float
    global_batch_size: int


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Evaluations or checkpoints of a run."""

    count: int
    interval: int | None
    """In iterations; None: once, at the end."""
    first: int | None
    """Iteration after which the first takes place; None: there is none."""
    samples_each: int | None = None
    """Samples of one evaluation."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The course of a run from its start or resumption to its end."""

    start_iteration: int
    """Completed iterations of the checkpoint."""
    train_iters: int
    train_samples: int
    train_tokens: int
    landmarks: tuple[Landmark, ...]
    evaluations: Repeated
    checkpoints: Repeated


def timeline_of(plan: Plan, facts: Facts, data: Sequence[DatasetUse]) -> Timeline:
    """Return the timeline of a plan with these datasets, assuming that no step is skipped."""
    derived = plan.derived
    return Timeline(
        start_iteration=derived.start_iteration,
        train_iters=derived.train_iters,
        train_samples=derived.train_samples,
        train_tokens=derived.train_samples * plan.config.data.seq_length,
        landmarks=tuple(_landmarks(plan, facts)),
        evaluations=_evaluations(plan, has_data=any(use.split == "valid" for use in data)),
        checkpoints=_checkpoints(plan),
    )


def _landmarks(plan: Plan, facts: Facts) -> Iterator[Landmark]:
    derived, schedule = plan.derived, plan.derived.schedule
    sizes = batch_sizes(plan.config, data_parallel_size=derived.data_parallel_size)
    start, left = derived.start_consumed_samples, derived.train_iters - derived.start_iteration
    # Schedules that restart, as with --no-load-optim, count samples from the checkpoint.
    offset = 0 if continues_optimizer(plan.config, facts) else start
    schedules = build_schedules(plan)
    if left <= 0 or plan.config.training.only_evaluates:
        return
    marks: list[tuple[str, int]] = [("start", 0)]

    def mark(what: str, samples: float) -> None:
        """Add the first iteration after this number of samples of the schedules."""
        consumed = math.ceil(samples) + offset
        if consumed > start:
            marks.append((what, sizes.iterations_to(consumed, consumed=start, fills_up=True)))

    mark("warm-up ends", schedule.lr_warmup_samples)
    if schedule.lr_wsd_decay_samples is not None:
        mark("decay starts", schedule.lr_decay_samples - schedule.lr_wsd_decay_samples)
    if schedule.lr_decay_style != "constant":
        mark("decay ends", schedule.lr_decay_samples)
    marks += [(f"batch grows to {size}", iterations) for iterations, size in _growth(sizes, start, left)]
    marks.append(("last iteration", left - 1))
    for what, iterations in sorted(marks, key=lambda entry: entry[1]):
        if iterations < left:
            consumed = sizes.samples_after(iterations, consumed=start)
            yield Landmark(
                what=what,
                iteration=derived.start_iteration + iterations + 1,
                consumed_samples=consumed,
                lr=schedules.at(consumed - offset).lr,
                global_batch_size=sizes.at(consumed),
            )


def _growth(sizes: BatchSizes, consumed: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield the iterations, counted from here, at which the batch size changes, with the new size."""
    before, count = sizes.at(consumed), 0
    while consumed < sizes.rule.constant_from and count < limit:
        consumed += sizes.at(consumed)
        count += 1
        if sizes.at(consumed) != before:
            before = sizes.at(consumed)
            yield count, before


def _evaluations(plan: Plan, *, has_data: bool) -> Repeated:
    found, start = evaluations(plan), plan.derived.start_iteration
    is_whole = plan.config.data.full_validation
    count = found.remaining(start) if (found.eval_iters or is_whole) and has_data else 0
    count += bool(count and plan.config.training.eval_at_start and start == 0 and not found.skip_train)
    first = None
    if count:
        interval, at_least = found.eval_interval, found.start_eval_at_iter or 0
        first = found.train_iters
        if found.skip_train or (plan.config.training.eval_at_start and start == 0):
            first = start
        elif interval is not None:
            first = min(first, math.ceil(max(start + 1, at_least) / interval) * interval)
    return Repeated(
        count=count,
        interval=found.eval_interval,
        first=first,
        samples_each=None if is_whole else found.samples,
    )


def _checkpoints(plan: Plan) -> Repeated:
    checkpoint, end, start = plan.config.checkpoint, plan.derived.train_iters, plan.derived.start_iteration
    interval = checkpoint.save_interval
    if checkpoint.save is None or plan.config.training.only_evaluates or start >= end:
        return Repeated(count=0, interval=interval, first=None)
    if interval is None:
        return Repeated(count=1, interval=None, first=end)
    at_interval = end // interval - start // interval
    return Repeated(
        count=at_interval + bool(end % interval),
        interval=interval,
        first=min(end, (start // interval + 1) * interval),
    )
