"""Parts of the kernels of chunked scans: tiles of a chunk, decays within it, and documents.

A chunk has CHUNK tokens, a power of two; rows after the end of a sample are 0 and do not decay. `first` is the row of the
first token of a token's document, -1 for the first document of a sample, which continues the state before the sample:

    token j reaches token i       first_i <= j <= i          within a chunk that starts at row `start`
    the state reaches token i     first_i < start
    token j reaches the end       first_last <= j            `first_last` is that of the chunk's last token
    the state reaches the end     first_last < start

Decays are base-2 logarithms, summed within a chunk in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.config.model_spec.part import MAX_SCAN_STATE
from megatrain.kernels.fused.launching import is_fake, is_fused, jit, tl


def has_kernel(x: Tensor, rows: int, columns: int) -> bool:
    """Return True if fused kernels scan x: 16-bit, with states [rows, columns] whose tiles shared memory can hold."""
    return is_fused(x) and x.element_size() == 2 and rows * columns <= MAX_SCAN_STATE


def first_rows(cu_seqlens: Tensor | None, b: int, s: int) -> Tensor | None:
    """Return `first` of each token, int32 [b, s], from boundaries in the concatenated samples; None: no boundaries."""
    if cu_seqlens is None or is_fake(cu_seqlens):
        return None
    token = torch.arange(b * s, dtype=torch.int32, device=cu_seqlens.device)
    boundary = cu_seqlens[torch.bucketize(token, cu_seqlens, right=True) - 1].view(b, s)
    first = boundary - torch.arange(b, dtype=torch.int32, device=cu_seqlens.device).unsqueeze(1) * s
    return first.to(torch.int32).masked_fill_(first <= 0, -1)


def first_rows_of_ids(document_ids: Tensor | None) -> Tensor | None:
    """Return `first` of each token, int32 [b, s], from the document of each token, [s, b]."""
    if document_ids is None or is_fake(document_ids):
        return None
    starts = torch.arange(len(document_ids), dtype=torch.int32, device=document_ids.device).unsqueeze(1)
    is_start = F.pad(document_ids[1:] != document_ids[:-1], (0, 0, 1, 0))
    return starts.where(is_start, -1).to(torch.int32).cummax(0).values.t().contiguous()


def with_contiguous_channels(x: Tensor) -> Tensor:
    """Return x with a last stride of 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def like(x: Tensor) -> Tensor:
    """Return an empty dense tensor with the shape of x [a, b, ...] and the order of its first two axes in memory."""
    if x.stride(0) >= x.stride(1):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return torch.empty((x.shape[1], x.shape[0], *x.shape[2:]), dtype=x.dtype, device=x.device).transpose(0, 1)


@jit
def head_at(X, strides, sample, head):
    """Return the pointer to a head of a sample."""
    return X + tl.cast(sample, tl.int64) * strides[1] + tl.cast(head, tl.int64) * strides[2]


@jit
def load_rows(X, start, stride, rows, CHUNK: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr):
    """Load the rows of a chunk, [CHUNK, PADDED]; 0 outside."""
    row, channel = tl.arange(0, CHUNK)[:, None], tl.arange(0, PADDED)[None, :]
    pointer = X + tl.cast(start, tl.int64) * stride + (row * stride + channel)
    if CHANNELS == PADDED:
        return tl.load(pointer, mask=start + row < rows, other=0)
    return tl.load(pointer, mask=(start + row < rows) & (channel < CHANNELS), other=0)


@jit
def store_rows(X, x, start, stride, rows, CHUNK: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr):
    """Store the rows of a chunk."""
    row, channel = tl.arange(0, CHUNK)[:, None], tl.arange(0, PADDED)[None, :]
    pointer = X + tl.cast(start, tl.int64) * stride + (row * stride + channel)
    tl.store(pointer, x.to(X.dtype.element_ty), mask=(start + row < rows) & (channel < CHANNELS))


