"""Cross-attention: queries of the residual stream, keys and values of the memory, the output of another stack."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from megatrain.config.model_spec.cross_attention import CrossAttentionSpec
from megatrain.model import functions
from megatrain.model.families.masked_attention import MaskedAttention
from megatrain.model.layer import TransformerLayer, branch_output
from megatrain.model.layer_context import LayerContext
from megatrain.model.recompute import RecomputedModule
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.tensor_parallel import TensorParallel


class CrossAttention(nn.Module):
    """Attention over this rank's heads, from the norm to the output of the branch."""

    def __init__(self, spec: CrossAttentionSpec, context: LayerContext) -> None:
        super().__init__()
        self.spec = spec
        linears = context.linears(spec)
        self.q = context.column_linear(linears["q"], context.branch_norm(spec), has_bias=spec.has_qkv_bias)
        self.kv = context.column_linear(linears["k"], None, has_bias=spec.has_qkv_bias, keeps_norm=True)
        core = MaskedAttention(spec, context)
        self.core = RecomputedModule(core) if context.recompute.has_part("core_attn") else core
        self.proj = context.row_linear(linears["proj"], has_bias=spec.has_bias)
        self.output = branch_output(spec, context)

    def forward(
        self, residual: Tensor, delta: Tensor | None, memory: Tensor, info: PassInfo
    ) -> tuple[Tensor, Tensor | None]:
        """Like the branches of `parts.py`, with the memory [s_memory/tp, b, h]."""
        residual, q = self.q(residual, delta, info)
        _, kv = self.kv(memory, None, info)
        kv = kv.unflatten(-1, (-1, self.spec.head_dim))  # the heads of keys, then those of values
        k, v = functions.split_heads(kv, [kv.shape[2] // 2] * 2)
        heads = self.core(q.unflatten(-1, (-1, self.spec.head_dim)), k, v, info)
        return self.output.add_to(residual, self.proj(heads, info), info)


class LayerWithMemory(TransformerLayer):
    """A layer of a stack that reads the output of another one, which is sent with the stream.

    [(s + s_memory)/tp, b, h] -> the same: first this rank's rows of the residual stream, then those of the memory.
    """

    def __init__(self, branches: list[nn.Module], tp: TensorParallel) -> None:
        super().__init__(branches)
        self.tp = tp

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        residual, memory, passed = _Split.apply(hidden, _rows_of_memory(batch, self.tp))
        delta: Tensor | None = None
        for branch in self.branches:
            if isinstance(branch, CrossAttention):
                residual, delta = branch(residual, delta, memory, info)
            else:
                residual, delta = branch(residual, delta, info)
        return torch.cat((residual if delta is None else residual + delta, passed))


def split_memory(hidden: Tensor, batch: Batch, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of the residual stream, and of the memory."""
    rows = _rows_of_memory(batch, tp)
    stream, memory = hidden.split([hidden.shape[0] - rows, rows])
    return stream, memory


def _rows_of_memory(batch: Batch, tp: TensorParallel) -> int:
    assert batch.encoder is not None, "the batch of a model with an encoder and a decoder"
    return tp.sequence_rows(batch.encoder.tokens.shape[1])


class _Split(Function):
    """[stream | memory] -> stream, and the memory twice; the backward pass adds its two gradients where they are stored."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG004
        stream, memory = hidden.split([hidden.shape[0] - rows, rows])
        return stream, memory, memory.view_as(memory)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstream: Tensor, dmemory: Tensor, dpassed: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        dhidden = dstream.new_empty(len(dstream) + len(dmemory), *dstream.shape[1:])
        dhidden[: len(dstream)] = dstream
        torch.add(dmemory, dpassed, out=dhidden[len(dstream) :])
        return dhidden, None
