"""Compares planned memory with the memory of a GPU or of a host.

largest total, memory of this host's GPU or of the assumed one  ─> a line for the memory table, or a warning
total of the ranks of a host, memory that this host has         ─> the same, for what lies in host memory
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from megatrain.config import Plan
from megatrain.config.plan_note import PlanNote
from megatrain.training.launch.memory_remedies import gigabytes, memory_fix

COMMON_GPUS: Final = ((40, "A100"), (80, "H100"), (141, "H200"), (192, "B200"), (288, "B300"))
"""Nominal memory in GB, ascending, and a GPU that has it."""
TIGHT: Final = 0.95
"""Share of the memory above which a run may not fit: CUDA's context, NCCL and fragmentation are not planned."""
WITHOUT_FP8: Final = ("A100",)
"""GPUs among these that have no FP8 GEMMs."""


@dataclass(frozen=True, kw_only=True)
class HostUse:
    """Bytes of host memory of a run, on the host that needs most."""

    ranks_per_host: int
    reason: str
    """Source of `ranks_per_host`."""
    per_host: int
    """Sum over its ranks: on CPUs all that a step needs; offloaded state and activations; copies of --async-save."""
    available: int
    """Bytes that this host can still allocate."""

    def __str__(self) -> str:
        words = "fits into" if self.per_host <= self.available else "exceeds"
        ranks = f"{self.ranks_per_host} rank{'s' * (self.ranks_per_host > 1)}"
        return (
            f"the {gigabytes(self.per_host)} GB of a host of {ranks} ({self.reason}) {words} the"
            f" {gigabytes(self.available)} GB that this host has available"
        )


def comparison(plan: Plan, needed: int, device_bytes: int | None, assumed: str | None = None) -> str | None:
    """Return how the memory of a rank compares with a GPU's; None for a run on CPUs.

    Args:
        needed: bytes of the rank that needs most.
        device_bytes: memory of a GPU.
        assumed: its name; None: it is this host's GPU.
    """
    if plan.config.training.device == "cpu" or device_bytes is None:
        return None
    gpu = "this host's GPU" if assumed is None else f"the {assumed} that --assume-gpu {assumed.lower()} names"
    if needed > device_bytes:
        total, limit = needed / 1e9, device_bytes / 1e9
        return f"the largest total of {total:.2f} GB exceeds the {limit:.2f} GB of {gpu}{_larger_gpu(plan, needed)}"
    share = needed / device_bytes
    tight = f", and takes {share:.0%} of them" if share > TIGHT else ""
    return f"the largest total fits into the {device_bytes / 1e9:.2f} GB of {gpu}{tight}"


def _larger_gpu(plan: Plan, needed: int) -> str:
    is_fp8 = plan.config.precision.fp8_format is not None
    for size, name in COMMON_GPUS:
        if needed <= size * 1e9 and not (is_fp8 and name in WITHOUT_FP8):
            return f"; a GPU such as the {name} has {size}"
    return f", and the {COMMON_GPUS[-1][0]} GB of the largest GPU"


def memory_warning(
    plan: Plan,
    needed: int,
    device_bytes: int | None,
    host: HostUse | None = None,
    assumed: str | None = None,
) -> str | None:
    """Return a warning if no step would fit into the GPU or, on CPUs, into this host; also if it would take nearly all of it."""
    text = comparison(plan, needed, device_bytes, assumed)
    if plan.config.training.device == "cpu" and host is not None:
        text, share = str(host), host.per_host / host.available
    else:
        share = 0 if device_bytes is None else needed / device_bytes
    if text is None or share <= TIGHT:
        return None
    end = "the run would end" if share > 1 else "fragmentation and NCCL may end the run"
    return f"{text}: {end} with an out-of-memory error\n  fix: {memory_fix(plan)}"


def ignored_flag(plan: Plan) -> PlanNote | None:
    """Return the note on a flag that would save memory and has no effect, if there is one."""
    return next((note for note in plan.notes if note.saves_memory), None)
