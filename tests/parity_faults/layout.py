"""Planted faults of layouts: the classic errors of distributed training, each with the layout in which parity must find it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatrain.kernels.attention.dropout import Dropout
from megatrain.kernels.attention.interface import SoftmaxMerge
from megatrain.model import head
from megatrain.model.implementations import attention, split_norm
from megatrain.optim.muon import Muon
from megatrain.optim.sharded import ShardedOptimizer
from megatrain.optim.soap import MatrixState
from megatrain.parallel import data_parallel, tensor_parallel
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.collectives import Transfer, all_gather, all_reduce
from megatrain.parallel.context import context_attention, gathered_attention
from megatrain.parallel.context_parallel import ContextParallel, TokenSplit
from megatrain.parallel.data_parallel import DataParallel, GradientReduction, WeightAllGather
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.tensor_overlap import gemms
from megatrain.parallel.tensor_parallel import VocabShard
from megatrain.tools.parity.runs.program import Patch
from megatrain.training import engine, routers
from megatrain.training.routers import Routers


def _dropped_all_reduce() -> AbstractContextManager[Any]:
    """Skip the all-reduces of tensor-parallel layers; the cross-entropy keeps its own."""
    return mock.patch.object(tensor_parallel, "_sum", lambda x, _group: x.clone())


def _later_half_lost() -> AbstractContextManager[Any]:
    """Drop the half of an MLP's weight gradient that overlaps the next gather."""
    first_half = gemms.first_half

    def lost(*arguments: Any) -> Any:
        first = first_half(*arguments)
        arguments[-1].late.clear()
        return first

    return mock.patch.object(gemms, "first_half", lost)


def _wrong_scale() -> AbstractContextManager[Any]:
    def doubled(**values: Any) -> PassInfo:
        return PassInfo(**{**values, "loss_scale": 2 * values["loss_scale"]})

    return mock.patch.object(engine, "PassInfo", doubled)


def _muon_per_rank() -> AbstractContextManager[Any]:
    step = Muon.step

    def alone(self: Muon, *args: Any) -> None:
        self.owned = {
            family: [[one for of_rank in owned for one in of_rank]] for family, owned in self.owned.items()
        }
        self.groups = dict.fromkeys(self.groups, RankGroup("own", (0,), 0))
        step(self, *args)

    return mock.patch.object(Muon, "step", alone)


def _covariances_of_a_part() -> AbstractContextManager[Any]:
    accumulate = MatrixState.accumulate

    def of_rows(self: MatrixState, gradient: torch.Tensor, beta: float) -> None:
        rows = torch.arange(len(gradient), device=gradient.device)[:, None] < len(gradient) // 2
        accumulate(self, gradient * rows, beta)

    return mock.patch.object(MatrixState, "accumulate", of_rows)


def _documents_ignored() -> AbstractContextManager[Any]:
    return mock.patch.object(engine, "PassInfo", lambda **values: PassInfo(**{**values, "documents": None}))


def _stale_gather() -> AbstractContextManager[Any]:
    return mock.patch.object(DataParallel, "all_gather_weights", return_value=None)


def _first_bucket_skipped() -> AbstractContextManager[Any]:
    mark_ready = GradientReduction.mark_ready

    def skipping(self: GradientReduction, number: int, *, is_last: bool) -> None:
        if number:
            mark_ready(self, number, is_last=is_last)

    return mock.patch.object(GradientReduction, "mark_ready", skipping)


def _first_bucket_too_large() -> AbstractContextManager[Any]:
    """Scale one rank's gradients by 1.001: less than bf16 rounding, far more than the rounding of fp32 sums."""
    mark_ready = GradientReduction.mark_ready

    def spoiling(self: GradientReduction, number: int, *, is_last: bool) -> None:
        if number == 1 and is_last and self.families[number].shard.rank == 0:
            self.memory.full[number] *= 1.001
        mark_ready(self, number, is_last=is_last)

    return mock.patch.object(GradientReduction, "mark_ready", spoiling)


