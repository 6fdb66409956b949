"""The gated delta rule in chunks: `kernels.gated_delta.continue_gated_delta_rule` on GPUs, forward and backward.

    solve            a chunk of a head                      -> the inverse T of its triangular system
    states           a head, chunk by chunk                 -> the state before each chunk, and the values written
    outputs          a chunk of a head                      -> o                                                forward
    decayed_scores   a chunk of a head                      -> q k^T * decay, and the states again
    state_gradients  a head, chunk by chunk, in reverse     -> dS after each chunk, and dR
    query_gradients  a chunk of a head                      -> dq, summed over the heads that share keys
    key_gradients    a chunk of a head                      -> dk, dv, dg, dbeta                                backward

With R = beta (V - exp(c) K S) the values written are V' = T R, so the chunk needs neither of the two solutions of
`kernels.gated_delta`; and with dR = T^T dV' the gradient of the system is -dR V'^T, so T needs no gradient. The scans
are as long as the sample: their programs divide the channels of values. The forward pass saves its inputs and T; states
and V' are written in the dtype of v, which is the dtype of the GEMMs, T is solved in fp32. Deterministic.

Source: Yang et al., Gated Delta Networks, arXiv:2412.06464; the chunks: arXiv:2406.06484.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.fused.launching import cdiv, launch, power_of_two
from megatrain.kernels.fused.scans import gated_delta_kernels as kernels
from megatrain.kernels.fused.scans.chunks import first_rows_of_ids, has_kernel, like, with_contiguous_channels
from megatrain.kernels.fused.scans.decays import decays_of_chunks
from megatrain.kernels.qkv import Place

CHUNK = 64
"""Tokens of a chunk."""
_MULTIPROCESSORS = 132
_MAX_WIDTH = 128


class Tile(NamedTuple):
    """Resources of a program."""

    num_warps: int
    num_stages: int


SOLVE, STATES, OUTPUTS = Tile(4, 1), Tile(4, 3), Tile(4, 1)
STATE_GRADIENTS, QUERY_GRADIENTS, KEY_GRADIENTS = Tile(4, 3), Tile(4, 1), Tile(4, 1)


class Inputs(NamedTuple):
    """Inputs of the rule; see `kernels.gated_delta.continue_gated_delta_rule`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    first: Tensor | None
    sums: Tensor
    """See `Decays`."""


class Chunks(NamedTuple):
    """Results of a scan of the chunks."""

    states: Tensor
    """State before each chunk, [b, chunks, n, dk, dv]."""
    new: Tensor
    """V', [s, b, n, dv]."""
    last_state: Tensor


def has_rule_kernel(k: Tensor, v: Tensor) -> bool:
    """Return True if the kernels apply the rule to such keys and values: a program holds several chunks of whole keys."""
    return has_kernel(v, k.shape[-1], v.shape[-1]) and max(k.shape[-1], v.shape[-1]) <= _MAX_WIDTH


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    *, document_ids: Tensor | None = None, state: Tensor | None = None, place: Place | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Implement `kernels.gated_delta.continue_gated_delta_rule`; q and k may have fewer heads than v, each shared by consecutive ones."""
    outputs: tuple[Tensor, Tensor] = _Rule.apply(
        q, k, v, g, beta, first_rows_of_ids(document_ids), state, place
    )
    return outputs


class _Rule(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor | None, state: Tensor | None,
        place: Place | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, last_state, inverses = rule_forward(_inputs(q, k, v, g, beta, first), state)
        ctx.save_for_backward(q, k, v, g, beta, first, state, inverses)
        ctx.place = place
        ctx.set_materialize_grads(False)
        return out, last_state

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, state, inverses = ctx.saved_tensors
        dout = torch.zeros_like(inputs[2]) if dout is None else dout
        *gradients, dstate = rule_backward(dout, dlast, _inputs(*inputs), state, inverses, ctx.place)
        return (*gradients, None, dstate if ctx.needs_input_grad[6] else None, None)


def _inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor | None) -> Inputs:
    q, k, v = (with_contiguous_channels(x) for x in (q, k, v))
    return Inputs(q, k, v, g, beta, first, decays_of_chunks(g, None, CHUNK).sums)


def rule_forward(inputs: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs [s, b, n, dv], the last state [b, n, dk, dv] in fp32, and T of all chunks [b, chunks, n, CHUNK, CHUNK]."""
    q, k, v, g, beta, first, sums = inputs
    out, (s, b, n, _) = like(v), v.shape
    inverses = torch.empty(b, cdiv(s, CHUNK), n, CHUNK, CHUNK, dtype=v.dtype, device=v.device)
    launch(
        kernels.solve, (n, cdiv(s, CHUNK), b), k, sums, beta, g if first is None else first, inverses, *_strides(k, beta),
        s, n // k.shape[2], **_constants(inputs), **SOLVE._asdict(),
    )  # fmt: skip
    chunks = _scan(inputs, state, inverses)
    launch(
        kernels.outputs, (n, cdiv(s, CHUNK), b), q, k, sums, g if first is None else first, chunks.states, chunks.new, out,
        *_strides(q, k, chunks.new, out), s, n // q.shape[2], **_constants(inputs), **_all_values(v), **OUTPUTS._asdict(),
    )  # fmt: skip
    return out, chunks.last_state, inverses


