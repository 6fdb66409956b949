"""The schedules of learning rate and weight decay: their lengths, and those of the checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatrain.config.derive.lr_schedule import ScheduleValues, group_learning_rates
from megatrain.config.errors import Problem
from megatrain.config.fixes import Change, divisors, located, use, words
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import Notes, Problems, derives, note, rule
from megatrain.config.schema.lr_decay import LrDecay
from megatrain.config.schema.tree import flag_of
from megatrain.config.schema.values import UnresolvedError
from megatrain.config.user_function import LR_FUNCTION

_BATCH, _MICRO = "training.global_batch_size", "training.micro_batch_size"


@derives("derived.lr_decay_samples")
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


@derives("derived.lr_warmup_samples")
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


@rule
def warmup_ends_before_decay(draft: Draft) -> Problems:
    warmup, decay = draft.derived.lr_warmup_samples, draft.derived.lr_decay_samples
    if warmup >= decay:
        schedule = draft.config.schedule
        shorter = f"--lr-warmup-samples {decay // 10}"
        if schedule.lr_warmup_fraction is not None:
            shorter = "--lr-warmup-fraction 0.1"
        elif schedule.lr_warmup_iters:
            shorter = f"--lr-warmup-iters {schedule.lr_warmup_iters * decay // warmup // 10}"
        yield Problem(
            f"warm-up takes {warmup} samples, but the decay ends at sample {decay}{_end_of_decay(draft)}",
            f"shorten warm-up, for example: use {shorter}, a tenth of the decay; or end the decay later"
            " (--lr-decay-iters, --lr-decay-samples)",
        )


def _end_of_decay(draft: Draft) -> str:
    """Return the setting that ends the decay, in parentheses."""
    ends = [
        f"{section}_{unit}"
        for section in ("schedule.lr_decay", "training.train")
        for unit in ("samples", "iters")
    ]
    given = [path for path in ends if draft.config.raw(path) is not None]
    return f" ({flag_of(given[0])} {draft.config.get(given[0])})" if given else ""


@derives("derived.lr_wsd_decay_samples")
def lr_wsd_decay_samples(draft: Draft) -> DerivedValue:
    schedule = draft.config.schedule
    if schedule.lr_decay_style != "WSD":
        return DerivedValue(None, "the decay is not WSD")
    if schedule.lr_wsd_decay_samples is not None:
        return DerivedValue(schedule.lr_wsd_decay_samples, "--lr-wsd-decay-samples")
    if schedule.lr_wsd_decay_iters is None:
        raise UnresolvedError  # The rule `wsd_decay_has_one_length` reports it.
    return _samples_of(draft, schedule.lr_wsd_decay_iters)


@rule
def wsd_decay_has_one_length(draft: Draft) -> Problems:
    schedule = draft.config.schedule
    iterations, samples = schedule.lr_wsd_decay_iters, schedule.lr_wsd_decay_samples
    if schedule.lr_decay_style == "WSD" and iterations is None and samples is None:
        yield Problem(
            "--lr-decay-style WSD requires the length of its final decay",
            f"add --lr-wsd-decay-samples {max(1, draft.derived.lr_decay_samples // 10)}, a tenth of the schedule, for example, or --lr-wsd-decay-iters",
        )


@rule
def wsd_decay_fits_the_schedule(draft: Draft) -> Problems:
    wsd, decay = draft.derived.lr_wsd_decay_samples, draft.derived.lr_decay_samples
    if wsd is not None and wsd > decay:
        iterations = draft.config.schedule.lr_wsd_decay_iters
        longest = (
            f"--lr-wsd-decay-iters {iterations * decay // wsd}"
            if iterations is not None
            else f"--lr-wsd-decay-samples {decay}"
        )
        yield Problem(
            f"the final decay of WSD takes {wsd} samples, but ends at sample {decay}",
            f"use {longest} or less",
        )


@rule
def learning_rates_are_in_order(draft: Draft) -> Problems:
    top = draft.config.optimizer.lr
    for path in ("schedule.min_lr", "schedule.lr_warmup_init"):
        value = draft.config.get(path)
        if value > top:
            yield Problem(
                f"{flag_of(path)} {value} is above --lr {top}",
                use(draft, [{path: top}], [{"optimizer.lr": value}]),
            )


@rule
def decoupled_rates_are_in_order(draft: Draft) -> Problems:
    optimizer, floor = draft.config.optimizer, draft.config.schedule.min_lr
    top, bottom = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    if top is None:
        return
    lowest, flag = (floor, "--min-lr") if bottom is None else (bottom, "--decoupled-min-lr")
    if lowest > top:
        yield Problem(
            f"{flag} {lowest} is above --decoupled-lr {top}", f"use --decoupled-min-lr {top} or less"
        )


@rule
def weight_decay_schedule_is_complete(draft: Draft) -> Problems:
    schedule = draft.config.schedule
    start, end = schedule.start_weight_decay, schedule.end_weight_decay
    if schedule.weight_decay_incr_style == "constant":
        return
    if start is None or end is None:
        yield Problem(
            f"--weight-decay-incr-style {schedule.weight_decay_incr_style} requires a start and an end",
            f"add --start-weight-decay 0 --end-weight-decay {draft.config.optimizer.weight_decay}, for example",
        )
    elif end < start:
        yield Problem(
            f"--end-weight-decay {end} is below --start-weight-decay {start}",
            f"use --end-weight-decay {start} or more",
        )


@derives("derived.schedule")
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


@derives("derived.lr_groups")
def lr_groups(draft: Draft) -> DerivedValue:
    return DerivedValue(
        *group_learning_rates(draft.config.model, draft.config.optimizer, draft.derived.schedule)
    )


@note("result")
def decay_ends_with_the_run(draft: Draft) -> Notes:
    """Name the end of the decay if iterations follow it without a learning rate, or if the run ends before."""
    derived, schedule = draft.derived, draft.derived.schedule
    if draft.config.training.only_evaluates or not schedule.style.decays:
        return
    batch, decay = draft.config.training.global_batch_size, schedule.lr_decay_samples
    restarts = draft.facts.checkpoint is not None and not draft.continues_optimizer
    end = derived.train_samples - (derived.start_consumed_samples if restarts else 0)
    past = (end - decay - (not schedule.style.reaches_min_lr)) // batch
    if decay - end >= batch:
        yield (
            f"the run ends at sample {end}, before the decay of the learning rate to --min-lr {schedule.min_lr:g} ends at"
            f" sample {decay}"
        )
    elif past > 0 and schedule.min_lr == 0:
        which = f"the last {past} iterations have" if past > 1 else "the last iteration has"
        yield (
            f"{which} a learning rate of 0, since the decay ends at sample {decay} of {end}"
            " (--lr-decay-iters, --lr-decay-samples) and --min-lr is 0: no weight changes then"
        )


@note("result")
def soap_is_that_of_the_paper(draft: Draft) -> Notes:
    if draft.config.optimizer.optimizer == "soap":
        yield "--optimizer soap has the covariances of the paper; Megatron-LM has those of KL-Shampoo and updates its bases every iteration"


@note("result")
def schedules_restart(draft: Draft) -> Notes:
    stored, checkpoint = draft.facts.checkpoint, draft.config.checkpoint
    is_continued = stored is not None and not stored.is_start
    if is_continued and checkpoint.no_load_optim and not draft.continues_optimizer:
        yield "--no-load-optim: the learning-rate and weight-decay schedules start from scratch, as in Megatron-LM"


@note("result")
def schedules_are_the_checkpoints(draft: Draft) -> Notes:
    stored = draft.facts.checkpoint.schedule if draft.facts.checkpoint else None
    if stored and draft.continues_optimizer and draft.config.schedule.use_checkpoint_opt_param_scheduler:
        given = {"--lr": draft.config.optimizer.lr, "--min-lr": draft.config.schedule.min_lr}
        used = {"--lr": draft.derived.schedule.lr, "--min-lr": draft.derived.schedule.min_lr}
        changes = [f"{flag} {used[flag]}, not {given[flag]}" for flag in given if used[flag] != given[flag]]
        yield "schedules are taken from the checkpoint" + (f" ({'; '.join(changes)})" if changes else "")


@rule
def schedules_match_checkpoint(draft: Draft) -> Problems:
    """As in Megatron-LM, a change of the schedule on resume requires a flag."""
    stored = draft.facts.checkpoint
    if stored is None or stored.schedule is None or not draft.continues_optimizer:
        return
    if draft.config.schedule.override_opt_param_scheduler:
        return
    changes = draft.derived.schedule.changes(stored.schedule)
    if changes:
        differences = "; ".join(
            f"{name}: the checkpoint has {_plain(before)}, this run {_plain(now)}"
            for name, before, now in changes
        )
        own = draft.derived.schedule
        former = dataclasses.replace(own, **stored.schedule)
        yield Problem(
            f"the schedules differ from the checkpoint {stored.path}: {differences}\n  of the checkpoint: {former}\n  of this run: {own}",
            _batch_of_checkpoint(draft)
            + _lengths_of_checkpoint(draft, stored.schedule)
            + "add --override-opt-param-scheduler to use the schedules of this run, or"
            " --use-checkpoint-opt-param-scheduler to use those of the checkpoint",
        )


def _plain(value: Any) -> Any:
    """Return a float without a fraction, such as samples of a share of the run, as the whole number that it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@rule
