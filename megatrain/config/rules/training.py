"""Rules about the length of training, batch sizes, the optimizer, dtypes and signals."""

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from megatrain.config.derive.batch_sizes import batch_rule, batch_sizes
from megatrain.config.errors import ConfigError, Problem
from megatrain.config.fixes import divisors, use
from megatrain.config.plan import Draft
from megatrain.config.schema.tree import flag_of
from megatrain.config.user_function import USER_FUNCTIONS, user_function

Problems = Iterator[Problem]


def signal_number(text: str) -> int | None:
    """Return the number of a signal given by name or number; None if it does not exist or cannot be caught."""
    by_name = {member.name: member.value for member in signal.Signals}
    number = int(text) if text.isdecimal() else by_name.get(text.upper())
    if number not in by_name.values() or number in (signal.SIGKILL, signal.SIGSTOP):
        return None
    return number


def evaluation_has_a_checkpoint(draft: Draft) -> Iterator[Problem]:
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
    ):
        yield Problem(
            "--eval-only with --eval-iters 0 evaluates nothing", "add --eval-iters 100, or --full-validation"
        )


def training_has_one_length(draft: Draft) -> Problems:
    training = draft.config.training
    if training.train_iters is None and training.train_samples is None:
        yield Problem(
            "neither --train-iters nor --train-samples is given",
            "give one of them, such as --train-iters 1000",
        )
    if training.train_iters is not None and training.train_samples is not None:
        yield Problem(
            f"--train-iters {training.train_iters} and --train-samples {training.train_samples} both set the length of training",
            "give one of them",
        )


def samples_fill_a_batch(draft: Draft) -> Problems:
    training = draft.config.training
    samples, batch = training.train_samples, training.global_batch_size
    is_changing = bool(training.rampup_batch_size) or training.step_batch_size_schedule is not None
    if samples is not None and draft.derived.train_iters == 0:
        yield Problem(
            f"--train-samples {samples} is less than one {'batch' if is_changing else f'--global-batch-size {batch}'}",
            f"use --train-samples {batch} or more",
        )


def batch_sizes_are_valid(draft: Draft) -> Problems:
    training = draft.config.training
    if training.step_batch_size_schedule is not None:
        others = {
            "--rampup-batch-size": bool(training.rampup_batch_size),
            "--global-batch-size": draft.is_given("training.global_batch_size"),
            "--decrease-batch-size-if-needed": training.decrease_batch_size_if_needed,
        }
        for flag, is_given in others.items():
            if is_given:
                yield Problem(
                    f"--step-batch-size-schedule and {flag} both set the batch size",
                    "give one of them",
                )
    pass_size = training.micro_batch_size * draft.derived.data_parallel_size
    try:
        rule = batch_rule(draft.config, pass_size=pass_size)
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


def changing_batches_require_samples(draft: Draft) -> Problems:
    training, schedule = draft.config.training, draft.config.schedule
    if not training.rampup_batch_size and not training.step_batch_size_schedule:
        return
    flag = "--rampup-batch-size" if training.rampup_batch_size else "--step-batch-size-schedule"
    counted = {
        "--train-iters": (training.train_iters, "--train-samples"),
        "--lr-decay-iters": (schedule.lr_decay_iters, "--lr-decay-samples"),
        "--lr-warmup-iters": (schedule.lr_warmup_iters or None, "--lr-warmup-samples"),
        "--lr-wsd-decay-iters": (schedule.lr_wsd_decay_iters, "--lr-wsd-decay-samples"),
    }
    for other, (value, instead) in counted.items():
        if value is not None:
            yield Problem(
                f"{other} {value} counts iterations, whose batch size changes with {flag}",
                f"use {instead} {value * training.global_batch_size} in place of {other}, as Megatron-LM requires too",
            )


def dtypes_agree(draft: Draft) -> Problems:
    precision = draft.config.precision
    if precision.bf16 and precision.fp16:
        yield Problem("--bf16 and --fp16 contradict each other", "remove one of them")
        return
    for flag, is_on, dtype in (
        ("--bf16", precision.bf16, "bfloat16"),
        ("--fp16", precision.fp16, "float16"),
    ):
        if is_on and precision.params_dtype != dtype:
            yield Problem(
                f"{flag} and --params-dtype {precision.params_dtype} contradict each other",
                "remove one of them",
            )
        if not is_on and precision.params_dtype == dtype:
            yield Problem(f"--params-dtype {dtype} requires {flag}", f"add {flag}")


def loss_scale_is_in_range(draft: Draft) -> Problems:
    precision = draft.config.precision
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield Problem(
            f"--min-loss-scale {precision.min_loss_scale:g} is above --initial-loss-scale"
            f" {precision.initial_loss_scale:g}",
            f"use --min-loss-scale {precision.initial_loss_scale:g} or less",
        )


