"""Running sums of the log decays of chunks, which the kernels of chunked scans read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, tl

_HEADS = 16
"""Heads of a program."""


class Decays(NamedTuple):
    """Values of each chunk, contiguous and in fp32, [b, chunks, n, chunk]; after the end of a sample steps are 0, sums the last one."""

    steps: Tensor
    sums: Tensor
    """Sums of log decays in base 2, from the first token of the chunk to each of its tokens."""


def decays_of_chunks(steps: Tensor, factors: Tensor | None, chunk: int) -> Decays:
    """Sum steps [s, b, n], times the factors [n] of heads: log decays in base e; without factors `steps` of the result are not written."""
    s, b, n = steps.shape
    decays = Decays(
        *(
            torch.empty(b, cdiv(s, chunk), n, chunk, dtype=torch.float32, device=steps.device)
            for _ in range(2)
        )
    )
    launch(
        _sum, (cdiv(n, _HEADS), cdiv(s, chunk), b), steps, steps if factors is None else factors, *decays, steps.stride(), s, n,
        CHUNK=chunk, HEADS=_HEADS, HAS_FACTORS=factors is not None, num_warps=4,
    )  # fmt: skip
    return decays


@jit
def _sum(
    X, FACTORS, STEPS, SUMS, x_at, s, n, CHUNK: tl.constexpr, HEADS: tl.constexpr, HAS_FACTORS: tl.constexpr
):
    """Programs: (heads, chunk, sample)."""
    row, head = tl.arange(0, CHUNK)[:, None], tl.program_id(0) * HEADS + tl.arange(0, HEADS)[None, :]
    chunk, sample = tl.program_id(1), tl.program_id(2)
    start, inside = tl.cast(chunk, tl.int64) * CHUNK, head < n
    pointer = X + tl.cast(sample, tl.int64) * x_at[1] + (start + row) * x_at[0] + head * x_at[2]
    x = tl.load(pointer, mask=inside & (start + row < s), other=0).to(tl.float32)
    place = ((tl.cast(sample, tl.int64) * tl.num_programs(1) + chunk) * n + head) * CHUNK + row
    if HAS_FACTORS:
        tl.store(STEPS + place, x, mask=inside)
        x *= tl.load(FACTORS + head, mask=inside, other=0).to(tl.float32)
    tl.store(SUMS + place, tl.cumsum(x * 1.4426950408889634, 0), mask=inside)


@jit
def load_chunk(X, place, CHUNK: tl.constexpr):
    """Load the numbers of a chunk, [CHUNK]."""
    return tl.load(X + place * CHUNK + tl.arange(0, CHUNK))


@jit
def load_sums(SUMS, place, CHUNK: tl.constexpr):
    """Load the sums of a chunk, [CHUNK], and the last one."""
    return load_chunk(SUMS, place, CHUNK), tl.load(SUMS + place * CHUNK + CHUNK - 1)
