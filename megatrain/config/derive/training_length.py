"""Derived values of data and training length: split, cache, batches, iterations, samples, schedules."""

import dataclasses
import os.path
from collections.abc import Mapping
from typing import Any

from megatrain.config.derive.batch_sizes import BatchSizes, batch_sizes, parse_steps
from megatrain.config.derive.datasets import split_problems
from megatrain.config.derive.lr_schedule import ScheduleValues, group_learning_rates
from megatrain.config.errors import ConfigError
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.schema.lr_decay import LrDecay
from megatrain.config.schema.values import UnresolvedError, whole
from megatrain.config.user_function import LR_FUNCTION


def split(draft: Draft) -> DerivedValue:
    if draft.config.data.mock_data:
        return DerivedValue("1,1,1", "fixed for mock data")
    reason = "--dataset does not read it" if draft.config.data.dataset else "Megatron-LM's default for files"
    return DerivedValue("969, 30, 1", reason)


def data_cache_path(draft: Draft) -> DerivedValue:
    if not draft.facts.datasets:
        return DerivedValue(None, "there are no files")
    if "://" in draft.facts.datasets[0].prefix:
        folder = draft.config.data.object_storage_cache_path or "."
        return DerivedValue(os.path.join(folder, "index_cache"), "in --object-storage-cache-path")  # noqa: PTH118
    folder = os.path.dirname(draft.facts.datasets[0].prefix)  # noqa: PTH120 (a path such as `./a` stays as it is)
    return DerivedValue(os.path.join(folder, "index_cache"), "next to the first dataset")  # noqa: PTH118


def even_split_of_mock_data(draft: Draft) -> DerivedValue | None:
    """Override --split for mock data; a split that is not valid stays, and is reported."""
    given = draft.config.data.split
    if not draft.config.data.mock_data or given == "1,1,1" or split_problems(given):
        return None
    return DerivedValue(
        "1,1,1", f"--split {given} has no effect: mock data is split 1,1,1, as in Megatron-LM"
    )


def start_iteration(draft: Draft) -> DerivedValue:
    stored = draft.facts.checkpoint
    return DerivedValue(stored.iteration, f"{stored.path}") if stored else DerivedValue(0, "no checkpoint")


def start_consumed_samples(draft: Draft) -> DerivedValue:
    stored = draft.facts.checkpoint
    return (
        DerivedValue(stored.consumed_train_samples, f"{stored.path}")
        if stored
        else DerivedValue(0, "no checkpoint")
    )


def global_batch_size(draft: Draft) -> DerivedValue:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    if training.step_batch_size_schedule is not None:
        try:
            steps = parse_steps(training.step_batch_size_schedule, seq_length=draft.config.data.seq_length)
        except ConfigError:
            raise UnresolvedError from None  # The rule `batch_sizes_are_valid` reports it.
        return DerivedValue(steps.sizes[-1], "the last entry of --step-batch-size-schedule")
    return DerivedValue(training.micro_batch_size * dp, f"micro-batch {training.micro_batch_size} * dp {dp}")


def num_microbatches(draft: Draft) -> DerivedValue:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    return _num_microbatches(draft, training.global_batch_size, dp)


def eval_global_batch_size(draft: Draft) -> DerivedValue:
    batch = draft.config.training.global_batch_size
    if draft.config.training.decrease_batch_size_if_needed:
        per_pass = draft.config.training.micro_batch_size * draft.derived.data_parallel_size
        return DerivedValue(
            batch // per_pass * per_pass, f"global batch {batch} down to a multiple of {per_pass}"
        )
    return DerivedValue(batch, "equals --global-batch-size")


def num_eval_microbatches(draft: Draft) -> DerivedValue:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    return _num_microbatches(draft, training.eval_global_batch_size, dp)


def _num_microbatches(draft: Draft, batch: int, dp: int) -> DerivedValue:
    micro = draft.config.training.micro_batch_size
    is_decreased = draft.config.training.decrease_batch_size_if_needed
    count = batch // (micro * dp) if is_decreased else whole(batch, micro * dp)
    rounded = ", rounded down" if batch % (micro * dp) else ""
    return DerivedValue(count, f"global batch {batch} / (micro-batch {micro} * dp {dp}){rounded}")


def tokens_per_iteration(draft: Draft) -> DerivedValue:
    batch, length = draft.config.training.global_batch_size, draft.config.data.seq_length
    return DerivedValue(batch * length, f"global batch {batch} * {length} tokens")


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


