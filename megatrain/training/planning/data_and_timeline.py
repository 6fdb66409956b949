"""Datasets, timeline and duration of a dry run: epochs per dataset, learning rate and batch size over time, evaluations, checkpoints.

Only the headers of data files are read, no index is built. The tokens of a split are estimated from its fraction of the
sequences, as if all sequences had the same length; so epochs are estimates. The time of an iteration is that of its FLOPs at a
usual share of the GPU's peak; `megatrain plan` predicts it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from megatrain.config import Facts, Plan
from megatrain.config.derive.batch_sizes import BatchSizes, batch_sizes, length_steps
from megatrain.config.derive.datasets import SPLIT_NAMES, split_fractions
from megatrain.config.facts import DatasetFacts
from megatrain.config.plan import continues_optimizer
from megatrain.config.subjects.data_plans import evaluations, samples_of_phases
from megatrain.data.samples.blend import blend_counts, normalized
from megatrain.training.build import build_schedules
from megatrain.training.checkpoints import saved_kinds
from megatrain.training.engine import Engine
from megatrain.training.logging.metrics import peak_tflops


@dataclass(frozen=True, kw_only=True)
class DatasetUse:
    """One dataset in one split."""

    split: str
    dataset: str
    """Path prefix, the function of --dataset, text that is not tokenized yet, or `mock data`."""
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
        share = split_fractions(plan.config.data.split)[number]
        if not facts.datasets:
            for name in _names_without_datasets(plan, facts, split, share):
                yield DatasetUse(
                    split=split,
                    dataset=name,
                    samples=requested,
                    plans=getattr(plan.derived, f"{split}_plan"),
                    tokens=None,
                    epochs=None,
                )
            continue
        phases = [(0, requested, getattr(plan.derived, f"{split}_plan"))]
        for start, samples, plans in samples_of_phases(plan) if split == "train" else phases:
            read = [
                one for one in facts.datasets if one.split in (split, "all") and one.from_iteration == start
            ]
            fractions = [share if one.split == "all" else 1.0 for one in read]
            if not any(fractions):
                continue
            counted = _counted_images if plan.config.data.image_data_path else _counted
            found = counted(plan, read, fractions, samples)
            for one, (count, tokens, epochs) in zip(read, found, strict=True):
                yield DatasetUse(
                    split=split, dataset=one.prefix, samples=count, plans=plans, tokens=tokens, epochs=epochs
                )


_Counted = tuple[int | None, int | None, float | None]
"""Samples, tokens and epochs of a dataset; see `DatasetUse`."""


def _names_without_datasets(plan: Plan, facts: Facts, split: str, share: float) -> list[str]:
    """Return what a split reads that is no dataset (yet). share: its fraction of data that --split divides."""
    if not facts.untokenized:
        return [plan.config.data.dataset or "mock data"]
    texts = facts.untokenized.get(split, ()) + (facts.untokenized.get("all", ()) if share else ())
    return [", ".join(texts)] if texts else []


def _counted(
    plan: Plan, read: Sequence[DatasetFacts], fractions: Sequence[float], requested: int | None
) -> Iterator[_Counted]:
    """Yield samples, tokens and epochs of datasets that a split reads in one phase, each with its fraction."""
    tokens = [round(one.num_tokens * fraction) for one, fraction in zip(read, fractions, strict=True)]
    samples = _samples(read, tokens, requested, plan.config.data.seq_length)
    for size, count in zip(tokens, samples, strict=True):
        yield count, size, 1.0 if count is None else count * plan.config.data.seq_length / max(1, size)


def _counted_images(
    plan: Plan, read: Sequence[DatasetFacts], fractions: Sequence[float], requested: int | None
) -> Iterator[_Counted]:
    """Yield the same of conversations about images: they repeat, and their tokens are not counted."""
    rows = [one.num_sequences * fraction for one, fraction in zip(read, fractions, strict=True)]
    weights = [size if one.weight is None else one.weight for one, size in zip(read, rows, strict=True)]
    counts = [None] * len(read) if requested is None else blend_counts(normalized(weights), requested)
    for size, count in zip(rows, counts, strict=True):
        is_counted = count is not None and not plan.config.data.use_packed_sequence
        yield count, None, (count or 0) / max(size, 1) if is_counted else None


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
    """An iteration at which the learning rate or the batch size enters another phase; not a skipped one."""

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
    """Return the timeline of a plan with these datasets, assuming that only steps of --iterations-to-skip are skipped."""
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


class _Course:
    """Samples of the iterations to come, which count from 0: consumed, and those by which the schedules go.

    Iterations of --iterations-to-skip consume samples and leave the schedules where they are.
    """

    def __init__(self, plan: Plan, facts: Facts) -> None:
        derived, stored = plan.derived, facts.checkpoint
        self.sizes = batch_sizes(plan.config, data_parallel_size=derived.data_parallel_size)
        self.left = max(0, derived.train_iters - derived.start_iteration)
        self.start, self.scheduled_start = derived.start_consumed_samples, 0
        if stored is not None and continues_optimizer(plan.config, facts):  # otherwise schedules restart
            known = stored.scheduled_samples
            self.scheduled_start = stored.consumed_train_samples if known is None else known
        numbers = (number - derived.start_iteration for number in plan.config.training.iterations_to_skip)
        self.skipped = sorted({number for number in numbers if 0 <= number < self.left})
        batches = [self.sizes.at(self.consumed(number)) for number in self.skipped]
        self._skipped_samples = [0, *itertools.accumulate(batches)]

    def consumed(self, iterations: int) -> int:
        """Return the samples consumed before this iteration."""
        return self.sizes.samples_after(iterations, consumed=self.start)

    def scheduled(self, iterations: int) -> int:
        """Return the position of the schedules before this iteration."""
        skipped = self._skipped_samples[bisect.bisect_left(self.skipped, iterations)]
        return self.scheduled_start + self.consumed(iterations) - self.start - skipped

    def iteration_at(self, scheduled: float) -> int:
        """Return the first iteration at or after this position of the schedules; `left`: there is none."""
        return bisect.bisect_left(range(self.left), scheduled, key=self.scheduled)

    def trained(self, iterations: int, step: int = 1) -> int:
        """Return this iteration, or if it is skipped the next (step 1) or last (step -1) one that is not."""
        while iterations in self.skipped:
            iterations += step
        return iterations


def _landmarks(plan: Plan, facts: Facts) -> Iterator[Landmark]:
    schedule, course, schedules = plan.derived.schedule, _Course(plan, facts), build_schedules(plan)
    if plan.config.training.only_evaluates:
        return
    ends: list[tuple[str, float]] = [("warm-up ends", schedule.lr_warmup_samples)]
    if schedule.style.final_decay is not None:
        ends.append(
            ("decay starts", schedule.lr_decay_samples - getattr(schedule, schedule.style.final_decay))
        )
    if schedule.style.decays:
        ends.append(("decay ends", schedule.lr_decay_samples))
    marks = [("start", 0)]
    marks += [(what, course.iteration_at(at)) for what, at in ends if at > course.scheduled_start]
    growth = _growth(course.sizes, course.start, course.left)
    marks += [(f"batch grows to {size}", iterations) for iterations, size in growth]
    steps = length_steps(plan.config)
    for at, length in () if steps is None else steps.steps:
        if at > course.start:
            iterations = bisect.bisect_left(range(course.left), at, key=course.consumed)
            marks.append((f"sequences of {length}", iterations))
    marks = [(what, course.trained(iterations)) for what, iterations in marks]
    marks.append(("last iteration", course.trained(course.left - 1, -1)))
    for what, iterations in sorted(marks, key=lambda entry: entry[1]):
        if 0 <= iterations < course.left:
            consumed = course.consumed(iterations)
            yield Landmark(
                what=what,
                iteration=plan.derived.start_iteration + iterations + 1,
                consumed_samples=consumed,
                lr=schedules.at(course.scheduled(iterations)).lr,
                global_batch_size=course.sizes.at(consumed),
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


_SHARE_OF_PEAK: Final = 0.4
"""Usual share of the bf16 peak that training reaches."""
_BYTES: Final = {"float64": 8, "float32": 4, "fp32": 4, "bf16": 2, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Time and storage of a run."""

    seconds_per_iteration: float | None
    """None: the peak of the device is not known."""
    checkpoint_bytes: int
    """Bytes of one checkpoint."""
    kept_checkpoints: int
    """Checkpoints in --save at the end."""

    def hours(self, iterations: int) -> float | None:
        return None if self.seconds_per_iteration is None else iterations * self.seconds_per_iteration / 3600


