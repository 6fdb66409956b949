"""Progress of a run: what a checkpoint stores besides tensors and configuration, so that training continues from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(kw_only=True)
class Progress:
    """Counters of a run, equal on all ranks. They count iterations whose report is read."""

    iteration: int = 0
    consumed_train_samples: int = 0
    scheduled_samples: int = 0
    """Samples of the steps that updated weights: the position of the schedules."""
    consumed_valid_samples: int = 0
    is_evaluation_pending: bool = False
    """The run stopped before the evaluation at this iteration was complete."""
    loaded: Path | None = None
    """The checkpoint from which the run continues: all its data are intact."""

    def advance(self, samples: int, *, is_updated: bool) -> None:
        """Count an iteration of this many samples; schedules move if it updated weights."""
        self.iteration += 1
        self.consumed_train_samples += samples
        self.scheduled_samples += samples if is_updated else 0
