"""Layouts of a run: how a model and its batch are distributed, the flags that say so, and all that are worth a look.

resolved plan ─> `Workload` (what is trained) and `Layout` (how); world size ─> `layouts`, every other way
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from megatrain.config import Plan, Request
from megatrain.config.derive.vision import sample_length
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.schema.pipeline_schedules import ONE_CHUNK, PIPELINE_SCHEDULES
from megatrain.config.schema.tree import Setting, settings_by_path
from megatrain.config.subjects.experts import (
    GPUS_PER_HOST,
    all_gather_of_tokens,
    capacity_on_gpus,
    experts_are_split,
    possible_rows,
    ranks_that_forward,
)
from megatrain.config.subjects.pipeline import balanced_split
from megatrain.config.subjects.ranks import why_products_wait
from megatrain.parallel.pipeline.actions import Placement
from megatrain.parallel.pipeline.schedule import PipelineSchedule, placement_of
from megatrain.tools.plan.network import Group

Recomputation = Literal["none", "selective", "full"]
Sharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]

_CHUNKS: Final = (2, 3, 4, 5, 6, 8, 10)
_MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
_OFTEN_DEFAULT: Final = {
    "parallel.data_parallel_sharding_strategy": "optim",
    "parallel.sequence_parallel": False,
}
"""Values that open settings usually get."""
_MOST_STAGES: Final = 32
_SHORTEST_PART: Final = 4096
"""Fewest tokens of a sequence on a context-parallel rank that are worth a look."""

AXES: Final = {
    "tp": "parallel.tensor_model_parallel_size",
    "cp": "parallel.context_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
    "ep": "parallel.expert_model_parallel_size",
    "micro_batch": "training.micro_batch_size",
    "sharding": "parallel.data_parallel_sharding_strategy",
    "schedule": "parallel.pipeline_schedule",
}
"""Settings of a layout's fields, which the search keeps if a flag gives them."""


