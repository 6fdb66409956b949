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
    def numbers(self) -> Tensor:
        """Which document each token is in: int64 [b, s]."""
        places = torch.arange(self.num_samples * self.seq_length, device=self.cu_seqlens.device)
        return torch.bucketize(places, self.cu_seqlens, right=True).view(self.num_samples, self.seq_length)

    def within(self, places: range) -> Tensor:
        """Borders of what documents have at these places, of samples cut down to them and laid end to end.

        int32 [documents + 1], from 0 to b * len(places); a document that has nothing there is empty.
        """
        if len(places) == self.seq_length:
            return self.cu_seqlens
        sample, place = self.cu_seqlens // self.seq_length, self.cu_seqlens % self.seq_length
        return sample * len(places) + (place - places.start).clamp(0, len(places))

    @functools.cached_property
    def mask(self) -> Tensor:
        """True where query i may see key j: both in one document, and j no later than i. Bool [b, 1, s, s]."""
        is_same = self.numbers.unsqueeze(-1) == self.numbers.unsqueeze(-2)
        return is_same.tril().unsqueeze(1)


def whole_samples(num_samples: int, seq_length: int, device: torch.device) -> Documents:
    """Each sample is a document."""
    borders = torch.arange(num_samples + 1, dtype=torch.int32, device=device) * seq_length
    return Documents(borders, seq_length, num_samples, seq_length)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of b samples of s tokens, as every tensor and pipeline rank of a replica sees it.

    A context rank has its rows of them alone: s is then s/cp.
    """

    tokens: Tensor
    """Input ids, int64 [b, s]."""
    labels: Tensor
    """Ids to predict, int64 [b, s]."""
    loss_mask: Tensor
    """1 where a label counts, 0 where it does not, float32 [b, s]."""
    position_ids: Tensor
    """Place of each token in its document or sample, int64 [b, s]."""
    documents: Documents | None = None
    """Of the whole samples, also where context ranks hold parts of them. None: attention sees the whole sample."""
    own_mean_over: Tensor | None = None
    """`mean_over` where it is not the number of this batch's own tokens that count, as for a part of a micro-batch."""

    @functools.cached_property
    def mean_over(self) -> Tensor:
        """What the sum of its token losses is divided by to be its share of the micro-batch's mean: a number."""
        return self.counts.sum() if self.own_mean_over is None else self.own_mean_over

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

    router_metrics: dict[int, Tensor] = field(default_factory=dict)
    """What the routers of this pass tell, by the numbers of their layers: see `model/router.py`."""

    def compute_weight_gradient(self, work: Callable[[], None]) -> None:
        """Run `work` now, or keep it for the schedule's weight-gradient action."""
        if self.deferred is None:
            work()
        else:
            self.deferred.append(work)
