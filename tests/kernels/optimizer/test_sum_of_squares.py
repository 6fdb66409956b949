"""Sums of squares are exact to the last digits of fp32 for any number of elements."""

import pytest
import torch

from megatrain.kernels.optimizer.sum_of_squares import sum_of_squares

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_millions_of_elements_lose_nothing(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.rand(size, generator=generator, dtype=dtype) ** 9 for size in (3_000_001, 7, 0, 1 << 20)]
    exact = sum(tensor.double().square().sum() for tensor in tensors)
    found = sum_of_squares(tensors, CPU)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, exact, rtol=1e-7 if dtype == torch.float32 else 1e-14, atol=0)


def test_no_tensors_have_no_squares() -> None:
    assert sum_of_squares([], CPU) == 0


def test_sums_of_non_finite_elements_are_not_finite() -> None:
    assert sum_of_squares([torch.tensor([1.0, float("nan")])], CPU).isnan()
    assert sum_of_squares([torch.ones(3), torch.tensor([float("inf")])], CPU).isinf()
