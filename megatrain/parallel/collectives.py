"""Communication within a `RankGroup`: every function returns at once where the group has one rank.

Tensors without memory, on the meta device, travel nowhere: what plans a run needs no other ranks.
Nothing here knows autograd; the differentiable forms are in `tensor.py`. This is the one module through which tensors
travel, so that torch.distributed's changing names are met in one place.
"""

from __future__ import annotations

import json
import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatrain.parallel.grid import RankGroup

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Transfer:
    """A collective on its way. What it reads and writes lives, and stays as it is, until `wait`."""

    def __init__(self, work: Any = None, *kept: Tensor) -> None:
        self._works = work if isinstance(work, list) else [] if work is None else [work]
        self._kept = kept

    def wait(self) -> None:
        """Order what follows behind it: on a GPU the stream waits, not the host."""
        for work in self._works:
            work.wait()
        self._works, self._kept = [], ()


def all_reduce(x: Tensor, group: RankGroup, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
    """Combine `x` over the group, in place; returns `x`."""
    if group.size > 1 and not x.is_meta:
        dist.all_reduce(x, op=_OPS[op], group=group.handle)
    return x


def begin_all_reduce(x: Tensor, group: RankGroup) -> Transfer:
    """Sum `x` over the group, in place."""
    if group.size == 1:
        return Transfer()
    if x.is_meta:
        return Transfer(None, x)
    return Transfer(dist.all_reduce(x, group=group.handle, async_op=True), x)


def all_gather(x: Tensor, group: RankGroup) -> Tensor:
    """Join the ranks' tensors along dimension 0: [n, ...] -> [n * size, ...]."""
    if group.size == 1:
        return x
    out = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    all_gather_into(out, x.contiguous(), group)
    return out


def all_gather_into(out: Tensor, x: Tensor, group: RankGroup) -> None:
    """As `all_gather`, into `out`; `x` may be this rank's part of `out`."""
    begin_all_gather_into(out, x, group).wait()


def begin_all_gather_into(out: Tensor, x: Tensor, group: RankGroup) -> Transfer:
    """Begin what `all_gather_into` does."""
    if group.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Transfer()
    if not x.is_cuda and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        x = x.clone()  # gloo does not promise to work in place
    if x.is_meta:
        return Transfer(None, out, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames it; torch 2.11 lacks the new name
        return Transfer(dist.all_gather_into_tensor(out, x, group=group.handle, async_op=True), out, x)


def reduce_scatter(x: Tensor, group: RankGroup) -> Tensor:
    """Sum over the ranks, of which each keeps its part along dimension 0: [n * size, ...] -> [n, ...]."""
    if group.size == 1:
        return x
    assert x.shape[0] % group.size == 0, f"{x.shape[0]} rows do not split over {group.size} ranks"
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    begin_reduce_scatter_into(out, x.contiguous(), group).wait()
    return out


def begin_reduce_scatter_into(out: Tensor, x: Tensor, group: RankGroup) -> Transfer:
    """Begin what `reduce_scatter` does, into `out`, which may be this rank's part of `x`."""
    assert group.size > 1, "there is nothing to sum"
    if x.is_meta:
        return Transfer(None, out, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return Transfer(dist.reduce_scatter_tensor(out, x, group=group.handle, async_op=True), out, x)


def all_to_all(x: Tensor, to_ranks: list[int], from_ranks: list[int], group: RankGroup) -> Tensor:
    """Send each rank its part of `x`, of so many elements; what they send comes joined, in the order of the ranks."""
    if group.size == 1:
        return x
    out = x.new_empty(sum(from_ranks))
    begin_all_to_all_into(out, x, group, to_ranks=to_ranks, from_ranks=from_ranks).wait()
    return out


def begin_all_to_all_into(
    out: Tensor,
    x: Tensor,
    group: RankGroup,
    *,
    to_ranks: list[int] | None = None,
    from_ranks: list[int] | None = None,
) -> Transfer:
    """Begin to send each rank its rows of `x`; what they send comes joined in `out`, in the order of the ranks.

    Args:
        to_ranks, from_ranks: rows for and from each rank; None: equally many.
    """
    if group.size == 1:
        out.copy_(x)
        return Transfer()
    if x.is_meta:
        return Transfer(None, out, x)
    work = dist.all_to_all_single(out, x, from_ranks, to_ranks, group=group.handle, async_op=True)
    return Transfer(work, out, x)


def begin_shift(x: Tensor, out: Tensor, group: RankGroup) -> Transfer:
    """Begin to send `x` to the next rank of a ring, and to fill `out` with what the rank before sends."""
    assert group.size > 1, "a ring of one rank has no next one"
    if x.is_meta:
        return Transfer(None, x, out)
    to_rank, from_rank = (group.ranks[(group.rank + step) % group.size] for step in (1, -1))
    both = [
        dist.P2POp(dist.isend, x, to_rank, group.handle),
        dist.P2POp(dist.irecv, out, from_rank, group.handle),
    ]
    return Transfer(dist.batch_isend_irecv(both), x, out)


def gather_json(value: Any, group: RankGroup, device: torch.device | None = None) -> list[Any]:
    """Every rank's value (anything that JSON holds), in the order of the ranks, on every rank.

    For what all of them need at once; words for rank 0 go by the grid's `messages`. A group of devices needs to be told
    this rank's.
    """
    if group.size == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = all_gather(torch.tensor([text.numel()], device=device), group).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    rows = all_gather(padded[None], group).cpu()
    return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]


def send(x: Tensor, group: RankGroup, step: int) -> Any:
    """Begin to send `x` to the rank `step` places on; returns a handle to wait on. `x` must live until then."""
    if x.is_meta:
        return Transfer(None, x)
    return dist.isend(x, group.ranks[group.rank + step], group=group.handle)


def receive(x: Tensor, group: RankGroup, step: int) -> Tensor:
    """Fill `x` from the rank `step` places on."""
    if x.is_meta:
        return x
    work = dist.irecv(x, group.ranks[group.rank + step], group=group.handle)
    assert work is not None
    work.wait()
    return x
