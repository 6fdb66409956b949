"""Planted faults of BERT and T5: padding, cross-attention, the next-sentence head, tables that stages and stacks share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatrain.model import gpt
from megatrain.model.families.cross_attention import CrossAttention
from megatrain.model.families.masked_lm import BinaryHead
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.context import whole_keys
from megatrain.parallel.context_parallel import TokenSplit
from megatrain.parallel.grid import RankGroup
from megatrain.tools.parity.runs.program import Patch
from megatrain.training import engine
from megatrain.training.engine import Engine


def _padding_of_another_row() -> AbstractContextManager[Any]:
    def rolled(**values: Any) -> PassInfo:
        return PassInfo(**{**values, "is_token": values["is_token"].roll(1, dims=0)})

    return mock.patch.object(engine, "PassInfo", rolled)


def _cross_attention_reads_the_decoder() -> AbstractContextManager[Any]:
    forward = CrossAttention.forward

    def of_decoder(
        self: CrossAttention, residual: Tensor, delta: Tensor | None, memory: Tensor, info: PassInfo
    ) -> tuple[Tensor, Tensor]:
        return forward(self, residual, delta, torch.cat((residual, memory))[: len(memory)], info)

    return mock.patch.object(CrossAttention, "forward", of_decoder)


def _loss_over_padding() -> AbstractContextManager[Any]:
    """Count tokens of padding that the loss mask leaves out."""
    shard = Engine.shard_batches

    def counted(self: Engine, batches: Sequence[Batch]) -> list[Batch]:
        found = []
        for batch in shard(self, batches):
            assert batch.is_token is not None
            mask = batch.loss_mask + ~batch.is_token
            found.append(replace(batch, loss_mask=mask.clamp(max=1), denominator=None))
        return found

    return mock.patch.object(Engine, "shard_batches", counted)


def _gradient_of_the_pooler_twice() -> AbstractContextManager[Any]:
    forward = BinaryHead.forward

    def twice(self: BinaryHead, x: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        mean = forward(self, x, batch, info)
        return 2 * mean - mean.detach()

    return mock.patch.object(BinaryHead, "forward", twice)


def _pooler_of_every_rank() -> AbstractContextManager[Any]:
    """Pool the first token of the rows of each tensor and context rank."""
    return mock.patch.object(TokenSplit, "is_first", True)


def _keys_in_the_order_of_the_ranks() -> AbstractContextManager[Any]:
    return mock.patch.object(whole_keys, "to_sequence_order", lambda x, _: x)


def _gradients_of_keys_not_summed() -> AbstractContextManager[Any]:
    """Keep the gradients of this context rank's queries alone."""

    def local(dx: Tensor, group: RankGroup) -> Tensor:
        return whole_keys.to_rank_order(dx, group.size).chunk(group.size)[group.rank].contiguous()

    return mock.patch.object(whole_keys, "_summed", local)


def _words_of_the_decoder_not_summed() -> AbstractContextManager[Any]:
    """Leave the gradients of the word table apart on the stages that embed tokens."""
    return mock.patch.object(gpt, "embedding_ranks", return_value=(0,))


def _relative_positions_not_summed() -> AbstractContextManager[Any]:
    table = gpt.RelativePositions

    def alone(*arguments: Any, is_shared: bool) -> gpt.RelativePositions:
        return table(*arguments, is_shared=False)

    return mock.patch.object(gpt, "RelativePositions", alone)


FAMILY_FAULTS: dict[str, tuple[Patch, str]] = {
    "padding mask of another row": (_padding_of_another_row, "dp2 bert"),
    "cross-attention reads the decoder": (_cross_attention_reads_the_decoder, "tp2 sp t5"),
    "loss over padding": (_loss_over_padding, "dp2 bert"),
    "gradient of the pooler twice": (_gradient_of_the_pooler_twice, "pp2 bert"),
    "pooler of every tensor rank": (_pooler_of_every_rank, "tp2 sp bert"),
    "pooler of every context rank": (_pooler_of_every_rank, "cp2 bert"),
    "keys in the order of the context ranks": (_keys_in_the_order_of_the_ranks, "cp2 bert"),
    "gradients of keys not summed over context ranks": (_gradients_of_keys_not_summed, "cp2 mlm"),
    "words of the decoder not summed over stages": (_words_of_the_decoder_not_summed, "pp2 t5"),
    "relative positions not summed over stages": (_relative_positions_not_summed, "pp2 t5relative"),
}
"""The function that plants each fault, and the layout in which parity finds it."""
