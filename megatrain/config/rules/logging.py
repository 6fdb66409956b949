"""Rules about logging and profiling."""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.plan import Draft


def optional_packages_are_installed(draft: Draft) -> Iterator[Problem]:
    if draft.config.training.dry_run is None:
        yield from missing_packages(draft)


def missing_packages(draft: Draft) -> Iterator[Problem]:
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
    ):
        if value is not None and package not in libraries:
            yield Problem(
                f"{flag} {value} requires the package {package}, which is not installed",
                f"run pip install {package}, or remove {flag}: metrics.jsonl has the same values",
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
                f"--profile-ranks {rank} does not exist: there are {world_size} ranks",
                f"use --profile-ranks 0, or others up to {world_size - 1}",
            )


LOGGING_RULES: Final[tuple[Callable[[Draft], Iterator[Problem]], ...]] = (
    optional_packages_are_installed,
    profiled_iterations_and_ranks_exist,
)
