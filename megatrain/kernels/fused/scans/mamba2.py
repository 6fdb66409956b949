"""Mamba-2's scan in chunks: `kernels.mamba2.mamba2_scan` on GPUs, forward and backward.

    decays_of_chunks                                    -> sums of log decays
    states           a head, chunk by chunk             -> the state S before each chunk, and the last state
    outputs          a chunk of some heads of a group   -> y                                                     forward
    states           again
    states           in reverse, from dy and C          -> dS after each chunk
    outputs          in reverse, from dy and dS         -> dx, a part of ddt
    step_gradients   a chunk of some heads of a group   -> ddt, parts of dA and dD
    group_gradients  a chunk of all heads of a group    -> dB, dC                                                backward

The scans are as long as the sample: their programs divide the columns of states, which they carry in fp32 and write in the
dtype of x, the dtype of the GEMMs. The forward pass saves its inputs. Each result is written by one program: no atomic sums,
deterministic.

Source: Dao and Gu, Transformers are SSMs, arXiv:2405.21060, section 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.fused.launching import cdiv, launch, power_of_two
from megatrain.kernels.fused.scans import mamba2_kernels as kernels
from megatrain.kernels.fused.scans.chunks import first_rows, like, with_contiguous_channels
from megatrain.kernels.fused.scans.decays import Decays, decays_of_chunks
from megatrain.kernels.qkv import Place

CHUNK = 64
"""Tokens of a chunk."""
_PROGRAMS = 256
"""Programs that fill an H200; fewer divide the columns of states, down to _MIN_BLOCK."""
_MIN_BLOCK = 32
_HEADS = 16
"""Heads of a program that share B and C, at most."""
_STATE_BLOCK = 128
"""Columns of states in a program of `group_gradients`, which also has the gradients of the scores between tokens."""


class Tile(NamedTuple):
    """Resources of a program."""

    num_warps: int
    num_stages: int


STATES, OUTPUTS, STEP_GRADIENTS, GROUP_GRADIENTS = Tile(4, 3), Tile(4, 3), Tile(4, 3), Tile(8, 2)


class Inputs(NamedTuple):
    """Inputs of the scan; see `kernels.mamba2.mamba2_scan`. Tensors with rows are [s, b, ...]."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    first: Tensor | None


def mamba2_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
    *, cu_seqlens: Tensor | None = None, initial_state: Tensor | None = None, places: Sequence[Place] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Implement `kernels.mamba2.mamba2_scan`."""
    outputs: tuple[Tensor, Tensor] = _Scan.apply(
        x, dt, A, B, C, D, first_rows(cu_seqlens, *x.shape[:2]), initial_state, places
    )
    return outputs


class _Scan(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, first: Tensor | None, state: Tensor | None,
        places: Sequence[Place] | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y, last_state = scan_forward(_by_rows(x, dt, a, b, c, d, first), state)
        ctx.save_for_backward(x, dt, a, b, c, d, first, state)
        ctx.places = places
        ctx.set_materialize_grads(False)
        return y, last_state

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, state = ctx.saved_tensors
        dy = torch.zeros_like(inputs[0]) if dy is None else dy
        *gradients, dstate = scan_backward(dy.transpose(0, 1), dlast, _by_rows(*inputs), state, ctx.places)
        return (*gradients, None, dstate if ctx.needs_input_grad[7] else None, None)


def _by_rows(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, first: Tensor | None
) -> Inputs:
    x, b, c = (with_contiguous_channels(tensor).transpose(0, 1) for tensor in (x, b, c))
    return Inputs(x, dt.transpose(0, 1), a, b, c, d, first)


def scan_forward(inputs: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return y [b, s, n, p], and in fp32 the last state [b, n, p, m]."""
    decays, y = decays_of_chunks(inputs.dt, inputs.a, CHUNK), like(inputs.x.transpose(0, 1))
    before, last_state = _states(inputs, decays, inputs.x, inputs.b, state, is_reverse=False)
    _outputs(inputs, decays, inputs.x, before, y, decays.sums, is_reverse=False)
    return y, last_state


