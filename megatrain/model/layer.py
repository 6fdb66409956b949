"""A transformer layer: branches of the residual stream, each made of leaves.

hidden ──┬─ norm + qkv ─ RoPE ─ core attention ─ gate ─ projection ─ output ─┐
         └───────────────────────────────── + ───────────────────────────────┘──┬─ norm + fc1 ─ activation + fc2 ─ output ─┐
                                                                                └───────────────────── + ──────────────────┘── hidden

"Gate" is --attention-output-gate. "Output" is a norm, dropout, both or nothing. A branch adds the output of the branch before it to the residual stream, so that
one kernel does this addition and the norm; branches of a `ParallelLayer` all read the input of the layer. Layers with experts have the branch of experts.py in place of the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatrain.kernels.rotary import RotarySpec, cos_sin_tables
from megatrain.model import functions
from megatrain.model.attention_parts import attention_projection, core_attention, gate_output, qk_norm
from megatrain.model.implementations.leaves import Leaves, Pointwise
from megatrain.model.layouts import (
    Columns,
    Weights,
    branch_norm_weights,
    columns_bias_layout,
    columns_layout,
    norm_weights,
    qkv_columns,
    rows_layout,
    stream_layout,
)
from megatrain.model.recompute import Recompute, RecomputedModule
from megatrain.model.specs import AttentionSpec, GptSpec, MlpSpec, NormPosition
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.layout import Init
from megatrain.parallel.tensor_overlap.terms import add_terms
from megatrain.parallel.tensor_parallel import TensorParallel


class TransformerLayer(nn.Module):
    """A layer: the branch of its mixer, the branch of its MLP, or both."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a segment)
        residual, delta = hidden, None  # delta: output of the branch before, not yet added
        for branch in self.branches:
            residual, delta = branch(residual, delta, info)
        if delta is not None and delta.dim() > residual.dim():
            return add_terms(residual, delta)
        return residual if delta is None else residual + delta


class ParallelLayer(TransformerLayer):
    """A layer whose branches all read its input (GPT-J, GPT-NeoX): hidden + attention(hidden) + MLP(hidden)."""

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a segment)
        residual, outputs = hidden, []
        for branch in self.branches:
            residual, output = branch(residual, None, info)
            outputs.append(output)
        return sum(outputs, residual)


