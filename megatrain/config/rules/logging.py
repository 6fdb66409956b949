"""What is wrong, or without effect, about what a run shall show."""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.plan import Draft


def optional_packages_are_there(draft: Draft) -> Iterator[Problem]:
    logging, libraries = draft.config.logging, draft.facts.libraries
    for flag, value, package in (
        ("--tensorboard-dir", logging.tensorboard_dir, "tensorboard"),
        ("--wandb-project", logging.wandb_project, "wandb"),
    ):
        if value is not None and package not in libraries:
            yield Problem(
                f"{flag} {value} needs the package {package}, which is not installed",
                f"pip install {package}, or leave {flag} out: metrics.jsonl has the same numbers",
            )


def profiled_iterations_and_ranks_exist(draft: Draft) -> Iterator[Problem]:
    logging, world_size = draft.config.logging, draft.facts.world_size
    if not logging.profile:
        return
    if logging.profile_step_end <= logging.profile_step_start:
        yield Problem(
            f"--profile-step-end {logging.profile_step_end} is not above --profile-step-start {logging.profile_step_start}",
            f"use --profile-step-end {logging.profile_step_start + 2}",
        )
    for rank in logging.profile_ranks:
        if not 0 <= rank < world_size:
            yield Problem(
                f"--profile-ranks names rank {rank}, and there are {world_size} ranks",
                f"name ranks from 0 to {world_size - 1}",
            )


LOG_RULES: Final[tuple[Callable[[Draft], Iterator[Problem]], ...]] = (
    optional_packages_are_there,
    profiled_iterations_and_ranks_exist,
)


def profiling_without_a_switch(draft: Draft) -> Iterator[str]:
    names = ("profile_step_start", "profile_step_end", "profile_ranks", "profile_dir")
    given = [name for name in names if draft.is_given(f"logging.{name}")]
    if not draft.config.logging.profile and given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        yield f"{flags}: without effect, as --profile is not given"


def profiling_ends_in_time(draft: Draft) -> Iterator[str]:
    logging, train_iters = draft.config.logging, draft.derived.train_iters
    if not logging.profile or train_iters is None:
        return
    if logging.profile_step_start >= train_iters:
        yield (
            f"--profile-step-start {logging.profile_step_start}: the run ends at iteration {train_iters}, and "
            "nothing is profiled"
        )
    elif logging.profile_step_end > train_iters:
        yield f"--profile-step-end {logging.profile_step_end}: the run ends at iteration {train_iters}, and so does the profile"


def wandb_without_a_project(draft: Draft) -> Iterator[str]:
    logging = draft.config.logging
    given = [name for name in ("exp_name", "save_dir", "entity") if draft.is_given(f"logging.wandb_{name}")]
    if logging.wandb_project is None and given:
        flags = ", ".join(f"--wandb-{name.replace('_', '-')}" for name in given)
        yield f"{flags}: without effect, as --wandb-project is not given"


def tensorboard_without_a_folder(draft: Draft) -> Iterator[str]:
    """W&B gets the same curves, so that the flags have an effect with it alone."""
    logging = draft.config.logging
    names = ("log_timers", "log_memory", "log_validation_ppl", "log_world_size")
    given = [name for name in names if getattr(logging, f"{name}_to_tensorboard")]
    if logging.tensorboard_dir is None and logging.wandb_project is None and given:
        flags = ", ".join(f"--{name.replace('_', '-')}-to-tensorboard" for name in given)
        yield f"{flags}: without effect, as --tensorboard-dir is not given"


LOG_NOTES: Final[tuple[Callable[[Draft], Iterator[str]], ...]] = (
    wandb_without_a_project,
    tensorboard_without_a_folder,
    profiling_without_a_switch,
    profiling_ends_in_time,
)