def scan_backward(
    dy: Tensor,
    dlast: Tensor | None,
    inputs: Inputs,
    state: Tensor | None,
    places: Sequence[Place] | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, dt, A, B, C, D and the first state, in the axes and dtypes of the arguments of the scan."""
    x, dt, a, b, c, d, first = inputs
    dy, first, decays = (
        with_contiguous_channels(dy.to(x.dtype)),
        a if first is None else first,
        decays_of_chunks(inputs.dt, inputs.a, CHUNK),
    )
    before, _ = _states(inputs, decays, x, b, state, is_reverse=False)
    after, dstate = _states(inputs, decays, dy, c, dlast, is_reverse=True)
    (s, samples, n, _), (g, m), constants = x.shape, b.shape[2:], _constants(inputs)
    chunks, dx, db, dc = cdiv(s, CHUNK), *_gradients((x, b, c), places)
    ends = torch.empty_like(decays.sums)
    _outputs(inputs, decays, dy, after, dx, ends, is_reverse=True)
    heads, block = math.gcd(n // g, _HEADS), min(_padded(m), _STATE_BLOCK)
    ddt = torch.empty(samples, n, s, dtype=torch.float32, device=x.device)
    da, dd = (torch.empty(samples, chunks, n, dtype=torch.float32, device=x.device) for _ in range(2))
    launch(
        kernels.step_gradients, (n // heads, chunks, samples), dy, x, b, c, *decays, a, first, before, after, ends, ddt, da, dd,
        *_strides(dy, x, b, c), s, heads, n // g, **constants, ALL_M=_padded(m), **STEP_GRADIENTS._asdict(),
    )  # fmt: skip
    launch(
        kernels.group_gradients, (g * cdiv(m, block), chunks, samples), dy, x, b, c, *decays, first, before, after, db, dc,
        *_strides(dy, x, b, c, db.transpose(0, 1), dc.transpose(0, 1)), s, n, n // g,
        **constants, BLOCK=block, **GROUP_GRADIENTS._asdict(),
    )  # fmt: skip
    ddt = ddt.permute(0, 2, 1).to(dt.dtype)
    return dx, ddt, da.sum((0, 1)).to(a.dtype), db, dc, dd.sum((0, 1)).to(d.dtype), dstate


def _gradients(tensors: Sequence[Tensor], places: Sequence[Place] | None) -> list[Tensor]:
    """Return memory for the gradients of tensors [s, b, heads, channels], with samples first."""
    if places is None:
        return [like(tensor.transpose(0, 1)) for tensor in tensors]
    return [
        place().unflatten(-1, tensor.shape[2:]).transpose(0, 1)
        for tensor, place in zip(tensors, places, strict=True)
    ]


def _states(
    inputs: Inputs, decays: Decays, x: Tensor, b: Tensor, start: Tensor | None, *, is_reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk (after it, if reverse) in the dtype of x, [b, chunks, n, p, m], and the last state in fp32."""
    (s, samples, n, p), m, first = x.shape, b.shape[-1], inputs.first
    states = torch.empty(samples, cdiv(s, CHUNK), n, p, m, dtype=x.dtype, device=x.device)
    end = torch.empty(samples, n, p, m, dtype=torch.float32, device=x.device)
    block = min(_padded(m), max(power_of_two(_padded(m) * samples * n // _PROGRAMS), _MIN_BLOCK))
    launch(
        kernels.states, (cdiv(m, block), n, samples), x, b, *decays, inputs.a if first is None else first,
        states if start is None else start.contiguous(), states, end, *_strides(x, b), s, cdiv(s, CHUNK), n // b.shape[2],
        **_constants(inputs), BLOCK=block, HAS_START=start is not None, IS_REVERSE=is_reverse, **STATES._asdict(),
    )  # fmt: skip
    return states, end


def _outputs(
    inputs: Inputs, decays: Decays, x: Tensor, states: Tensor, y: Tensor, ends: Tensor, *, is_reverse: bool
) -> None:
    """Write y [b, s, n, p] from x and the states before chunks; dx and `ends` from dy and the gradients of the states after them."""
    _, _, a, b, c, d, first = inputs
    (s, samples, n, _), (g, m) = x.shape, b.shape[2:]
    heads = math.gcd(n // g, _HEADS)
    launch(
        kernels.outputs, (n // heads, cdiv(s, CHUNK), samples), x, inputs.x, b, c, *decays, d, a if first is None else first,
        states, y, ends, *_strides(x, inputs.x, b, c, y.transpose(0, 1)), s, heads, n // g,
        **_constants(inputs), ALL_M=_padded(m), IS_REVERSE=is_reverse, **OUTPUTS._asdict(),
    )  # fmt: skip


def _strides(*tensors: Tensor) -> list[tuple[int, ...]]:
    return [x.stride()[:3] for x in tensors]


def _constants(inputs: Inputs) -> dict[str, Any]:
    p, m = inputs.x.shape[-1], inputs.b.shape[-1]
    return {
        "CHUNK": CHUNK,
        "P": p,
        "ALL_P": _padded(p),
        "M": m,
        "HAS_FIRST": inputs.first is not None,
        "PRECISION": "ieee" if inputs.x.dtype is torch.float32 else "tf32",
    }


def _padded(size: int) -> int:
    return max(power_of_two(size), 16)
