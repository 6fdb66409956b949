"""Heads with which kernels of attention are tried on a GPU, as `config/derive/attention_backend.py` lets them have them."""

import torch

LIMITS = {torch.bfloat16: 0.02, torch.float16: 0.005}
"""Of errors, relative to the largest value."""
DTYPES = {
    8: torch.bfloat16,
    16: torch.float16,
    32: torch.float16,
    40: torch.bfloat16,
    80: torch.bfloat16,
    96: torch.float16,
    120: torch.bfloat16,
    256: torch.bfloat16,
}
"""By the channels of a head."""


def heads_of(*backends: str) -> list[tuple[str, int]]:
    """Each of these with the channels of DTYPES that it takes."""
    return [(backend, d) for backend in backends for d in DTYPES if _takes(backend, d)]


def _takes(backend: str, d: int) -> bool:
    is_narrow = d <= 128 or backend in ("flash2", "sdpa")
    return is_narrow and (backend != "flash4" or d % 32 == 0)