@dataclass(frozen=True, eq=False)
class Workload:
    """A model with its batch, apart from any layout."""

    plan: Plan
    """A resolved plan of the run; only what no layout changes is read from it."""

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.plan.derived.model_spec.layers

    @functools.cached_property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """Sizes of each layer, the layers of multi-token prediction last."""
        return self.plan.derived.model_spec.all_layers

    @functools.cached_property
    def kinds(self) -> tuple[tuple[LayerSpec, bool], ...]:
        """Sizes of each layer, and whether its linear layers are in FP8."""
        fp8_layers = frozenset(self.plan.derived.fp8_layers)
        return tuple((sizes, number in fp8_layers) for number, sizes in enumerate(self.layers))

    @property
    def hidden(self) -> int:
        return self.plan.config.model.hidden_size

    @property
    def vocabulary(self) -> int:
        return self.plan.config.model.padded_vocab_size

    @property
    def seq_length(self) -> int:
        return sample_length(self.plan.config)

    @property
    def global_batch(self) -> int:
        return self.plan.config.training.global_batch_size

    @property
    def num_experts(self) -> int:
        return self.plan.config.experts.num_experts or 1

    def tokens(self, layout: Layout) -> float:
        """Return the tokens of a micro-batch on a rank."""
        return self.seq_length / layout.cp * layout.micro_batch

    @functools.cache  # noqa: B019 (a plan has few workloads)
    def gathers_tokens(self, ep: int) -> bool:
        """Return whether expert ranks gather all tokens, as --moe-alltoall-as-allgather decides for `ep` of them."""
        config = self.plan.config
        if config.experts.moe_token_dispatcher_type == "allgather":  # noqa: S105 (no password)
            return True
        if self.plan.origins["experts.moe_alltoall_as_allgather"].is_given:
            return config.experts.moe_alltoall_as_allgather
        return bool(all_gather_of_tokens(config.experts, ep, on_gpus_of_host=ep <= GPUS_PER_HOST).value)

    def ranks_that_forward(self, group: Group, etp: int) -> int:
        """Return how many ranks of a host forward tokens of an all-to-all, as --moe-alltoall-ranks-per-host decides for a group."""
        experts = self.plan.config.experts
        if self.plan.origins["experts.moe_alltoall_ranks_per_host"].is_given:
            return experts.moe_alltoall_ranks_per_host
        return int(ranks_that_forward(experts, group.size, etp, group.cluster.gpus_per_node).value)

    def overlaps_products(self, layout: Layout, capability: tuple[int, int]) -> bool:
        """Return whether tensor ranks overlap products and communication, as --tp-comm-overlap decides for a layout."""
        parallel = self.plan.config.parallel
        if self.plan.origins["parallel.tp_comm_overlap"].is_given:
            return parallel.tp_comm_overlap and layout.sequence_parallel
        samples = layout.micro_batch / layout.cp
        reason = next(why_products_wait(self.plan, layout.tp, samples, capability), None)
        return layout.sequence_parallel and reason is None

    def row_factor(self, ep: int) -> float:
        """Return the rows of experts that a rank has memory for, relative to an even load."""
        experts = self.plan.config.experts
        if ep == 1 or not self.gathers_tokens(ep):
            return 1.0
        is_given = self.plan.origins["experts.moe_expert_rank_capacity_factor"].is_given
        factor = experts.moe_expert_rank_capacity_factor if is_given else capacity_on_gpus(experts, ep)
        return min(factor or math.inf, possible_rows(experts, ep))

    @functools.cached_property
    def flops(self) -> int:
        """FLOPs of an iteration by Megatron-LM's formula."""
        tokens = self.global_batch * self.seq_length
        return self.plan.derived.model_spec.training_flops(
            num_tokens=tokens,
            sum_of_squared_lengths=tokens * self.seq_length,
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run is distributed over its ranks."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    micro_batch: int = 1
    schedule: str = ONE_CHUNK
    chunks: int = 1
    """Model chunks of a pipeline rank."""
    sharding: Sharding = "optim"
    recompute: Recomputation = "none"
    modules: tuple[str, ...] = ()
    """Modules that selective recomputation covers."""
    sequence_parallel: bool = False
    split: tuple[int, ...] = ()
    """Layers of each virtual stage."""
    overlaps_passes: bool = False
    """Rows are sent to experts while another micro-batch computes (--overlap-moe-expert-parallel-comm)."""

    @classmethod
    def of(cls, plan: Plan) -> Layout:
        """Return the layout of a resolved plan."""
        parallel, derived, training = plan.config.parallel, plan.derived, plan.config.training
        has_experts = plan.config.experts.num_experts is not None
        return cls(
            **{axis: plan.config.get(path) for axis, path in AXES.items()},
            dp=derived.data_parallel_size,
            etp=derived.expert_tensor_parallel_size if has_experts else 1,
            chunks=derived.pipeline_chunks,
            recompute=training.recompute_granularity or "none",
            modules=training.recompute_modules if training.recompute_granularity == "selective" else (),
            sequence_parallel=parallel.sequence_parallel,
            split=derived.pipeline_layers,
            overlaps_passes=plan.config.experts.overlap_moe_expert_parallel_comm and experts_are_split(plan),
        )

    @property
    def placement(self) -> Placement:
        return placement_of(self.schedule, self.pp, self.chunks)

    @property
    def pipeline(self) -> PipelineSchedule:
        return PipelineSchedule(self.schedule, self.placement, combines=self.overlaps_passes)

    @property
    def expert_dp(self) -> int:
        """Replicas of an expert."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def num_microbatches(self, global_batch: int) -> int:
        return global_batch // (self.dp * self.micro_batch)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the layout, by path: also those that must be off for it."""
        is_split = self.pp > 1
        is_full = self.recompute == "full"
        return {
            "parallel.tensor_model_parallel_size": self.tp,
            "parallel.sequence_parallel": self.sequence_parallel,
            "parallel.context_parallel_size": self.cp,
            "parallel.pipeline_model_parallel_size": self.pp,
            "parallel.pipeline_schedule": self.schedule if is_split else None,
            "parallel.num_virtual_stages_per_pipeline_rank": self.chunks if self.chunks > 1 else None,
            "parallel.num_layers_per_virtual_pipeline_stage": None,
            "parallel.decoder_first_pipeline_num_layers": None,
            "parallel.decoder_last_pipeline_num_layers": None,
            "parallel.account_for_embedding_in_pipeline_split": False,
            "parallel.account_for_loss_in_pipeline_split": False,
            "parallel.pipeline_model_parallel_layout": "auto" if is_split else None,
            "parallel.expert_model_parallel_size": self.ep,
            "parallel.expert_tensor_parallel_size": self.etp if self.tp > 1 else None,
            "experts.overlap_moe_expert_parallel_comm": self.overlaps_passes,
            "parallel.data_parallel_sharding_strategy": self.sharding,
            "training.micro_batch_size": self.micro_batch,
            "training.recompute_granularity": None if self.recompute == "none" else self.recompute,
            "training.recompute_modules": self.modules or None,
            "training.recompute_method": "uniform" if is_full else None,
            "training.recompute_num_layers": 1 if is_full else None,
        }

    def flags(self, request: Request) -> list[str]:
        """Return the words that give a run this layout, after the words of the request."""
        has_experts = request.known("experts.num_experts") is not None
        known = settings_by_path()
        words = []
        for path, value in self.settings().items():
            is_given = request.origins[path].kind != "default"
            is_default = value in (None, known[path].default, _OFTEN_DEFAULT.get(path))
            is_missing = path.startswith(("parallel.expert", "experts.")) and not has_experts
            if not is_missing and (is_given or not is_default):
                words += _words(known[path], value)
        return words


def _words(setting: Setting, value: Any) -> list[str]:
    """Return the words that give a setting a value; None turns it off."""
    if isinstance(value, bool):
        return [setting.flag if value else setting.opposite_flag]
    if setting.name == "pipeline_schedule" and value is None:
        value = ONE_CHUNK
    values = value if isinstance(value, tuple) else (value,)
    return [setting.flag, *("none" if one is None else str(one) for one in values)]


def layouts(
    workload: Workload, num_gpus: int, gpus_per_node: int, micro_batches: Sequence[int] = _MICRO_BATCHES
) -> Iterator[Layout]:
    """Yield the layouts that use all GPUs, apart from those that the rules of this function call senseless.

    Tensor ranks share a node. Sequences are split only if each part keeps `_SHORTEST_PART` tokens. Gradients and weights
    are sharded (ZeRO-2 and 3) only without a pipeline, where micro-batches do not multiply their communication.
    """
    for tp, cp in itertools.product(_tensor_sizes(workload, gpus_per_node), _context_sizes(workload)):
        for pp in _pipeline_sizes(workload, num_gpus):
            if num_gpus % (tp * cp * pp):
                continue
            dp = num_gpus // (tp * cp * pp)
            base = Layout(tp=tp, cp=cp, pp=pp, dp=dp, sequence_parallel=tp > 1)
            for one in _with_experts(base, workload):
                for two in _with_batch(one, workload, micro_batches):
                    yield from _with_pipeline(two, workload)


def _tensor_sizes(workload: Workload, gpus_per_node: int) -> list[int]:
    pieces = [
        piece
        for layer in workload.layers
        for one in layer.linears(workload.hidden)
        for piece in one.pieces
        if one.split == "outputs" and not one.num_experts
    ]
    sizes = (size for size in (1, 2, 4, 8, 16) if size <= gpus_per_node)
    return [size for size in sizes if all(piece.divides_over(size) for piece in pieces)]


def _context_sizes(workload: Workload) -> list[int]:
    length = workload.seq_length
    sizes = (2**power for power in range(8))
    return [size for size in sizes if size == 1 or length >= size * _SHORTEST_PART]


def _pipeline_sizes(workload: Workload, num_gpus: int) -> list[int]:
    most = min(_MOST_STAGES, len(workload.layers))
    return [
        size
        for size in range(1, most + 1)
        if num_gpus % size == 0 and (size & (size - 1) == 0 or size % 2 == 0)
    ]


def _with_experts(layout: Layout, workload: Workload) -> Iterator[Layout]:
    if workload.num_experts == 1:
        yield layout
        return
    ranks = layout.tp * layout.cp * layout.dp
    for power in range(9):
        ep = 2**power
        if workload.num_experts % ep == 0 and ranks % ep == 0:
            yield replace(layout, ep=ep)


def _with_batch(layout: Layout, workload: Workload, micro_batches: Sequence[int]) -> Iterator[Layout]:
    """Yield micro-batches, recomputation and sharding."""
    for micro_batch in micro_batches:
        if workload.global_batch % (layout.dp * micro_batch):
            continue
        for recompute, modules in _recomputations(workload):
            shardings: tuple[Sharding, ...] = ("optim",)
            if layout.pp == 1 and layout.dp > 1:
                shardings = ("optim", "optim_grads", "optim_grads_params")
            for sharding in shardings:
                yield replace(
                    layout,
                    micro_batch=micro_batch,
                    recompute=recompute,
                    modules=modules,
                    sharding=sharding,
                )


def _recomputations(workload: Workload) -> list[tuple[Recomputation, tuple[str, ...]]]:
    """Return none, what is cheap to run again, the whole MLP or all experts, and whole layers."""
    latent = ("mla_up_proj",) if workload.plan.config.model.multi_latent_attention else ()
    if workload.num_experts > 1:
        parts = [("layernorm", *latent, "moe_act"), ("layernorm", *latent, "moe")]
    else:
        parts = [("layernorm", *latent, "mlp")]
    return [("none", ()), *(("selective", modules) for modules in parts), ("full", ())]


def _with_pipeline(layout: Layout, workload: Workload) -> Iterator[Layout]:
    overlaps = (False, True) if layout.ep > 1 and not workload.gathers_tokens(layout.ep) else (False,)
    if layout.pp == 1:
        for overlap in overlaps if layout.num_microbatches(workload.global_batch) > 1 else (False,):
            yield replace(layout, split=(len(workload.layers),), overlaps_passes=overlap)
        return
    kinds = [
        (name, chunks, overlap)
        for name, traits in PIPELINE_SCHEDULES.items()
        for overlap in overlaps
        if (traits.overlaps_passes if overlap else traits.is_searched)
        for chunks in (_CHUNKS if traits.num_chunks is None else (traits.num_chunks,))
    ]
    if layout.num_microbatches(workload.global_batch) < layout.pp:
        return
    for schedule, chunks, overlap in kinds:
        if layout.pp * chunks > len(workload.layers) + 1:
            continue
        split = _split(workload, layout.pp * chunks)
        yield replace(layout, schedule=schedule, chunks=chunks, split=split, overlaps_passes=overlap)


@functools.lru_cache(maxsize=256)
def _split(workload: Workload, stages: int) -> tuple[int, ...]:
    """Return the layers of each virtual stage, as --pipeline-model-parallel-layout auto splits them."""
    spec, length = workload.plan.derived.model_spec, workload.seq_length
    costs, head = spec.flops_per_token(length)
    return balanced_split(costs, head, stages, tower=spec.vision_flops_per_token(length))[1]
