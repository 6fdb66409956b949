"""BERT's parts of the head: the transform before the output layer, and the next-sentence head.

    x (after the final norm) ─┬─ dense ─ GELU ─ norm ───────────────────> output layer
                              └─ first token ─ pooler: dense, tanh ─ two classes ─> cross-entropy with `Batch.are_swapped`

Source: BERT, arXiv:1810.04805, as in Megatron-LM (core/models/bert).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.config.model_spec.model import ModelSpec
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.model.functions import weight_of
from megatrain.model.implementations.module_builder import ModuleBuilder
from megatrain.model.layouts import LinearLayout, norm_weights, replicated_layout, stream_layout
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.layout import Init, ParamLayout, ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel

_CLASSES = 2


class HeadTransform(nn.Module):
    """norm(GELU(dense x)) with the exact GELU, on this rank's rows: [s/tp, b, h] -> [s/tp, b, h]."""

    def __init__(self, spec: ModelSpec, builder: ModuleBuilder, tp: TensorParallel) -> None:
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
    """Pooler and two classes; its tensors are on every tensor rank."""

    def __init__(self, spec: ModelSpec, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp = tp
        h, init = spec.hidden_size, Init(std=spec.init_std)
        for name, rows in (("pooler.dense", h), ("binary_head", _CLASSES)):
            attribute = name.partition(".")[0]
            weight = replicated_layout([(f"{name}.weight", rows)], h, init, tp)
            self.add_weight(f"{attribute}_weight", weight, dtype)
            self.add_weight(f"{attribute}_bias", stream_layout(f"{name}.bias", rows, Init(), tp), dtype)

    def forward(self, x: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        """Return the mean loss of the samples, as this rank differentiates it; write `sop_loss` to `info.sums`.

        With sequence parallelism the first tensor rank has the first token: others return 0. Evaluation also writes `samples`,
        and `sop_hits`, the number of them whose class has the larger logit.
        """
        assert batch.are_swapped is not None, "the batch of a model with a next-sentence head"
        logits = self.logits(x)
        losses = F.cross_entropy(
            logits.to(accumulation_dtype(logits.dtype)), batch.are_swapped, reduction="none"
        )
        count = len(losses) if info.num_samples is None else info.num_samples
        mean = losses[:count].sum() / max(count, 1)
        is_split = self.tp.sequence_parallel and self.tp.size > 1
        if is_split:
            mean = mean * (self.tp.rank == 0)
        sums = {"sop_loss": mean.detach()}
        if not info.is_training:
            hits = (logits.argmax(-1) == batch.are_swapped)[:count].sum().to(mean.dtype)
            sums["sop_hits"] = hits * (self.tp.rank == 0) if is_split else hits
        if is_split:
            sums = {name: all_reduce(x.clone(), self.tp.group) for name, x in sums.items()}
        info.sums |= sums
        if not info.is_training:
            info.sums["samples"] = torch.full_like(mean, count)
        return mean

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the classes, [b, 2], from the first token of x [s, b, h]."""
        return self._linear("binary_head", torch.tanh(self._linear("pooler", x[0])))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, weight_of(self, f"{name}_weight"), weight_of(self, f"{name}_bias"))


@dataclass(frozen=True)
class HeadParts:
    """Modules that some families add to the head."""

    transform: HeadTransform | None = None
    """Precedes the output layer."""
    binary: BinaryHead | None = None
    """Next-sentence head, whose loss is added."""
    bias: ParamLayout | None = None
    """Layout of the bias of the logits."""
    owns_embedding: bool = False
    """The tied embedding belongs to this segment."""


def average_over_microbatch(batch: Batch, info: PassInfo) -> None:
    """Make the sums of token losses in `info.sums` means of the micro-batch, which counts as one, or 0 if it is all padding."""
    for name in {"lm_loss", "z_loss"} & info.sums.keys():
        info.sums[name] = info.sums[name] / batch.loss_denominator.clamp(min=1)
    info.sums["tokens"] = torch.full_like(info.sums["tokens"], info.num_samples != 0)
