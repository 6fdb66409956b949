"""How GEMMs are described to cuBLASLt."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.kernels import cublaslt


def test_a_gemm_without_an_algorithm_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_checked", lambda *_: None)  # the library finds 0
    monkeypatch.setattr(cublaslt, "_library", SimpleNamespace)
    monkeypatch.setattr(cublaslt, "_handle", lambda _: ctypes.c_void_p())
    total, a, b = (torch.zeros(16, 16), *torch.zeros(2, 16, 48).to(torch.float8_e4m3fn))
    with pytest.raises(RuntimeError, match="has no algorithm"):
        cublaslt.accumulate(total, a, b, (torch.ones(()), torch.ones(())), beta=0.0)


def test_every_gemm_has_its_own_scales_also_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    scale_addresses: dict[int, int] = {}
    gemms = []

    def call(_: object, name: str, *arguments: Any) -> None:
        if name == "cublasLtMatmulDescSetAttribute" and arguments[1] in (
            cublaslt._SCALE_A,
            cublaslt._SCALE_B,
        ):
            scale_addresses[arguments[1]] = arguments[2]._obj.value
        elif name == "cublasLtMatmulAlgoGetHeuristic":
            arguments[-1]._obj.value = 1  # one algorithm
        elif name == "cublasLtMatmul":
            gemms.append((scale_addresses[cublaslt._SCALE_B], scale_addresses[cublaslt._SCALE_A]))

    monkeypatch.setattr(cublaslt, "_checked", call)
    monkeypatch.setattr(cublaslt, "_library", SimpleNamespace)
    monkeypatch.setattr(cublaslt, "_handle", lambda _: ctypes.c_void_p())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    out, a, b = (torch.zeros(16, 16), *torch.zeros(2, 16, 16).to(torch.float8_e4m3fn))
    gemm = cublaslt._Gemm(cublaslt.problem_of(out, a, b))
    expected = []
    for scales in torch.ones(2, 2):
        gemm.run(out, a, b, (scales[0], scales[1]), 0.0)
        expected.append((scales[0].data_ptr(), scales[1].data_ptr()))
    assert gemms == expected
