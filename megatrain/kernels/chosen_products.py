"""Products of bf16 matrices with measured algorithms (--product-algorithms). Others use torch's choice.

y = x W^T       a is x, b is W stored as [n, k]
dx = dy W       a is dy, b is W
dW += dy^T x    a is dy stored as [k, m], b is x; fp32
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar, Final

import torch
from torch import Tensor

from megatrain.config.product_algorithms import MeasuredAlgorithm, Product
from megatrain.kernels.cublaslt import PreparedProduct, Problem
from megatrain.kernels.fused.launching import is_fake

_ALIGNMENT: Final = 16
"""Bytes that the addresses of matrices are multiples of."""


class ChosenProducts:
    """The process-wide algorithms. They are process state for the reason that `launching.FusedKernels` gives."""

    find: ClassVar[Callable[[Product], PreparedProduct | None] | None] = None
    """Returns the algorithm of a product, or None if torch chooses it; None: torch chooses all."""


class UnusableAlgorithmError(Exception):
    """The library refuses an algorithm."""


def choose_algorithms(entries: Iterable[MeasuredAlgorithm], device: torch.device) -> None:
    """Use these algorithms in this process from now on. Raises UnusableAlgorithmError."""
    chosen = {}
    for entry in entries:
        try:
            chosen[entry.product] = prepared(entry.product, bytes.fromhex(entry.algorithm), device)
        except ValueError as error:
            raise UnusableAlgorithmError(str(error)) from error
    ChosenProducts.find = chosen.get if chosen else None


@contextmanager
def recorded_products() -> Iterator[list[Product]]:
    """Yield a list of the products that are computed inside the context, all by torch."""
    found: list[Product] = []
    before, ChosenProducts.find = ChosenProducts.find, found.append
    try:
        yield found
    finally:
        ChosenProducts.find = before


def prepared(product: Product, algorithm: bytes, device: torch.device) -> PreparedProduct:
    """Prepare a product for calls. Raises ValueError if the algorithm does not compute it."""
    return PreparedProduct(problem_of(product, device), algorithm, beta=float(product.accumulates))


def problem_of(product: Product, device: torch.device) -> Problem:
    """Return the library's problem."""
    m, n, k, transposes_a, transposes_b, accumulates = product
    bf16, out = torch.bfloat16, torch.float32 if accumulates else torch.bfloat16
    alignments = (_ALIGNMENT, _ALIGNMENT, _ALIGNMENT)
    return Problem(m, n, k, bf16, bf16, out, transposes_a, transposes_b, False, alignments, device.index)


def multiply_chosen(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor | None:
    """Return a b if an algorithm was chosen for it: [..., k], [k, n] -> [..., n]. Autograd does not record it.

    Args:
        b: contiguous, or the transposed view of such a matrix.
    """
    find = ChosenProducts.find
    if find is None or a.dtype is not torch.bfloat16 or not a.is_cuda:
        return None
    k, n = b.shape
    is_transposed = b.stride(0) == 1
    chosen = find(Product(a.numel() // k, n, k, False, is_transposed, False))
    if chosen is None or not a.is_contiguous() or b.stride() != ((1, k) if is_transposed else (n, 1)):
        return None
    assert not torch.is_grad_enabled(), "autograd would not record the product"
    out = a.new_empty((*a.shape[:-1], n)) if out is None else out
    return out if _run(chosen, out, a, b) else None


def add_chosen(total: Tensor, a: Tensor, b: Tensor) -> bool:
    """Compute total += a^T b if an algorithm was chosen for it, and return whether: fp32 [m, n], [k, m], [k, n]."""
    find = ChosenProducts.find
    if find is None or a.dtype is not torch.bfloat16 or total.dtype is not torch.float32:
        return False
    (m, n), k = total.shape, a.shape[0]
    chosen = find(Product(m, n, k, True, False, True))
    is_contiguous = total.is_contiguous() and a.is_contiguous() and b.is_contiguous()
    return chosen is not None and is_contiguous and _run(chosen, total, a, b)


def _run(chosen: PreparedProduct, out: Tensor, a: Tensor, b: Tensor) -> bool:
    """Run the product if its matrices have memory and are aligned; return whether."""
    if is_fake(out) or (out.data_ptr() | a.data_ptr() | b.data_ptr()) % _ALIGNMENT:
        return False
    chosen.run(out, a, b)
    return True
