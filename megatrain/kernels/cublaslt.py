"""FP8 GEMMs that add to their fp32 result, by cuBLASLt, the library that torch itself calls: torch does not offer them.

    total = a b^T * scale_a * scale_b + beta * total

The library is column-major: it reads a row-major matrix as its transpose, so that the GEMM is computed as total^T = b a^T.

Source: cuBLAS documentation, "Using the cuBLASLt API"; values of its enumerations from cublasLt.h.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import is_fake

_DTYPES: Final = {torch.float32: 0, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
"""`cudaDataType_t`."""
_COMPUTE_FP32: Final = 68
_TRANSPOSE_A, _SCALE_A, _SCALE_B = 3, 17, 18
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
    """A GEMM that an algorithm is chosen for: [m, k] by [n, k], which are contiguous along k."""

    m: int
    n: int
    k: int
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    alignments: tuple[int, int, int]
    """Bytes that the addresses of a, b and total are multiples of, up to 256."""
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


def accumulate(total: Tensor, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], *, beta: float) -> None:
    """Compute total = a b^T * scales[0] * scales[1] + beta * total, in fp32.

    Args:
        total: fp32 [m, n].
        a, b: FP8 [m, k] and [n, k].
        scales: fp32 [].
    """
    if not is_fake(total):
        _gemm(problem_of(total, a, b)).run(total, a, b, scales, beta)


def problem_of(total: Tensor, a: Tensor, b: Tensor) -> Problem:
    """Return the problem of these matrices."""
    assert all(x.is_contiguous() for x in (total, a, b)), "matrices have rows without gaps"
    (m, n), k = total.shape, a.shape[1]
    alignments = (_alignment(a), _alignment(b), _alignment(total))
    return Problem(m, n, k, a.dtype, b.dtype, alignments, total.device.index)


class _Gemm:
    """The library's description of a problem, and the algorithm that it prefers. Used by one thread at a time."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.library, self.handle = _library(), _handle(problem.device)
        m, n, k = problem.m, problem.n, problem.k
        self.description = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(self.description), _COMPUTE_FP32, _DTYPES[torch.float32])
        self._set(_TRANSPOSE_A, c_int32(1))
        self.layouts = (
            self._layout(problem.b_dtype, k, n),
            self._layout(problem.a_dtype, k, m),
            self._layout(torch.float32, n, m),
        )

    def run(self, total: Tensor, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], beta: float) -> None:
        """Queue the GEMM on the current stream."""
        choice = self.choice  # before the scales are set: a first search sets others
        self._set(_SCALE_A, c_void_p(scales[1].data_ptr()))
        self._set(_SCALE_B, c_void_p(scales[0].data_ptr()))
        workspace = torch.empty(max(choice.workspace_bytes, 1), dtype=torch.uint8, device=total.device)
        layout_b, layout_a, layout_total = self.layouts
        self._call(
            "cublasLtMatmul", self.handle, self.description, byref(c_float(1.0)),
            c_void_p(b.data_ptr()), layout_b, c_void_p(a.data_ptr()), layout_a, byref(c_float(beta)),
            c_void_p(total.data_ptr()), layout_total, c_void_p(total.data_ptr()), layout_total,
            byref(choice.algorithm), c_void_p(workspace.data_ptr()), c_size_t(choice.workspace_bytes),
            c_void_p(torch.cuda.current_stream(total.device).cuda_stream),
        )  # fmt: skip

    @functools.cached_property
    def choice(self) -> _Choice:
        """The algorithm that the library prefers."""
        preference = c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        a, b, total = self.problem.alignments
        settings = [
            (_WORKSPACE, c_uint64(_WORKSPACE_BYTES)),
            *zip(_ALIGNMENTS, map(c_uint32, (b, a, total, total)), strict=True),
        ]
        for attribute, value in settings:
            self._call(
                "cublasLtMatmulPreferenceSetAttribute", preference, attribute, byref(value),
                c_size_t(ctypes.sizeof(value)),
            )  # fmt: skip
        self._set(_SCALE_A, _ANY_ADDRESS)
        self._set(_SCALE_B, _ANY_ADDRESS)
        found = (_Choice * _MAX_ALGORITHMS)()
        count = c_int(0)
        layout_b, layout_a, layout_total = self.layouts
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self.handle, self.description, layout_b, layout_a, layout_total, layout_total,
            preference, _MAX_ALGORITHMS, found, byref(count),
        )  # fmt: skip
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        choice = next((choice for choice in found[: count.value] if choice.status == 0), None)
        if choice is None:
            raise RuntimeError(f"cuBLASLt has no algorithm for {self.problem}")
        return choice

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


_gemm = functools.cache(_Gemm)


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
