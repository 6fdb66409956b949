"""Rules about learning-rate and weight-decay schedules."""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.plan import Draft

Problems = Iterator[Problem]


def warmup_has_one_length(draft: Draft) -> Problems:
    schedule = draft.config.schedule
    given = {
        "--lr-warmup-fraction": schedule.lr_warmup_fraction,
        "--lr-warmup-iters": schedule.lr_warmup_iters or None,
        "--lr-warmup-samples": schedule.lr_warmup_samples or None,
    }
    lengths = [f"{flag} {value}" for flag, value in given.items() if value is not None]
    if len(lengths) > 1:
        yield Problem(f"{' and '.join(lengths)} each set the length of warm-up", "give one of them")


def decay_has_one_length(draft: Draft) -> Problems:
    iterations, samples = draft.config.schedule.lr_decay_iters, draft.config.schedule.lr_decay_samples
    if iterations is not None and samples is not None:
        yield Problem(
            f"--lr-decay-iters {iterations} and --lr-decay-samples {samples} both set the end of the decay",
            "give one of them",
        )


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
            f"warm-up takes {warmup} samples, but the decay ends at sample {decay}",
            f"shorten warm-up, for example: use {shorter}, a tenth of the decay; or end the decay later"
            " (--lr-decay-iters, --lr-decay-samples)",
        )


def learning_rates_are_in_order(draft: Draft) -> Problems:
    schedule, top = draft.config.schedule, draft.config.optimizer.lr
    for flag, value in (("--min-lr", schedule.min_lr), ("--lr-warmup-init", schedule.lr_warmup_init)):
        if value > top:
            yield Problem(f"{flag} {value} is above --lr {top}", f"use {flag} {top} or less")


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


def wsd_decay_has_one_length(draft: Draft) -> Problems:
    schedule = draft.config.schedule
    iterations, samples = schedule.lr_wsd_decay_iters, schedule.lr_wsd_decay_samples
    if iterations is not None and samples is not None:
        yield Problem(
            f"--lr-wsd-decay-iters {iterations} and --lr-wsd-decay-samples {samples} both set the length of the decay",
            "give one of them",
        )
    if schedule.lr_decay_style == "WSD" and iterations is None and samples is None:
        yield Problem(
            "--lr-decay-style WSD requires the length of its final decay",
            f"add --lr-wsd-decay-samples {_tenth(draft)}, a tenth of the schedule, for example, or --lr-wsd-decay-iters",
        )


def _tenth(draft: Draft) -> int:
    return max(1, draft.derived.lr_decay_samples // 10)


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


def schedules_have_one_source(draft: Draft) -> Problems:
    schedule = draft.config.schedule
    if schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler:
        yield Problem(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other",
            "give one of them",
        )


SCHEDULE_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    warmup_has_one_length,
    decay_has_one_length,
    warmup_ends_before_decay,
    learning_rates_are_in_order,
    decoupled_rates_are_in_order,
    wsd_decay_has_one_length,
    wsd_decay_fits_the_schedule,
    weight_decay_schedule_is_complete,
    schedules_have_one_source,
)
