"""Planted faults of sinks, output gates and logits of attention, of linear attention and of parallel branches, each with the layout in which parity must find it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatrain.kernels import gated_delta
from megatrain.kernels.gated_delta import causal_convolution, continue_gated_delta_rule
from megatrain.model import functions, linear_attention
from megatrain.model.families.parallel_layer import ParallelLayer
from megatrain.model.implementations.attention import LocalContextAttention
from megatrain.model.layer import Attention, TransformerLayer
from megatrain.model.linear_attention import DeltaRule
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context import largest_logits
from megatrain.parallel.context.head_exchange import HeadExchange, Heads
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.tools.parity.runs.program import Patch
from megatrain.training.parts import attention_logits


def _sinks_of_first_context_rank() -> AbstractContextManager[Any]:
    """Give every rank that computes some heads of all tokens the sink logits of the first rank's heads."""

    def of_first_heads(self: LocalContextAttention, q: Tensor) -> Tensor:
        return functions.as_leaf(self.sink, self.weight_grads.get("sink"))[: q.shape[2]]

    return mock.patch.object(LocalContextAttention, "sink_logits", of_first_heads)


def _sinks_of_next_head() -> AbstractContextManager[Any]:
    """Shift the sink logits of one tensor rank's heads by a head."""

    def shifted(self: LocalContextAttention, q: Tensor) -> Tensor | None:
        sinks = sink_logits(self, q)
        return sinks if sinks is None or self.tp.rank == 0 else sinks.roll(1)

    sink_logits = LocalContextAttention.sink_logits
    return mock.patch.object(LocalContextAttention, "sink_logits", shifted)


def _gates_of_next_head() -> AbstractContextManager[Any]:
    """Shift the gates of one rank's heads by a head."""

    def shifted(self: Attention, qkv: Tensor, info: PassInfo) -> tuple[Tensor, ...]:
        q, k, v, gate = split(self, qkv, info)
        return q, k, v, gate if dist.get_rank() == 0 else gate.roll(1, 2)

    split = Attention.split_heads
    return mock.patch.object(Attention, "split_heads", shifted)


def _decays_of_next_head() -> AbstractContextManager[Any]:
    """Shift the decays of one rank's heads of linear attention by a head."""

    def shifted(self: DeltaRule, qkv: Tensor, strengths: Tensor, info: PassInfo) -> Tensor:
        beta, alpha = strengths.chunk(2, dim=-1)
        alpha = alpha if dist.get_rank() == 0 else alpha.roll(1, 2)
        return forward(self, qkv, torch.cat((beta, alpha), dim=-1), info)

    forward = DeltaRule.forward
    return mock.patch.object(DeltaRule, "forward", shifted)


def _convolutions_of_one_rank() -> AbstractContextManager[Any]:
    """Convolve each chunk of a context rank as if no tokens came before: its last tokens are not handed to the next rank."""

    def of_chunks(x: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
        chunks = torch.arange(len(x)) // (len(x) // (2 * dist.get_world_size()))
        return causal_convolution(x, weight, chunks[:, None].expand(x.shape[:2]))

    return mock.patch.object(gated_delta, "causal_convolution", of_chunks)


def _convolutions_over_documents() -> AbstractContextManager[Any]:
    """Let convolutions read tokens of the document before."""

    def over_all(x: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
        return causal_convolution(x, weight)

    return mock.patch.object(gated_delta, "causal_convolution", over_all)


def _states_over_documents() -> AbstractContextManager[Any]:
    """Keep the state of delta nets over the end of a document."""

    def over_all(*arguments: Any, document_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        assert document_ids is not None
        return continue_gated_delta_rule(*arguments)

    return mock.patch.object(linear_attention, "continue_gated_delta_rule", over_all)


def _keys_of_first_context_rank() -> AbstractContextManager[Any]:
    """Give every context rank the filters and decays of the first rank's heads."""

    def of_first(self: HeadExchange, x: Tensor, parts: Sequence[Heads]) -> Tensor:
        return share(HeadExchange(ContextParallel(replace(self.group, rank=0))), x, parts)

    share = HeadExchange.share
    return mock.patch.object(HeadExchange, "share", of_first)


def _branches_in_sequence() -> AbstractContextManager[Any]:
    """Let the MLP of a parallel layer read the output of attention."""
    return mock.patch.object(ParallelLayer, "forward", TransformerLayer.forward)


def _logits_of_one_replica() -> AbstractContextManager[Any]:
    """Clip by the logits of a rank's own tokens and heads."""
    return mock.patch.object(attention_logits, "all_reduce", lambda x, *_: x)


def _logits_of_own_keys() -> AbstractContextManager[Any]:
    """Give each context rank its own keys in place of those of whole samples."""
    return mock.patch.object(largest_logits, "gather_samples", lambda k, cp: torch.cat([k] * cp.size))


ATTENTION_FAULTS: dict[str, tuple[Patch, str]] = {
    "sinks of the first context rank's heads": (_sinks_of_first_context_rank, "cp2 heads gpt-oss"),
    "sinks of the next head on a tensor rank": (_sinks_of_next_head, "tp2 gpt-oss"),
    "output gates of the next head on a tensor rank": (_gates_of_next_head, "tp2 qwen"),
    "decays of the next head on a tensor rank": (_decays_of_next_head, "tp2 qwen3-next"),
    "last tokens of a convolution not handed to the next rank": (_convolutions_of_one_rank, "cp2 qwen3-next"),
    "convolutions of the first context rank's heads": (_keys_of_first_context_rank, "cp2 qwen3-next"),
    "convolutions over the end of a document": (_convolutions_over_documents, "cp2 documents qwen3-next"),
    "states over the end of a document": (_states_over_documents, "cp2 documents qwen3-next"),
    "parallel branches in sequence": (_branches_in_sequence, "tp2 neox"),
    "attention logits of one replica": (_logits_of_one_replica, "dp2 qkclip"),
    "attention logits of a context rank's own keys": (_logits_of_own_keys, "cp2 qkclip"),
}
"""Context manager and layout of each fault."""