def lr_decay_samples(draft: Draft) -> DerivedValue:
    schedule, stored = draft.config.schedule, _schedule_of_checkpoint(draft)
    if "lr_decay_samples" in stored:
        return DerivedValue(stored["lr_decay_samples"], "the checkpoint's")
    if schedule.lr_decay_samples is not None:
        return DerivedValue(schedule.lr_decay_samples, "--lr-decay-samples")
    if schedule.lr_decay_iters is not None:
        return _samples_of(draft, schedule.lr_decay_iters)
    samples, end = _samples_of_training(draft), draft.derived.train_samples
    if not schedule.style.decays or abs(samples.value - end) < draft.config.training.global_batch_size:
        return DerivedValue(samples.value, "to the end of training")
    return DerivedValue(samples.value, f"{samples.reason}; training ends at sample {end}")


def lr_warmup_samples(draft: Draft) -> DerivedValue:
    schedule, stored = draft.config.schedule, _schedule_of_checkpoint(draft)
    if "lr_warmup_samples" in stored:
        return DerivedValue(stored["lr_warmup_samples"], "the checkpoint's")
    if schedule.lr_warmup_fraction is not None:
        decay = draft.derived.lr_decay_samples
        return DerivedValue(
            schedule.lr_warmup_fraction * decay, f"{schedule.lr_warmup_fraction} of {decay} decay samples"
        )
    if schedule.lr_warmup_samples:
        return DerivedValue(schedule.lr_warmup_samples, "--lr-warmup-samples")
    return _samples_of(draft, schedule.lr_warmup_iters)


def lr_wsd_decay_samples(draft: Draft) -> DerivedValue:
    schedule = draft.config.schedule
    if schedule.lr_decay_style != "WSD":
        return DerivedValue(None, "the decay is not WSD")
    if schedule.lr_wsd_decay_samples is not None:
        return DerivedValue(schedule.lr_wsd_decay_samples, "--lr-wsd-decay-samples")
    if schedule.lr_wsd_decay_iters is None:
        raise UnresolvedError  # The rule `wsd_decay_has_one_length` reports it.
    return _samples_of(draft, schedule.lr_wsd_decay_iters)


def schedule(draft: Draft) -> DerivedValue:
    config, derived, optimizer = draft.config.schedule, draft.derived, draft.config.optimizer
    start, end = config.start_weight_decay, config.end_weight_decay
    if config.weight_decay_incr_style == "constant":
        start = end = optimizer.weight_decay
    if start is None or end is None:
        raise UnresolvedError  # The rule `weight_decay_schedule_is_complete` reports it.
    given = ScheduleValues(
        lr=optimizer.lr,
        min_lr=config.min_lr,
        decoupled_lr=optimizer.decoupled_lr,
        decoupled_min_lr=optimizer.decoupled_min_lr,
        lr_warmup_init=config.lr_warmup_init,
        **{
            entry.name: getattr(derived if hasattr(derived, entry.name) else config, entry.name)
            for entry in dataclasses.fields(LrDecay)
        },
        lr_decay_digest=draft.facts.digests.get(LR_FUNCTION),
        lr_warmup_samples=derived.lr_warmup_samples,
        lr_decay_samples=derived.lr_decay_samples,
        start_weight_decay=start,
        end_weight_decay=end,
        weight_decay_incr_style=config.weight_decay_incr_style,
        weight_decay_incr_samples=_samples_of_training(draft).value,
    )
    stored = _schedule_of_checkpoint(draft)
    if stored:
        values = dataclasses.replace(given, **{"lr_decay_digest": None, **stored})
        return DerivedValue(values, "the checkpoint's")
    return DerivedValue(given, "of this run")


def lr_groups(draft: Draft) -> DerivedValue:
    return DerivedValue(
        *group_learning_rates(draft.config.model, draft.config.optimizer, draft.derived.schedule)
    )


def _schedule_of_checkpoint(draft: Draft) -> Mapping[str, Any]:
    """Return the values of the checkpoint's schedules if the run uses them; empty: it uses its own."""
    stored, is_wanted = draft.facts.checkpoint, draft.config.schedule.use_checkpoint_opt_param_scheduler
    if stored is None or not (is_wanted and draft.continues_optimizer):
        return {}
    return stored.schedule or {}


def _samples_of(draft: Draft, iterations: int) -> DerivedValue:
    batch = draft.config.training.global_batch_size
    return DerivedValue(iterations * batch, f"{iterations} iterations * global batch {batch}")


def _samples_of_training(draft: Draft) -> DerivedValue:
    """Return the samples of training as schedules count them: without left-over samples or former batch sizes."""
    training = draft.config.training
    if training.train_samples is not None:
        return DerivedValue(training.train_samples, "--train-samples")
    return _samples_of(draft, draft.derived.train_iters)


def sizes_of_batches(draft: Draft) -> BatchSizes:
    """Return the batch sizes. Raises UnresolvedError if they are not valid: rules report it."""
    try:
        sizes = batch_sizes(draft.config, data_parallel_size=draft.derived.data_parallel_size)
    except ConfigError:
        raise UnresolvedError from None
    if sizes.misfits(is_decreased=draft.config.training.decrease_batch_size_if_needed):
        raise UnresolvedError
    return sizes