@jit
def load_block(X, start, stride, rows, width, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Load the first `width` channels of a block of a chunk's rows; 0 outside."""
    row, channel = tl.arange(0, CHUNK)[:, None], tl.arange(0, BLOCK)[None, :]
    pointer = X + tl.cast(start, tl.int64) * stride + (row * stride + channel)
    return tl.load(pointer, mask=(start + row < rows) & (channel < width), other=0)


@jit
def store_block(X, x, start, stride, rows, width, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Store the first `width` channels of a block of a chunk's rows."""
    row, channel = tl.arange(0, CHUNK)[:, None], tl.arange(0, BLOCK)[None, :]
    pointer = X + tl.cast(start, tl.int64) * stride + (row * stride + channel)
    tl.store(pointer, x.to(X.dtype.element_ty), mask=(start + row < rows) & (channel < width))


@jit
def load_values(X, start, stride, rows, CHUNK: tl.constexpr):
    """Load a number per row of a chunk in fp32, [CHUNK]; 0 outside."""
    row = tl.arange(0, CHUNK)
    pointer = X + (tl.cast(start, tl.int64) + row) * stride
    return tl.load(pointer, mask=start + row < rows, other=0).to(tl.float32)


@jit
def store_values(X, x, start, stride, rows, CHUNK: tl.constexpr):
    """Store a number per row of a chunk."""
    row = tl.arange(0, CHUNK)
    pointer = X + (tl.cast(start, tl.int64) + row) * stride
    tl.store(pointer, x.to(X.dtype.element_ty), mask=start + row < rows)


@jit
def load_state(
    X, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALL_ROWS: tl.constexpr, ALL_COLUMNS: tl.constexpr
):
    """Load a state [ROWS, COLUMNS], contiguous; 0 outside, [ALL_ROWS, ALL_COLUMNS]."""
    row, column = tl.arange(0, ALL_ROWS)[:, None], tl.arange(0, ALL_COLUMNS)[None, :]
    if ROWS == ALL_ROWS and COLUMNS == ALL_COLUMNS:
        return tl.load(X + (row * COLUMNS + column))
    return tl.load(X + (row * COLUMNS + column), mask=(row < ROWS) & (column < COLUMNS), other=0)


@jit
def store_state(X, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a state [ROWS, COLUMNS], contiguous."""
    row, column = tl.arange(0, x.shape[0])[:, None], tl.arange(0, x.shape[1])[None, :]
    place = X + (row * COLUMNS + column)
    tl.store(place, x.to(X.dtype.element_ty), mask=(row < ROWS) & (column < COLUMNS))


@jit
def boundaries(FIRST, start, rows, CHUNK: tl.constexpr, HAS_FIRST: tl.constexpr):
    """Return `first` of the rows of a chunk, [CHUNK], and of its last row."""
    first = tl.full([CHUNK], -1, tl.int32)
    last = tl.full([], -1, tl.int32)
    if HAS_FIRST:
        row = start + tl.arange(0, CHUNK)
        first = tl.load(FIRST + row, mask=row < rows, other=-1)
        last = tl.load(FIRST + tl.minimum(start + CHUNK, rows) - 1)
    return first, last


@jit
def decays_between(sums, first, start, CHUNK: tl.constexpr, HAS_FIRST: tl.constexpr):
    """Return the decay from token j to token i, [i, j]; 0 where j does not reach i."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    reaches = i >= j
    if HAS_FIRST:
        reaches = reaches & (start + j >= first[:, None])
    return tl.exp2(tl.where(reaches, sums[:, None] - sums[None, :], float("-inf")))


@jit
def decays_from_start(sums, first, start, HAS_FIRST: tl.constexpr):
    """Return the decay from the state before a chunk to each token; 0 where it does not reach the token."""
    decay = tl.exp2(sums)
    if HAS_FIRST:
        decay = tl.where(first < start, decay, 0.0)
    return decay


@jit
def decays_to_end(sums, total, last, start, CHUNK: tl.constexpr, HAS_FIRST: tl.constexpr):
    """Return the decay from each token to the end of its chunk; 0 where it does not reach the end."""
    decay = tl.exp2(total - sums)
    if HAS_FIRST:
        decay = tl.where(start + tl.arange(0, CHUNK) >= last, decay, 0.0)
    return decay


@jit
def decay_of_chunk(total, last, start, HAS_FIRST: tl.constexpr):
    """Return the decay of the state over a chunk; 0 if a document starts in it."""
    decay = tl.exp2(total)
    if HAS_FIRST:
        decay = tl.where(last < start, decay, 0.0)
    return decay


@jit
def decay_gradient(dsums, at_end, of_state):
    """Return the gradient of each token's log decay (base e), [CHUNK].

    A token's decay is a factor of all that passes it: from the state before the chunk, or from a token before it, to a token at
    or after it (`dsums`: of each token, what reaches it less what leaves it), from tokens before it to the end (`at_end`),
    from the state to the end (`of_state`).
    """
    ending = tl.cumsum(at_end, 0) - at_end
    return tl.cumsum(dsums, 0, reverse=True) + ending + of_state