def muon_updates_on_the_device(draft: Draft) -> Problems:
    optimizer = draft.config.optimizer
    if optimizer.optimizer == "muon" and optimizer.optimizer_cpu_offload:
        yield Problem(
            "--optimizer-cpu-offload is not supported together with --optimizer muon, whose GEMMs are too slow on"
            " a CPU",
            "remove --optimizer-cpu-offload, or use --optimizer adam",
        )


def exit_signal_is_valid(draft: Draft) -> Problems:
    text = draft.config.resilience.exit_signal
    if signal_number(text) is None:
        yield Problem(
            f"--exit-signal {text} is not a signal that can be caught",
            "use a name, such as --exit-signal SIGTERM, or a number",
        )


def reruns_have_rejected_steps(draft: Draft) -> Problems:
    resilience, training = draft.config.resilience, draft.config.training
    validates = resilience.rerun_mode == "validate_results"
    if validates and resilience.on_nan != ("stop",):
        yield Problem(
            f"--rerun-mode validate_results ends the run at a step that --on-nan {' '.join(resilience.on_nan)} continues",
            "remove one of them",
        )
    if validates and not training.check_for_nan_in_loss_and_grad:
        yield Problem(
            "--rerun-mode validate_results needs the check that --no-check-for-nan-in-loss-and-grad turns off",
            "remove one of them",
        )
    if resilience.error_injection_rate and not validates:
        yield Problem(
            f"--error-injection-rate {resilience.error_injection_rate} rejects steps that nothing computes again",
            "add --rerun-mode validate_results",
        )


def bad_step_policies_are_valid(draft: Draft) -> Problems:
    resilience, training, checkpoint = draft.config.resilience, draft.config.training, draft.config.checkpoint
    for flag, words, others in (
        ("--on-nan", resilience.on_nan, ("stop", "skip")),
        ("--on-spike", resilience.on_spike, ("warn", "stop", "skip")),
    ):
        is_rewind = len(words) == 2 and words[0] == "rewind" and words[1].isdecimal()
        given = f"{flag} {' '.join(words)}"
        if not is_rewind and not (len(words) == 1 and words[0] in others):
            yield Problem(
                f"{given} is none of {', '.join(others)}, rewind N", f"use {flag} rewind 100, for example"
            )
        elif is_rewind and checkpoint.save is None:
            yield Problem(f"{given} returns to a checkpoint of --save, which is not set", "add --save FOLDER")
        elif is_rewind and checkpoint.no_save_optim:
            yield Problem(f"{given} needs the optimizer's state in checkpoints", "remove --no-save-optim")
    if resilience.on_nan != ("stop",) and not training.check_for_nan_in_loss_and_grad:
        yield Problem(
            f"--on-nan {' '.join(resilience.on_nan)} and --no-check-for-nan-in-loss-and-grad contradict each other",
            "remove one of them: without the check, such steps are skipped",
        )
    if resilience.on_spike != ("warn",) and not (
        training.check_for_spiky_loss or training.check_for_large_grads
    ):
        yield Problem(
            f"--on-spike {' '.join(resilience.on_spike)} has no effect: spikes are not looked for",
            "add --check-for-spiky-loss, --check-for-large-grads, or both",
        )


def functions_are_named(draft: Draft) -> Problems:
    for setting in USER_FUNCTIONS:
        given = draft.config.get(setting)
        if (
            isinstance(given, str) and user_function(draft.config, setting) is None
        ):  # see `spec_names_a_function`
            kind = "Class" if setting == "logging.callbacks" else "function"
            prefix = ", or --data-path for the prefix of .bin and .idx files" * (setting == "data.dataset")
            yield Problem(
                f"{flag_of(setting)} {given} does not name a {kind.lower()}",
                f"give {flag_of(setting)} file.py:{kind} or module:{kind}{prefix}",
            )


def losses_are_not_mixed(draft: Draft) -> Problems:
    config = draft.config
    if config.training.loss is not None and config.model.z_loss_coeff:
        yield Problem(
            f"--z-loss-coeff {config.model.z_loss_coeff} is not supported together with --loss, whose function has the"
            " cross-entropy only",
            "remove one of them",
        )


TRAINING_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    evaluation_has_a_checkpoint,
    training_has_one_length,
    samples_fill_a_batch,
    batch_sizes_are_valid,
    changing_batches_require_samples,
    dtypes_agree,
    loss_scale_is_in_range,
    muon_updates_on_the_device,
    exit_signal_is_valid,
    bad_step_policies_are_valid,
    reruns_have_rejected_steps,
    functions_are_named,
    losses_are_not_mixed,
)
