"""Planted faults of sinks and output gates of attention, of linear attention and of parallel branches, each with the layout in which parity must find it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from megatrain.model import functions
from megatrain.model.implementations.attention import LocalContextAttention
from megatrain.model.layer import Attention, ParallelLayer, TransformerLayer
from megatrain.model.linear_attention import DeltaRule
from megatrain.parallel.batch import PassInfo
from megatrain.tools.parity.runs.program import Patch


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

    def shifted(self: DeltaRule, qkv: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
        return forward(self, qkv, beta, alpha if dist.get_rank() == 0 else alpha.roll(1, 2))

    forward = DeltaRule.forward
    return mock.patch.object(DeltaRule, "forward", shifted)


def _branches_in_sequence() -> AbstractContextManager[Any]:
    """Let the MLP of a parallel layer read the output of attention."""
    return mock.patch.object(ParallelLayer, "forward", TransformerLayer.forward)


ATTENTION_FAULTS: dict[str, tuple[Patch, str]] = {
    "sinks of the first context rank's heads": (_sinks_of_first_context_rank, "cp2 heads gpt-oss"),
    "sinks of the next head on a tensor rank": (_sinks_of_next_head, "tp2 gpt-oss"),
    "output gates of the next head on a tensor rank": (_gates_of_next_head, "tp2 qwen"),
    "decays of the next head on a tensor rank": (_decays_of_next_head, "tp2 qwen3-next"),
    "parallel branches in sequence": (_branches_in_sequence, "tp2 neox"),
}
"""Context manager and layout of each fault."""