def duration_of(
    plan: Plan, engine: Engine, parameters: int, checkpoints: Repeated, device: str | None
) -> Duration:
    """Return the duration of a run on GPUs with this name."""
    peak = peak_tflops(device) if plan.config.training.device == "cuda" else None
    rate = None if peak is None else peak * 1e12 * _SHARE_OF_PEAK * plan.derived.world_size
    keep = plan.config.checkpoint.keep_last
    retained = plan.config.checkpoint.save_retain_interval
    kept = checkpoints.count if keep is None and retained is None else min(keep or 2, checkpoints.count)
    if retained is not None and checkpoints.interval is not None:
        kept += max(0, checkpoints.count * checkpoints.interval // retained)
    return Duration(
        seconds_per_iteration=None if rate is None else plan.derived.flops_per_iteration / rate,
        checkpoint_bytes=int(parameters * _bytes_per_parameter(plan, engine)),
        kept_checkpoints=min(kept, checkpoints.count),
    )


def _bytes_per_parameter(plan: Plan, engine: Engine) -> float:
    """Return the bytes of a parameter in a checkpoint, as if all had every kind of state."""
    optimizer, matrices = plan.config.optimizer, engine.optimizer.matrices
    dtypes = {"exp_avg": optimizer.exp_avg_dtype, "exp_avg_sq": optimizer.exp_avg_sq_dtype}
    numbers = {} if matrices is None else {matrices.factor_kind: matrices.factors_per_element}
    return sum(
        numbers.get(kind, 1) * _BYTES[dtypes.get(kind, plan.derived.master_dtype)]
        for kind in saved_kinds(plan, engine)
    )
