"""One pass over memory for `kernels.part_sums`."""

from __future__ import annotations

from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, tl

_BLOCK = 2048


def sum_parts(parts: Tensor, own: Tensor, number: int, out: Tensor) -> None:
    """Implement `kernels.part_sums.sum_parts`."""
    assert all(part.is_contiguous() for part in (parts, own, out))
    count = own.numel()
    launch(
        _sum_parts, (cdiv(count, _BLOCK),), own, parts, out, count,
        NUMBER=number, SIZE=parts.shape[0], BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@jit
def _sum_parts(OWN, PARTS, OUT, count, NUMBER: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(SIZE):
        source = OWN if part == NUMBER else PARTS + part * count.to(tl.int64)
        total += tl.load(source + index, mask=inside, other=0).to(tl.float32)
    tl.store(OUT + index, total.to(OUT.dtype.element_ty), mask=inside)
