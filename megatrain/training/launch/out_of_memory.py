"""Allocations that fail, on a GPU or in host memory: one message with what was asked for and what was held.

torch.OutOfMemoryError, CUDA and cuBLAS without memory, the CPU allocator of torch, MemoryError, ENOMEM ─> OutOfMemoryError
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from megatrain.config import Plan
from megatrain.config.errors import MegatrainError
from megatrain.process.available_memory import available_bytes, held_bytes, process_bytes
from megatrain.training.launch.memory_remedies import gigabytes, memory_fix

_ON_GPU: Final = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2",
)
"""Messages of torch's allocator, of the runtime (pinned memory too), of cuBLAS and of NCCL."""
_ON_HOST: Final = ("DefaultCPUAllocator: ", "std::bad_alloc", "Cannot allocate memory", "Unable to allocate ")
"""Messages of torch on CPUs, of C++, of the system and of numpy."""
_SIZES: Final = (
    r"[Tt]ried to allocate (?P<number>[\d.]+) (?P<unit>bytes|[KMGT]iB)",
    r"Unable to allocate (?P<number>[\d.]+) (?P<unit>bytes|[KMGTPE]iB)",
)
_UNITS: Final = {"bytes": 1, **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTPE", 1)}}
_OF_HOST_FIX: Final = (
    "free memory on this host, or raise the limit (ulimit -v, the control group, the memory of the job)"
)


class OutOfMemoryError(MegatrainError):
    """An allocation failed."""


@contextmanager
def allocation_errors(
    plan: Plan, doing: Callable[[], str], *, planned_bytes: int | None = None
) -> Iterator[None]:
    """Raise an `OutOfMemoryError` for an allocation that fails inside.

    Args:
        doing: returns what the rank does, such as `iteration 3`.
        planned_bytes: what the rank keeps allocated by its plan; None: not known.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        planned = (
            ""
            if planned_bytes is None
            else f"; the plan keeps {gigabytes(planned_bytes)} GB for the whole run"
        )
        raise OutOfMemoryError(
            f"out of memory during {doing()}: {description(error)}{planned}", fix=_fix(plan, error)
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception is a failed allocation, and not yet an `OutOfMemoryError`."""
    if isinstance(error, MegatrainError):
        return False
    return _is_on_gpu(error) or _is_on_host(error)


def without_plan(error: BaseException) -> OutOfMemoryError:
    """Return the error of a failed allocation outside of a run."""
    return OutOfMemoryError(f"out of memory: {description(error)}", fix=_OF_HOST_FIX)


def description(error: BaseException) -> str:
    """Return what was asked for, and what was held."""
    asked = next(filter(None, (re.search(pattern, str(error)) for pattern in _SIZES)), None)
    number = (
        f"{gigabytes(round(float(asked['number']) * _UNITS[asked['unit']]))} GB" if asked else "an allocation"
    )
    if _is_on_gpu(error):
        return f"{number} asked for on {_of_gpu()}"
    return f"{number} asked for in host memory; {_of_host()}"


def _is_on_gpu(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or _says(error, _ON_GPU)


def _is_on_host(error: BaseException) -> bool:
    is_refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or is_refused or _says(error, _ON_HOST)


def _says(error: BaseException, words: Sequence[str]) -> bool:
    return isinstance(error, RuntimeError) and any(one in str(error) for one in words)


def _of_gpu() -> str:
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"GPU {device}; held: {gigabytes(torch.cuda.memory_allocated(device))} GB allocated and"
        f" {gigabytes(torch.cuda.memory_reserved(device))} GB reserved by this process;"
        f" {gigabytes(free)} of {gigabytes(total)} GB are free"
    )


def _of_host() -> str:
    limit = process_bytes()
    limits = "" if limit is None else f", and its limits (ulimit -v, ulimit -d) leave {gigabytes(limit)} GB"
    return (
        f"held: {gigabytes(held_bytes())} GB by this process{limits};"
        f" {gigabytes(available_bytes())} GB of the host are available"
    )


def _fix(plan: Plan, error: BaseException) -> str:
    is_run_on_gpu = plan.config.training.device == "cuda"
    if is_run_on_gpu and not _is_on_gpu(error):
        return _OF_HOST_FIX
    return f"{memory_fix(plan)}; --dry-run prints what each part needs"
