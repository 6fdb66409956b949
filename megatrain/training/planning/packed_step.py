"""The packs of a dry run: the first global batch, scheduled and simulated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch

from megatrain.config import Plan
from megatrain.config.schema.parallel import DYNAMIC
from megatrain.data.samples.dataset import SampleDataset
from megatrain.data.samples.pack_loader import PackLoader
from megatrain.parallel.packs.schedule import SCHEDULERS, lower_bound
from megatrain.parallel.packs.simulate import drawing, simulate
from megatrain.training.planning.packs import pack_settings


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
