"""Batch sizes, and the length of training and evaluations in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from megatrain.config.derive.batch_sizes import (
    LARGEST_RAMP,
    BatchSizes,
    RampMisfitError,
    batch_rule,
    batch_sizes,
    length_steps,
    micro_batches,
    parse_steps,
    with_fitting_lengths,
)
from megatrain.config.derive.vision import sample_length
from megatrain.config.errors import ConfigError, Problem
from megatrain.config.fixes import Change, divisors, located, multiples, use
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import Notes, Problems, derives, note, rule, unproven
from megatrain.config.schema.tree import flag_of
from megatrain.config.schema.values import UnresolvedError, whole

_RAMP: Final = "training.rampup_batch_size"


@derives("training.global_batch_size")
def global_batch_size(draft: Draft) -> DerivedValue:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    if training.step_batch_size_schedule is not None:
        steps = parse_steps(training.step_batch_size_schedule, seq_length=draft.config.data.seq_length)
        return DerivedValue(steps.sizes[-1], "the last entry of --step-batch-size-schedule")
    return DerivedValue(training.micro_batch_size * dp, f"micro-batch {training.micro_batch_size} * dp {dp}")


@rule
def global_batch_divides_into_passes(draft: Draft) -> Problems:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    batch, per_pass = training.global_batch_size, training.micro_batch_size * dp
    if training.step_batch_size_schedule is not None:
        return  # The rule `batch_sizes_are_valid` checks all of its batch sizes.
    if training.decrease_batch_size_if_needed and batch < per_pass:
        yield Problem(
            f"--global-batch-size {batch} is less than --micro-batch-size {training.micro_batch_size} *"
            f" data-parallel size {dp} = {per_pass}: --decrease-batch-size-if-needed would decrease it to 0",
            use(
                draft,
                multiples("training.global_batch_size", per_pass, per_pass),
                _smaller_micro_batches(draft, batch),
            ),
        )
    if batch % per_pass and not training.decrease_batch_size_if_needed:
        yield Problem(
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {training.micro_batch_size} *"
            f" data-parallel size {dp} = {per_pass}",
            use(
                draft,
                _smaller_micro_batches(draft, batch),
                multiples("training.global_batch_size", batch, per_pass),
            ),
        )


def _smaller_micro_batches(draft: Draft, batch: int) -> Iterator[Change]:
    """Yield micro-batches with which replicas share a batch evenly: what is trained stays the same, or nearly if it does not divide."""
    replicas, limit = draft.derived.data_parallel_size, draft.config.training.micro_batch_size - 1
    per_replica = -(-batch // replicas)
    nearest = {} if batch % replicas == 0 else {"training.global_batch_size": per_replica * replicas}
    return ({**one, **nearest} for one in divisors("training.micro_batch_size", per_replica, limit))


@rule
def batch_sizes_are_valid(draft: Draft) -> Problems:
    training = draft.config.training
    try:
        rule = batch_rule(draft.config)
    except RampMisfitError as error:
        yield Problem(error.problems[0].text, _fix_of_ramp(draft, *error.ramp))
        return
    except ConfigError as error:
        yield from error.problems
        return
    sizes = batch_sizes(draft.config, data_parallel_size=draft.derived.data_parallel_size)
    misfits = sizes.misfits(is_decreased=training.decrease_batch_size_if_needed)
    is_changing = len(rule.sizes) > 1 or training.step_batch_size_schedule is not None
    if misfits and is_changing:
        flag = "--rampup-batch-size" if training.rampup_batch_size else "--step-batch-size-schedule"
        yield Problem(
            f"{flag} has a batch size of {misfits[0]}, which is not a multiple of --micro-batch-size"
            f" {training.micro_batch_size} * data-parallel size {draft.derived.data_parallel_size} = {sizes.pass_size}",
            _fix_of_batches(draft, rule.sizes, sizes.pass_size),
        )


def _fix_of_ramp(draft: Draft, start: int, increment: int, samples: int) -> str:
    """Return a ramp of whole passes that leads to the global batch, and the next global batch that the ramp leads to."""
    target, replicas = draft.config.training.global_batch_size, draft.derived.data_parallel_size
    per_pass = draft.config.training.micro_batch_size * replicas
    first = max(min(-(-start // per_pass) * per_pass, target - per_pass), per_pass)
    parts, rest = divmod(target - first, per_pass)
    sizes = (
        {parts, *(change[_RAMP] for change in divisors(_RAMP, parts, parts))}
        if parts > 0 and not rest
        else set()
    )
    ramps = (
        {_RAMP: (str(first), str(size * per_pass), str(samples))}
        for size in sorted(sizes, key=lambda size: abs(size * per_pass - increment))
        if parts // size <= LARGEST_RAMP
    )
    least = max(-(-(target - start) // increment), 1)
    batches = (
        {"training.global_batch_size": start + count * increment} for count in range(least, least + per_pass)
    )
    return f"{use(draft, ramps, batches)}, or leave --rampup-batch-size out"


def _fix_of_batches(draft: Draft, sizes: Sequence[int], pass_size: int) -> str:
    """Return how replicas share all batch sizes: by smaller micro-batches, which change nothing else, if there are some."""
    per_replica, rest = divmod(math.gcd(*sizes), draft.derived.data_parallel_size)
    limit = draft.config.training.micro_batch_size - 1
    smaller = [] if rest else list(divisors("training.micro_batch_size", per_replica, limit))
    fixes = [use(draft, smaller)] if smaller else []
    fixes.append(f"use batch sizes that are multiples of {pass_size}")
    if draft.breaks({"training.decrease_batch_size_if_needed": True}) == 0:
        fixes.append("add --decrease-batch-size-if-needed")
    return ", or ".join(fixes)


@rule
def pieces_are_valid(draft: Draft) -> Problems:
    """Pieces are split over ranks as samples are."""
    parallel, data = draft.config.parallel, draft.config.data
    try:
        steps = length_steps(draft.config)
    except ConfigError as error:
        yield from error.problems
        return
    unit = 2 * parallel.context_parallel_size if parallel.context_parallel_size > 1 else 1
    if parallel.sequence_parallel:
        unit = math.lcm(unit, parallel.context_parallel_size * parallel.tensor_model_parallel_size)
    if steps is None or data.seq_length % unit:
        return  # other rules report the whole length
    misfit = next((length for length in steps.sizes if length % unit), None)
    if misfit is not None:
        assert data.seq_length_schedule is not None
        fitting = with_fitting_lengths(data.seq_length_schedule, data.seq_length, unit)
        yield Problem(
            f"--seq-length-schedule: pieces of {misfit} tokens do not divide over context and tensor ranks, which need"
            f" multiples of {unit}",
            f"use --seq-length-schedule '{fitting}'",
        )


@note("result")
def samples_are_cut(draft: Draft) -> Notes:
    steps = length_steps(draft.config)
    if steps is not None and not draft.config.training.only_evaluates:
        pieces = ", ".join(f"{length} from sample {start} on" for start, length in steps.steps)
        yield (
            f"--seq-length-schedule cuts each sample of {draft.config.data.seq_length} tokens into pieces ({pieces}), on which"
            " attention stays; which tokens a step reads does not change, and evaluations read whole samples"
        )


@rule
def changing_batches_require_samples(draft: Draft) -> Problems:
    training, schedule = draft.config.training, draft.config.schedule
    if not training.rampup_batch_size and not training.step_batch_size_schedule:
        return
    flag = "--rampup-batch-size" if training.rampup_batch_size else "--step-batch-size-schedule"
    counted = {
        "training.train_iters": (training.train_iters, "--train-samples"),
        "schedule.lr_decay_iters": (schedule.lr_decay_iters, "--lr-decay-samples"),
        "schedule.lr_warmup_iters": (schedule.lr_warmup_iters or None, "--lr-warmup-samples"),
        "schedule.lr_wsd_decay_iters": (schedule.lr_wsd_decay_iters, "--lr-wsd-decay-samples"),
    }
    for path, (value, instead) in counted.items():
        if value is not None:
            samples, place = value * training.global_batch_size, located(draft, path)
            yield Problem(
                f"{flag_of(path)} {value} counts iterations, whose batch size changes with {flag}",
                f"use {instead} {samples} in place of {place}, as Megatron-LM requires too",
            )


@rule
def steps_end_with_the_batch_size(draft: Draft) -> Problems:
    """A saved configuration has both, where they agree."""
    training, last = draft.config.training, sizes_of_batches(draft).rule.sizes[-1]
    if training.step_batch_size_schedule is not None and training.global_batch_size != last:
        yield Problem(
            f"--global-batch-size {training.global_batch_size} is not supported together with --step-batch-size-schedule"
            f" {training.step_batch_size_schedule}: both set the batch size",
            f"remove {located(draft, 'training.global_batch_size')}",
        )


@note("result")
def batch_is_decreased(draft: Draft) -> Notes:
    training, passes = draft.config.training, draft.derived.num_microbatches
    size = passes * training.micro_batch_size * draft.derived.data_parallel_size
    if training.decrease_batch_size_if_needed and size != training.global_batch_size:
        yield f"--global-batch-size {training.global_batch_size} is decreased to {size}, {micro_batches(passes)} per replica"


@unproven("result")
def decreased_batches(draft: Draft) -> Notes:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    if not training.decrease_batch_size_if_needed:
        return
    sizes = sizes_of_batches(draft)
    wanted = (*sizes.rule.sizes, training.eval_global_batch_size)
    if any(size % sizes.pass_size for size in wanted):
        yield (
            "--decrease-batch-size-if-needed rounds the batch down to a multiple of"
            f" {training.micro_batch_size} * dp {dp} samples"
        )


@note("result")
def batch_changed_on_resume(draft: Draft) -> Notes:
    stored = draft.facts.checkpoint
    before = stored.config.get("training", {}).get("global_batch_size") if stored else None
    now = draft.config.training.global_batch_size
    if stored is not None and stored.iteration and before not in (None, now):
        yield (
            f"--global-batch-size {before} -> {now}: the order of samples is unchanged, and training resumes after sample"
            f" {stored.consumed_train_samples}; settings counted in iterations now cover a different number of samples"
        )


def sizes_of_batches(draft: Draft) -> BatchSizes:
    """Return the batch sizes. Raises UnresolvedError if they are not valid: rules report it."""
    try:
        sizes = batch_sizes(draft.config, data_parallel_size=draft.derived.data_parallel_size)
    except ConfigError:
        raise UnresolvedError from None
    if sizes.misfits(is_decreased=draft.config.training.decrease_batch_size_if_needed):
        raise UnresolvedError
    return sizes


@derives("derived.num_microbatches")
def num_microbatches(draft: Draft) -> DerivedValue:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    return _num_microbatches(draft, training.global_batch_size, training.micro_batch_size, dp)


@derives("training.eval_global_batch_size")
def eval_global_batch_size(draft: Draft) -> DerivedValue:
    batch = draft.config.training.global_batch_size
    if draft.config.training.decrease_batch_size_if_needed:
        per_pass = draft.config.training.eval_micro_batch_size * draft.derived.data_parallel_size
        return DerivedValue(
            batch // per_pass * per_pass, f"global batch {batch} down to a multiple of {per_pass}"
        )
    return DerivedValue(batch, "equals --global-batch-size")


@derives("training.eval_micro_batch_size")
def eval_micro_batch_size(draft: Draft) -> DerivedValue:
    return DerivedValue(draft.config.training.micro_batch_size, "equals --micro-batch-size")


@rule
def evaluation_batch_divides_into_passes(draft: Draft) -> Problems:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    micro = training.eval_micro_batch_size
    batch, per_pass = training.eval_global_batch_size, micro * dp
    is_rounded = training.decrease_batch_size_if_needed and batch >= per_pass
    is_reported = batch == training.global_batch_size and micro == training.micro_batch_size
    if batch % per_pass and not (is_rounded or is_reported):
        flag = "--micro-batch-size" if micro == training.micro_batch_size else "--eval-micro-batch-size"
        whole_share = 0 if batch % dp else batch // dp
        yield Problem(
            f"--eval-global-batch-size {batch} is not a multiple of {flag} {micro} *"
            f" data-parallel size {dp} = {per_pass}",
            use(
                draft,
                multiples("training.eval_global_batch_size", batch, per_pass),
                divisors("training.eval_micro_batch_size", whole_share, micro - 1),
            ),
        )


@derives("derived.num_eval_microbatches")
def num_eval_microbatches(draft: Draft) -> DerivedValue:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    return _num_microbatches(draft, training.eval_global_batch_size, training.eval_micro_batch_size, dp)


def _num_microbatches(draft: Draft, batch: int, micro: int, dp: int) -> DerivedValue:
    is_decreased = draft.config.training.decrease_batch_size_if_needed
    count = batch // (micro * dp) if is_decreased else whole(batch, micro * dp)
    rounded = ", rounded down" if batch % (micro * dp) else ""
    return DerivedValue(count, f"global batch {batch} / (micro-batch {micro} * dp {dp}){rounded}")


@derives("derived.tokens_per_iteration")
def tokens_per_iteration(draft: Draft) -> DerivedValue:
    batch, length = draft.config.training.global_batch_size, sample_length(draft.config)
    return DerivedValue(batch * length, f"global batch {batch} * {length} tokens")


@derives("derived.start_iteration")
def start_iteration(draft: Draft) -> DerivedValue:
    stored = draft.facts.checkpoint
    return DerivedValue(*((stored.iteration, stored.path) if stored else (0, "no checkpoint")))


@derives("derived.start_consumed_samples")
def start_consumed_samples(draft: Draft) -> DerivedValue:
    stored = draft.facts.checkpoint
    return DerivedValue(*((stored.consumed_train_samples, stored.path) if stored else (0, "no checkpoint")))


@derives("derived.train_iters")
def train_iters(draft: Draft) -> DerivedValue:
    training, derived = draft.config.training, draft.derived
    if training.train_iters is not None:
        return DerivedValue(training.train_iters, "--train-iters")
    if training.train_samples is None:
        raise UnresolvedError  # The rule `training_has_one_length` reports it.
    sizes = sizes_of_batches(draft)
    to_come = sizes.iterations_to(
        training.train_samples,
        consumed=derived.start_consumed_samples,
        fills_up=training.step_batch_size_schedule is not None,
    )
    done = f"{derived.start_iteration} done, and " if derived.start_iteration else ""
    samples = f"{training.train_samples - derived.start_consumed_samples if done else training.train_samples} samples"
    is_constant = len(sizes.rule.sizes) == 1
    return DerivedValue(
        derived.start_iteration + to_come,
        f"{done}{samples} // global batch {sizes.at(0)}"
        if is_constant
        else f"{done}{samples} in batches of {sizes.rule.sizes[0]} to {sizes.rule.sizes[-1]}",
    )


@derives("derived.train_samples")
def train_samples(draft: Draft) -> DerivedValue:
    derived, sizes = draft.derived, sizes_of_batches(draft)
    to_come = max(derived.train_iters - derived.start_iteration, 0)
    samples = sizes.samples_after(to_come, consumed=derived.start_consumed_samples)
    if len(sizes.rule.sizes) > 1:
        return DerivedValue(samples, f"{derived.train_iters} iterations of growing batches")
    if samples != derived.train_iters * sizes.at(0):
        return DerivedValue(
            samples,
            f"{derived.start_consumed_samples} so far + {to_come} iterations * global batch {sizes.at(0)}",
        )
    return DerivedValue(samples, f"{derived.train_iters} iterations * global batch {sizes.at(0)}")


@rule
def training_has_one_length(draft: Draft) -> Problems:
    training = draft.config.training
    if training.train_iters is None and training.train_samples is None:
        yield Problem(
            "neither --train-iters nor --train-samples is given",
            "give one of them, such as --train-iters 1000",
        )


@rule
def samples_fill_a_batch(draft: Draft) -> Problems:
    training = draft.config.training
    samples, batch = training.train_samples, training.global_batch_size
    is_changing = bool(training.rampup_batch_size) or training.step_batch_size_schedule is not None
    if samples is not None and draft.derived.train_iters == 0:
        yield Problem(
            f"--train-samples {samples} is less than one {'batch' if is_changing else f'--global-batch-size {batch}'}",
            f"use --train-samples {batch} or more",
        )


@note("result")
def train_samples_are_rounded(draft: Draft) -> Notes:
    samples, read = draft.config.training.train_samples, draft.derived.train_samples
    if samples is not None and samples > read:
        yield f"the last {samples - read} of --train-samples {samples} are not read, since they do not fill a global batch"
    if samples is not None and samples < read:
        yield f"training ends at {read} samples, not {samples}, since the last global batch is completed"


@rule
def evaluation_has_a_checkpoint(draft: Draft) -> Problems:
    checkpoint = draft.config.checkpoint
    if (
        draft.config.training.eval_only
        and checkpoint.load is None
        and checkpoint.pretrained_checkpoint is None
    ):
        yield Problem("--eval-only evaluates a checkpoint, and none is given", "add --load FOLDER")
    if (
        draft.config.training.eval_only
        and draft.config.training.eval_iters == 0
        and not draft.config.data.full_validation
        and not draft.config.training.eval_tasks
    ):
        yield Problem(
            "--eval-only with --eval-iters 0 evaluates nothing",
            "add --eval-iters 100, --full-validation or --eval-tasks",
        )
