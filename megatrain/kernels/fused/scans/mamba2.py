"""Mamba-2's scan in chunks: `kernels.mamba2.mamba2_scan` on GPUs, forward and backward.

    states           a segment of a head, from state 0    -> its state and decay
    pass_states      all segments of a head               -> the state before each segment, and the last state
    outputs          a segment of a head                  -> y                                                  forward
    states           the same from the true states                  -> S before each chunk
    states ...       both in reverse, from dy and C                 -> dS after each chunk
    head_gradients   a chunk of a head                    -> dx, ddt, parts of dA and dD
    group_gradients  a chunk of all heads of a group      -> dB, dC                                             backward

States are carried in fp32 from chunk to chunk. The forward pass saves its inputs and the states before segments; the backward
pass writes the states of each chunk in the dtype of x, the dtype of its GEMMs. Each result is written by one program: no atomic sums, deterministic.

Source: Dao and Gu, Transformers are SSMs, arXiv:2405.21060, section 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.fused.launching import cdiv, launch, power_of_two
from megatrain.kernels.fused.scans import mamba2_kernels as kernels
from megatrain.kernels.fused.scans.chunks import first_rows, like, with_contiguous_channels
from megatrain.kernels.qkv import Place

CHUNK = 64
"""Tokens of a chunk."""
_PROGRAMS = 512
"""Programs that fill an H200 several times: segments are as long as this many allow."""
_BLOCK, _BLOCK_WARPS = 256, 1
_STATE_BLOCK = 128
"""Columns of states in a program of `group_gradients`, which also has the gradients of the scores between tokens."""


class Tile(NamedTuple):
    """Resources of a program."""

    num_warps: int
    num_stages: int


STATES, OUTPUTS, HEAD_GRADIENTS, GROUP_GRADIENTS = Tile(4, 2), Tile(4, 2), Tile(4, 1), Tile(8, 2)


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
        y, last_state, starts = scan_forward(_by_rows(x, dt, a, b, c, d, first), state)
        ctx.save_for_backward(x, dt, a, b, c, d, first, starts)
        ctx.places = places
        ctx.set_materialize_grads(False)
        return y, last_state

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, starts = ctx.saved_tensors
        dy = torch.zeros_like(inputs[0]) if dy is None else dy
        *gradients, dstate = scan_backward(dy.transpose(0, 1), dlast, _by_rows(*inputs), starts, ctx.places)
        return (*gradients, None, dstate if ctx.needs_input_grad[7] else None, None)


def _by_rows(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, first: Tensor | None
) -> Inputs:
    x, b, c = (with_contiguous_channels(tensor).transpose(0, 1) for tensor in (x, b, c))
    return Inputs(x, dt.transpose(0, 1), a, b, c, d, first)


def scan_forward(inputs: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return y [b, s, n, p], and in fp32 the last state [b, n, p, m] and the states before segments [b, segments, n, p, m]."""
    x, dt, a, b, c, d, first = inputs
    starts, last_state = _segment_states(inputs, x, b, state, is_reverse=False)
    y = like(x.transpose(0, 1))
    s, samples, n, _ = x.shape
    chunks, per_segment = _chunks(x)
    launch(
        kernels.outputs, (n, cdiv(chunks, per_segment), samples), x, b, c, dt, a, d, a if first is None else first, starts, y,
        *_strides(x, b, c, dt, y.transpose(0, 1)), s, chunks, per_segment, n // b.shape[2],
        **_constants(inputs), ALL_M=_padded(b.shape[-1]), **OUTPUTS._asdict(),
    )  # fmt: skip
    return y, last_state, starts


