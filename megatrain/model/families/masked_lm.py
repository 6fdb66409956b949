"""BERT's parts of the head: the transform before the output layer, and the next-sentence head.

    x (after the final norm) ─┬─ dense ─ GELU ─ norm ───────────────────> output layer
                              └─ first token ─ pooler: dense, tanh ─ two classes ─> cross-entropy with `Batch.are_swapped`

Source: BERT, arXiv:1810.04805, as in Megatron-LM (core/models/bert).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from megatrain.config.model_spec.model import ModelSpec
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.model.functions import weight_of
from megatrain.model.implementations.local_builder import LocalBuilder
from megatrain.model.layouts import LinearLayout, norm_weights, replicated_layout, stream_layout
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.context_parallel import ContextParallel, TokenSplit
from megatrain.parallel.layout import Init, ParamLayout, ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel

_CLASSES = 2


class HeadTransform(nn.Module):
    """norm(GELU(dense x)) with the exact GELU, on this rank's rows: [s/tp, b, h] -> [s/tp, b, h]."""

    def __init__(self, spec: ModelSpec, builder: LocalBuilder, tp: TensorParallel) -> None:
        super().__init__()
        h = spec.hidden_size
        weight = replicated_layout([("lm_head.dense.weight", h)], h, Init(std=spec.init_std), tp)
        bias = stream_layout("lm_head.dense.bias", h, Init(), tp)
        self.dense = builder.replicated_linear(None, LinearLayout(weight, bias))
        self.norm = builder.norm(norm_weights("lm_head.norm", h, spec.norm, tp), spec.norm)

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        _, y = self.dense(x, None, info)
        out: Tensor = self.norm(F.gelu(y), info)
        return out


class BinaryHead(ShardedModule):
    """Pooler and two classes; its tensors are on every tensor rank. The first context rank has the first token."""

    def __init__(self, spec: ModelSpec, split: TokenSplit, dtype: torch.dtype) -> None:
        super().__init__()
        self.split, self.tp = split, split.tp
        tp = split.tp
        h, init = spec.hidden_size, Init(std=spec.init_std)
        for name, rows in (("pooler.dense", h), ("binary_head", _CLASSES)):
            attribute = name.partition(".")[0]
            weight = replicated_layout([(f"{name}.weight", rows)], h, init, tp)
            self.add_weight(f"{attribute}_weight", weight, dtype)
            self.add_weight(f"{attribute}_bias", stream_layout(f"{name}.bias", rows, Init(), tp), dtype)

    def forward(self, x: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        """Return the mean loss of the samples, as this rank differentiates it; write `sop_loss` to `info.sums`.

        The ranks without the first token return 0, and context ranks of them write 0. Evaluation also writes `samples`, and
        `sop_hits`, the number of them whose class has the larger logit.
        """
        assert batch.are_swapped is not None, "the batch of a model with a next-sentence head"
        logits = self.logits(x)
        losses = F.cross_entropy(
            logits.to(accumulation_dtype(logits.dtype)), batch.are_swapped, reduction="none"
        )
        count = len(losses) if info.num_samples is None else info.num_samples
        mean = losses[:count].sum() / max(count, 1)
        mean = mean * self.split.is_first
        sums = {"sop_loss": mean.detach()}
        if not info.is_training:
            hits = (logits.argmax(-1) == batch.are_swapped)[:count].sum().to(mean.dtype)
            sums["sop_hits"] = hits * self.split.is_first
        if self.tp.sequence_parallel:
            sums = {name: all_reduce(x.clone(), self.tp.group) for name, x in sums.items()}
        info.sums |= sums
        if not info.is_training:
            info.sums["samples"] = torch.full_like(mean, count * (self.split.cp.rank == 0))
        return mean

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the classes, [b, 2], from the first token of x [s, b, h]."""
        return self._linear("binary_head", torch.tanh(self._linear("pooler", x[0])))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, weight_of(self, f"{name}_weight"), weight_of(self, f"{name}_bias"))


@dataclass(frozen=True)
class MicrobatchMeans:
    """Means of micro-batches in place of the sums of token losses in `PassInfo.sums`; context ranks have parts of them."""

    cp: ContextParallel

    def apply(self, batch: Batch, info: PassInfo) -> None:
        """Divide the sums by the tokens of the micro-batch; it counts as one, on the first context rank, or as 0 if it is all padding."""
        for name in {"lm_loss", "z_loss"} & info.sums.keys():
            info.sums[name] = info.sums[name] / batch.loss_denominator.clamp(min=1)
        counts = self.cp.rank == 0 and info.num_samples != 0
        info.sums["tokens"] = torch.full_like(info.sums["tokens"], counts)


@dataclass(frozen=True)
class LabelledTokens:
    """Choice of the tokens with a label, which are few: only they go through the output layer.

    Their number is the same in each micro-batch, as CUDA graphs need it: those that are missing have no part in the loss.
    """

    per_sample: int
    """Labels that a sample has at most."""

    def of(self, x: Tensor, labels: Tensor, mask: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows of x [t, h], labels [t] and loss mask [t] of these tokens, in order.

        The mask becomes NaN, and with it the loss, if there are more labels than expected.
        """
        b, s = batch.labels.shape
        most = min(self.per_sample, s) * b
        has_label = mask != 0
        ends = has_label.cumsum(0)
        places = (ends - 1).masked_fill(~has_label | (ends > most), most)
        rows = places.new_zeros(most + 1).scatter(0, places, torch.arange(s * b, device=x.device))[:most]
        is_taken = torch.arange(most, device=x.device) < ends[-1]
        mask = (mask[rows] * is_taken).masked_fill(ends[-1] > most, torch.nan)
        return _SelectedRows.apply(x, rows, places), labels[rows] * is_taken, mask


class _SelectedRows(Function):
    """x [t, h], rows [n], places [t] -> x[rows]; `places` says which selected row each row is, n: none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return F.pad(grads[0], (0, 0, 0, 1)).index_select(0, places), None, None


@dataclass(frozen=True)
class HeadParts:
    """Modules that some families add to the head."""

    transform: HeadTransform | None = None
    """Precedes the output layer."""
    binary: BinaryHead | None = None
    """Next-sentence head, whose loss is added."""
    bias: ParamLayout | None = None
    """Layout of the bias of the logits."""
    selection: LabelledTokens | None = None
    """The tokens whose logits are computed; None: all."""
    means: MicrobatchMeans | None = None
    """Means of micro-batches in place of sums of tokens."""
    owns_embedding: bool = False
    """The tied embedding belongs to this segment."""
