"""Multi-token prediction: further layers; each predicts one token further ahead than the one before.

    hidden states of depth k - 1 ────── norm ─┐
    embedding of the token k ahead ──── norm ─┴─ concatenation ─ projection ─ layer ─ norm ─> hidden states of depth k

Depth 0 is the model itself, after its final norm. A depth of a hybrid has several layers. With --mtp-use-repeated-layer all depths
are one segment with the weights of the first. Embedding and head are those of the model: the head computes the loss of every depth (`head.py`), against the label k positions further ahead. Evaluation and generation use depth 0 alone.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2; the norms are placed as in Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatrain.config.model_spec.model import ModelSpec
from megatrain.model.embedding import Embedding
from megatrain.model.experts.router import mean_losses
from megatrain.model.implementations.local_builder import LocalBuilder
from megatrain.model.layouts import Columns, LinearLayout, columns_layout, norm_weights
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.column_gather import gather_columns
from megatrain.parallel.layout import Init, ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel


class InfoOfUse:
    """The info of a pass for one of several uses of a module in it, which has metrics of layers of its own."""

    def __init__(self, info: PassInfo) -> None:
        self.info = info
        self.router_metrics: dict[int, Tensor] = {}
        self.indexer_losses: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.info, name)


class MtpLayer(ShardedModule):
    """The segment of one depth, or of all that share its weights: hidden states of the depths before, concatenated,
    [k s/tp, b, h] -> [(k + n) s/tp, b, h].

    Args:
        depths: k - 1 to k + n - 1, from 0.
        model_norm: final norm of the model, applied by the first depth; None for the others.
        embedding: embedding of this rank.
        owns_embedding: the embedding belongs to this segment; else to another one of this rank.
        embedding_output: pointwise modules applied to the embedded tokens.
        layers: the transformer layers of a depth.
        hidden_dtype: dtype of the residual stream.
    """

    def __init__(
        self,
        spec: ModelSpec,
        depths: range,
        *,
        model_norm: nn.Module | None,
        embedding: Embedding,
        owns_embedding: bool,
        embedding_output: nn.Module,
        layers: Sequence[nn.Module],
        builder: LocalBuilder,
        tp: TensorParallel,
        hidden_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.depths, self.tp, self.hidden_dtype = depths, tp, hidden_dtype
        self.model_norm = model_norm
        self.tied_to = (embedding,)
        if owns_embedding:
            self.embedding = embedding
        self.embedding_output = embedding_output
        h, prefix = spec.hidden_size, f"mtp.layers.{depths.start}"
        names = ("embedding_norm", "hidden_norm", "final_norm")
        norms = [
            builder.norm(norm_weights(f"{prefix}.{name}", h, spec.norm, tp), spec.norm) for name in names
        ]
        self.embedding_norm, self.hidden_norm, self.final_norm = norms
        columns = [Columns(f"{prefix}.projection.weight", h)]
        weight = columns_layout(columns, 2 * h, Init(std=spec.init_std), tp)
        self.projection = builder.column_linear(None, LinearLayout(weight))
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        if self.model_norm is not None:
            hidden = self.model_norm(hidden, info).to(self.hidden_dtype)
        if not info.is_training:
            return hidden
        before = hidden.chunk(self.depths.start + 1)[-1] if self.depths.start else hidden
        if len(self.depths) == 1:
            return torch.cat((hidden, self._predict(before, self.depths.start, batch, info)))
        outputs, uses = [hidden], [InfoOfUse(info) for _ in self.depths]
        for depth, use in zip(self.depths, uses, strict=True):
            before = self._predict(before, depth, batch, cast("PassInfo", use))
            outputs.append(before)
        for layer in uses[0].router_metrics:
            rows = [use.router_metrics[layer] for use in uses]
            info.router_metrics[layer] = mean_losses(torch.stack(rows).sum(0), len(rows))
        for layer in uses[0].indexer_losses:
            info.indexer_losses[layer] = torch.stack([use.indexer_losses[layer] for use in uses]).mean()
        return torch.cat(outputs)

    def _predict(self, before: Tensor, depth: int, batch: Batch, info: PassInfo) -> Tensor:
        """Return the hidden states of a depth from those of the depth before, [s/tp, b, h]."""
        (embedding,) = self.tied_to
        assert isinstance(embedding, Embedding)
        tokens = self.embedding_output(embedding.words(batch.ahead[depth], info), info)
        both = torch.cat((self.embedding_norm(tokens, info), self.hidden_norm(before, info)), dim=-1)
        _, columns = self.projection(both, None, info)
        x = gather_columns(columns, self.tp).to(self.hidden_dtype)
        for layer in self.layers:
            x = layer(x, batch, info)
        return self.final_norm(x, info).to(self.hidden_dtype)
