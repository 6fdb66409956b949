"""Packs of a run: the domain of its ranks, and the times by which a schedule balances them."""

from __future__ import annotations

from typing import Final

import torch

from megatrain.config import Plan
from megatrain.config.subjects.packs import row_multiple
from megatrain.data.samples.dataset import SampleDataset
from megatrain.data.samples.pack_loader import PackLoader, PackSettings
from megatrain.parallel.documents import Documents
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.packs.context import PackBatch, StepWork
from megatrain.parallel.packs.schedule import SCHEDULERS, PackCosts, PackDomain

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
