"""Helpers for tests of fused kernels; importing them skips a test module where no kernel can run.

On a GPU kernels are compiled; elsewhere Triton's interpreter runs them, if installed: `TRITON_INTERPRET=1 pytest ...` (triton 3.6 with numpy below 2.3 and `-W ignore`).
"""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
if DEVICE == "cpu":
    DTYPES.remove(torch.bfloat16)  # the interpreter uses numpy, which has no bfloat16


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def near(
    found: torch.Tensor | None, expected: torch.Tensor | None, dtype: torch.dtype, terms: int = 1
) -> None:
    """Assert equality within two roundings of the dtype, relative to the largest value, plus fp32 sums over `terms`."""
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    assert found.shape == expected.shape
    size = expected.double().abs().max().clamp(min=1e-30)
    error = ((found.double() - expected.double()).abs().max() / size).item()
    assert error <= 2 * torch.finfo(dtype).eps + 1e-6 * max(terms, 4) ** 0.5, error
