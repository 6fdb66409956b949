"""Planted faults that parity must find. Each changes the program in all ranks of a layout, which passes without it."""

from __future__ import annotations

import functools
from typing import NamedTuple

from megatrain.tools.parity.measure import Job, Measured, RunOfRank, measure
from megatrain.tools.parity.runs.program import Patch
from parity_faults.attention import ATTENTION_FAULTS
from parity_faults.distillation import DISTILLATION_FAULTS
from parity_faults.expert import EXPERT_FAULTS
from parity_faults.families import FAMILY_FAULTS
from parity_faults.fp8 import FP8_FAULTS
from parity_faults.latent import LATENT_FAULTS
from parity_faults.layout import LAYOUT_FAULTS
from parity_faults.mamba import MAMBA_FAULTS
from parity_faults.mtp import MTP_FAULTS
from parity_faults.pipeline import PIPELINE_FAULTS
from parity_faults.vision import VISION_FAULTS


class Fault(NamedTuple):
    """A context manager that breaks something, and the words of the smallest layout in which parity must find it."""

    plant: Patch
    layout: str


FAULTS = {
    name: Fault(*fault)
    for faults in (
        LAYOUT_FAULTS,
        ATTENTION_FAULTS,
        EXPERT_FAULTS,
        FP8_FAULTS,
        LATENT_FAULTS,
        PIPELINE_FAULTS,
        MTP_FAULTS,
        DISTILLATION_FAULTS,
        FAMILY_FAULTS,
        VISION_FAULTS,
        MAMBA_FAULTS,
    )
    for name, fault in faults.items()
}


def measured_with(fault: str) -> RunOfRank:
    """Return the function that measures a rank with this fault; it can be sent to other processes."""
    return functools.partial(_measure_with, fault)


def _measure_with(fault: str, rank: int, world_size: int, job: Job) -> Measured:
    with FAULTS[fault].plant():
        return measure(rank, world_size, job)
