"""Context parallelism of multi-latent attention by gathered latents: no keys or values are sent.

    latents of a rank's rows ── all-gather over tp (with sp) and cp ──> latents of whole samples, in the order of the sequence
                                                                        └─ up-projection ─> keys and values of whole samples
    queries of a rank's rows ─────────────────────────────────────────────────────────────> attention

Every rank expands all latents to its heads; gradients of the latents are summed over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatrain.kernels.attention.interface import AttentionKernel
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_gather
from megatrain.parallel.context.block_masks import BlockMasks, key_range
from megatrain.parallel.context_parallel import ContextParallel, to_sequence_order
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import TensorParallel, all_gather_rows, conjugate


def gather_latents(x: Tensor, tp: TensorParallel, cp: ContextParallel) -> Tensor:
    """Gather rows whose gradients are equal on all tensor ranks: [s/(cp tp), b, ...] with sp, else [s/cp, ...] -> [s, b, ...]."""
    return gather_samples(conjugate(x, tp.group, all_gather, _local_rows) if tp.sequence_parallel else x, cp)


def _local_rows(dy: Tensor, group: RankGroup) -> Tensor:
    """Return this rank's rows of a gradient that all ranks have."""
    return dy.chunk(group.size)[group.rank]


def gather_samples(x: Tensor, cp: ContextParallel) -> Tensor:
    """Gather the rows of whole samples, in the order of the sequence: [s/cp, b, ...] -> [s, b, ...]."""
    return to_sequence_order(all_gather_rows(x, cp.group), cp.size)


def attend_to_samples(
    q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel, masks: BlockMasks, cp: ContextParallel
) -> Tensor:
    """Attend from this rank's rows to whole samples.

    Args:
        q: queries, [s/cp, b, n, d].
        k, v: keys and values, [s, b, n, d].
    Returns:
        [s/cp, b, n, d].
    """
    out: Tensor = _AttendToSamples.apply(q, k, v, kernel, masks, cp)
    return out


class _AttendToSamples(Function):
    """Each of a rank's two chunks attends causally to the range of keys that ends with it."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kernel: AttentionKernel,
        masks: BlockMasks,
        cp: ContextParallel,
    ) -> Tensor:
        parts = []
        for rows, chunk, keys in _blocks(q, masks, cp):
            mask = masks.between((chunk,), (keys,))
            parts.append(kernel.forward(q[rows], k[keys.start : keys.stop], v[keys.start : keys.stop], mask))
        out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.masks, ctx.cp = kernel, masks, cp
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dtype = torch.empty_like(q), accumulation_dtype(q.dtype)
        dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        for rows, chunk, keys in _blocks(q, ctx.masks, ctx.cp):
            mask, part = ctx.masks.between((chunk,), (keys,)), slice(keys.start, keys.stop)
            dq[rows], dk_part, dv_part = ctx.kernel.backward(
                grads[0][rows], q[rows], k[part], v[part], out[rows], lse[rows], mask
            )
            dk[part] += dk_part
            dv[part] += dv_part
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _blocks(q: Tensor, masks: BlockMasks, cp: ContextParallel) -> list[tuple[slice, range, range]]:
    """Return rows, positions and positions of the keys of a rank's two chunks."""
    middle = q.shape[0] // 2
    halves = slice(middle), slice(middle, None)
    return [
        (rows, chunk, key_range(chunk, masks.window))
        for rows, chunk in zip(halves, cp.chunks(q.shape[0]), strict=True)
    ]


class WholeKeys(nn.Module):
    """Core attention of a context rank's rows to all-gathered keys and values; the backward pass sums their gradients.

    q [s/cp, b, n, d], k and v [s/cp, b, g, d] -> [s/cp, b, n * d]. `core` takes k and v of [s, b, g, d].
    """

    def __init__(self, core: nn.Module, cp: ContextParallel) -> None:
        super().__init__()
        self.core, self.cp = core, cp

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        out: Tensor = self.core(q, *(gather_samples(x, self.cp) for x in (k, v)), info)
        return out
