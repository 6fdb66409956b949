"""Rotary position embedding (RoPE): frequencies, their scaling for longer sequences, cos/sin tables, and the rotation of heads.

    base, channels ──> frequencies ──> scaled (linear, Llama 3, YaRN) ──> cos and sin per position
    (a, b) -> (a cos - b sin, b cos + a sin)          the backward pass uses -sin

Pairs (a, b) are channels i and i + c/2 of the c rotary channels, or adjacent channels if interleaved; the other channels
of a head pass through. On GPUs one fused kernel applies the rotation, in place for the output of a QKV projection. The
references here run in any dtype on any device.

Sources: RoFormer, arXiv:2104.09864, section 3.4; YaRN, arXiv:2309.00071; Llama 3 scaling as released with the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.config.model_spec.rotary import LlamaScaling, RotarySpec, YarnScaling
from megatrain.kernels.fused import rotary as fused
from megatrain.kernels.fused.launching import is_fused


def cos_sin_tables(
    spec: RotarySpec, head_dim: int, positions: Tensor, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles at `positions` [s], each [s, 1, 1, rotary channels / 2] in `dtype`."""
    channels = spec.rotary_dim(head_dim)
    if (
        positions.is_meta
    ):  # no values, and operators of tables would import torch's compiler, which takes a second
        shape = (len(positions), 1, 1, channels // 2)
        return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)
    exponents = torch.arange(0, channels, 2, dtype=torch.float64, device=positions.device) / channels
    frequencies = spec.base**-exponents
    scale = 1.0
    match spec.scaling:
        case LlamaScaling():
            frequencies = _llama(frequencies, spec.scaling)
        case YarnScaling():
            frequencies = _yarn(frequencies, spec.base, spec.scaling)
            scale = spec.scaling.concentration
    angles = torch.outer(positions.double() / spec.interpolation, frequencies)[:, None, None, :]
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _llama(frequencies: Tensor, scaling: LlamaScaling) -> Tensor:
    periods = scaling.original_length * frequencies / (2 * math.pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((periods - scaling.low_freq_factor) / width).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, base: float, scaling: YarnScaling) -> Tensor:
    pairs = frequencies.numel()

    def pair_with(periods: float) -> float:
        """Return the index of the channel pair with this many periods over the original length."""
        return pairs * math.log(scaling.original_length / (periods * 2 * math.pi)) / math.log(base)

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.rounds_range:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(pairs, device=frequencies.device) - low) / (high - low)).clamp(0, 1)
    return frequencies * (1 - ramp + ramp / scaling.factor)


def apply_rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool, is_backward: bool = False
) -> Tensor:
    """Apply RoPE to queries or keys.

    Args:
        x: [s, b, n, d].
        cos, sin: tables of the positions in the accumulation dtype, [s, 1, 1, c/2].
        is_interleaved: True: adjacent channels form a pair.
        is_backward: rotate by the negative angle, which is the gradient.
    Returns:
        [s, b, n, d] in the dtype of `x`.
    """
    implementation = fused.apply_rope if is_fused(x) else apply_rope_reference
    return implementation(x, cos, sin, is_interleaved=is_interleaved, is_backward=is_backward)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool, is_backward: bool = False) -> None:
    """Apply RoPE in place: see `apply_rope`."""
    if is_fused(x) and x.stride(-1) == 1:
        fused.rotate_into(x, x, cos, sin, is_interleaved, is_backward)
    else:
        x.copy_(apply_rope_reference(x, cos, sin, is_interleaved=is_interleaved, is_backward=is_backward))


def apply_rope_to_qkv(
    qkv: Tensor, sizes: Sequence[int], cos: Tensor, sin: Tensor, *, is_interleaved: bool
) -> tuple[Tensor, ...]:
    """Split a QKV projection [s, b, heads, d] and apply RoPE to queries and keys, in place on GPUs; do not reuse `qkv`.

    Args:
        sizes: heads of queries, keys, and of the parts without RoPE: values, and a gate if there is one.
    """
    if is_fused(qkv):
        return fused.apply_rope_to_qkv(qkv, sizes, cos, sin, is_interleaved=is_interleaved)
    q, k, *others = qkv.split(list(sizes), dim=2)
    q, k = (apply_rope_reference(x, cos, sin, is_interleaved=is_interleaved) for x in (q, k))
    return q, k, *others


def apply_rope_to_qkv_backward(
    gradients: Sequence[Tensor], cos: Tensor, sin: Tensor, *, is_interleaved: bool
) -> Tensor:
    """Return the gradient of `qkv`, [s, b, heads, d], from the gradients of its parts, which may be overwritten."""
    if is_fused(gradients[0]):
        return fused.apply_rope_to_qkv_backward(gradients, cos, sin, is_interleaved=is_interleaved)
    dq, dk = (
        apply_rope_reference(x, cos, sin, is_interleaved=is_interleaved, is_backward=True)
        for x in gradients[:2]
    )
    return torch.cat((dq, dk, *gradients[2:]), dim=2)


def apply_rope_reference(
    x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool, is_backward: bool = False
) -> Tensor:
    """Apply RoPE with torch operators."""
    channels = 2 * cos.shape[-1]
    xw = x[..., :channels].to(cos.dtype)
    a, b = (xw[..., 0::2], xw[..., 1::2]) if is_interleaved else xw.chunk(2, dim=-1)
    sin = -sin if is_backward else sin
    pairs = (a * cos - b * sin, b * cos + a * sin)
    rotated = torch.stack(pairs, dim=-1).flatten(-2) if is_interleaved else torch.cat(pairs, dim=-1)
    rotated = rotated.to(x.dtype)
    return torch.cat((rotated, x[..., channels:]), dim=-1) if channels < x.shape[-1] else rotated
