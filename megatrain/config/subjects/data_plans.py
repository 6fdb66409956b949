"""Number of samples that a run requests from each split, and the plans that give their order.

    iterations, batches, evaluations     -> requested: samples of train, valid and test      (Megatron-LM's rule)
    requested, plans of the checkpoint   -> plans: those of the checkpoint, and one for further samples

The order of samples depends on how many are planned. A run therefore keeps its first plan, and a longer run reads the
further samples in another plan: samples that were read keep their order.

With --data-schedule, each phase of training has plans of its own. A phase that has begun keeps its first sample and its
plans; later ones follow the flags.

With --phase-transition-iterations, the data flags name the data of one phase of training, the current one, which has a
plan of its own, shuffled with --seed (Megatron-LM's rule).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatrain.config.derive.datasets import SPLIT_NAMES
from megatrain.config.errors import ConfigError, Problem
from megatrain.config.facts import DataPhase
from megatrain.config.plan import DerivedValue, Draft, Plan
from megatrain.config.registry import Notes, Problems, derives, note, rule
from megatrain.config.subjects.batches import sizes_of_batches

MAX_SEED: Final = 2**32 - 1
"""Largest seed of the generator that shuffles samples."""
_PHASES: Final = "--phase-transition-iterations"


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """Iterations at which a run evaluates, and the samples of an evaluation."""

    train_iters: int
    eval_interval: int | None
    eval_iters: int
    batch_size: int
    start_eval_at_iter: int | None = None
    skip_train: bool = False

    @property
    def samples(self) -> int:
        """Number of samples of an evaluation."""
        return self.eval_iters * self.batch_size

    @property
    def planned(self) -> int:
        """Number of evaluations that Megatron-LM plans for: sometimes one too many."""
        if self.skip_train or self.eval_interval is None:
            return 1
        before = (self.start_eval_at_iter or 0) // self.eval_interval
        return max(0, self.train_iters // self.eval_interval + 1 - before)

    def is_due(self, iteration: int) -> bool:
        """Return whether an evaluation follows this iteration: at the interval, and at the end of training."""
        if iteration >= self.train_iters:
            return True
        interval = self.eval_interval
        return (
            interval is not None and iteration % interval == 0 and iteration >= (self.start_eval_at_iter or 0)
        )

    def remaining(self, iteration: int) -> int:
        """Return the number of evaluations after later iterations than this one."""
        if self.skip_train:
            return 1
        if iteration >= self.train_iters:
            return 0
        at_interval = 0
        if self.eval_interval is not None:
            passed = max(iteration, (self.start_eval_at_iter or 0) - 1) // self.eval_interval
            at_interval = max(0, (self.train_iters - 1) // self.eval_interval - passed)
        return at_interval + 1


def evaluations(draft: Draft | Plan) -> Evaluations:
    """Return the evaluations of a run."""
    training = draft.config.training
    return Evaluations(
        train_iters=draft.derived.train_iters,
        eval_interval=training.eval_interval,
        eval_iters=training.eval_iters,
        # --decrease-batch-size-if-needed may leave fewer samples than --eval-global-batch-size.
        batch_size=draft.derived.num_eval_microbatches
        * training.eval_micro_batch_size
        * draft.derived.data_parallel_size,
        start_eval_at_iter=training.start_eval_at_iter,
        skip_train=training.only_evaluates,
    )


@derives("derived.requested_train_samples")
def requested_train_samples(draft: Draft) -> DerivedValue:
    training, read = draft.config.training, draft.derived.train_samples
    if training.train_samples is not None and training.train_samples >= read:
        return DerivedValue(training.train_samples, "--train-samples")
    if training.decrease_batch_size_if_needed and training.train_iters is not None:
        iterations, batch = draft.derived.train_iters, training.global_batch_size
        if iterations * batch > read:  # as in Megatron-LM, which plans for the given batch
            return DerivedValue(iterations * batch, f"{iterations} iterations * global batch {batch}")
    return DerivedValue(read, draft.origins["derived.train_samples"].detail)


@derives("derived.requested_valid_samples")
def requested_valid_samples(draft: Draft) -> DerivedValue:
    if draft.config.data.full_validation:
        return DerivedValue(None, "all, with --full-validation")
    evals, stored = evaluations(draft), draft.facts.checkpoint
    each = f"{evals.eval_iters} iterations * global batch {evals.batch_size}"
    consumed = stored.consumed_valid_samples if stored else 0
    remaining = evals.remaining(stored.iteration if stored else 0)
    remaining += bool(stored and stored.is_evaluation_left)
    needed = consumed + remaining * evals.samples
    if evals.samples and needed > evals.planned * evals.samples:
        # The interval was shorter before, for example.
        return DerivedValue(needed, f"{consumed} so far, and {remaining} to come * {each}")
    return DerivedValue(evals.planned * evals.samples, f"{evals.planned} * {each}")


@derives("derived.requested_test_samples")
def requested_test_samples(draft: Draft) -> DerivedValue:
    evals = evaluations(draft)
    return DerivedValue(evals.samples, f"{evals.eval_iters} iterations * global batch {evals.batch_size}")


@derives("derived.train_plan")
def train_plan(draft: Draft) -> DerivedValue:
    end = min([train_end(draft), *_phase_starts(draft).values()])
    return _plan(draft, "train", max(end - draft.derived.train_start, 0))


@derives("derived.valid_plan")
def valid_plan(draft: Draft) -> DerivedValue:
    return _plan(draft, "valid", draft.derived.requested_valid_samples)


@derives("derived.test_plan")
def test_plan(draft: Draft) -> DerivedValue:
    return _plan(draft, "test", draft.derived.requested_test_samples)


def _plan(draft: Draft, split: str, requested: int | None) -> DerivedValue:
    assert split in SPLIT_NAMES
    stored = draft.facts.checkpoint
    plans = stored.data_plans.get(split, ()) if stored else ()
    if stored and split == "train" and stored.train_start != draft.derived.train_start:
        plans = ()  # of the phase before
    stored_plan = [count for count in plans if count]
    if requested is None:
        return DerivedValue((None,), "all of one epoch")
    if not stored_plan:
        return DerivedValue((requested,), "one plan for all samples")
    if draft.config.data.dataloader_type == "cyclic":
        return DerivedValue(tuple(stored_plan), "the checkpoint's, which the cyclic order repeats")
    plan = extended(stored_plan, requested)
    if len(plan) > len(stored_plan):
        before = " + ".join(map(str, stored_plan))
        return DerivedValue(plan, f"the checkpoint's {before}, and {plan[-1]} more with another seed")
    return DerivedValue(
        plan, "the checkpoint's" + (", more than are read" if requested < sum(stored_plan) else "")
    )


def extended(plan: Sequence[int], requested: int) -> tuple[int, ...]:
    """Return the plan with at least `requested` samples that starts with this one."""
    missing = requested - sum(plan)
    return (*plan, missing) if missing > 0 else tuple(plan)


@rule
def seed_is_in_range(draft: Draft) -> Problems:
    derived, seed = draft.derived, draft.config.training.seed
    plans = (derived.train_plan, derived.valid_plan, derived.test_plan)
    of_phases = sum(len(phase.plan) for phase in derived.later_phases)
    largest = MAX_SEED - max(map(len, plans)) - of_phases + 1  # each additional plan uses the next seed
    if seed > largest:
        yield Problem(f"--seed {seed} is too large for shuffling", f"use --seed {largest} or less")


@derives("derived.later_phases")
def later_phases(draft: Draft) -> DerivedValue:
    starts = _phase_starts(draft)
    stored = draft.facts.checkpoint
    begun = {phase.from_iteration: phase.plan for phase in begun_phases(draft)}
    ends = [*starts.values(), draft.derived.requested_train_samples][1:]
    phases = []
    for (iteration, start), end in zip(starts.items(), ends, strict=True):
        wanted = max(min(end, draft.derived.requested_train_samples) - start, 0)
        plan = extended(begun.get(iteration, ()), wanted)
        phases.append(DataPhase(from_iteration=iteration, start=start, plan=plan))
    if not phases:
        return DerivedValue((), "training data does not change")
    reason = f"{len(begun)} of the checkpoint, others of --data-schedule" if stored else "of --data-schedule"
    return DerivedValue(tuple(phases), reason)


def begun_phases(draft: Draft) -> tuple[DataPhase, ...]:
    """Return the later phases that the checkpoint has begun to read."""
    stored = draft.facts.checkpoint
    phases = stored.later_phases if stored else ()
    return tuple(phase for phase in phases if stored and phase.from_iteration < stored.iteration)


def samples_of_phases(plan: Plan) -> list[tuple[int, int, tuple[int | None, ...]]]:
    """Return first iteration, number of samples and plans of every phase of training that the run reads."""
    derived = plan.derived
    phases = [(0, derived.train_start, derived.train_plan)]
    phases += [
        (phase.from_iteration, phase.start, phase.plan) for phase in derived.later_phases if phase.plan
    ]
    ends = [*(start for _, start, _ in phases[1:]), train_end(plan)]
    return [
        (iteration, end - start, plans) for (iteration, start, plans), end in zip(phases, ends, strict=True)
    ]


def _phase_starts(draft: Draft) -> dict[int, int]:
    """Return the first sample of each later phase, by iteration: a stored one, or the samples of the iterations before it."""
    iterations = sorted({dataset.from_iteration for dataset in draft.facts.datasets} - {0})
    if not iterations:
        return {}
    derived, sizes = draft.derived, sizes_of_batches(draft)
    starts = {phase.from_iteration: phase.start for phase in begun_phases(draft)}
    for iteration in iterations:
        to_come = max(iteration - derived.start_iteration, 0)
        starts.setdefault(iteration, sizes.samples_after(to_come, consumed=derived.start_consumed_samples))
    return {iteration: starts[iteration] for iteration in iterations}


def parse_transitions(text: str | None) -> tuple[int, ...]:
    """Return the iterations of --phase-transition-iterations, ascending. Raises ConfigError if one is not a whole number."""
    if text is None:
        return ()
    words = re.findall(r"[^,\s]+", text)
    iterations = sorted({int(word) for word in words if re.fullmatch(r"[0-9]{1,18}", word)} - {0})
    if len(iterations) < max(1, len(words)):
        remedy = ",".join(map(str, iterations)) or "20000,30000"
        raise ConfigError(
            f"--phase-transition-iterations {text!r} does not list different whole numbers above 0",
            fix=f"use --phase-transition-iterations {remedy}",
        )
    return tuple(iterations)


@derives("derived.phase_transitions")
def phase_transitions(draft: Draft) -> DerivedValue:
    found = parse_transitions(draft.config.data.phase_transition_iterations)
    return DerivedValue(found, "--phase-transition-iterations" if found else "training data does not change")


@derives("derived.train_start")
def train_start(draft: Draft) -> DerivedValue:
    batch, start = draft.config.training.global_batch_size, draft.derived.start_iteration
    passed = [one for one in draft.derived.phase_transitions if one <= start]
    if not passed:
        return DerivedValue(0, "the first phase of training")
    return DerivedValue(max(passed) * batch, f"{max(passed)} iterations * global batch {batch}")


def train_end(plan: Draft | Plan) -> int:
    """Return the sample before which the run ends: that of its target, or of the next --phase-transition-iterations."""
    batch, start = plan.config.training.global_batch_size, plan.derived.start_iteration
    ends = [one * batch for one in plan.derived.phase_transitions if one > start]
    return min([plan.derived.requested_train_samples, *ends])


@rule
def current_phase_is_kept(draft: Draft) -> Problems:
    stored, given = draft.facts.checkpoint, draft.derived.phase_transitions
    if stored is None or stored.is_of_megatron or draft.config.training.only_evaluates:
        return
    if stored.train_start != draft.derived.train_start and stored.iteration not in given:
        batch = draft.config.training.global_batch_size
        before, now = stored.train_start // batch, draft.derived.train_start // batch
        kept = {before, *(one for one in given if one > stored.iteration)} - {0}
        yield Problem(
            f"{_PHASES} cannot change before iteration {stored.iteration} of the checkpoint: its phase started after"
            f" iteration {before}, that of this run after {now}",
            (f"use {_PHASES} {','.join(map(str, sorted(kept)))}" if kept else f"remove {_PHASES}")
            + ", or add --finetune and another --save to start a new run from these weights",
        )


@rule
def phases_start_at_whole_batches(draft: Draft) -> Problems:
    stored, given = draft.facts.checkpoint, draft.derived.phase_transitions
    if stored is None or not given or draft.config.training.only_evaluates:
        return
    batch = draft.config.training.global_batch_size
    iteration, consumed = stored.iteration, stored.consumed_train_samples
    if iteration * batch != consumed:
        is_whole = iteration and not consumed % iteration
        yield Problem(
            f"{_PHASES} counts samples as iterations * --global-batch-size {batch}, but the checkpoint of iteration"
            f" {iteration} has consumed {consumed} samples",
            f"use --global-batch-size {consumed // iteration}"
            if is_whole
            else f"remove {_PHASES}; --data-schedule supports growing batches",
        )


@rule
def each_phase_has_other_data(draft: Draft) -> Problems:
    """The same data would be read again from its first sample on."""
    stored, start = draft.facts.checkpoint, draft.derived.train_start
    if stored is None or stored.train_start == start or draft.config.training.only_evaluates:
        return
    before, now = (
        [(one.digest, one.weight, one.split) for one in datasets if one.split in ("all", "train")]
        for datasets in (stored.datasets, draft.facts.datasets)
    )
    if before and before == now:
        iteration = start // draft.config.training.global_batch_size
        yield Problem(
            f"{_PHASES}: a phase starts after iteration {iteration}, but the training data is that of the phase before,"
            " which would be read again from its first sample on",
            f"give the data of the new phase (--data-path), or remove {iteration} from {_PHASES}",
        )


@note("result")
def phases_are_not_reached(draft: Draft) -> Notes:
    unread = [str(phase.from_iteration) for phase in draft.derived.later_phases if not phase.plan]
    if unread and not draft.config.training.only_evaluates:
        yield (
            f"--data-schedule: the run ends at iteration {draft.derived.train_iters}, before the data changes at"
            f" {', '.join(unread)}"
        )
    end = draft.derived.train_iters
    late = [str(one) for one in draft.derived.phase_transitions if one >= end]
    if late:
        yield f"--phase-transition-iterations {' '.join(late)}: no effect, since the run ends at iteration {end}"
