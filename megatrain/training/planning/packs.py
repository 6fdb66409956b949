"""Packs of a run: the domain of its ranks, the times by which a schedule balances them, and the first global batch for a dry run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

import torch

from megatrain.config import Plan
from megatrain.config.schema.parallel import DYNAMIC
from megatrain.config.subjects.packs import row_multiple
from megatrain.data.samples.dataset import SampleDataset
from megatrain.data.samples.pack_loader import PackLoader, PackSettings
from megatrain.parallel.documents import Documents
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.packs.context import PackBatch, StepWork
from megatrain.parallel.packs.schedule import SCHEDULERS, PackCosts, PackDomain, lower_bound
from megatrain.parallel.packs.simulate import drawing, simulate

_PRODUCTS: Final = 632e12
"""FLOP/s of all but attention, forward and backward in bf16: fitted by scripts/benchmarks/packs.py --fit to six layers of Llama-3-8B on H200s, as all here."""
_ATTENTION: Final = 513e12
"""FLOP/s of attention with flash-attn-4."""
_SENT: Final = 0.105
"""Share of a token's time that the exchange of heads adds, over NVLink."""
_LAYER: Final = 0.9e-3
"""Seconds of a layer that do not depend on the pack."""


def pack_costs(plan: Plan) -> PackCosts:
    """Return the times of packs in seconds, as measured on GPUs; schedules depend on their ratios alone."""
    spec, tp = plan.derived.model_spec, plan.config.parallel.tensor_model_parallel_size
    (short, head), (long, _) = spec.flops_per_token(1), spec.flops_per_token(1025)
    pair = (sum(long) - sum(short)) / 1024
    token = (sum(short) - pair + head) / _PRODUCTS / tp
    return PackCosts(
        token=token, pair=pair / _ATTENTION / tp, sent=_SENT * token, each=_LAYER * len(spec.layers)
    )


def pack_domain(plan: Plan) -> PackDomain:
    """Return the ranks of dp and cp and their groups."""
    parallel, derived = plan.config.parallel, plan.derived
    assert parallel.max_seqlen_per_dp_cp_rank is not None, "it is derived with packs"
    num_ranks = derived.data_parallel_size * parallel.context_parallel_size
    of_experts = parallel.expert_model_parallel_size * derived.expert_tensor_parallel_size
    of_experts //= parallel.tensor_model_parallel_size
    # All ranks communicate in each pass, to gather weights or to reduce gradients.
    has_equal_passes = parallel.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")
    return PackDomain(
        num_ranks=num_ranks,
        sizes=derived.pack_group_sizes,
        tokens_per_rank=parallel.max_seqlen_per_dp_cp_rank,
        multiple=row_multiple(plan.config),
        num_in_step=num_ranks if has_equal_passes else max(of_experts, 1),
        filler_length=plan.config.data.seq_length if of_experts > 1 else 0,
    )


def pack_settings(plan: Plan) -> PackSettings:
    """Return how documents are packed and distributed."""
    parallel = plan.config.parallel
    return PackSettings(
        scheduler=SCHEDULERS[str(parallel.sequence_packing_scheduler)],
        costs=pack_costs(plan),
        domain=pack_domain(plan),
        seq_length=plan.config.data.seq_length,
        documents_per_pass=plan.config.training.micro_batch_size * plan.derived.data_parallel_size,
    )


def pack_loader(
    plan: Plan, grid: RankGrid, device: torch.device, samples: SampleDataset, num_samples: int
) -> PackLoader:
    """Return the loader of this rank's packs."""
    workers = plan.config.data.num_workers
    return PackLoader(
        samples, num_samples, pack_settings(plan), rank=grid.replicas.rank, device=device, num_workers=workers
    )


def largest_pack(plan: Plan, device: torch.device) -> PackBatch:
    """Return the pack that needs the most memory, with documents of --seq-length tokens, for a plan of memory."""
    domain, limit = pack_domain(plan), plan.config.data.seq_length
    size = domain.sizes[-1]
    length = domain.capacity(size)
    ids = [torch.zeros(1, length, dtype=torch.int64, device=device) for _ in range(4)]
    count = -(-length // limit)
    cu_seqlens = torch.zeros(count + 1, dtype=torch.int32, device=device)
    return PackBatch(
        tokens=ids[0],
        labels=ids[1],
        loss_mask=torch.ones(1, length, device=device),
        position_ids=ids[2],
        documents=Documents(cu_seqlens, min(limit, length), 1, length),
        token_ids=ids[3],
        group_size=size,
        num_tokens=length,
        work=StepWork(num_tokens=length, sum_of_squared_lengths=length * min(limit, length)),
    )


@dataclass(frozen=True, kw_only=True)
class PackedStep:
    """The first global batch of a run as its ranks compute it, by the planned times of packs."""

    scheduler: str
    documents: int
    tokens: int
    longest: int
    packs: dict[int, int]
    """Number of packs by the size of their group."""
    time_over_bound: float
    """Time of the step, divided by a time that no schedule is below."""
    idle_share: float
    """Share of the ranks' time in which they wait."""
    ranks_in_step: int
    """Ranks whose passes wait for each other, because they share experts or weights."""
    time_by_scheduler: dict[str, float]
    """Times of the other schedulers with groups of the largest size, divided by this one's."""
    drawing: tuple[str, ...]


def packed_step(plan: Plan, samples: SampleDataset) -> PackedStep:
    """Simulate the first global batch of a run."""
    settings, first = pack_settings(plan), plan.derived.start_consumed_samples
    loader = PackLoader(samples, len(samples), settings, rank=0, device=torch.device("cpu"), num_workers=0)
    count = min(plan.config.training.global_batch_size, len(samples) - first)
    lengths, packs = loader.schedule(first, count)
    domain, costs = settings.domain, settings.costs
    step = simulate(packs, lengths, costs, domain)
    fixed = replace(domain, sizes=domain.sizes[-1:])
    others = {
        name: simulate(scheduler(lengths, costs, fixed), lengths, costs, fixed).time / step.time
        for name, scheduler in SCHEDULERS.items()
        if name not in (DYNAMIC, plan.config.parallel.sequence_packing_scheduler)
    }
    return PackedStep(
        scheduler=str(plan.config.parallel.sequence_packing_scheduler),
        documents=len(lengths),
        tokens=int(lengths.sum()),
        longest=int(lengths.max()),
        packs=dict(sorted(Counter(pack.size for pack in packs).items())),
        time_over_bound=step.time / lower_bound(lengths, costs, domain),
        idle_share=step.idle_share,
        ranks_in_step=domain.num_in_step,
        time_by_scheduler=others,
        drawing=tuple(drawing(packs, step, domain)),
    )
