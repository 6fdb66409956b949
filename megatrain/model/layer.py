"""A transformer layer: branches of the residual stream, each a module.

hidden ──┬─ norm + qkv ─ RoPE ─ core attention ─ gate ─ projection ─ output ─┐
         └───────────────────────────────── + ───────────────────────────────┘──┬─ norm + fc1 ─ activation + fc2 ─ output ─┐
                                                                                └───────────────────── + ──────────────────┘── hidden

"Gate" is --attention-output-gate. "Output" is a norm, dropout, both or nothing. A branch adds the output of the branch before it to the residual stream, so that
one kernel does this addition and the norm, unless dropout did it; branches of a `ParallelLayer` (families/parallel_layer.py) all read the input of the layer. Layers with experts have the branch of experts/experts.py in place of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.part import Part
from megatrain.config.model_spec.rotary import RotarySpec
from megatrain.kernels.rotary import cos_sin_tables
from megatrain.model import functions
from megatrain.model.attention_parts import core_attention, gate_output, qk_norm
from megatrain.model.implementations.module_protocols import Pointwise
from megatrain.model.layer_context import LayerContext
from megatrain.model.layouts import norm_weights
from megatrain.model.recompute import RecomputedModule
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.tensor_overlap.terms import add_terms


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


class Attention(nn.Module):
    """Self-attention over this rank's heads, from the norm to the output of the branch."""

    def __init__(self, spec: AttentionSpec, context: LayerContext) -> None:
        super().__init__()
        self.spec = spec
        tp = context.tp
        local_groups = max(1, spec.num_query_groups // tp.size)
        num_heads = spec.num_heads // tp.size
        self.sizes = [num_heads, local_groups, local_groups, *([num_heads] if spec.has_output_gate else [])]
        linears = context.linears(spec)
        self.qkv = context.column_linear(
            linears["q"], context.branch_norm(spec), has_bias=spec.has_qkv_bias, is_qkv=True
        )
        columns = context.columns(linears["q"], "weight")
        norms = [qk_norm(spec, context, f"{x}_norm", one) for x, one in zip("qk", columns[:2], strict=True)]
        # Without norms of queries and keys, one kernel splits the projection and applies RoPE.
        rope = context.rope_of(spec)
        self.rope = None if any(norms) else rope
        after_norm: list[Pointwise] = [] if rope is None or self.rope is not None else [rope]
        self.query_output, self.key_output = (Sequential([*norm, *after_norm]) for norm in norms)
        core = core_attention(spec, context)
        self.core = RecomputedModule(core) if context.recompute.has_part("core_attn") else core
        self.proj = context.row_linear(linears["proj"], has_bias=spec.has_bias)
        self.output = branch_output(spec, context)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor | None]:
        residual, qkv = self.qkv(residual, delta, info)
        q, k, v, *gates = self.split_heads(qkv.unflatten(-1, (-1, self.spec.head_dim)), info)
        heads = self.core(q, k, v, info)
        for gate in gates:
            heads = gate_output(heads, gate.flatten(2))
        return self.output.add_to(residual, self.proj(heads, info), info)

    def split_heads(self, qkv: Tensor, info: PassInfo) -> tuple[Tensor, ...]:
        """Split [s, b, heads, d] into queries, keys, values and, if there is one, the gate; queries and keys get norm and RoPE."""
        if self.rope is not None:
            parts: tuple[Tensor, ...] = self.rope.split_qkv(qkv, self.sizes)
            return parts
        q, k, *others = functions.split_heads(qkv, self.sizes)
        return self.query_output(q, info), self.key_output(k, info), *others


class Mlp(nn.Module):
    """The dense MLP, from the norm to the output of the branch."""

    def __init__(self, spec: MlpSpec, context: LayerContext) -> None:
        super().__init__()
        fc1, fc2 = spec.linears(context.model.hidden_size)
        self.fc1 = context.column_linear(
            fc1,
            context.branch_norm(spec),
            has_bias=spec.has_bias,
            keeps_norm=context.recompute.has_part("mlp") or context.recompute.mlp_rows is not None,
        )
        weights = context.row_weights(fc2, has_bias=spec.has_bias)
        recompute = context.recompute.has_part("mlp_act")
        self.fc2 = context.builder.activation_row_linear(spec, weights, recompute_activation=recompute)
        self.output = branch_output(spec, context)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor | None]:
        residual, x = self.fc1(residual, delta, info)
        return self.output.add_to(residual, self.fc2(x, info), info)


class RotaryEmbedding(nn.Module):
    """RoPE over the first channels of each head; other channels pass unchanged.

    Args:
        positions: positions of this rank's rows; without `tables_of`, shorter sequences use the first of them.
        dtype: dtype of the tables.
    """

    def __init__(self, spec: RotarySpec, head_dim: int, positions: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.tables = cos_sin_tables(spec, head_dim, positions, dtype=dtype)
        self.is_interleaved = spec.is_interleaved
        self.tables_of: Callable[[int], tuple[Tensor, Tensor]] | None = None  # for any number of rows

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a pointwise module)
        return functions.apply_rope(x, *self.rows(x.shape[0]), is_interleaved=self.is_interleaved)

    def split_qkv(self, qkv: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Split [s, b, heads, d] and apply RoPE to the first two parts, queries and keys, in place; `qkv` must not be reused."""
        rows = self.rows(len(qkv))
        return functions.apply_rope_to_qkv(qkv, sizes, *rows, is_interleaved=self.is_interleaved)

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the tables of this number of rows."""
        cos, sin = self.tables if self.tables_of is None else self.tables_of(count)
        return (cos, sin) if count == len(cos) else (cos[:count], sin[:count])


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


class BranchOutput(Sequential):
    """The norm and the dropout that end a branch, if it has them."""

    adds = False  # True: dropout also adds to the residual stream

    def add_to(self, residual: Tensor, x: Tensor, info: PassInfo) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream and the output, None if it has been added."""
        if not self.adds:
            return residual, self(x, info)
        *norms, dropout = self.steps
        for norm in norms:
            x = norm(x, info)
        return dropout(x, info, residual), None


def branch_output(part: Part, context: LayerContext) -> BranchOutput:
    """Build the norm and the dropout that end the branch of a part, if it has them."""
    modules: list[Pointwise] = []
    spec, name = context.model, context.name(part)
    if context.norm_position != "pre":
        weights = norm_weights(f"{name}.post_norm", spec.hidden_size, spec.norm, context.tp)
        modules.append(context.builder.norm(weights, spec.norm))
    if spec.hidden_dropout:
        modules.append(context.builder.dropout(spec.hidden_dropout, f"{name}.hidden"))
    output = BranchOutput(modules)
    output.adds = context.adds_outputs
    return output
