"""A transformer layer: what passes between its leaves.

hidden ──┬─ norm + qkv ─ rotate ─ attention ─ projection ─┐
         └────────────────────── + ──────────────────────┘──┬─ norm + fc1 ─ activation + fc2 ─┐
                                                            └──────────────── + ──────────────┘── hidden
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.model.functions import rotate
from megatrain.model.implementations.leaves import Leaves
from megatrain.model.layouts import columns_layout, norm_layout, rows_layout
from megatrain.model.specs import AttentionSpec, GptSpec, LayerSpec, MlpSpec
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.layout import Init
from megatrain.parallel.tensor import TensorParallel

RotaryTables = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Self-attention over this rank's heads, between two leaves that know the ranks."""

    def __init__(
        self,
        spec: AttentionSpec,
        gpt: GptSpec,
        prefix: str,
        leaves: Leaves,
        tp: TensorParallel,
        rotary: RotaryTables | None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.rotary = rotary
        d, h = spec.head_channels, gpt.hidden_size
        self.sizes = [
            spec.num_heads // tp.size,
            spec.num_query_groups // tp.size,
            spec.num_query_groups // tp.size,
        ]
        qkv = [("q", spec.num_heads), ("k", spec.num_query_groups), ("v", spec.num_query_groups)]
        self.qkv = leaves.norm_column_linear(
            norm_layout(f"{prefix}.norm.weight", h, tp),
            columns_layout([(f"{prefix}.{x}.weight", n * d) for x, n in qkv], h, Init(std=gpt.init_std), tp),
        )
        self.core = leaves.core_attention(spec)
        self.proj = leaves.row_linear(
            rows_layout(f"{prefix}.proj.weight", h, spec.num_heads * d, Init(std=gpt.output_init_std), tp)
        )

    def forward(
        self, hidden: Tensor, info: PassInfo
    ) -> tuple[Tensor, Tensor]:  # [s/tp, b, h] -> (residual, delta)
        residual, qkv = self.qkv(hidden, None, info)
        q, k, v = qkv.unflatten(-1, (-1, self.spec.head_channels)).split(self.sizes, dim=2)
        if self.rotary is not None:
            cos, sin = (table[: q.shape[0]] for table in self.rotary)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return residual, self.proj(self.core(q, k, v, info), info)


class Mlp(nn.Module):
    """Gated feed-forward part."""

    def __init__(self, spec: MlpSpec, gpt: GptSpec, prefix: str, leaves: Leaves, tp: TensorParallel) -> None:
        super().__init__()
        h, f = gpt.hidden_size, spec.ffn_hidden_size
        fc1 = [(f"{prefix}.gate.weight", f), (f"{prefix}.up.weight", f)]
        self.fc1 = leaves.norm_column_linear(
            norm_layout(f"{prefix}.norm.weight", h, tp), columns_layout(fc1, h, Init(std=gpt.init_std), tp)
        )
        self.fc2 = leaves.swiglu_row_linear(
            rows_layout(f"{prefix}.down.weight", h, f, Init(std=gpt.output_init_std), tp)
        )

    def forward(self, residual: Tensor, delta: Tensor, info: PassInfo) -> tuple[Tensor, Tensor]:
        residual, x = self.fc1(residual, delta, info)
        return residual, self.fc2(x, info)


class TransformerLayer(nn.Module):
    """One layer, a segment of its own. `number` is global, whatever the pipeline stage."""

    def __init__(
        self,
        spec: LayerSpec,
        gpt: GptSpec,
        number: int,
        leaves: Leaves,
        tp: TensorParallel,
        rotary: RotaryTables | None,
    ) -> None:
        super().__init__()
        prefix = f"decoder.layers.{number}"
        self.attention = Attention(spec.mixer, gpt, f"{prefix}.attention", leaves, tp, rotary)
        self.mlp = Mlp(spec.mlp, gpt, f"{prefix}.mlp", leaves, tp)

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:  # noqa: ARG002 (a segment gets the batch)
        residual, delta = self.attention(hidden, info)
        residual, delta = self.mlp(residual, delta, info)
        out: Tensor = residual + delta
        return out


def rotary_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the tables: fp32, or wider where the model is."""
    return torch.promote_types(dtype, torch.float32)
