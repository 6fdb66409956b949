"""What a dry run finds, under the names of its JSON object; the parts that are larger have files of their own."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config import Plan
from megatrain.training.planning.dry_run_data import DatasetUse
from megatrain.training.planning.dry_run_timeline import Timeline
from megatrain.training.planning.memory_plan import StageMemory
from megatrain.training.planning.model_tree import ModelTree


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations by Megatron-LM's formula; recomputation is not counted."""

    per_iteration: int
    """Of a full batch."""
    per_token: float
    per_rank_and_iteration: float
    whole_run: int
    """Of all samples that are still to be read."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Groups of one kind: `count` of them, each of `size` ranks that lie `stride` apart."""

    size: int
    count: int
    stride: int
    first: tuple[int, ...]
    """Ranks of the first group; of a large one the first three and the last."""
    last: tuple[int, ...]
    """The same of the last group."""


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """Who works with whom."""

    world_size: int
    reason: str
    """Where the number comes from."""
    axes: dict[str, Axis]
    """tp, dp and pp."""
    stages: tuple[tuple[int, ...], ...]
    """Ranks of each pipeline stage; of a large one the first three and the last."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What the schedule costs, by the simulator: a forward pass 1, a backward pass 2, messages nothing."""

    schedule: str
    num_stages: int
    num_microbatches: int
    bubble_share: float
    """Of all stages' time, in which they wait."""
    microbatches_in_flight: tuple[int, ...]
    """At most, stage by stage."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Everything that is shown, under the names of the JSON object."""

    plan: Plan
    model: ModelTree
    flops: Flops
    memory: tuple[StageMemory, ...]
    """Of a rank of each pipeline stage."""
    device_memory_bytes: int | None
    """Of this host's GPU; None: not known."""
    ranks: RankLayout
    data: tuple[DatasetUse, ...]
    timeline: Timeline
    pipeline: Pipeline
