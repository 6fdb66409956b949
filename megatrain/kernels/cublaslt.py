"""GEMMs by cuBLASLt, the library that torch itself calls, for what torch does not offer.

    out = a b + beta * out      for FP8 operands too, and with a choice among the library's algorithms

The library is column-major: it reads a row-major matrix as its transpose, so that a product is computed as out^T = b^T a^T.

Source: cuBLAS documentation, "Using the cuBLASLt API"; values of its enumerations from cublasLt.h.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import (
    byref,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import is_fake

_DTYPES: Final = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
"""`cudaDataType_t`."""
_COMPUTE_FP32: Final = 68
_TRANSPOSE_A, _TRANSPOSE_B, _SCALE_A, _SCALE_B, _FAST_ACCUMULATION = 3, 4, 17, 18, 25
"""`cublasLtMatmulDescAttributes_t`."""
_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)
"""`cublasLtMatmulPreferenceAttributes_t`."""
_WORKSPACE_BYTES: Final = 32 * 2**20
"""The size that NVIDIA recommends for Hopper."""
_MAX_ALIGNMENT: Final = 256
_ANY_ADDRESS: Final = c_void_p(_MAX_ALIGNMENT)
"""Address of a scale that is not read."""
_MAX_ALGORITHMS: Final = 16


class Problem(NamedTuple):
    """A product that algorithms are chosen for: [m, k] by [k, n]."""

    m: int
    n: int
    k: int
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    transposes_a: bool
    """`a` is stored as [k, m]."""
    transposes_b: bool
    """`b` is stored as [n, k]."""
    is_fast: bool
    """FP8 tensor cores keep fewer bits of partial sums."""
    alignments: tuple[int, int, int]
    """Bytes that the addresses of a, b and out are multiples of, up to 256."""
    device: int


class _Choice(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def multiply(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: float = 0.0,
    transposes_a: bool = False,
    transposes_b: bool = False,
    scales: tuple[Tensor, Tensor] | None = None,
    is_fast: bool = False,
    algorithm: int = 0,
) -> Tensor:
    """Compute out = a b * scales[0] * scales[1] + beta * out, in fp32 until the result is rounded.

    Args:
        out: [m, n].
        a: [m, k], or [k, m] with `transposes_a`.
        b: [k, n], or [n, k] with `transposes_b`. FP8 matrices on Hopper are contiguous along k.
        scales: fp32 [], of FP8 matrices.
        is_fast: see `Problem`.
        algorithm: number in the library's own order of preference, see `num_algorithms`.
    Returns:
        `out`.
    """
    if is_fake(out):
        return out
    product = _product(problem_of(out, a, b, transposes_a, transposes_b, is_fast), scales is not None)
    product.run(out, a, b, beta, scales, algorithm)
    return out


def problem_of(
    out: Tensor, a: Tensor, b: Tensor, transposes_a: bool, transposes_b: bool, is_fast: bool = False
) -> Problem:
    """Return the problem of these matrices."""
    assert all(x.is_contiguous() for x in (out, a, b)), "matrices have rows without gaps"
    m, n = out.shape
    return Problem(
        m, n, a.shape[0 if transposes_a else 1], a.dtype, b.dtype, out.dtype, transposes_a, transposes_b, is_fast,
        (_alignment(a), _alignment(b), _alignment(out)), out.device.index,
    )  # fmt: skip


def num_algorithms(problem: Problem, *, has_scales: bool) -> int:
    """Return how many algorithms the library offers, at most `_MAX_ALGORITHMS`."""
    return len(_product(problem, has_scales).choices)


class ProductError(RuntimeError):
    """The library has not launched a product, or has no algorithm for it."""


class _Product:
    """The library's description of a problem, and the algorithms that it offers. Used by one thread at a time."""

    def __init__(self, problem: Problem, has_scales: bool) -> None:
        self.problem, self.has_scales = problem, has_scales
        self.library, self.handle = _library(), _handle(problem.device)
        m, n, k = problem.m, problem.n, problem.k
        self.description = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(self.description), _COMPUTE_FP32, _DTYPES[torch.float32])
        self._set(_TRANSPOSE_A, c_int32(problem.transposes_b))
        self._set(_TRANSPOSE_B, c_int32(problem.transposes_a))
        self._set(_FAST_ACCUMULATION, c_int8(problem.is_fast))
        rows_b, columns_b = (k, n) if problem.transposes_b else (n, k)
        rows_a, columns_a = (m, k) if problem.transposes_a else (k, m)
        self.layouts = (
            self._layout(problem.b_dtype, rows_b, columns_b),
            self._layout(problem.a_dtype, rows_a, columns_a),
            self._layout(problem.out_dtype, n, m),
        )

    def run(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        beta: float,
        scales: tuple[Tensor, Tensor] | None,
        algorithm: int,
    ) -> None:
        """Queue the product on the current stream."""
        choice = self.choices[algorithm]  # before the scales are set: a first search sets others
        if scales is not None:
            self._set(_SCALE_A, c_void_p(scales[1].data_ptr()))
            self._set(_SCALE_B, c_void_p(scales[0].data_ptr()))
        workspace = torch.empty(max(choice.workspace_bytes, 1), dtype=torch.uint8, device=out.device)
        layout_b, layout_a, layout_out = self.layouts
        self._call(
            "cublasLtMatmul", self.handle, self.description, byref(c_float(1.0)),
            c_void_p(b.data_ptr()), layout_b, c_void_p(a.data_ptr()), layout_a, byref(c_float(beta)),
            c_void_p(out.data_ptr()), layout_out, c_void_p(out.data_ptr()), layout_out,
            byref(choice.algorithm), c_void_p(workspace.data_ptr()), c_size_t(choice.workspace_bytes),
            c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
        )  # fmt: skip

    @functools.cached_property
    def choices(self) -> list[_Choice]:
        """The algorithms that the library prefers."""
        problem, preference = self.problem, c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        a, b, out = problem.alignments
        settings = [
            (_WORKSPACE, c_uint64(_WORKSPACE_BYTES)),
            *zip(_ALIGNMENTS, map(c_uint32, (b, a, out, out)), strict=True),
        ]
        for attribute, value in settings:
            self._call(
                "cublasLtMatmulPreferenceSetAttribute", preference, attribute, byref(value),
                c_size_t(ctypes.sizeof(value)),
            )  # fmt: skip
        if self.has_scales:
            self._set(_SCALE_A, _ANY_ADDRESS)
            self._set(_SCALE_B, _ANY_ADDRESS)
        found = (_Choice * _MAX_ALGORITHMS)()
        count = c_int(0)
        layout_b, layout_a, layout_out = self.layouts
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self.handle, self.description, layout_b, layout_a, layout_out, layout_out,
            preference, _MAX_ALGORITHMS, found, byref(count),
        )  # fmt: skip
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        choices = [choice for choice in found[: count.value] if choice.status == 0]
        if not choices:
            raise ProductError(f"cuBLASLt has no algorithm for {problem}")
        return choices

    def _layout(self, dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate", byref(layout), _DTYPES[dtype], c_uint64(rows), c_uint64(columns),
            c_int64(rows),
        )  # fmt: skip
        return layout

    def _set(self, attribute: int, value: Any) -> None:
        self._call(
            "cublasLtMatmulDescSetAttribute", self.description, attribute, byref(value),
            c_size_t(ctypes.sizeof(value)),
        )  # fmt: skip

    def _call(self, name: str, *arguments: Any) -> None:
        _checked(self.library, name, *arguments)


_product = functools.cache(_Product)


@functools.cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _checked(_library(), "cublasLtCreate", byref(handle))
    return handle


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the library of torch's CUDA version, which importing torch has loaded."""
    major = str(torch.version.cuda).split(".", maxsplit=1)[0]
    return ctypes.CDLL(f"libcublasLt.so.{major}")


def _checked(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    status = getattr(library, name)(*arguments)
    if status:
        raise RuntimeError(f"{name} of cuBLASLt failed with status {status}")


def _alignment(x: Tensor) -> int:
    address: int = x.data_ptr() | _MAX_ALIGNMENT
    return address & -address