def rule_backward(
    dout: Tensor, dlast: Tensor | None, inputs: Inputs, state: Tensor | None, inverses: Tensor, place: Place | None
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of q, k, v, g, beta and the first state; `inverses`: T, of the forward pass."""
    q, k, v, g, beta, first, sums = inputs
    dout = with_contiguous_channels(dout.to(v.dtype))
    chunks, scores = _scan(inputs, state, inverses), torch.empty_like(inverses)
    (s, b, n, _), nk = v.shape, q.shape[2]
    shares, pointer, grid = n // nk, g if first is None else first, (n, cdiv(s, CHUNK), b)
    launch(
        kernels.decayed_scores, grid, q, k, sums, pointer, scores, *_strides(q, k), s, shares,
        **_constants(inputs), **OUTPUTS._asdict(),
    )  # fmt: skip
    after, dright, dstate = (torch.empty_like(x) for x in (chunks.states, chunks.new, chunks.last_state))
    launch(
        kernels.state_gradients, _scan_grid(v), dout, q, k, sums, beta, pointer, inverses, scores,
        g if dlast is None else dlast.contiguous(), after, dstate, dright, *_strides(dout, q, k, beta, dright),
        s, cdiv(s, CHUNK), shares, **_constants(inputs), DV=v.shape[-1], BLOCK=_block(v),
        HAS_END=dlast is not None, **STATE_GRADIENTS._asdict(),
    )  # fmt: skip
    dq, dk = (torch.empty(s, b, n, q.shape[-1], dtype=q.dtype, device=q.device) for _ in range(2))
    dv = like(v) if place is None else place().unflatten(-1, v.shape[2:])
    dsums, dg, dbeta = (g.new_empty(b, n, s, dtype=torch.float32) for _ in range(3))
    constants = {**_constants(inputs), **_all_values(v)}
    launch(
        kernels.query_gradients, grid, dout, q, k, sums, pointer, chunks.states, chunks.new, dq, dsums,
        *_strides(dout, q, k, chunks.new, dq), s, shares, **constants, **QUERY_GRADIENTS._asdict(),
    )  # fmt: skip
    launch(
        kernels.key_gradients, grid, dout, q, k, v, sums, beta, pointer, chunks.states, after, chunks.new, dright, dsums,
        dk, dv, dg, dbeta, *_strides(dout, q, k, v, beta, chunks.new, dk, dv), s, shares,
        **constants, **KEY_GRADIENTS._asdict(),
    )  # fmt: skip
    if shares > 1:
        dq, dk = (_sum_of_shares(x.unflatten(2, (nk, shares))) for x in (dq, dk))
    return dq, dk, dv, dg.permute(2, 0, 1).to(g.dtype), dbeta.permute(2, 0, 1).to(beta.dtype), dstate


def _sum_of_shares(x: Tensor) -> Tensor:
    """[s, b, nk, shares, d] -> [s, b, nk, d]; torch's kernel of sums takes three times as long for two terms."""
    return x[:, :, :, 0] + x[:, :, :, 1] if x.shape[3] == 2 else x.sum(3)


def _scan(inputs: Inputs, state: Tensor | None, inverses: Tensor) -> Chunks:
    """Scan the chunks."""
    _, k, v, g, beta, first, sums = inputs
    (s, b, n, dv), dk, num_chunks = v.shape, k.shape[-1], cdiv(v.shape[0], CHUNK)
    pointer, shares = g if first is None else first, n // k.shape[2]
    new = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    states = torch.empty(b, num_chunks, n, dk, dv, dtype=v.dtype, device=v.device)
    last_state = torch.empty(b, n, dk, dv, dtype=torch.float32, device=v.device)
    launch(
        kernels.states, _scan_grid(v), k, v, sums, beta, pointer, inverses, g if state is None else state.contiguous(),
        states, last_state, new, *_strides(k, v, beta, new), s, num_chunks, shares,
        **_constants(inputs), DV=dv, BLOCK=_block(v), HAS_START=state is not None, **STATES._asdict(),
    )  # fmt: skip
    return Chunks(states, new, last_state)


def _block(v: Tensor) -> int:
    """Return the channels of values of a program that scans: few, if there are few heads."""
    _, b, n, dv = v.shape
    widest = 64 if b * n * cdiv(dv, 64) >= _MULTIPROCESSORS else 32
    return min(widest, max(power_of_two(dv), 16))


def _scan_grid(v: Tensor) -> tuple[int, int, int]:
    return cdiv(v.shape[3], _block(v)), v.shape[2], v.shape[1]


def _strides(*tensors: Tensor) -> list[tuple[int, ...]]:
    return [x.stride()[:3] for x in tensors]


def _constants(inputs: Inputs) -> dict[str, Any]:
    dk = inputs.k.shape[-1]
    return {
        "CHUNK": CHUNK,
        "DK": dk,
        "ALL_K": max(power_of_two(dk), 16),
        "HAS_FIRST": inputs.first is not None,
        "PRECISION": "ieee" if inputs.v.dtype is torch.float32 else "tf32",
    }


def _all_values(v: Tensor) -> dict[str, int]:
    return {"DV": v.shape[-1], "ALL_V": max(power_of_two(v.shape[-1]), 16)}
