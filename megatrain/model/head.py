"""The last segment of the model: final norm, logits, cross-entropy and their gradients, chunked over tokens.

The gradient of the loss is known before the forward pass (it follows from the loss mask), so a chunk's logits live only
as long as the chunk: forward computes the loss, the gradient of the hidden states and, without split backward, the weight
gradient. With split backward the logits' gradient is kept until the schedule runs the weight gradient.

In evaluation only the loss is computed, and predictions for accuracy. Padded ids are masked in the softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatrain.config.model_spec.model import ModelSpec
from megatrain.kernels.cross_entropy import chunk_rows
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.linear import accumulate_weight_gradient, linear
from megatrain.kernels.logit_scaling import LogitScaling
from megatrain.kernels.sums import add_column_sums
from megatrain.model.families.accuracy import vocab_parallel_argmax
from megatrain.model.families.cross_attention import split_memory
from megatrain.model.families.masked_lm import HeadParts
from megatrain.model.user_loss import UserLoss
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.collectives import all_gather
from megatrain.parallel.layout import ParamLayout, ShardedModule
from megatrain.parallel.tensor_parallel import (
    Bias,
    TensorParallel,
    VocabShard,
    enter_tp_region,
    vocab_parallel_cross_entropy,
    vocab_parallel_logits_gradient,
)


class Head(ShardedModule):
    """The head segment with its loss.

    Args:
        norm: the final norm; None: multi-token prediction has applied it.
        parts: the parts of its family.
        weight: layout of the output weight; None: it is that of `embedding`.
        embedding: the embedding of this stage, if the output weight is tied to it.
        spec: spec of the model, with the logits' scale, their cap, the losses and multi-token prediction.
        user_loss: loss of the user in place of the cross-entropy (--loss).
        dtype: dtype of the output weight.
    """

    def __init__(
        self,
        norm: nn.Module | None,
        parts: HeadParts,
        weight: ParamLayout | None,
        embedding: ShardedModule | None,
        spec: ModelSpec,
        user_loss: UserLoss | None,
        tp: TensorParallel,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.norm, self.means, self.selection = norm, parts.means, parts.selection
        self.transform, self.binary = parts.transform, parts.binary
        self.spec, self.has_memory = spec.head, spec.stacks[-1].memory is not None
        self.tp, self.vocab_size = tp, spec.vocab_size
        self.scaling = LogitScaling(spec.logit_scale, spec.logit_softcap)
        self.z_loss_coeff, self.user_loss, self.dtype = spec.z_loss_coeff, user_loss, dtype
        self.note_scores: Callable[[Batch, PassInfo], Any] | None = None
        self.mtp_loss_factor = spec.mtp.loss_factor / spec.mtp.num_depths if spec.mtp is not None else 0.0
        if embedding is not None:
            self.tied_to = (embedding,)
            if parts.owns_embedding:
                self.embedding = embedding
        if weight is not None:
            self.add_weight("weight", weight, dtype)
        if parts.bias is not None:
            self.add_weight("bias", parts.bias, dtype)

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        """Return the scaled loss of this rank's tokens, a scalar; write `lm_loss`, `tokens` and any `z_loss` to `info.sums`.

        Its gradient is that of info.loss_scale * (sum of losses and z-losses of tokens that count) / batch.loss_denominator,
        so that gradients of context ranks sum to that of the micro-batch's mean. Other tokens may have any label. `hidden` may
        have those of multi-token prediction after the model's: their losses, times a factor, write `mtp_1_lm_loss`, `mtp_1_tokens` ...
        A next-sentence head adds `sop_loss`; see also `MicrobatchMeans`. For accuracy, evaluation writes `labels` (number
        that count) and `hits` (number of those that have the largest logit).
        """
        if self.has_memory:
            hidden, _ = split_memory(hidden, batch, self.tp)
        model_hidden, *others = hidden.chunk(1 + len(batch.ahead)) if batch.ahead else (hidden,)
        loss = self._loss(model_hidden, batch, info, 0)
        for depth, (x, ahead) in enumerate(zip(others, batch.ahead, strict=True), start=1):
            loss = loss + self._loss(x, ahead, info, depth)
        return loss

    def _loss(self, hidden: Tensor, batch: Batch, info: PassInfo, depth: int) -> Tensor:
        """Return the scaled loss of one depth, 0 for the model itself, from its hidden states [s/tp, b, h]."""
        factor, z_loss_coeff = (self.mtp_loss_factor, 0.0) if depth else (1.0, self.z_loss_coeff)
        prefix = f"mtp_{depth}_" if depth else ""
        normed, output = self._normed(hidden, info), self._output()
        x, mask = self._whole_rows(normed, info), batch.loss_mask.t().flatten()
        labels = batch.labels.t().flatten().masked_fill(mask == 0, 0)
        if self.selection is not None and self.user_loss is None:
            x, labels, mask = self.selection.of(x, labels, mask, batch)
        kind = accumulation_dtype(x.dtype)
        scale = factor * info.loss_scale
        if isinstance(scale, Tensor):
            scale = scale.to(kind)  # as torch does with a number
        token_scale = mask.to(kind) * (batch.loss_denominator.clamp(min=1).to(kind).reciprocal() * scale)
        predictions = torch.empty_like(labels) if self.spec.has_accuracy and not info.is_training else None
        losses, z_losses, scaled = _HeadLoss.apply(
            x, output.weight, output.weight_grads.get("weight"), self._bias(), labels, token_scale,
            VocabShard(self.tp.group, output.weight.shape[0], self.vocab_size),
            self.scaling, z_loss_coeff, self.user_loss and partial(self.user_loss.compute, batch=batch), info, predictions,
            None if depth else self._further_loss(normed, x, token_scale, batch, info),
        )  # fmt: skip
        info.sums[f"{prefix}lm_loss"] = (losses * mask).sum()
        if z_loss_coeff:
            info.sums["z_loss"] = (z_losses * mask).sum()
        info.sums[f"{prefix}tokens"] = mask.sum()
        if predictions is not None:
            info.sums |= {"hits": ((predictions == labels) * mask).sum(), "labels": mask.sum()}
        if self.means is not None:
            self.means.apply(batch, info)
        if self.binary is None:
            return scaled  # type: ignore[no-any-return]
        return scaled + self.binary(normed, batch, info) * scale  # type: ignore[no-any-return]

    def _further_loss(self, *values: Any) -> Any:
        """Return what a subclass trains besides, see `DistilledHead`, or what notes scores; it may change the scale of the cross-entropy."""
        return None if self.note_scores is None else self.note_scores(*values[-2:])

    def logits(self, hidden: Tensor, info: PassInfo) -> Tensor:
        """Compute the logits of the tokenizer's ids, [s, b, v], for generation."""
        x = self._whole_rows(self._normed(hidden, info), info)
        local = self.scaling.logits(
            linear(x, self._output().weight, getattr(self, "bias", None))
        )  # [t, v/tp]
        parts: Tensor = all_gather(local, self.tp.group).unflatten(0, (self.tp.size, -1, hidden.shape[1]))
        return parts.movedim(0, 2).flatten(2)[..., : self.vocab_size]

    def _normed(self, hidden: Tensor, info: PassInfo) -> Tensor:
        normed: Tensor = hidden.to(self.dtype) if self.norm is None else self.norm(hidden, info)
        return normed

    def _whole_rows(self, normed: Tensor, info: PassInfo) -> Tensor:
        """Return the input of the output layer, [t, h], from this rank's rows after the final norm."""
        x = normed if self.transform is None else self.transform(normed, info)
        return enter_tp_region(x, self.tp).flatten(0, 1)

    def _bias(self) -> Bias | None:
        bias = getattr(self, "bias", None)
        return None if bias is None else Bias(bias, self.weight_grads.get("bias"))

    def _output(self) -> Any:
        """Return the module that owns the output weight."""
        return self.tied_to[0] if self.tied_to else self


