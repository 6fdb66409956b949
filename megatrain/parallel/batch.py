"""What travels from the data to the model: one micro-batch, and what is known about its pass.

`data/` makes a `Batch`, `model/` reads it; neither knows the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of b samples of s tokens, as every tensor and pipeline rank of a replica sees it."""

    tokens: Tensor
    """Input ids, int64 [b, s]."""
    labels: Tensor
    """Ids to predict, int64 [b, s]."""
    loss_mask: Tensor
    """1 where a label counts, 0 where it does not, float32 [b, s]."""
    position_ids: Tensor
    """Place of each token in its document or sample, int64 [b, s]."""


@dataclass(kw_only=True)
class PassInfo:
    """One pass of one micro-batch through the model, as its parts need to know it."""

    microbatch: int = 0
    """Number of the micro-batch in this step, from 0."""
    is_training: bool = True
    """False in evaluation: no gradients are formed."""
    loss_scale: float = 1.0
    """What the sum of the masked token losses is multiplied with to give this pass's share of the step's loss."""
    deferred: list[Callable[[], None]] | None = None
    """Where leaves leave their weight gradients when a schedule runs them later; None: formed at once."""
    splits_backward: bool = False
    """Whether the schedule forms weight gradients as actions of their own."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Named sums for the log, such as `lm_loss` (of token losses) and `tokens` (of the loss mask), fp32 or wider."""

    def form_weight_gradient(self, work: Callable[[], None]) -> None:
        """Run `work` now, or keep it for the schedule's weight-gradient action."""
        if self.deferred is None:
            work()
        else:
            self.deferred.append(work)
