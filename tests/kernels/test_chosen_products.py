"""Products with chosen algorithms, with a stand-in for cuBLASLt that computes on the CPU what it is asked for."""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config.product_algorithms import MeasuredAlgorithm, Product
from megatrain.kernels import cublaslt
from megatrain.kernels.chosen_products import (
    ChosenProducts,
    UnusableAlgorithmError,
    choose_algorithms,
    recorded_products,
)
from megatrain.kernels.linear import linear, product
from megatrain.kernels.wgrad import accumulate_weight_gradient
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import TensorParallel, column_linear, row_linear

GOOD, WITH_WORKSPACE, REFUSED = (bytes([number]) * 64 for number in (1, 2, 3))
TOKENS, OUTPUTS, INPUTS = 32, 48, 16
FORWARD = Product(TOKENS, OUTPUTS, INPUTS, False, True, False)
INPUT_GRADIENT = Product(TOKENS, INPUTS, OUTPUTS, False, False, False)
WEIGHT_GRADIENT = Product(OUTPUTS, INPUTS, TOKENS, True, False, True)
DTYPES = {0: torch.float32, 14: torch.bfloat16}


class Library:
    """Keeps descriptors by number; multiplies column-major matrices at addresses, as the documentation describes."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.kept: dict[int, Any] = {}
        self.calls: list[bytes] = []

    def _create(self, result: Any, value: Any) -> int:
        number = next(self.numbers)
        result._obj.value, self.kept[number] = number, value
        return 0

    def cublasLtMatmulDescCreate(  # noqa: N802
        self, result: Any, compute: int, scale: int
    ) -> int:
        assert (compute, scale) == (68, 0), "sums and factors are in fp32"
        return self._create(result, {})

    def cublasLtMatmulDescSetAttribute(  # noqa: N802
        self, description: Any, attribute: int, value: Any, size: Any
    ) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.kept[description.value][attribute] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(  # noqa: N802
        self, result: Any, dtype: int, rows: Any, columns: Any, stride: Any
    ) -> int:
        assert rows.value == stride.value
        return self._create(result, (DTYPES[dtype], rows.value, columns.value))

    def cublasLtMatmulAlgoCheck(  # noqa: N802
        self, *arguments: Any
    ) -> int:
        algorithm, result = bytes(arguments[6]._obj), arguments[7]._obj
        result.workspace_bytes = 64 if algorithm == WITH_WORKSPACE else 0
        return 15 if algorithm == REFUSED else 0

    def cublasLtMatmul(  # noqa: N802
        self, *arguments: Any
    ) -> int:
        (_, description, alpha, a, layout_a, b, layout_b, beta, c, layout_c, d, layout_d) = arguments[:12]
        algorithm, workspace, size, _ = arguments[12:]
        assert (c.value, layout_c.value, alpha._obj.value) == (d.value, layout_d.value, 1.0)
        assert bool(workspace.value) == bool(size.value)
        transposes = self.kept[description.value]
        factors = [
            self._matrix(address, layout).float().t()
            if transposes[attribute]
            else self._matrix(address, layout).float()
            for address, layout, attribute in ((a, layout_a, 3), (b, layout_b, 4))
        ]
        out = self._matrix(d, layout_d)
        result = factors[0] @ factors[1]
        out.copy_(result + beta._obj.value * out.float() if beta._obj.value else result)
        self.calls.append(bytes(algorithm._obj))
        return 0

    def _matrix(self, address: Any, layout: Any) -> Tensor:
        dtype, rows, columns = self.kept[layout.value]
        memory = (ctypes.c_uint8 * (rows * columns * dtype.itemsize)).from_address(address.value)
        return torch.frombuffer(memory, dtype=dtype).view(columns, rows).t()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(cublaslt, "_library", lambda: library)
    monkeypatch.setattr(cublaslt, "_handle", lambda _: ctypes.c_void_p(7))
    monkeypatch.setattr(cublaslt, "_product", functools.cache(cublaslt._Product))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(ChosenProducts, "find", None)
    return library


def choose(*products: Product, algorithm: bytes = GOOD) -> None:
    entries = [
        MeasuredAlgorithm(product=one, algorithm=algorithm.hex(), ms=1.0, torch_ms=1.1) for one in products
    ]
    choose_algorithms(entries, torch.device("cuda", 0))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("algorithm", [GOOD, WITH_WORKSPACE], ids=["no workspace", "workspace"])
def test_the_three_products_of_a_linear_layer_are_right(library: Library, algorithm: bytes) -> None:
    x, w, dy = drawn(4, 8, INPUTS), drawn(OUTPUTS, INPUTS, seed=1), drawn(4, 8, OUTPUTS, seed=2)
    total = drawn(OUTPUTS, INPUTS, seed=3).float()
    expected = x @ w.t(), dy @ w, total + dy.flatten(0, 1).float().t() @ x.flatten(0, 1).float()
    choose(FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, algorithm=algorithm)
    with torch.no_grad():
        accumulate_weight_gradient(total, dy.flatten(0, 1), x.flatten(0, 1))
        found = linear(x, w), product(dy, w), total
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        error = (one.float() - other.float()).abs().max() / other.float().abs().max()
        assert error < (2**-7 if one.dtype is torch.bfloat16 else 2**-20), error
    assert library.calls == [algorithm] * 3


def test_layers_use_them_forward_and_backward(library: Library) -> None:
    alone = RankGroup("alone", (0,), 0)
    tp = TensorParallel(alone, alone, sequence_parallel=False)
    for layer in (column_linear, row_linear):
        choose(FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
        x, w = drawn(4, 8, INPUTS).requires_grad_(), drawn(OUTPUTS, INPUTS, seed=1).requires_grad_()
        total, dy = torch.zeros(OUTPUTS, INPUTS), drawn(4, 8, OUTPUTS, seed=2)
        layer(x, w, total, tp, PassInfo()).backward(dy)
        assert library.calls == [GOOD] * 3
        library.calls.clear()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, dy @ w.detach(), rtol=2**-6, atol=2**-6)
        torch.testing.assert_close(total, dy.flatten(0, 1).float().t() @ x.detach().flatten(0, 1).float())


def test_the_result_may_have_memory_of_its_own(library: Library) -> None:
    dy, w, dx = drawn(TOKENS, OUTPUTS), drawn(OUTPUTS, INPUTS, seed=1), drawn(2 * TOKENS, INPUTS)
    choose(INPUT_GRADIENT)
    with torch.no_grad():
        assert product(dy, w, out=dx[TOKENS:]).data_ptr() == dx[TOKENS:].data_ptr()
    torch.testing.assert_close(dx[TOKENS:], dy @ w, rtol=2**-6, atol=2**-6)
    assert library.calls == [GOOD]


@pytest.mark.parametrize("reason", ["another size", "fp32", "gaps", "alignment", "no memory", "a CPU"])
def test_other_products_use_the_choice_of_torch(
    library: Library, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    choose(INPUT_GRADIENT)
    rows = TOKENS + 1 if reason == "another size" else TOKENS
    dy, w = drawn(rows, OUTPUTS), drawn(OUTPUTS, INPUTS, seed=1)
    if reason == "fp32":
        dy, w = dy.float(), w.float()
    elif reason == "gaps":
        dy = drawn(rows, 2 * OUTPUTS)[:, :OUTPUTS]
    elif reason == "alignment":
        dy = drawn(rows * OUTPUTS + 1)[1:].view(rows, OUTPUTS)
    elif reason == "no memory":
        dy, w = dy.to("meta"), w.to("meta")
    elif reason == "a CPU":
        monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    with torch.no_grad():
        found = product(dy, w)
    assert found.shape == (rows, INPUTS)
    assert found.is_meta or torch.equal(found, dy @ w)
    assert library.calls == []


def test_a_refused_algorithm_is_an_error(library: Library) -> None:
    del library
    choose(FORWARD)
    with pytest.raises(UnusableAlgorithmError, match="refuses"):
        choose(FORWARD, INPUT_GRADIENT, algorithm=REFUSED)


def test_a_failed_call_is_an_error(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cublasLtMatmul", lambda *_: 14)
    choose(INPUT_GRADIENT)
    with torch.no_grad(), pytest.raises(RuntimeError, match="status 14"):
        product(drawn(TOKENS, OUTPUTS), drawn(OUTPUTS, INPUTS))


def test_products_are_recorded(library: Library) -> None:
    choose(INPUT_GRADIENT)
    dy, w = drawn(TOKENS, OUTPUTS), drawn(OUTPUTS, INPUTS)
    with torch.no_grad():
        with recorded_products() as found:
            product(dy, w)
            linear(drawn(TOKENS, INPUTS), w)
        assert (found, library.calls) == ([INPUT_GRADIENT, FORWARD], [])
        product(dy, w)
    assert library.calls == [GOOD]
