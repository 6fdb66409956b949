"""A transformer layer: what passes between its leaves.

hidden ──┬─ norm + qkv ─ rotate ─ attention ─ projection ─ end ─┐
         └────────────────────────── + ─────────────────────────┘──┬─ norm + fc1 ─ activation + fc2 ─ end ─┐
                                                                   └────────────────── + ──────────────────┘── hidden

The end of a branch is a norm, dropout, both or nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatrain.kernels.rotary import RotarySpec, tables
from megatrain.model import functions
from megatrain.model.branches import Chain, branch_end, first_norm, ones
from megatrain.model.experts import ExpertBranch, ExpertRanks
from megatrain.model.implementations.leaves import Leaves, Pointwise
from megatrain.model.layouts import (
    Columns,
    Weights,
    columns_bias_layout,
    columns_layout,
    heads_layout,
    rows_layout,
    stream_layout,
)
from megatrain.model.recompute import Recompute, Recomputed
from megatrain.model.specs import (
    AttentionSpec,
    ExpertsSpec,
    GptSpec,
    LayerSpec,
    MlpSpec,
    NormPosition,
    NormSpec,
)
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.layout import Init
from megatrain.parallel.tensor import TensorParallel


class Rotation(nn.Module):
    """Turns queries or keys by their places in the sequence; channels beyond the tables' pass.

    Args:
        places: of the rows that come here; a shorter sequence has the first of them.
    """

    def __init__(self, spec: RotarySpec, head_channels: int, places: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.tables = tables(spec, head_channels, places, dtype=dtype)
        self.is_interleaved = spec.is_interleaved

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002 (a part gets it)
        cos, sin = (table[: x.shape[0]] for table in self.tables)
        return functions.turn(x, cos, sin, is_interleaved=self.is_interleaved)

    def heads(self, qkv: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys turned, and values, of [s, b, n + 2 g, d], which nothing may read afterwards."""
        cos, sin = (table[: qkv.shape[0]] for table in self.tables)
        return functions.turn_heads(qkv, sizes, cos, sin, is_interleaved=self.is_interleaved)


