"""The run: functions of the user, bad steps, its end, logging and profiling."""

from __future__ import annotations

import signal
from collections.abc import Callable

from megatrain.config.errors import Problem
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import Notes, Problems, derives, note, rule, unproven
from megatrain.config.schema.tree import flag_of
from megatrain.config.schema.values import UnresolvedError
from megatrain.config.user_function import USER_FUNCTIONS, user_function


def signal_number(text: str) -> int | None:
    """Return the number of a signal given by name or number; None if it does not exist or cannot be caught."""
    by_name = {member.name: member.value for member in signal.Signals}
    number = int(text) if text.isdecimal() else by_name.get(text.upper())
    if number not in by_name.values() or number in (signal.SIGKILL, signal.SIGSTOP):
        return None
    return number


@rule
def exit_signal_is_valid(draft: Draft) -> Problems:
    text = draft.config.resilience.exit_signal
    if signal_number(text) is None:
        yield Problem(
            f"--exit-signal {text} is not a signal that can be caught",
            "use a name, such as --exit-signal SIGTERM, or a number",
        )


@rule
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


@rule
def restarts_continue_from_saves(draft: Draft) -> Problems:
    checkpoint = draft.config.checkpoint
    if not draft.config.resilience.inprocess_restart:
        return
    if checkpoint.save is None or checkpoint.load != checkpoint.save:
        folder = checkpoint.save or "FOLDER"
        yield Problem(
            f"--inprocess-restart continues from the checkpoints of --save {checkpoint.save}, and --load is {checkpoint.load}",
            f"add --save {folder} --load {folder}; --pretrained-checkpoint names other weights to start with",
        )
    for flag, given in (
        ("--finetune", checkpoint.finetune),
        ("--ckpt-step", checkpoint.ckpt_step is not None),
    ):
        if given:
            yield Problem(
                f"--inprocess-restart would begin at the same place after each failure with {flag}",
                f"remove {flag}; --pretrained-checkpoint names other weights to start with",
            )


@unproven("nothing")
def restarts_on_gpus(draft: Draft) -> Notes:
    if draft.config.resilience.inprocess_restart and draft.config.training.device == "cuda":
        yield "--inprocess-restart was tested with gloo on CPUs, not with NCCL"


@note("result")
def bad_steps_are_skipped(draft: Draft) -> Notes:
    if not draft.config.training.check_for_nan_in_loss_and_grad:
        yield (
            "--no-check-for-nan-in-loss-and-grad: an update whose gradients are not finite is skipped, where Megatron-LM applies"
            " it in bf16 and fp32"
        )


@rule
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


def digest_of(setting: str) -> Callable[[Draft], DerivedValue]:
    """Return the derivation of the digest of the file that one of `USER_FUNCTIONS` names."""

    def derive(draft: Draft) -> DerivedValue:
        function = user_function(draft.config, setting)
        if function is None:
            return DerivedValue(None, f"{flag_of(setting)} names no file")
        if setting not in draft.facts.digests:
            raise UnresolvedError  # `data_problems` has the reason.
        return DerivedValue(draft.facts.digests[setting], f"of {function}")

    return derive


DIGESTS = tuple(derives(f"{setting}_digest")(digest_of(setting)) for setting in USER_FUNCTIONS)


@rule
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


@unproven("nothing")
def custom_loss(draft: Draft) -> Notes:
    if draft.config.training.loss is not None:
        yield f"--loss {draft.config.training.loss} has no row in `megatrain parity`"


@rule
def optional_packages_are_installed(draft: Draft) -> Problems:
    if draft.config.training.dry_run is None:
        yield from missing_packages(draft)


def missing_packages(draft: Draft) -> Problems:
    """Yield a problem for each package that the logging flags require; a dry run only notes it."""
    logging, libraries = draft.config.logging, draft.facts.libraries
    if logging.log_energy and draft.config.training.device == "cuda" and "nvidia-ml-py" not in libraries:
        yield Problem(
            "--log-energy requires the package nvidia-ml-py, which is not installed",
            "run pip install nvidia-ml-py, or remove --log-energy",
        )
    for flag, value, package in (
        ("--tensorboard-dir", logging.tensorboard_dir, "tensorboard"),
        ("--wandb-project", logging.wandb_project, "wandb"),
        ("--mlflow-experiment", logging.mlflow_experiment, "mlflow"),
        ("--comet-project", logging.comet_project, "comet_ml"),
    ):
        if value is not None and not {package, f"{package}-skinny"} & libraries.keys():
            yield Problem(
                f"{flag} {value} requires the package {package}, which is not installed",
                f"run pip install {package}, or remove {flag}: metrics.jsonl has the same values",
            )


@note("result")
def packages_of_the_run_are_missing(draft: Draft) -> Notes:
    if draft.config.training.dry_run is not None:
        yield from (f"{problem.text} on this host" for problem in missing_packages(draft))


@rule
def profiled_iterations_and_ranks_exist(draft: Draft) -> Problems:
    logging, world_size = draft.config.logging, draft.facts.world_size
    if not (logging.profile or logging.record_memory_history):
        return
    if logging.profile_step_end <= logging.profile_step_start:
        yield Problem(
            f"--profile-step-end {logging.profile_step_end} is not above --profile-step-start {logging.profile_step_start}",
            f"use --profile-step-end {logging.profile_step_start + 2}",
        )
    for rank in logging.profile_ranks:
        if not 0 <= rank < world_size:
            yield Problem(
                f"--profile-ranks {rank} does not exist: there are {world_size} ranks",
                f"use --profile-ranks 0, or others up to {world_size - 1}",
            )


@note("nothing")
def profiling_ends_in_time(draft: Draft) -> Notes:
    logging, train_iters = draft.config.logging, draft.derived.train_iters
    if not logging.profile or train_iters is None:
        return
    if logging.profile_step_start >= train_iters:
        yield (
            f"--profile-step-start {logging.profile_step_start} has no effect, since the run ends at iteration {train_iters}"
        )
    elif logging.profile_step_end > train_iters:
        yield f"--profile-step-end {logging.profile_step_end}: the profile ends with the run at iteration {train_iters}"