def _one_all_gather_skipped() -> AbstractContextManager[Any]:
    """Skip one all-gather, so that the layer computes with old weights: on a CPU a missing wait would rarely show."""
    begin = WeightAllGather.begin
    seen: Counter[int] = Counter()

    def only_at_start(self: WeightAllGather, number: int) -> Transfer:
        seen[number] += 1
        return Transfer() if number == 1 and seen[number] > 1 else begin(self, number)

    return mock.patch.object(WeightAllGather, "begin", only_at_start)


def _instances_not_reduced() -> AbstractContextManager[Any]:
    return mock.patch.object(data_parallel, "begin_all_reduce", return_value=Transfer())


def _last_microbatch_only() -> AbstractContextManager[Any]:
    return mock.patch.object(data_parallel, "add_to_shard", lambda own, received: own.copy_(received))


def _weights_not_gathered() -> AbstractContextManager[Any]:
    """Leave the allocated memory of weights empty (zeros)."""
    begin = WeightAllGather.begin

    def empty(self: WeightAllGather, number: int) -> Transfer:
        is_kept = self.memory.is_kept_full[number]
        transfer = begin(self, number)
        if not is_kept:
            transfer.wait()
            self.memory.full[number].data.zero_()
        return transfer

    return mock.patch.object(WeightAllGather, "begin", empty)


def _double_counted_norm() -> AbstractContextManager[Any]:
    return mock.patch.object(ShardedOptimizer, "counted", lambda _, flats: flats)


def _partial_sums_skipped_over(name: str) -> Callable[[], AbstractContextManager[Any]]:
    def plant() -> AbstractContextManager[Any]:
        sum_partial = DataParallel.finish_gradients

        def skipping(self: DataParallel) -> None:
            with mock.patch("megatrain.parallel.data_parallel.all_reduce", _unless):
                sum_partial(self)

        def _unless(x: Any, group: Any) -> Any:
            return x if group.name == name else all_reduce(x, group)

        return mock.patch.object(DataParallel, "finish_gradients", skipping)

    return plant


def _replicas_counted_by_each_rank() -> AbstractContextManager[Any]:
    is_first_of = RankGrid.is_first_of
    return mock.patch.object(
        RankGrid, "is_first_of", lambda self, names: is_first_of(self, [n for n in names if n != "kv"])
    )


def _shifted_vocabulary() -> AbstractContextManager[Any]:
    return mock.patch.object(VocabShard, "first", property(lambda self: self.group.rank * (self.rows + 1)))


def _z_loss_doubled() -> AbstractContextManager[Any]:
    def counted_twice(*known: Any, z_loss_coeff: float) -> Any:
        return tensor_parallel.vocab_parallel_logits_gradient(*known, z_loss_coeff=2 * z_loss_coeff)

    return mock.patch.object(head, "vocab_parallel_logits_gradient", counted_twice)


def _mask_on_first_rank_only() -> AbstractContextManager[Any]:
    shard_batches = engine.Engine.shard_batches

    def unmasked(self: engine.Engine, batches: Sequence[Batch]) -> list[Batch]:
        shards = shard_batches(self, batches)
        if dist.get_rank() == 0:
            return shards
        mask = torch.ones_like(shards[0].loss_mask)
        return [replace(shard, loss_mask=mask) for shard in shards]

    return mock.patch.object(engine.Engine, "shard_batches", unmasked)


def _gathered_in_reverse() -> AbstractContextManager[Any]:
    def turned(x: torch.Tensor, group: Any) -> torch.Tensor:
        return torch.cat(all_gather(x, group).chunk(group.size)[::-1])

    return mock.patch.object(tensor_parallel, "all_gather", turned)


def _dropout_keyed_by_local_head() -> AbstractContextManager[Any]:
    return mock.patch.object(attention, "Dropout", lambda **rule: Dropout(**{**rule, "first_head": 0}))


def _dropout_keyed_by_local_row() -> AbstractContextManager[Any]:
    of_block = Dropout.of_block

    def of_first_rows(self: Dropout, queries: Sequence[range], keys: Sequence[range]) -> Dropout:
        return of_block(self, [range(sum(map(len, queries)))], keys)

    return mock.patch.object(Dropout, "of_block", of_first_rows)