class Attention(nn.Module):
    """Self-attention over this rank's heads, between two leaves that know the ranks."""

    def __init__(
        self,
        spec: AttentionSpec,
        gpt: GptSpec,
        position: NormPosition,
        prefix: str,
        leaves: Leaves,
        tp: TensorParallel,
        rotation: Rotation | None,
        recompute: Recompute,
    ) -> None:
        super().__init__()
        self.spec = spec
        d, h = spec.head_channels, gpt.hidden_size
        own_groups = max(1, spec.num_query_groups // tp.size)
        self.sizes = [spec.num_heads // tp.size, own_groups, own_groups]
        self.qkv = leaves.column_linear(
            first_norm(gpt, position, prefix, tp),
            Weights(
                columns_layout(_qkv(spec, prefix, "weight", tp), h, Init(std=gpt.init_std), tp, is_qkv=True),
                columns_bias_layout(_qkv(spec, prefix, "bias", tp), tp) if spec.has_qkv_bias else None,
            ),
            forms_norm_again=recompute.has_part("layernorm"),
        )
        norms = [
            _head_norms(spec, f"{prefix}.{x}_norm", columns, gpt.norm, leaves, tp)
            for x, columns in zip("qk", _qkv(spec, prefix, "norm", tp)[:2], strict=True)
        ]
        self.rotation = None if any(norms) else rotation
        turn: list[Pointwise] = [] if rotation is None or self.rotation is not None else [rotation]
        self.queries, self.keys = (Chain([*norm, *turn]) for norm in norms)
        sink = columns_bias_layout([Columns(f"{prefix}.sink", spec.num_heads)], tp, Init(std=gpt.init_std))
        core = leaves.core_attention(spec, sink if spec.sink == "learned" else None, prefix)
        assert isinstance(core, nn.Module)
        self.core = Recomputed(core) if recompute.has_part("core_attn") else core
        self.proj = leaves.row_linear(
            Weights(
                rows_layout(
                    f"{prefix}.proj.weight", h, spec.num_heads * d, Init(std=gpt.output_init_std), tp
                ),
                stream_layout(f"{prefix}.proj.bias", h, Init(), tp) if spec.has_bias else None,
            )
        )
        self.end = branch_end(gpt, position, prefix, leaves, tp)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        residual, qkv = self.qkv(residual, delta, info)
        q, k, v = self._heads(qkv.unflatten(-1, (-1, self.spec.head_channels)), info)
        return residual, self.end(self.proj(self.core(q, k, v, info), info), info)

    def _heads(self, qkv: Tensor, info: PassInfo) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of [s, b, n + 2 g, d]."""
        if self.rotation is not None:
            return self.rotation.heads(qkv, self.sizes)
        q, k, v = functions.split_heads(qkv, self.sizes)
        return self.queries(q, info), self.keys(k, info), v


class Mlp(nn.Module):
    """Feed-forward part."""

    def __init__(
        self,
        spec: MlpSpec,
        gpt: GptSpec,
        position: NormPosition,
        prefix: str,
        leaves: Leaves,
        tp: TensorParallel,
        *,
        forms_norm_again: bool,
    ) -> None:
        super().__init__()
        h, f = gpt.hidden_size, spec.ffn_hidden_size
        fc1 = ["gate", "up"] if spec.is_gated else ["up"]
        self.fc1 = leaves.column_linear(
            first_norm(gpt, position, prefix, tp),
            Weights(
                columns_layout(
                    [Columns(f"{prefix}.{x}.weight", f) for x in fc1], h, Init(std=gpt.init_std), tp
                ),
                columns_bias_layout([Columns(f"{prefix}.{x}.bias", f) for x in fc1], tp)
                if spec.has_bias
                else None,
            ),
            forms_norm_again=forms_norm_again,
        )
        self.fc2 = leaves.activation_row_linear(
            spec,
            Weights(
                rows_layout(f"{prefix}.down.weight", h, f, Init(std=gpt.output_init_std), tp),
                stream_layout(f"{prefix}.down.bias", h, Init(), tp) if spec.has_bias else None,
            ),
        )
        self.end = branch_end(gpt, position, prefix, leaves, tp)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        residual, x = self.fc1(residual, delta, info)
        return residual, self.end(self.fc2(x, info), info)


class TransformerLayer(nn.Module):
    """One layer, a segment of its own. `number` is global, whatever the pipeline stage."""

    def __init__(
        self,
        spec: LayerSpec,
        gpt: GptSpec,
        number: int,
        leaves: Leaves,
        ranks: ExpertRanks,
        rotation: Rotation | None,
        recompute: Recompute,
    ) -> None:
        super().__init__()
        tp = ranks.split.tp
        prefix, position = f"decoder.layers.{number}", spec.norm_position
        self.branches = nn.ModuleList()
        if spec.mixer is not None:
            self.branches.append(
                Attention(spec.mixer, gpt, position, f"{prefix}.attention", leaves, tp, rotation, recompute)
            )
        if isinstance(spec.mlp, ExpertsSpec):
            self.branches.append(ExpertBranch(spec.mlp, gpt, number, position, leaves, ranks, recompute))
        elif spec.mlp is not None:
            is_whole = recompute.has_part("mlp")
            again = recompute.has_part("layernorm") and not is_whole
            mlp = Mlp(spec.mlp, gpt, position, f"{prefix}.mlp", leaves, tp, forms_norm_again=again)
            self.branches.append(Recomputed(mlp) if is_whole else mlp)

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:  # noqa: ARG002 (a segment gets the batch)
        residual, delta = hidden, None  # a branch first adds what the one before it gave
        for branch in self.branches:
            residual, delta = branch(residual, delta, info)
        return residual if delta is None else residual + delta


def _qkv(spec: AttentionSpec, prefix: str, kind: str, tp: TensorParallel) -> list[Columns]:
    """What belongs to the outputs of the first projection: queries, keys and values."""
    queries, keys = spec.num_heads * spec.head_channels, spec.num_query_groups * spec.head_channels
    copies = tp.kv if spec.num_query_groups < tp.size else None
    return [
        Columns(f"{prefix}.q.{kind}", queries),
        Columns(f"{prefix}.k.{kind}", keys, copies=copies),
        Columns(f"{prefix}.v.{kind}", keys, copies=copies),
    ]


def _head_norms(
    spec: AttentionSpec, name: str, columns: Columns, norm: NormSpec, leaves: Leaves, tp: TensorParallel
) -> list[Pointwise]:
    """The norm of queries or keys, if there is one; `columns`: those that the projection gives them."""
    if spec.qk_norm == "head":
        decays = spec.does_qk_norm_decay
        weight = heads_layout(f"{name}.weight", spec.head_channels, ones(norm), tp, decays=decays)
        bias = heads_layout(f"{name}.bias", spec.head_channels, Init(), tp, decays=decays)
        return [leaves.norm(Weights(weight, bias if norm.kind == "LayerNorm" else None), norm)]
    if spec.qk_norm == "all_heads":
        channels = dataclasses.replace(columns, name=f"{name}.weight")
        weight = columns_bias_layout([channels], tp, ones(norm), decays=spec.does_qk_norm_decay)
        return [leaves.split_norm(Weights(weight), norm)]
    return []
