"""Data passed to the model: one micro-batch, and the context of its pass. `data/` creates a `Batch`, `model/` reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatrain.parallel.documents import Documents


@dataclass(frozen=True)
class EncoderTokens:
    """The encoder's part of the samples of a micro-batch, if the model has a decoder too."""

    tokens: Tensor
    """Input ids, int64 [b, s_encoder]."""
    position_ids: Tensor
    """Positions in the sample, int64 [b, s_encoder]."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of b samples of s tokens, the same on every tensor and pipeline rank of a replica; a context rank has s/cp."""

    tokens: Tensor
    """Input ids, int64 [b, s]; below 0: a vector of `images`."""
    labels: Tensor
    """Ids to predict, int64 [b, s]."""
    loss_mask: Tensor
    """1 where a label counts, else 0, float32 [b, s]. A label below 0 never counts: its entry becomes 0."""
    position_ids: Tensor
    """Position of each token in its document or sample, int64 [b, s]."""
    documents: Documents | None = None
    """Documents of the whole samples, on context ranks too. None: attention covers the whole sample."""
    encoder: EncoderTokens | None = None
    """Input of the encoder, if this is the decoder's; None: the model has one stack."""
    is_token: Tensor | None = None
    """True for tokens of the encoder that are no padding, bool [b, s] or [b, s_encoder]; None: all, or there is no encoder."""
    types: Tensor | None = None
    """Type of each token, int64 [b, s]; None: the model has none."""
    are_swapped: Tensor | None = None
    """1 for a sample whose second part does not follow the first, int64 [b]; None: the model has no next-sentence head."""
    images: Tensor | None = None
    """Images of each sample, float32 [b, images, channels, height, width]: token -1 - r has row r of its sample's vectors."""
    ahead: tuple[Batch, ...] = ()
    """The micro-batch one token ahead, two tokens ahead ..., for multi-token prediction: see `with_batches_ahead`."""
    pieces: int = 1  # so many samples here are one of the data, see `data/pieces.py`
    denominator: InitVar[Tensor | None] = None
    """Value of `loss_denominator`; None: the number of this batch's tokens that count."""
    loss_denominator: Tensor = field(init=False)
    """Divisor of the sum of token losses that gives this batch's part of the micro-batch's mean, a scalar."""

    def __post_init__(self, denominator: Tensor | None) -> None:
        mask = self.loss_mask.masked_fill(self.labels < 0, 0)
        object.__setattr__(self, "loss_mask", mask)
        object.__setattr__(self, "loss_denominator", mask.sum() if denominator is None else denominator)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with a function applied to every tensor."""
        encoder, documents = self.encoder, self.documents
        tensors: dict[str, Any] = {
            name: function(x) for name in _TENSORS if (x := getattr(self, name)) is not None
        }
        return replace(
            self,
            **tensors,
            encoder=encoder and EncoderTokens(function(encoder.tokens), function(encoder.position_ids)),
            documents=documents and replace(documents, cu_seqlens=function(documents.cu_seqlens)),
            ahead=tuple(one.mapped(function) for one in self.ahead),
            denominator=function(self.loss_denominator),
        )


NUM_LATE = 2
"""Weight gradients of a projection to heads and of one from heads take longer than a transfer of tokens to experts."""
_TENSORS = ("tokens", "labels", "loss_mask", "position_ids", "is_token", "types", "are_swapped", "images")


@dataclass(kw_only=True)
class PassInfo:
    """The context of one pass of one micro-batch through the model."""

    microbatch: int = 0
    """Index of the micro-batch in this step."""
    first_sample: int | Tensor = 0
    """Index of its first sample in the run, the same under every layout; dropout is keyed by it. A CUDA graph reads it from the device."""
    pieces: int = 1  # as of `Batch`; `first_sample` counts pieces
    chunk: tuple[slice, int] | None = None  # of an MLP's rows, and their number: `ChunkedMlp`
    documents: Documents | None = None
    """Documents of the batch."""
    is_token: Tensor | None = None
    """See `Batch`."""
    num_samples: int | None = None
    """Samples of the micro-batch before its padding; None: all. Padding has no part in the experts' capacity."""
    is_training: bool = True
    """False in evaluation: no gradients are computed."""
    loss_scale: float | Tensor = 1.0
    """Factor that turns the mean of the counted token losses into this pass's part of the step's loss."""
    router_loss_scale: float | Tensor = 1.0
    """Factor that turns the losses of the micro-batch's routers into their part of the step's loss."""
    deferred: list[Callable[[], None]] | None = None
    """Weight gradients to compute later in the schedule; None: they are computed at once."""
    late: list[Callable[[], None]] | None = None
    """The newest weight gradients, which overlap with the next transfer of the backward pass; None: such are computed at once."""
    splits_backward: bool = False
    """The schedule computes weight gradients as separate actions."""
    token_indices: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """See `TokenSplit.shared_token_indices`."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Named sums for the log, such as `lm_loss` (of token losses) and `tokens` (number that count), fp32 or fp64."""
    router_metrics: dict[int, Tensor] = field(default_factory=dict)
    """Metrics of the routers of this pass, by layer number: see `model/experts/router.py`."""
    indexer_losses: dict[int, Tensor] = field(default_factory=dict)
    """Losses of the indexers of sparse attention in this pass, without their coefficient, by layer number."""

    def of_rows(self, rows: slice, count: int) -> PassInfo:
        """Return the pass of a chunk of an MLP's `count` rows."""
        return replace(self, chunk=(rows, count))

    def compute_weight_gradient(self, work: Callable[[], None], *, may_be_late: bool = False) -> None:
        """Run `work` now, or defer it to the schedule's weight-gradient action or to `compute_late`."""
        if self.deferred is not None:
            self.deferred.append(work)
        elif may_be_late and self.late is not None:
            while len(self.late) == NUM_LATE:
                self.late.pop(0)()
            self.late.append(work)
        else:
            work()

    @torch.no_grad()
    def compute_late(self) -> None:
        """Compute the gradients in `late`."""
        while self.late:
            self.late.pop(0)()