def schedule_of_checkpoint_is_available(draft: Draft) -> Problems:
    """No code is run that only a checkpoint names."""
    schedule, given = draft.derived.schedule, draft.config.schedule.lr_decay_style
    name = schedule.lr_decay_style
    if schedule.function is not None and given != name:
        yield Problem(
            f"the schedule of the checkpoint is the function {name}, and no code is run that only a checkpoint names",
            f"add --lr-decay-style {name} if you trust that code",
        )


def _lengths_of_checkpoint(draft: Draft, stored: Mapping[str, Any]) -> str:
    """Return the part of a fix that states the lengths of the checkpoint's schedules in samples, if only these changed."""
    schedule, own = draft.config.schedule, draft.derived.schedule.to_dict()
    lengths: dict[str, Any] = {}
    replaced: dict[str, Any] = {}
    for name in ("lr_warmup", "lr_decay", "lr_wsd_decay"):
        length = stored.get(f"{name}_samples")
        if length is None or length != int(length) or length == own[f"{name}_samples"]:
            continue
        lengths[f"schedule.{name}_samples"] = int(length)
        others = {f"{name}_iters": 0 if name == "lr_warmup" else None, f"{name}_fraction": None}
        replaced |= {f"schedule.{one}": none for one, none in others.items() if getattr(schedule, one, None)}
    if not lengths or draft.breaks({**lengths, **replaced}):
        return ""
    instead = f" in place of {' and '.join(located(draft, path) for path in replaced)}" if replaced else ""
    return f"use {words(lengths)}{instead}, the same lengths in samples, which no batch size changes, or "


def _batch_of_checkpoint(draft: Draft) -> str:
    """Return the start of a fix: the batch size with which the schedules are the checkpoint's, if that is what changed."""
    training, dp = draft.config.training, draft.derived.data_parallel_size
    stored = draft.facts.checkpoint.config.get("training", {}) if draft.facts.checkpoint else {}
    batch, micro = (stored.get(name) for name in ("global_batch_size", "micro_batch_size"))
    if batch in (None, training.global_batch_size):
        return ""
    candidates: list[Change] = [{_BATCH: batch}]
    if micro != training.micro_batch_size and not draft.is_given(_BATCH):
        candidates.insert(0, {_MICRO: micro})
    smaller = divisors(_MICRO, batch // dp, training.micro_batch_size) if batch % dp == 0 else ()
    candidates += [{**change, _BATCH: batch} for change in smaller]
    fitting = next((change for change in candidates if draft.breaks(change) == 0), None)
    return f"use {words(fitting)}, which keeps the schedules of the checkpoint, or " if fitting else ""
