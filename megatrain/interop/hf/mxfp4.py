"""Weights in MXFP4, as gpt-oss stores its experts: blocks of 32 values of 4 bits, each block with a power of two.

    X_blocks   [experts, rows, columns / 32, 16]    two values per byte, the first one in the low bits
    X_scales   [experts, rows, columns / 32]        exponent of the power of two, plus 127

Source: OCP Microscaling Formats (MX) Specification, version 1.0.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7 (E2M1); the fourth bit is the sign."""
_EXPONENT_BIAS: Final = 127


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values [..., columns] of blocks [..., columns / 32, 16] in bf16, which represents them exactly."""
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
    codes = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - _EXPONENT_BIAS
    return torch.ldexp(values[codes.to(torch.int32)], exponents).bfloat16().flatten(-2)
