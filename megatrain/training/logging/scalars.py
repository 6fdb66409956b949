"""The curves of TensorBoard and W&B, by Megatron-LM's names, from what `metrics.jsonl` gets.

{"lm_loss": 2.5, "consumed_samples": 40, ...}  ->  {"lm loss": 2.5, "lm loss vs samples": 2.5 at 40, ...}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatrain.config import LoggingConfig

VS_SAMPLES = " vs samples"
"""Ends the name of a curve over consumed samples, the twin of one over iterations."""
_WITHOUT_TWIN = ("iteration-time", "throughput", "-time", "mem-", "samples vs steps")


def iteration_scalars(
    values: Mapping[str, Any], logging: LoggingConfig, *, world_size: int
) -> dict[str, float]:
    """One iteration's points, without the twins; what is not known is left out."""
    found: dict[str, float | None] = {
        "learning-rate": values["learning_rate"],
        "batch-size": values["global_batch_size"],
        "lm loss": values["lm_loss"],
        "z loss": values["z_loss"],
        "grad-norm": values["grad_norm"],
        "num-zeros": values["num_zeros"],
        "params-norm": values["params_norm"],
        "samples vs steps": values["consumed_samples"],
    }
    if values["routers"] is not None:
        found |= values["routers"]["losses"]
    if logging.log_loss_scale_to_tensorboard:
        found["loss-scale"] = values["loss_scale"]
    if logging.log_world_size_to_tensorboard:
        found["world-size"] = world_size
    if logging.log_throughput:
        found["throughput"] = values["tflops_per_gpu"]
    if logging.log_timers_to_tensorboard:
        found["iteration-time"] = values["iteration_ms"] / 1000
        found |= {f"{name}-time": milliseconds / 1000 for name, milliseconds in values["timers"].items()}
    if logging.log_memory_to_tensorboard:
        found["mem-allocated-bytes"] = values["memory_bytes"]
        found["mem-reserved-bytes"] = values["reserved_memory_bytes"]
        found["mem-max-allocated-bytes"] = values["max_memory_bytes"]
    return _finite(found)


def evaluation_scalars(values: Mapping[str, Any], logging: LoggingConfig) -> dict[str, float]:
    """An evaluation's points: `lm loss validation`, or with the name of one of several sets behind it."""
    split, dataset = values["split"], values["dataset"]
    name = f"lm loss {'validation' if split == 'valid' else split}"
    name += "" if dataset is None else f"-{dataset}"
    found: dict[str, float | None] = {name: values["loss"]}
    if logging.log_validation_ppl_to_tensorboard:
        found[f"{name} ppl"] = values["ppl"]
    return _finite(found)


def has_twin(name: str) -> bool:
    """Whether there is a curve over samples beside this one."""
    return not any(part in name for part in _WITHOUT_TWIN)


def _finite(found: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}
