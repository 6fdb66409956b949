"""The head and its loss, as one part: norm, logits, cross-entropy and their gradients, chunked over tokens.

The gradient of the loss is known before the forward pass (it follows from the loss mask), so a chunk's logits live
only as long as the chunk: forward forms the loss, the gradient of the hidden states and, in fused mode, that of the
weight. In split mode the weight gradient waits with the logits' gradient until the schedule asks for it.

In evaluation only the loss is formed. Padded ids are masked in the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatrain.kernels.dtypes import wide
from megatrain.kernels.wgrad import accumulate_weight_gradient
from megatrain.model.specs import GptSpec
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.collectives import all_gather
from megatrain.parallel.layout import Borrower, LaidOutModule
from megatrain.parallel.tensor import TensorParallel, enter
from megatrain.parallel.vocab import VocabShard, cross_entropy, logits_gradient

_WANTED_CHUNKS = 4
"""Of a micro-batch, if the logits of each take no less and no more than the next two say."""
_LEAST_CHUNK_BYTES = 1 << 29
_MOST_CHUNK_BYTES = 1 << 31
_ROUND = 128
"""Rows that matrix products take without a remainder."""


def chunk_rows(tokens: int, columns: int, itemsize: int) -> int:
    """How many of the tokens have their logits formed at once, `columns` of `itemsize` bytes for each.

    Chunks are few, since each reads and writes the whole weight gradient, and alike.
    """
    row = columns * itemsize
    size = min(max(tokens * row // _WANTED_CHUNKS, _LEAST_CHUNK_BYTES), _MOST_CHUNK_BYTES)
    most = max(1, size // row)
    if most >= tokens:
        return max(tokens, 1)
    even = -(-tokens // -(-tokens // most))
    return min(most, -(-even // _ROUND) * _ROUND)


@dataclass(frozen=True)
class LogitCurve:
    """What is done to products with the output weight before they are logits: cap * tanh(scale * product / cap)."""

    scale: float
    cap: float | None
    """None: scale * product."""

    def of(self, products: Tensor) -> Tensor:
        """The logits; `products` is used up."""
        if self.scale != 1.0:
            products *= self.scale
        return products if self.cap is None else torch.tanh(products / self.cap) * self.cap

    def slope(self, logits: Tensor) -> Tensor | None:
        """How logits move with scale * product; None: alike."""
        return None if self.cap is None else 1 - (logits / self.cap).square()


class Head(Borrower):
    """The last segment.

    Args:
        norm: the final norm.
        output: the module that holds the output weight as `weight`: the embedding where they are tied on one stage.
        spec: of the model; says how logits are scaled and capped, and what z-loss is added.
    """

    def __init__(self, norm: nn.Module, output: LaidOutModule, spec: GptSpec, tp: TensorParallel) -> None:
        super().__init__()
        self.norm = norm
        self.tp = tp
        self.vocab_size = spec.vocab_size
        self.curve = LogitCurve(spec.logit_scale, spec.logit_softcap)
        self.z_loss_coeff = spec.z_loss_coeff
        self.borrowed = (output,)

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        """Scaled loss of this rank's tokens, a number; adds `lm_loss`, `tokens` and, if there is one, `z_loss` to the sums.

        Its gradient is that of info.loss_scale * (sum of the token losses that count, with their z-loss) /
        batch.mean_over, so that context ranks' gradients add up to that of the micro-batch's mean. What the labels of
        other tokens are does not matter.
        """
        x = self._normed(hidden, info)
        (output,) = self.borrowed
        assert isinstance(output.weight, Tensor)
        mask = batch.counts.t().flatten()
        labels = batch.labels.t().flatten().masked_fill(mask == 0, 0)
        mean_over = batch.mean_over.clamp(min=1).to(wide(x.dtype))
        token_scale = mask.to(wide(x.dtype)) * (info.loss_scale / mean_over)
        losses, z_losses, scaled = _HeadLoss.apply(
            x, output.weight, output.weight_grads.get("weight"), labels, token_scale,
            self._vocab(output.weight), self.curve, self.z_loss_coeff, info,
        )  # fmt: skip
        info.sums["lm_loss"] = (losses * mask).sum()
        if self.z_loss_coeff:
            info.sums["z_loss"] = (z_losses * mask).sum()
        info.sums["tokens"] = mask.sum()
        loss: Tensor = scaled
        return loss

    def logits(self, hidden: Tensor, info: PassInfo) -> Tensor:
        """Logits of the tokenizer's ids, [s, b, v]: for generation, where they are few."""
        (output,) = self.borrowed
        assert isinstance(output.weight, Tensor)
        x = self._normed(hidden, info)
        own = self.curve.of(x @ output.weight.t())
        columns = own.t().contiguous()  # [v/tp, t]
        logits: Tensor = all_gather(columns, self.tp.group)[: self.vocab_size].t()
        return logits.view(-1, hidden.shape[1], self.vocab_size)

    def _normed(self, hidden: Tensor, info: PassInfo) -> Tensor:
        return enter(self.norm(hidden, info), self.tp).flatten(0, 1)  # [t, h]

    def _vocab(self, weight: Tensor) -> VocabShard:
        return VocabShard(self.tp.group, weight.shape[0], self.vocab_size)


class _HeadLoss(Function):
    """x [t, h], weight [v/tp, h], labels [t], token_scale [t] -> (losses [t], z-losses [t], scaled sum of both)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_grad: Tensor | None,
        labels: Tensor,
        token_scale: Tensor,
        vocab: VocabShard,
        curve: LogitCurve,
        z_loss_coeff: float,
        info: PassInfo,
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses, z_losses = torch.empty_like(token_scale), torch.zeros_like(token_scale)
        dx = torch.empty_like(x) if info.is_training else None
        kept: list[tuple[Tensor, Tensor]] = []

        def form(part: slice) -> None:
            """All of a chunk. Its logits end with it: they shall not stand beside the next one's."""
            logits = curve.of(x[part] @ weight.t())
            slope = None if dx is None else curve.slope(logits)
            known = cross_entropy(logits, labels[part], vocab)
            losses[part] = known.losses
            if z_loss_coeff:
                z_losses[part] = known.log_sums.square() * z_loss_coeff
            if dx is None:
                return
            assert weight_grad is not None
            dlogits = logits_gradient(
                known, token_scale[part] * curve.scale, vocab, x.dtype, z_loss_coeff=z_loss_coeff
            )
            if slope is not None:
                dlogits *= slope
            torch.mm(dlogits, weight, out=dx[part])
            if info.splits_backward:
                kept.append((dlogits, x[part]))
            else:
                accumulate_weight_gradient(weight_grad, dlogits, x[part])

        chunk = chunk_rows(x.shape[0], vocab.rows, x.element_size())
        for start in range(0, x.shape[0], chunk):
            form(slice(start, start + chunk))
        ctx.save_for_backward(dx)
        ctx.weight_grad, ctx.info, ctx.kept = weight_grad, info, kept
        ctx.mark_non_differentiable(losses, z_losses)
        return losses, z_losses, ((losses + z_losses) * token_scale).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None, None, None]:
        # In fused mode the weight gradient is formed already, so a loss that is scaled afterwards would be wrong.
        (dx,) = ctx.saved_tensors
        weight_grad, kept = ctx.weight_grad, ctx.kept
        ctx.kept = []
        for dlogits, x in kept:
            ctx.info.form_weight_gradient(
                lambda d=dlogits, x=x: accumulate_weight_gradient(weight_grad, d, x)
            )
        return dx * grads[2].to(dx.dtype), None, None, None, None, None, None, None, None
