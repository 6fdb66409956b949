"""Whether CUDA graphs pay, measured in the first iterations: they do where the GPU waits for the host's launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGroup

MIN_LEAD: Final = 5e-3
"""Seconds. A host that limits is ahead of the GPU by the last kernels alone; another one by up to the 1,024 launches that CUDA queues."""
MAX_USED: Final = 0.8
"""Part of the GPU's memory. Graphs keep that of their activations, which evaluation then lacks."""

Choice = Callable[[float], bool]
"""Decides after the warm-up whether passes become graphs, the same on all ranks, given the seconds from the host's last
launch to the end of the passes."""


def always(lead: float) -> bool:  # noqa: ARG001
    """Use graphs in any case: `--cuda-graph-impl local`."""
    return True


def host_is_late(
    lead: float, *, world: RankGroup, device: torch.device, used: float, tell: Callable[[str], None]
) -> bool:
    """Use graphs if the host of any rank limits the speed and all ranks have memory for them.

    Args:
        world: all ranks.
        used: part of this rank's memory that was in use at most.
        tell: receives a sentence for the log.
    """
    most = torch.tensor([-lead, used], dtype=torch.float64, device=device)
    shortest, used = all_reduce(most, world, "max").tolist()
    ahead = f"the host is {-1000 * shortest:.1f} ms ahead of the GPU"
    is_chosen = -shortest < MIN_LEAD and used <= MAX_USED
    if is_chosen:
        tell(f"records CUDA graphs: {ahead} and limits the speed")
    elif -shortest < MIN_LEAD:
        tell(f"records no CUDA graphs, although {ahead}: {used:.0%} of a GPU's memory is in use")
    else:
        tell(f"records no CUDA graphs: {ahead}")
    return is_chosen


def used_memory(device: torch.device) -> float:
    """Return the part of a GPU's memory that tensors had at the peak."""
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_allocated(device) / total