def _dropout_keyed_by_rank_rows() -> AbstractContextManager[Any]:
    numbers = TokenSplit.token_indices

    def of_later_rows(self: TokenSplit, *given: Any, **known: Any) -> torch.Tensor:
        return numbers(self, *given, **known) + self.tp.rank

    return mock.patch.object(TokenSplit, "token_indices", of_later_rows)


def _tokens_not_reduced() -> AbstractContextManager[Any]:
    return mock.patch.object(
        engine, "all_reduce", lambda x, group: x if not x.dim() else all_reduce(x, group)
    )


def _norm_not_reduced() -> AbstractContextManager[Any]:
    return mock.patch.object(split_norm, "all_reduce", lambda x, _group: x)


def _first_row_everywhere() -> AbstractContextManager[Any]:
    return mock.patch.object(tensor_parallel.TensorParallel, "first_row", return_value=0)


def _dropout_keyed_by_local_sample() -> AbstractContextManager[Any]:
    return mock.patch.object(engine, "PassInfo", lambda **values: PassInfo(**{**values, "first_sample": 0}))


def _contiguous_rows() -> AbstractContextManager[Any]:
    def cut(self: ContextParallel, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.tensor_split(self.size, dim)[self.rank]

    return mock.patch.object(ContextParallel, "shard", cut)


def _chunks_not_reordered() -> AbstractContextManager[Any]:
    return mock.patch.object(context_attention, "to_sequence_order", lambda x, _cp_size: x)


def _other_keys_skipped() -> AbstractContextManager[Any]:
    return mock.patch.object(SoftmaxMerge, "add", return_value=None)


def _ring_gradients_lost() -> AbstractContextManager[Any]:
    def lost(sums: torch.Tensor, _group: RankGroup) -> tuple[torch.Tensor, Transfer]:
        return torch.zeros_like(sums), Transfer()

    return mock.patch.object(context_attention, "_begin_sums", lost)


def _key_gradients_not_reduced() -> AbstractContextManager[Any]:
    def alone(out: torch.Tensor, x: torch.Tensor, group: RankGroup) -> Transfer:
        out.copy_(x.chunk(group.size)[group.rank])
        return Transfer()

    return mock.patch.object(gathered_attention, "begin_reduce_scatter_into", alone)


def _positions_from_local_row() -> AbstractContextManager[Any]:
    def of_a_sample(_self: ContextParallel, rows: int, device: torch.device) -> torch.Tensor:
        return torch.arange(rows, device=device)

    return mock.patch.object(ContextParallel, "positions", of_a_sample)


def _chunk_means() -> AbstractContextManager[Any]:
    shard_batch = ContextParallel.shard_batch
    return mock.patch.object(
        ContextParallel,
        "shard_batch",
        lambda self, batch, **_: shard_batch(self, batch, has_chunk_means=True),
    )


def _unscaled_losses_on_early_stages() -> AbstractContextManager[Any]:
    def whole(**values: Any) -> PassInfo:
        is_last = dist.get_rank() == dist.get_world_size() - 1
        return PassInfo(**(values if is_last else {**values, "router_loss_scale": 1.0}))

    return mock.patch.object(engine, "PassInfo", whole)


def _local_number_of_tokens() -> AbstractContextManager[Any]:
    return mock.patch.object(TokenSplit, "num_ranks", 1)


def _loads_not_reduced() -> AbstractContextManager[Any]:
    return mock.patch.object(TokenSplit, "sum", lambda _self, x: x)


def _biases_not_reduced() -> AbstractContextManager[Any]:
    def without_sums(self: Routers, infos: Sequence[PassInfo]) -> None:
        with mock.patch.object(routers, "all_reduce", lambda x, _group: x):
            collect(self, infos)

    collect = Routers.collect
    return mock.patch.object(Routers, "collect", without_sums)


LAYOUT_FAULTS: dict[str, tuple[Patch, str]] = {
    "dropped all-reduce": (_dropped_all_reduce, "tp2"),
    "later half of a weight gradient lost": (_later_half_lost, "tp2 sp tpoverlap"),
    "wrong scale": (_wrong_scale, "dp2 zero1 overlap"),
    "stale gather": (_stale_gather, "dp2 zero1 overlap"),
    "gradient reduction of one bucket skipped": (_first_bucket_skipped, "dp2 zero1 overlap"),
    "gradients a little too large": (_first_bucket_too_large, "dp2 zero1 overlap"),
    "weights of one layer used before their all-gather": (_one_all_gather_skipped, "dp2 zero1 overlap"),
    "gradients not reduced over optimizer instances": (
        _instances_not_reduced,
        "dp4 zero1 instances2 overlap",
    ),
    "gradients of earlier micro-batches lost under ZeRO-2": (_last_microbatch_only, "dp2 zero2 overlap"),
    "weights not gathered under ZeRO-3": (_weights_not_gathered, "dp2 zero3 overlap"),
    "double-counted norm": (_double_counted_norm, "tp2"),
    "missing gradient sum of a norm under sp": (_partial_sums_skipped_over("tp"), "tp2 sp"),
    "missing gradient sum of replicated keys and values": (_partial_sums_skipped_over("kv"), "tp4 groups2"),
    "replicated keys and values counted in the norm by each rank": (
        _replicas_counted_by_each_rank,
        "tp4 groups2",
    ),
    "vocabulary shifted on later tensor ranks": (_shifted_vocabulary, "tp2"),
    "tokens counted on one replica only": (_tokens_not_reduced, "dp2 zero1 overlap tokens"),
    "attention across documents": (_documents_ignored, "tp2 documents"),
    "missing gradient sum of a head norm": (_partial_sums_skipped_over("tp"), "tp2 qwen"),
    "all-heads norm computed per rank": (_norm_not_reduced, "tp2 olmo2"),
    "positions of another rank's rows under sp": (_first_row_everywhere, "tp2 sp gpt2"),
    "z-loss counted by each rank": (_z_loss_doubled, "tp2 zloss"),
    "loss mask applied on one rank only": (_mask_on_first_rank_only, "tp2"),
    "sequence gathered in the wrong rank order": (_gathered_in_reverse, "tp2 sp"),
    "attention dropout keyed by the local head": (_dropout_keyed_by_local_head, "tp2 attentiondropout"),
    "attention dropout mask keyed by the local row": (_dropout_keyed_by_local_row, "cp2 attentiondropout"),
    "dropout keyed by the rank's rows": (_dropout_keyed_by_rank_rows, "tp2 qwen"),
    "dropout keyed by the micro-batch's sample": (_dropout_keyed_by_local_sample, "dp2 zero1 overlap gpt2"),
    "context ranks cut contiguously": (_contiguous_rows, "cp2"),
    "context chunks not reordered": (_chunks_not_reordered, "cp2 heads"),
    "keys and values of other context ranks skipped": (_other_keys_skipped, "cp2 ring"),
    "ring gradients of keys and values lost": (_ring_gradients_lost, "cp4 ring"),
    "gathered gradients of keys and values not reduced": (_key_gradients_not_reduced, "cp2 allgather"),
    "positions counted from a context rank's first row": (_positions_from_local_row, "cp2"),
    "loss mean over a context rank's tokens": (_chunk_means, "cp2"),
    "router losses scaled by pipeline stages": (_unscaled_losses_on_early_stages, "pp2 mixtral auxloss"),
    "router losses over the rank's number of tokens": (_local_number_of_tokens, "cp2 mixtral auxloss"),
    "router losses with the rank's own loads": (_loads_not_reduced, "cp2 deepseek seqauxloss"),
    "expert biases updated by the replica's own loads": (_biases_not_reduced, "dp2 deepseek"),
    "Muon orthogonalizes a rank's shard only": (_muon_per_rank, "tp2 muon"),
    "SOAP has covariances of a tensor rank's rows": (_covariances_of_a_part, "tp2 soap"),
    "wrong tied embedding": (_partial_sums_skipped_over("embedding"), "pp2 tied"),
    "gradient of the embedding's copy for multi-token prediction lost": (
        _partial_sums_skipped_over("embedding"),
        "pp2 mtp1",
    ),
}
