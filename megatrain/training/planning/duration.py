"""The weeks of a run: days to its end, bytes of its checkpoints, hours between them, and what a failure costs.

The time of an iteration is that of its FLOPs at a usual share of the GPU's peak; `megatrain plan` predicts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from megatrain.config import Plan
from megatrain.training.checkpoints import saved_kinds
from megatrain.training.engine import Engine
from megatrain.training.logging.metrics import peak_tflops
from megatrain.training.planning.data_and_timeline import Repeated

_SHARE_OF_PEAK: Final = 0.4
"""Usual share of the bf16 peak that training reaches."""
_BYTES: Final = {"float64": 8, "float32": 4, "fp32": 4, "bf16": 2, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Time and storage of a run."""

    seconds_per_iteration: float | None
    """None: the peak of the device is not known."""
    checkpoint_bytes: int
    """Bytes of one checkpoint."""
    kept_checkpoints: int
    """Checkpoints in --save at the end."""

    def hours(self, iterations: int) -> float | None:
        return None if self.seconds_per_iteration is None else iterations * self.seconds_per_iteration / 3600


def duration_of(
    plan: Plan, engine: Engine, parameters: int, checkpoints: Repeated, device: str | None
) -> Duration:
    """Return the duration of a run on GPUs with this name."""
    peak = peak_tflops(device) if plan.config.training.device == "cuda" else None
    rate = None if peak is None else peak * 1e12 * _SHARE_OF_PEAK * plan.derived.world_size
    keep = plan.config.checkpoint.keep_last
    retained = plan.config.checkpoint.save_retain_interval
    kept = checkpoints.count if keep is None and retained is None else min(keep or 2, checkpoints.count)
    if retained is not None and checkpoints.interval is not None:
        kept += max(0, checkpoints.count * checkpoints.interval // retained)
    return Duration(
        seconds_per_iteration=None if rate is None else plan.derived.flops_per_iteration / rate,
        checkpoint_bytes=int(parameters * _bytes_per_parameter(plan, engine)),
        kept_checkpoints=min(kept, checkpoints.count),
    )


def _bytes_per_parameter(plan: Plan, engine: Engine) -> float:
    """Return the bytes of a parameter in a checkpoint, as if all had every kind of state."""
    optimizer, matrices = plan.config.optimizer, engine.optimizer.matrices
    dtypes = {"exp_avg": optimizer.exp_avg_dtype, "exp_avg_sq": optimizer.exp_avg_sq_dtype}
    numbers = {} if matrices is None else {matrices.factor_kind: matrices.factors_per_element}
    return sum(
        numbers.get(kind, 1) * _BYTES[dtypes.get(kind, plan.derived.master_dtype)]
        for kind in saved_kinds(plan, engine)
    )
