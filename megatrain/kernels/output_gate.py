"""Gate of attention: each channel of a head's output times the sigmoid of its own gate.

    y = x * sigmoid(g)      dx = dy * sigmoid(g)      dg = dy * x * sigmoid(g) * (1 - sigmoid(g))

On GPUs one fused kernel computes each direction. The references here run in any dtype on any device. Arithmetic is in
the accumulation dtype.

Source: Qiu et al., Gated Attention for Large Language Models, arXiv:2505.06708, gate G1.
"""

from __future__ import annotations

from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import output_gate as fused
from megatrain.kernels.fused.launching import is_fused


def gate_output(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate) in the dtype of x: [s, b, c] each."""
    return (fused.gate_output if is_fused(x) else gate_output_reference)(x, gate)


def gate_output_backward(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the gate, [s, b, c] each."""
    return (fused.gate_output_backward if is_fused(x) else gate_output_backward_reference)(dy, x, gate)


def gate_output_reference(x: Tensor, gate: Tensor) -> Tensor:
    """Apply the gate with torch operators."""
    return (x * gate.to(accumulation_dtype(gate.dtype)).sigmoid()).to(x.dtype)


def gate_output_backward_reference(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients with torch operators."""
    weight = gate.to(accumulation_dtype(gate.dtype)).sigmoid()
    dx = dy * weight
    dgate = dx * x * (1 - weight)
    return dx.to(x.dtype), dgate.to(gate.dtype)
