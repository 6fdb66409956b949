"""Faults that parity must find, to be planted in the ranks of a layout: the classic ones of such systems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatrain.kernels.attention.interface import SoftmaxMerge
from megatrain.kernels.random import keep_mask
from megatrain.model import functions, head
from megatrain.model.implementations import attention_context
from megatrain.optim.muon import Muon
from megatrain.optim.sharded import ShardedOptimizer
from megatrain.parallel import context_attention, data_parallel, tensor_parallel
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.collectives import Transfer, all_gather, all_reduce
from megatrain.parallel.context_parallel import ContextParallel, TokenSplit
from megatrain.parallel.data_parallel import DataParallel, GradientReduction, WeightAllGather
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.tensor_parallel import VocabShard
from megatrain.tools.parity.expert_faults import EXPERT_FAULTS
from megatrain.training import engine, routers
from megatrain.training.routers import Routers


@dataclass(frozen=True)
class Fault:
    """What is broken while the context lasts, and the words of a layout in which it shows."""

    plant: Callable[[], AbstractContextManager[Any]]
    layout: str


def planted(name: str | None) -> AbstractContextManager[Any]:
    """The context in which a fault is at work; nothing where `name` is None."""
    return nullcontext() if name is None else FAULTS[name].plant()


def _dropped_all_reduce() -> AbstractContextManager[Any]:
    return mock.patch.object(tensor_parallel, "all_reduce", lambda x, _group: x)


def _wrong_scale() -> AbstractContextManager[Any]:
    def doubled(**values: Any) -> PassInfo:
        return PassInfo(**{**values, "loss_scale": 2 * values["loss_scale"]})

    return mock.patch.object(engine, "PassInfo", doubled)


def _matrices_of_one_rank() -> AbstractContextManager[Any]:
    step = Muon.step

    def alone(self: Muon, shards: Any, momenta: Any) -> None:
        self.groups = dict.fromkeys(self.groups, RankGroup("own", (0,), 0))
        step(self, shards, momenta)

    return mock.patch.object(Muon, "step", alone)


def _no_documents() -> AbstractContextManager[Any]:
    return mock.patch.object(engine, "PassInfo", lambda **values: PassInfo(**{**values, "documents": None}))


def _stale_gather() -> AbstractContextManager[Any]:
    return mock.patch.object(DataParallel, "all_gather_weights", return_value=None)


def _first_bucket_left_out() -> AbstractContextManager[Any]:
    formed = GradientReduction.formed

    def skipping(self: GradientReduction, number: int, *, is_last: bool) -> None:
        if number:
            formed(self, number, is_last=is_last)

    return mock.patch.object(GradientReduction, "formed", skipping)


def _first_bucket_too_large() -> AbstractContextManager[Any]:
    """On one rank by a thousandth: less than bf16 rounds, and far more than sums of fp32 do."""
    formed = GradientReduction.formed

    def spoiling(self: GradientReduction, number: int, *, is_last: bool) -> None:
        if number == 1 and is_last and self.families[number].shard.rank == 0:
            self.memory.wholes[number] *= 1.001
        formed(self, number, is_last=is_last)

    return mock.patch.object(GradientReduction, "formed", spoiling)


def _one_gather_not_waited_for() -> AbstractContextManager[Any]:
    """On a CPU it would be there in time by luck: the layer computes with what was there before."""
    begin = WeightAllGather.begin
    seen: Counter[int] = Counter()

    def only_at_start(self: WeightAllGather, number: int) -> Transfer:
        seen[number] += 1
        return Transfer() if number == 1 and seen[number] > 1 else begin(self, number)

    return mock.patch.object(WeightAllGather, "begin", only_at_start)


def _own_instance_alone() -> AbstractContextManager[Any]:
    return mock.patch.object(data_parallel, "begin_all_reduce", return_value=Transfer())


def _last_microbatch_alone() -> AbstractContextManager[Any]:
    return mock.patch.object(data_parallel, "add_to_shard", lambda own, received: own.copy_(received))


def _nothing_is_brought() -> AbstractContextManager[Any]:
    """Layers compute with what lies in the memory that they get: here with zeros."""
    begin = WeightAllGather.begin

    def empty(self: WeightAllGather, number: int) -> Transfer:
        is_kept = self.memory.is_kept_full(number)
        transfer = begin(self, number)
        if not is_kept:
            transfer.wait()
            self.memory.wholes[number].data.zero_()
        return transfer

    return mock.patch.object(WeightAllGather, "begin", empty)


@contextmanager
def _double_counted_norm() -> Iterator[None]:
    def all_of_them(self: ShardedOptimizer) -> list[Any]:
        return self.buffers.gradient_shards

    with mock.patch.object(ShardedOptimizer, "_gradients_counted_here", all_of_them):
        yield


def _without_partial_sums_over(name: str) -> Callable[[], AbstractContextManager[Any]]:
    def plant() -> AbstractContextManager[Any]:
        sum_partial = DataParallel.finish_gradients

        def skipping(self: DataParallel) -> None:
            with mock.patch("megatrain.parallel.data_parallel.all_reduce", _unless):
                sum_partial(self)

        def _unless(x: Any, group: Any) -> Any:
            return x if group.name == name else all_reduce(x, group)

        return mock.patch.object(DataParallel, "finish_gradients", skipping)

    return plant


def _copies_counted_by_each() -> AbstractContextManager[Any]:
    is_first_of = RankGrid.is_first_of
    return mock.patch.object(
        RankGrid, "is_first_of", lambda self, names: is_first_of(self, [n for n in names if n != "kv"])
    )


def _shifted_vocabulary() -> AbstractContextManager[Any]:
    return mock.patch.object(VocabShard, "first", property(lambda self: self.group.rank * (self.rows + 1)))


def _z_loss_of_each_rank() -> AbstractContextManager[Any]:
    def counted_twice(*known: Any, z_loss_coeff: float) -> Any:
        return tensor_parallel.vocab_parallel_logits_gradient(*known, z_loss_coeff=2 * z_loss_coeff)

    return mock.patch.object(head, "vocab_parallel_logits_gradient", counted_twice)


def _mask_of_the_first_rank_alone() -> AbstractContextManager[Any]:
    def counts(batch: Batch) -> torch.Tensor:
        return batch.loss_mask if dist.get_rank() == 0 else torch.ones_like(batch.loss_mask)

    return mock.patch.object(Batch, "counts", property(counts))


def _gathered_backwards() -> AbstractContextManager[Any]:
    def turned(x: torch.Tensor, group: Any) -> torch.Tensor:
        return torch.cat(all_gather(x, group).chunk(group.size)[::-1])

    return mock.patch.object(tensor_parallel, "all_gather", turned)


def _heads_that_draw_alike() -> AbstractContextManager[Any]:
    def as_on_the_first_rank(rows: torch.Tensor, *columns: int, **stream: Any) -> torch.Tensor:
        num_heads, s = rows.shape[-2:]
        return keep_mask(rows - dist.get_rank() * num_heads * s, *columns, **stream)

    return mock.patch.object(attention_context, "keep_mask", as_on_the_first_rank)


def _rows_of_each_rank() -> AbstractContextManager[Any]:
    numbers = TokenSplit.token_indices

    def of_later_rows(self: TokenSplit, *sizes: int, **known: Any) -> torch.Tensor:
        return numbers(self, *sizes, **known) + self.tp.rank

    return mock.patch.object(TokenSplit, "token_indices", of_later_rows)


def _own_token_count() -> AbstractContextManager[Any]:
    return mock.patch.object(
        engine, "all_reduce", lambda x, group: x if not x.dim() else all_reduce(x, group)
    )


def _own_heads_alone() -> AbstractContextManager[Any]:
    return mock.patch.object(functions, "all_reduce", lambda x, _group: x)


def _first_rows_everywhere() -> AbstractContextManager[Any]:
    return mock.patch.object(tensor_parallel.TensorParallel, "first_row", return_value=0)


def _samples_of_the_step() -> AbstractContextManager[Any]:
    return mock.patch.object(engine, "PassInfo", lambda **values: PassInfo(**{**values, "first_sample": 0}))


def _rows_in_plain_order() -> AbstractContextManager[Any]:
    def cut(self: ContextParallel, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.tensor_split(self.size, dim)[self.rank]

    return mock.patch.object(ContextParallel, "shard", cut)


def _chunks_as_they_come() -> AbstractContextManager[Any]:
    return mock.patch.object(context_attention, "to_sequence_order", lambda x, _cp_size: x)


def _own_keys_alone() -> AbstractContextManager[Any]:
    return mock.patch.object(SoftmaxMerge, "add", return_value=None)


def _sums_that_stay_away() -> AbstractContextManager[Any]:
    def lost(sums: torch.Tensor, _group: RankGroup) -> tuple[torch.Tensor, Transfer]:
        return torch.zeros_like(sums), Transfer()

    return mock.patch.object(context_attention, "_hand_on", lost)


def _own_gradient_of_keys() -> AbstractContextManager[Any]:
    def alone(out: torch.Tensor, x: torch.Tensor, group: RankGroup) -> Transfer:
        out.copy_(x.chunk(group.size)[group.rank])
        return Transfer()

    return mock.patch.object(context_attention, "begin_reduce_scatter_into", alone)


def _places_from_the_first_row() -> AbstractContextManager[Any]:
    def of_a_sample(_self: ContextParallel, rows: int, device: torch.device) -> torch.Tensor:
        return torch.arange(rows, device=device)

    return mock.patch.object(ContextParallel, "positions", of_a_sample)


def _means_of_chunks() -> AbstractContextManager[Any]:
    shard_batch = ContextParallel.shard_batch
    return mock.patch.object(
        ContextParallel, "shard_batch", lambda self, batch, **_: shard_batch(self, batch, has_chunk_means=True)
    )


def _whole_losses_on_early_stages() -> AbstractContextManager[Any]:
    def whole(**values: Any) -> PassInfo:
        is_last = dist.get_rank() == dist.get_world_size() - 1
        return PassInfo(**(values if is_last else {**values, "loss_scale": 1.0}))

    return mock.patch.object(engine, "PassInfo", whole)


def _own_number_of_tokens() -> AbstractContextManager[Any]:
    return mock.patch.object(TokenSplit, "num_ranks", 1)


def _own_loads_alone() -> AbstractContextManager[Any]:
    return mock.patch.object(TokenSplit, "sum", lambda _self, x: x)


def _biases_of_own_passes() -> AbstractContextManager[Any]:
    def without_sums(self: Routers, infos: Sequence[PassInfo]) -> None:
        with mock.patch.object(routers, "all_reduce", lambda x, _group: x):
            collect(self, infos)

    collect = Routers.collect
    return mock.patch.object(Routers, "collect", without_sums)


FAULTS = {
    "dropped all-reduce": Fault(_dropped_all_reduce, "tp2"),
    "wrong scale": Fault(_wrong_scale, "dp2 zero1 overlap"),
    "stale gather": Fault(_stale_gather, "dp2 zero1 overlap"),
    "reduction of one bucket left out": Fault(_first_bucket_left_out, "dp2 zero1 overlap"),
    "gradients a little too large": Fault(_first_bucket_too_large, "dp2 zero1 overlap"),
    "weights of one layer not waited for": Fault(_one_gather_not_waited_for, "dp2 zero1 overlap"),
    "gradients of the own instance alone": Fault(_own_instance_alone, "dp4 zero1 instances2 overlap"),
    "gradients of the last micro-batch alone": Fault(_last_microbatch_alone, "dp2 zero2 overlap"),
    "weights that were not brought": Fault(_nothing_is_brought, "dp2 zero3 overlap"),
    "double-counted norm": Fault(_double_counted_norm, "tp2"),
    "missing gradient sum of a norm under sp": Fault(_without_partial_sums_over("tp"), "tp2 sp"),
    "missing gradient sum of copied keys and values": Fault(_without_partial_sums_over("kv"), "tp4 groups2"),
    "copied keys and values counted by each rank": Fault(_copies_counted_by_each, "tp4 groups2"),
    "vocabulary shifted on later tensor ranks": Fault(_shifted_vocabulary, "tp2"),
    "tokens counted on one replica alone": Fault(_own_token_count, "dp2 zero1 overlap tokens"),
    "attention across documents": Fault(_no_documents, "tp2 documents"),
    "missing gradient sum of a norm of heads": Fault(_without_partial_sums_over("tp"), "tp2 qwen"),
    "norm over a rank's own heads alone": Fault(_own_heads_alone, "tp2 olmo2"),
    "places of another rank's rows under sp": Fault(_first_rows_everywhere, "tp2 sp gpt2"),
    "z-loss counted by each rank": Fault(_z_loss_of_each_rank, "tp2 zloss"),
    "loss mask heeded on one rank alone": Fault(_mask_of_the_first_rank_alone, "tp2"),
    "sequence gathered in another order": Fault(_gathered_backwards, "tp2 sp"),
    "dropout that draws alike for all ranks' heads": Fault(_heads_that_draw_alike, "tp2 gpt2"),
    "dropout of whole rows that differs between ranks": Fault(_rows_of_each_rank, "tp2 qwen"),
    "dropout that draws alike for all samples": Fault(_samples_of_the_step, "dp2 zero1 overlap gpt2"),
    "samples cut in plain order": Fault(_rows_in_plain_order, "cp2"),
    "chunks of the context ranks in the order of the ranks": Fault(_chunks_as_they_come, "cp2 heads"),
    "keys and values of other ranks skipped": Fault(_own_keys_alone, "cp2 ring"),
    "gradients of keys and values lost on their way around": Fault(_sums_that_stay_away, "cp4 ring"),
    "gradient of keys and values of the own queries alone": Fault(_own_gradient_of_keys, "cp2 allgather"),
    "places counted from a context rank's first row": Fault(_places_from_the_first_row, "cp2"),
    "mean over a context rank's own tokens": Fault(_means_of_chunks, "cp2"),
    "losses of routers that grow with pipeline stages": Fault(
        _whole_losses_on_early_stages, "pp2 mixtral auxloss"
    ),
    "losses of routers over a rank's number of tokens": Fault(_own_number_of_tokens, "cp2 mixtral auxloss"),
    "loads of a rank's own tokens in losses of routers": Fault(_own_loads_alone, "cp2 deepseek seqauxloss"),
    "biases of routers moved by a replica's own loads": Fault(_biases_of_own_passes, "dp2 deepseek"),
    "a rank's part of a matrix made orthogonal alone": Fault(_matrices_of_one_rank, "tp2 muon"),
    "wrong tied embedding": Fault(_without_partial_sums_over("embedding"), "pp2 tied"),
    **{name: Fault(*fault) for name, fault in EXPERT_FAULTS.items()},
}
