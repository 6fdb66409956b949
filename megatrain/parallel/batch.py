"""What travels from the data to the model: one micro-batch, and what is known about its pass.

`data/` makes a `Batch`, `model/` reads it; neither knows the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Where the documents of a micro-batch lie that attention stays inside of."""

    cu_seqlens: Tensor
    """Borders in the micro-batch's samples laid end to end, b * s tokens: int32 [documents + 1], from 0 to b * s."""
    max_seqlen: int
    """Tokens of the longest one."""
    num_samples: int
    """b."""
    seq_length: int
    """s."""

    @functools.cached_property
    def mask(self) -> Tensor:
        """True where query i may see key j: both in one document, and j no later than i. Bool [b, 1, s, s]."""
        borders = self.cu_seqlens
        s = self.seq_length
        places = torch.arange(self.num_samples * s, device=borders.device)
        document = torch.bucketize(places, borders, right=True).view(self.num_samples, 1, s)
        is_same = document.unsqueeze(-1) == document.unsqueeze(-2)
        return is_same & torch.ones(s, s, dtype=torch.bool, device=borders.device).tril()


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
    documents: Documents | None = None
    """None: attention sees the whole sample."""

    @functools.cached_property
    def counts(self) -> Tensor:
        """The loss mask, with 0 also where a label is below 0, which marks a token to ignore; float32 [b, s]."""
        return self.loss_mask.masked_fill(self.labels < 0, 0)


@dataclass(kw_only=True)
class PassInfo:
    """One pass of one micro-batch through the model, as its parts need to know it."""

    microbatch: int = 0
    """Number of the micro-batch in this step, from 0."""
    first_sample: int = 0
    """Number of its first sample in the whole run, the same under every layout; dropout is keyed by it."""
    documents: Documents | None = None
    """What attention stays inside of, as in the batch."""
    is_training: bool = True
    """False in evaluation: no gradients are formed."""
    loss_scale: float | Tensor = 1.0
    """What the mean of the token losses that count is multiplied with to give this pass's share of the step's loss."""
    deferred: list[Callable[[], None]] | None = None
    """Where leaves leave their weight gradients when a schedule runs them later; None: formed at once."""
    splits_backward: bool = False
    """Whether the schedule forms weight gradients as actions of their own."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Named sums for the log, such as `lm_loss` (of token losses) and `tokens` (how many count), fp32 or wider."""

    def form_weight_gradient(self, work: Callable[[], None]) -> None:
        """Run `work` now, or keep it for the schedule's weight-gradient action."""
        if self.deferred is None:
            work()
        else:
            self.deferred.append(work)