class Attention(nn.Module):
    """Self-attention over this rank's heads, from the norm to the output of the branch."""

    def __init__(
        self,
        spec: AttentionSpec,
        gpt: GptSpec,
        position: NormPosition,
        prefix: str,
        leaves: Leaves,
        tp: TensorParallel,
        rope: RotaryEmbedding | None,
        recompute: Recompute,
    ) -> None:
        super().__init__()
        self.spec = spec
        local_groups = max(1, spec.num_query_groups // tp.size)
        num_heads = spec.num_heads // tp.size
        self.sizes = [num_heads, local_groups, local_groups, *([num_heads] if spec.has_output_gate else [])]
        columns, init = qkv_columns(spec, prefix, "weight", tp), Init(std=gpt.init_std)
        self.qkv = leaves.column_linear(
            branch_norm_weights(gpt, position, prefix, tp),
            Weights(
                columns_layout(columns, gpt.hidden_size, init, tp, is_qkv=True),
                columns_bias_layout(qkv_columns(spec, prefix, "bias", tp), tp) if spec.has_qkv_bias else None,
            ),
            recompute_norm=recompute.has_part("layernorm"),
        )
        norms = [
            qk_norm(spec, f"{prefix}.{x}_norm", columns, gpt.norm, leaves, tp)
            for x, columns in zip("qk", qkv_columns(spec, prefix, "norm", tp)[:2], strict=True)
        ]
        # Without norms of queries and keys, one kernel splits the projection and applies RoPE.
        self.rope = None if any(norms) else rope
        after_norm: list[Pointwise] = [] if rope is None or self.rope is not None else [rope]
        self.query_output, self.key_output = (Sequential([*norm, *after_norm]) for norm in norms)
        core = core_attention(spec, gpt, prefix, leaves, tp)
        self.core = RecomputedModule(core) if recompute.has_part("core_attn") else core
        self.proj = attention_projection(spec, gpt, prefix, leaves, tp)
        self.output = branch_output(gpt, position, prefix, leaves, tp)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        residual, qkv = self.qkv(residual, delta, info)
        q, k, v, *gates = self.split_heads(qkv.unflatten(-1, (-1, self.spec.head_channels)), info)
        heads = self.core(q, k, v, info)
        for gate in gates:
            heads = gate_output(heads, gate.flatten(2))
        return residual, self.output(self.proj(heads, info), info)

    def split_heads(self, qkv: Tensor, info: PassInfo) -> tuple[Tensor, ...]:
        """Split [s, b, heads, d] into queries, keys, values and, if there is one, the gate; queries and keys get norm and RoPE."""
        if self.rope is not None:
            return self.rope.split_qkv(qkv, self.sizes)
        q, k, *others = functions.split_heads(qkv, self.sizes)
        return self.query_output(q, info), self.key_output(k, info), *others


class Mlp(nn.Module):
    """The dense MLP, from the norm to the output of the branch."""

    def __init__(
        self,
        spec: MlpSpec,
        gpt: GptSpec,
        position: NormPosition,
        prefix: str,
        leaves: Leaves,
        tp: TensorParallel,
        *,
        recompute_norm: bool,
    ) -> None:
        super().__init__()
        h, f = gpt.hidden_size, spec.ffn_hidden_size
        fc1 = [Columns(f"{prefix}.{name}.weight", f) for name in spec.fc1_names]
        fc1_bias = [Columns(f"{prefix}.{name}.bias", f) for name in spec.fc1_names]
        self.fc1 = leaves.column_linear(
            branch_norm_weights(gpt, position, prefix, tp),
            Weights(
                columns_layout(fc1, h, Init(std=gpt.init_std), tp),
                columns_bias_layout(fc1_bias, tp) if spec.has_bias else None,
            ),
            recompute_norm=recompute_norm,
        )
        self.fc2 = leaves.activation_row_linear(
            spec,
            Weights(
                rows_layout(f"{prefix}.down.weight", h, f, Init(std=gpt.output_init_std), tp),
                stream_layout(f"{prefix}.down.bias", h, Init(), tp) if spec.has_bias else None,
            ),
        )
        self.output = branch_output(gpt, position, prefix, leaves, tp)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        residual, x = self.fc1(residual, delta, info)
        return residual, self.output(self.fc2(x, info), info)


class RotaryEmbedding(nn.Module):
    """RoPE over the first channels of each head; other channels pass unchanged.

    Args:
        positions: positions of this rank's rows; shorter sequences use the first of them.
        dtype: dtype of the tables.
    """

    def __init__(self, spec: RotarySpec, head_channels: int, positions: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.tables = cos_sin_tables(spec, head_channels, positions, dtype=dtype)
        self.is_interleaved = spec.is_interleaved

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a pointwise module)
        cos, sin = (table[: x.shape[0]] for table in self.tables)
        return functions.apply_rope(x, cos, sin, is_interleaved=self.is_interleaved)

    def split_qkv(self, qkv: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Split [s, b, heads, d] and apply RoPE to the first two parts, queries and keys, in place; `qkv` must not be reused."""
        cos, sin = (table[: qkv.shape[0]] for table in self.tables)
        return functions.apply_rope_to_qkv(qkv, sizes, cos, sin, is_interleaved=self.is_interleaved)


class Sequential(nn.Module):
    """Pointwise modules applied in order; without any, the identity."""

    def __init__(self, modules: Sequence[Pointwise]) -> None:
        super().__init__()
        self.steps = nn.ModuleList([module for module in modules if isinstance(module, nn.Module)])
        assert len(self.steps) == len(modules)

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        for step in self.steps:
            x = step(x, info)
        return x


def branch_output(
    gpt: GptSpec, position: NormPosition, prefix: str, leaves: Leaves, tp: TensorParallel
) -> Sequential:
    """Build the norm and the dropout that end a branch, if it has them."""
    modules: list[Pointwise] = []
    if position != "pre":
        weights = norm_weights(f"{prefix}.post_norm", gpt.hidden_size, gpt.norm, tp)
        modules.append(leaves.norm(weights, gpt.norm))
    if gpt.hidden_dropout:
        modules.append(leaves.dropout(gpt.hidden_dropout, f"{prefix}.hidden"))
    return Sequential(modules)
