"""The objects that the iterations, the evaluations and the fault responses of a run share."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config import Plan
from megatrain.training.checkpoints import Progress
from megatrain.training.engine import Engine
from megatrain.training.launch.ranks import Ranks
from megatrain.training.run_log import RunLog
from megatrain.training.saving import RunSaves
from megatrain.training.stopping import StopRequest


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run of one rank, from a start or a rewind on."""

    ranks: Ranks
    plan: Plan
    """The plan of the run after it has resumed."""
    engine: Engine
    progress: Progress
    """Position of the run; updated."""
    log: RunLog
    saves: RunSaves
    """Saves in the background are committed after a step, and during an evaluation."""
    stop: StopRequest
    """Stop requests of this rank."""
