"""Start of a training process that a supervisor has started (--inprocess-restart)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megatrain.config import Request
from megatrain.config.environment import read_environment
from megatrain.config.errors import ConfigError
from megatrain.process.signals import Signals
from megatrain.training.launch.ranks import join_store
from megatrain.training.liveness.rank_watch import RankWatch
from megatrain.training.restarts.member import Member, train_in_generations
from megatrain.training.restarts.rendezvous import RECORD_NAME


class Train(Protocol):
    """Trains; returns the exit code."""

    def __call__(self, phases: None, /, *, follow: Callable[[RankWatch], None]) -> int: ...


def run_generations(request: Request, signals: Signals, train: Train) -> int:
    """Join the job's rendezvous, and train in one generation after another; return the exit code.

    Raises:
        ConfigError: the job has fewer processes than active ranks.
    """
    environment = read_environment()
    active = request.known("resilience.inprocess_active_world_size") or environment.world_size
    if active > environment.world_size:
        raise ConfigError(
            f"--inprocess-active-world-size {active} is more than the {environment.world_size} processes of the job",
            fix="start more processes, or lower --inprocess-active-world-size",
        )
    save, is_torchrun = request.known("checkpoint.save"), environment.launcher == "torchrun"
    member = Member(
        environment,
        join_store(environment) if is_torchrun else None,
        seconds_to_leave=request.known("resilience.inprocess_hard_timeout") or 0.0,
        hang_seconds=request.known("resilience.inprocess_soft_timeout") or 0.0,
        record=Path(save) / RECORD_NAME if save else None,
    )
    return train_in_generations(member, signals, lambda: train(None, follow=member.follow))
