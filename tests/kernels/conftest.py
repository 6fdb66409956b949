"""Fixtures of the tests of kernels."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def context_of_autograd() -> None:
    """Launch a kernel of the CUDA runtime in autograd's thread: cuBLAS warns in threads that have no context, and kernels of
    Triton, which the driver launches, make none current."""
    if torch.cuda.is_available():
        torch.ones(2, device="cuda", requires_grad=True).square().sum().backward()
