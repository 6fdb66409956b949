"""GPUs from NVIDIA's data sheets: of plans of layouts, and of a dry run on a host without one (`--assume-gpu`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from megatrain.config import Facts, Request
from megatrain.training.logging.metrics import PEAK_TFLOPS


@dataclass(frozen=True)
class Gpu:
    """A GPU, from NVIDIA's data sheets (SXM)."""

    name: str
    memory_bytes: float
    """Memory that torch reports."""
    capability: tuple[int, int]
    """Compute capability."""
    memory_rate: float
    """Bytes per second of the GPU's memory."""
    link_rate: float
    """Bytes per second of NVLink in one direction."""
    network_rate: float
    """Bytes per second of the network adapter that usually comes with a GPU, in one direction."""

    @property
    def peak(self) -> float:
        """Dense bf16 FLOPs per second."""
        return PEAK_TFLOPS[self.name] * 1e12

    @property
    def usable_bytes(self) -> float:
        """Memory for a run's tensors: without CUDA context, NCCL's buffers and fragmentation."""
        return self.memory_bytes - RESERVED_BYTES


RESERVED_BYTES: Final = 4e9
"""CUDA context (0.5 GB), NCCL and fragmentation: docs/planning.md asks for a few GB."""
GPUS: Final = {
    gpu.name: gpu
    for gpu in (
        # name, memory_bytes, capability, memory_rate, link_rate, network_rate
        Gpu("A100", 85.0e9, (8, 0), 2.04e12, 300e9, 25e9),
        Gpu("H100", 85.0e9, (9, 0), 3.35e12, 450e9, 50e9),
        Gpu("H800", 85.0e9, (9, 0), 3.35e12, 200e9, 50e9),
        Gpu("H200", 150.1e9, (9, 0), 4.8e12, 450e9, 50e9),
        Gpu("B200", 191.5e9, (10, 0), 8.0e12, 900e9, 50e9),
    )
}
"""By name; the values of `--assume-gpu` are these in lower case."""


def assumed_gpu(request: Request) -> Gpu | None:
    """Return the GPU to plan for; None: that of this host."""
    given = request.known("training.assume_gpu")
    if given is None and torch.cuda.is_available():
        return None
    return GPUS[(given or "h100").upper()]


def with_gpu(facts: Facts, gpu: Gpu) -> Facts:
    """Return the facts of a host with such GPUs."""
    return replace(facts, device_name=f"NVIDIA {gpu.name}", device_capability=gpu.capability, has_triton=True)