def scan_backward(
    dy: Tensor,
    dlast: Tensor | None,
    inputs: Inputs,
    starts: Tensor,
    places: Sequence[Place] | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, dt, A, B, C, D and the first state, in the axes and dtypes of the arguments of the scan.

    `starts`: the states before segments, of the forward pass.
    """
    x, dt, a, b, c, d, first = inputs
    dy, first = with_contiguous_channels(dy.to(x.dtype)), a if first is None else first
    before = _chunk_states(inputs, x, b, starts, is_reverse=False)
    ends, dstate = _segment_states(inputs, dy, c, dlast, is_reverse=True)
    after = _chunk_states(inputs, dy, c, ends, is_reverse=True)
    (s, samples, n, _), (g, m), constants = x.shape, b.shape[2:], _constants(inputs)
    chunks, dx, db, dc = cdiv(s, CHUNK), *_gradients((x, b, c), places)
    ddt = torch.empty(samples, n, s, dtype=torch.float32, device=x.device)
    da, dd = (torch.empty(samples, chunks, n, dtype=torch.float32, device=x.device) for _ in range(2))
    launch(
        kernels.head_gradients, (n, chunks, samples), dy, x, b, c, dt, a, d, first, before, after, dx, ddt, da, dd,
        *_strides(dy, x, b, c, dt, dx.transpose(0, 1)), s, n // g, **constants, ALL_M=_padded(m), **HEAD_GRADIENTS._asdict(),
    )  # fmt: skip
    block = min(_padded(m), _STATE_BLOCK)
    launch(
        kernels.group_gradients, (g * cdiv(m, block), chunks, samples), dy, x, b, c, dt, a, first, before, after, db, dc,
        *_strides(dy, x, b, c, dt, db.transpose(0, 1), dc.transpose(0, 1)), s, n, n // g,
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


def _chunks(x: Tensor) -> tuple[int, int]:
    """Return the chunks of a sample and of a segment."""
    chunks = cdiv(x.shape[0], CHUNK)
    return chunks, cdiv(chunks, min(chunks, cdiv(_PROGRAMS, x.shape[1] * x.shape[2])))


def _segment_states(
    inputs: Inputs, x: Tensor, b: Tensor, state: Tensor | None, *, is_reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return the state before each segment (after it, if reverse), and the last state."""
    (_, samples, n, p), m = x.shape, b.shape[-1]
    segments = cdiv(*_chunks(x))
    states = torch.empty(samples, segments, n, p, m, dtype=torch.float32, device=x.device)
    decays = torch.empty(samples, segments, n, dtype=torch.float32, device=x.device)
    _launch_states(inputs, x, b, states, decays, states, is_reverse=is_reverse, writes_chunks=False)
    end = torch.empty(samples, n, p, m, dtype=torch.float32, device=x.device)
    launch(
        kernels.pass_states, (cdiv(p * m, _BLOCK), n, samples), states, decays,
        states if state is None else state.contiguous(), end, segments,
        SIZE=p * m, BLOCK=_BLOCK, HAS_START=state is not None, IS_REVERSE=is_reverse, num_warps=_BLOCK_WARPS,
    )  # fmt: skip
    return states, end


def _chunk_states(inputs: Inputs, x: Tensor, b: Tensor, states: Tensor, *, is_reverse: bool) -> Tensor:
    """Return the state before each chunk (after it, if reverse) in the dtype of x, [b, chunks, n, p, m], from those of segments."""
    (s, samples, n, p), m = x.shape, b.shape[-1]
    of_chunks = torch.empty(samples, cdiv(s, CHUNK), n, p, m, dtype=x.dtype, device=x.device)
    _launch_states(inputs, x, b, states, states, of_chunks, is_reverse=is_reverse, writes_chunks=True)
    return of_chunks


def _launch_states(
    inputs: Inputs, x: Tensor, b: Tensor, states: Tensor, decays: Tensor, of_chunks: Tensor,
    *, is_reverse: bool, writes_chunks: bool,
) -> None:  # fmt: skip
    (s, samples, n, _), first = x.shape, inputs.first
    chunks, per_segment = _chunks(x)
    launch(
        kernels.states, (n, cdiv(chunks, per_segment), samples),
        x, b, inputs.dt, inputs.a, inputs.a if first is None else first, states, decays, of_chunks,
        *_strides(x, b, inputs.dt), s, chunks, per_segment, n // b.shape[2],
        IS_REVERSE=is_reverse, WRITES_CHUNKS=writes_chunks, ALL_M=_padded(b.shape[-1]),
        **_constants(inputs), **STATES._asdict(),
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
