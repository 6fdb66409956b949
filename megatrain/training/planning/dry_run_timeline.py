"""What happens when in a run: learning rate and batch size at its landmarks, evaluations, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatrain.config import Facts, Plan
from megatrain.config.derive.batch_sizes import BatchSizes, batch_sizes
from megatrain.config.derive.data_plans import evaluations
from megatrain.training.build import build_schedules


@dataclass(frozen=True, kw_only=True)
class Landmark:
    """An iteration at which something begins or ends."""

    what: str
    iteration: int
    """Counted from 1, as the log does."""
    consumed_samples: int
    """Before it."""
    lr: float
    global_batch_size: int


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """What comes again and again."""

    count: int
    interval: int | None
    """Iterations between them; None: once, at the end."""
    first: int | None
    """Iteration behind which the first comes; None: there is none."""
    samples_each: int | None = None
    """Of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """From where the run starts to its end."""

    start_iteration: int
    """Iterations that the checkpoint has done."""
    train_iters: int
    train_samples: int
    train_tokens: int
    landmarks: tuple[Landmark, ...]
    evaluations: Repeated
    checkpoints: Repeated


def timeline_of(plan: Plan, facts: Facts) -> Timeline:
    """The timeline of a plan, as long as no step is skipped."""
    derived = plan.derived
    return Timeline(
        start_iteration=derived.start_iteration,
        train_iters=derived.train_iters,
        train_samples=derived.train_samples,
        train_tokens=derived.train_samples * plan.config.data.seq_length,
        landmarks=tuple(_landmarks(plan, facts)),
        evaluations=_evaluations(plan),
        checkpoints=_checkpoints(plan),
    )


def _landmarks(plan: Plan, facts: Facts) -> Iterator[Landmark]:
    derived, schedule = plan.derived, plan.derived.schedule
    sizes = batch_sizes(plan.config, data_parallel_size=derived.data_parallel_size)
    start, left = derived.start_consumed_samples, derived.train_iters - derived.start_iteration
    # Schedules that start anew, as with --no-load-optim, count from here.
    goes_on = facts.checkpoint is not None and not plan.config.checkpoint.no_load_optim
    offset = 0 if goes_on or facts.checkpoint is None else start
    schedules = build_schedules(plan)
    if left <= 0 or plan.config.training.skip_train:
        return
    marks: list[tuple[str, int]] = [("start", 0)]

    def mark(what: str, samples: float) -> None:
        """The first iteration behind so many samples of the schedules."""
        behind = math.ceil(samples) + offset
        if behind > start:
            marks.append((what, sizes.iterations_to(behind, consumed=start, fills_up=True)))

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
    """Iterations from here at which the batch has another size than before, and that size."""
    before, count = sizes.at(consumed), 0
    while consumed < sizes.rule.constant_from and count < limit:
        consumed += sizes.at(consumed)
        count += 1
        if sizes.at(consumed) != before:
            before = sizes.at(consumed)
            yield count, before


def _evaluations(plan: Plan) -> Repeated:
    found, start = evaluations(plan), plan.derived.start_iteration
    is_whole = plan.config.data.full_validation
    count = found.to_come(start) if found.eval_iters or is_whole else 0
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
    if checkpoint.save is None or plan.config.training.skip_train or start >= end:
        return Repeated(count=0, interval=interval, first=None)
    if interval is None:
        return Repeated(count=1, interval=None, first=end)
    at_interval = end // interval - start // interval
    return Repeated(
        count=at_interval + bool(end % interval),
        interval=interval,
        first=min(end, (start // interval + 1) * interval),
    )
