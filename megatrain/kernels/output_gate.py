"""Gate of attention: each channel of a head's output times the sigmoid of its own gate, or its SiLU.

    y = x * sigmoid(g)      dx = dy * sigmoid(g)      dg = dy * x * sigmoid(g) * (1 - sigmoid(g))
    y = x * silu(g)         dx = dy * silu(g)         dg = dy * x * sigmoid(g) * (1 + g * (1 - sigmoid(g)))

On GPUs one fused kernel computes each direction. The references here run in any dtype on any device. Arithmetic is in
the accumulation dtype.

Source: Qiu et al., Gated Attention for Large Language Models, arXiv:2505.06708, gate G1.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import output_gate as fused
from megatrain.kernels.fused.launching import is_fused


def gate_output(x: Tensor, gate: Tensor, *, has_silu: bool = False) -> Tensor:
    """Return x * sigmoid(gate), or x * SiLU(gate), in the dtype of x: [s, b, c] each."""
    if is_fused(x):
        return fused.gate_output(x, gate, has_silu=has_silu)
    wide = gate.to(accumulation_dtype(gate.dtype))
    return (x * (F.silu(wide) if has_silu else wide.sigmoid())).to(x.dtype)


def gate_output_backward(
    dy: Tensor, x: Tensor, gate: Tensor, *, has_silu: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the gate, [s, b, c] each; a kernel writes that of the gate into `out`, if given."""
    if is_fused(x):
        return fused.gate_output_backward(dy, x, gate, has_silu=has_silu, out=out)
    wide = gate.to(accumulation_dtype(gate.dtype))
    sigmoid = wide.sigmoid()
    weight, derivative = sigmoid, sigmoid * (1 - sigmoid)
    if has_silu:
        weight, derivative = wide * sigmoid, sigmoid * (1 + wide * (1 - sigmoid))
    return (dy * weight).to(x.dtype), (dy * x * derivative).to(gate.dtype)