class _HeadLoss(Function):
    """x [t, h], weight [v/tp, h], labels [t], token_scale [t] -> (losses [t], z-losses [t], scaled sum of both)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_grad: Tensor | None,
        bias: Bias | None,
        labels: Tensor,
        token_scale: Tensor,
        vocab: VocabShard,
        scaling: LogitScaling,
        z_loss_coeff: float,
        user_loss: Callable[..., tuple[Tensor, Tensor]] | None,
        info: PassInfo,
        predictions: Tensor | None,
        further_loss: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the losses; `predictions`, int64 [t], receives the id of each token's largest logit.

        `further_loss` replaces `vocab_parallel_logits_gradient`: see `Divergence.begin` of distillation.py.
        """
        losses, z_losses = torch.empty_like(token_scale), torch.zeros_like(token_scale)
        dx = torch.empty_like(x) if info.is_training else None
        kept: list[tuple[Tensor, Tensor]] = []

        def compute(chunk: slice) -> None:
            """Compute one chunk. A function, so that its logits are freed before the next chunk's are allocated."""
            logits = scaling.logits(linear(x[chunk], weight, None if bias is None else bias.value))
            derivative = None if dx is None else scaling.softcap_derivative(logits)
            if predictions is not None:
                predictions[chunk] = vocab_parallel_argmax(logits, vocab)
            logits_gradient: Callable[..., Tensor] = vocab_parallel_logits_gradient
            if further_loss is not None:
                logits_gradient = further_loss.begin(logits, chunk, scaling.scale)
            token_losses = vocab_parallel_cross_entropy(logits, labels[chunk], vocab)
            losses[chunk] = token_losses.losses
            user_derivative: Tensor | float = 1.0
            if user_loss is not None:
                losses[chunk], user_derivative = user_loss(token_losses.losses, chunk=chunk)
            if z_loss_coeff:
                z_losses[chunk] = token_losses.log_sums.square() * z_loss_coeff
            if dx is None:
                return
            scale = token_scale[chunk] * (scaling.scale * user_derivative)
            dlogits = logits_gradient(token_losses, scale, vocab, x.dtype, z_loss_coeff=z_loss_coeff)
            if derivative is not None:
                dlogits *= derivative
            torch.matmul(dlogits, weight, out=dx[chunk])
            if info.splits_backward and weight_grad is not None:
                kept.append((dlogits, x[chunk]))
            else:
                _add_weight_gradients(weight_grad, bias, dlogits, x[chunk])

        rows = chunk_rows(x.shape[0], vocab.rows, x.element_size())
        for start in range(0, x.shape[0], rows):
            compute(slice(start, start + rows))
        ctx.save_for_backward(dx)
        ctx.weight_grad, ctx.bias, ctx.info, ctx.kept = weight_grad, bias, info, kept
        ctx.mark_non_differentiable(losses, z_losses)
        return losses, z_losses, ((losses + z_losses) * token_scale).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Without split backward the weight gradient is already computed, so a loss scaled after this would be wrong.
        (dx,) = ctx.saved_tensors
        add, kept = partial(_add_weight_gradients, ctx.weight_grad, ctx.bias), ctx.kept
        ctx.kept = []
        for dlogits, x in kept:
            ctx.info.compute_weight_gradient(partial(add, dlogits, x))
        return dx * grads[2].to(dx.dtype), *[None] * 12


def _add_weight_gradients(weight_grad: Tensor | None, bias: Bias | None, dlogits: Tensor, x: Tensor) -> None:
    accumulate_weight_gradient(weight_grad, dlogits, x)
    if bias is not None and bias.grad is not None:
        add_column_sums(bias.grad, dlogits)
