"""Planted faults of Mamba-2, each with the layout in which parity must find it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatrain.kernels import gated_delta
from megatrain.kernels.gated_delta import causal_convolution
from megatrain.kernels.mamba2 import mamba2_scan
from megatrain.model import mamba
from megatrain.tools.parity.runs.program import Patch

_Scanned = tuple[Tensor, Tensor]


def _state_over_documents() -> AbstractContextManager[Any]:
    """Let states continue in the next document."""

    def over_all(*arguments: Tensor, cu_seqlens: Tensor | None, **options: Any) -> _Scanned:
        return mamba2_scan(*arguments, **options)

    return mock.patch.object(mamba, "mamba2_scan", over_all)


def _groups_of_another_order() -> AbstractContextManager[Any]:
    """Give the heads of the second tensor rank the next groups."""

    def turned(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, **options: Any) -> _Scanned:
        if dist.get_rank() == 1:
            b, c = b.roll(1, dims=2), c.roll(1, dims=2)
        return mamba2_scan(x, dt, a, b, c, d, **options)

    return mock.patch.object(mamba, "mamba2_scan", turned)


def _decay_in_bf16() -> AbstractContextManager[Any]:
    def rounded(x: Tensor, dt: Tensor, a: Tensor, *others: Any, **options: Any) -> _Scanned:
        return mamba2_scan(x, dt, a.bfloat16().to(a.dtype), *others, **options)

    return mock.patch.object(mamba, "mamba2_scan", rounded)


def _convolution_of_chunks() -> AbstractContextManager[Any]:
    """Forget the last tokens before each half of a sample, as a context rank that computes its own rows would."""

    def apart(x: Tensor, weight: Tensor, document_ids: Tensor | None) -> Tensor:
        assert document_ids is None
        return torch.cat([causal_convolution(half, weight) for half in x.chunk(2)])

    return mock.patch.object(gated_delta, "causal_convolution", apart)


MAMBA_FAULTS: dict[str, tuple[Patch, str]] = {
    "states of Mamba over the end of a document": (_state_over_documents, "dp2 documents hybrid"),
    "groups of Mamba in another order": (_groups_of_another_order, "tp2 hybrid"),
    "decay of Mamba in bf16": (_decay_in_bf16, "tp2 hybrid"),
    "convolution of Mamba without the rows before": (_convolution_of_chunks, "cp2 hybrid"),
}
