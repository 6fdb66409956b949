"""Checks of the GPUs of this host, by nvidia-smi: driver, errors of memory, slowed clocks, other programs, equal models."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from megatrain.tools.doctor.finding import Finding

_FIELDS: Final = (
    "index",
    "name",
    "driver_version",
    "memory.used",
    "memory.total",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
    "ecc.errors.uncorrected.volatile.total",
    "temperature.gpu",
    "power.limit",
    "power.default_limit",
)
_REASONS: Final = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
"""Bits of clocks_throttle_reasons.active that a run should not start with. Source: NVML, nvmlClocksThrottleReasons."""
_MIN_DRIVERS: Final = {11: 450, 12: 525, 13: 580}
"""First driver of a CUDA major version, from NVIDIA's table of minor version compatibility."""
_MAX_USED: Final = 0.03
"""Fraction of a GPU's memory in use by others that a run can spare."""


def read_gpus() -> list[dict[str, str]] | None:
    """Return the values of nvidia-smi of each GPU; None: it is not installed."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        return None
    if ended.returncode:
        raise OSError((ended.stdout + ended.stderr).strip() or f"exit code {ended.returncode}")
    rows = csv.reader(ended.stdout.splitlines(), skipinitialspace=True)
    return [dict(zip(_FIELDS, row, strict=False)) for row in rows if row]


def check_gpus() -> Iterator[Finding]:
    """Check all GPUs of this host."""
    try:
        gpus = read_gpus()
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding.error(
            "GPUs", f"nvidia-smi fails: {error}", "reload the driver, or take the host out of service"
        )
        return
    if gpus is None:
        yield Finding.ok("GPUs", "none: nvidia-smi is not installed; a run uses the CPU")
        return
    names = {gpu["name"] for gpu in gpus}
    yield Finding.ok("GPUs", f"{len(gpus)} x {', '.join(sorted(names))}, driver {gpus[0]['driver_version']}")
    if len(names) > 1:
        yield Finding.warning(
            "GPUs", "they are of different models: the slowest sets the speed", "use hosts with equal GPUs"
        )
    yield from _driver(gpus[0]["driver_version"])
    if cuda_of_torch() is not None and not torch_has_gpus():
        yield Finding.error(
            "GPUs",
            "torch can use none of them",
            "look at CUDA_VISIBLE_DEVICES, and at what `python -c 'import torch; torch.cuda.init()'` prints",
        )
    for gpu in gpus:
        yield from _one(gpu)


def cuda_of_torch() -> str | None:
    """Return the CUDA version that torch was built for; None: without CUDA."""
    return torch.version.cuda


def torch_has_gpus() -> bool:
    """Return whether torch can use GPUs of NVIDIA here."""
    return torch.version.cuda is not None and torch.cuda.is_available()


def _driver(version: str) -> Iterator[Finding]:
    cuda = cuda_of_torch()
    if cuda is None:
        yield Finding.error(
            "driver", "torch was built without CUDA, and this host has GPUs", "install torch for CUDA"
        )
        return
    major = version.split(".", maxsplit=1)[0]
    needed = _MIN_DRIVERS.get(int(cuda.split(".")[0]))
    if needed is not None and major.isdecimal() and int(major) < needed:
        yield Finding.error(
            "driver",
            f"{version} is too old for torch's CUDA {cuda}",
            f"install driver {needed} or later, or a torch for an older CUDA",
        )


def _one(gpu: Mapping[str, str]) -> Iterator[Finding]:
    """Check one GPU. Values that it does not support, such as [N/A], are passed over."""
    name = f"GPU {gpu['index']}"
    errors = _number(gpu, "ecc.errors.uncorrected.volatile.total")
    if errors:
        yield Finding.error(
            name, f"{errors:.0f} uncorrected memory errors", "reset the GPU, and replace it if they come back"
        )
    bits = gpu.get("clocks_throttle_reasons.active", "")
    active = int(bits, 16) if bits.startswith("0x") else 0
    reasons = sorted({text for bit, text in _REASONS.items() if active & bit})
    if reasons:
        clock, heat = _number(gpu, "clocks.sm"), _number(gpu, "temperature.gpu")
        yield Finding.error(
            name,
            f"clocks are slowed by {' and '.join(reasons)}: {clock or 0:.0f} MHz at {heat or 0:.0f} °C",
            "check cooling and power of the host",
        )
    used, total = _number(gpu, "memory.used"), _number(gpu, "memory.total")
    if used and total and used > _MAX_USED * total:
        yield Finding.error(
            name,
            f"{used:,.0f} of {total:,.0f} MiB are in use by another program",
            "end it: nvidia-smi lists it by its process id",
        )
    limit, default = _number(gpu, "power.limit"), _number(gpu, "power.default_limit")
    if limit and default and limit < 0.95 * default:
        yield Finding.warning(
            name, f"the power limit is {limit:.0f} W, by default {default:.0f} W", "nvidia-smi --power-limit"
        )


def _number(gpu: Mapping[str, str], field: str) -> float | None:
    try:
        return float(gpu.get(field, ""))
    except ValueError:
        return None
