"""GPUs that a dry run plans for on a host without one: `--assume-gpu`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from megatrain.config import Facts, Request


@dataclass(frozen=True)
class GpuKind:
    """A GPU, from NVIDIA's data sheets (SXM)."""

    name: str
    memory_bytes: float
    """Memory that torch reports."""
    capability: tuple[int, int]
    """Compute capability."""


GPU_KINDS: Final = {
    kind.name.lower(): kind
    for kind in (
        GpuKind("A100", 85.0e9, (8, 0)),
        GpuKind("H100", 85.0e9, (9, 0)),
        GpuKind("H800", 85.0e9, (9, 0)),
        GpuKind("H200", 150.1e9, (9, 0)),
        GpuKind("B200", 191.5e9, (10, 0)),
    )
}
"""By the values of `--assume-gpu`."""
_DEFAULT: Final = "h100"


def assumed_gpu(request: Request) -> GpuKind | None:
    """Return the GPU to plan for; None: that of this host."""
    given = request.known("training.assume_gpu")
    if given is None and torch.cuda.is_available():
        return None
    return GPU_KINDS[given or _DEFAULT]


def with_gpu(facts: Facts, kind: GpuKind) -> Facts:
    """Return the facts of a host with such GPUs."""
    return replace(
        facts, device_name=f"NVIDIA {kind.name}", device_capability=kind.capability, has_triton=True
    )
