"""Communication within a `RankGroup`: the only module that calls collectives of torch.distributed.

One rank returns at once; tensors on the meta device are never sent, so that a dry run needs no other ranks.
Nothing here knows autograd; `tensor_parallel.py` has differentiable forms.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatrain.parallel.grid import RankGroup

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed by torch 2.13
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Transfer:
    """A collective in flight. The tensors that it reads and writes must not change until `wait`."""

    def __init__(self, work: Any = None, *kept: Tensor) -> None:
        self._works = work if isinstance(work, list) else [] if work is None else [work]
        self._kept = kept

    def wait(self) -> None:
        """Order the work that follows after the collective: on a GPU the stream waits, not the host."""
        for work in self._works:
            work.wait()
        self._works, self._kept = [], ()


def _is_sent(x: Tensor, group: RankGroup) -> bool:
    """Return whether there is another rank to send to, and memory to send."""
    return group.size > 1 and not x.is_meta


def all_reduce(x: Tensor, group: RankGroup, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
    """Reduce `x` over the group, in place; returns `x`."""
    if _is_sent(x, group):
        dist.all_reduce(x, op=_OPS[op], group=group.handle)
    return x


def begin_all_reduce(x: Tensor, group: RankGroup) -> Transfer:
    """Begin to sum `x` over the group, in place."""
    if not _is_sent(x, group):
        return Transfer(None, x)
    return Transfer(dist.all_reduce(x, group=group.handle, async_op=True), x)


def all_gather(x: Tensor, group: RankGroup) -> Tensor:
    """Concatenate the ranks' tensors along dimension 0: [n, ...] -> [n * size, ...]."""
    out, transfer = begin_all_gather(x, group)
    transfer.wait()
    return out


def begin_all_gather(x: Tensor, group: RankGroup) -> tuple[Tensor, Transfer]:
    """Begin an `all_gather`; its result must not be read before the wait."""
    if group.size == 1:
        return x, Transfer()
    out = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    return out, begin_all_gather_into(out, x.contiguous(), group)


def begin_all_gather_into(out: Tensor, x: Tensor, group: RankGroup) -> Transfer:
    """Begin an `all_gather` into `out`; `x` may be this rank's part of `out`."""
    if group.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Transfer()
    if not x.is_cuda and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        x = x.clone()  # gloo does not guarantee to work in place
    if not _is_sent(x, group):
        return Transfer(None, out, x)
    return Transfer(_ALL_GATHER(out, x, group=group.handle, async_op=True), out, x)


def reduce_scatter(x: Tensor, group: RankGroup) -> Tensor:
    """Sum over the ranks, then keep this rank's part of dimension 0: [n * size, ...] -> [n, ...]."""
    out, transfer = begin_reduce_scatter(x, group)
    transfer.wait()
    return out


def begin_reduce_scatter(x: Tensor, group: RankGroup) -> tuple[Tensor, Transfer]:
    """Begin a `reduce_scatter`; its result must not be read before the wait."""
    if group.size == 1:
        return x, Transfer()
    assert x.shape[0] % group.size == 0, f"{x.shape[0]} rows do not split over {group.size} ranks"
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    return out, begin_reduce_scatter_into(out, x.contiguous(), group)


def begin_reduce_scatter_into(out: Tensor, x: Tensor, group: RankGroup) -> Transfer:
    """Begin a `reduce_scatter` into `out`, which may be this rank's part of `x`."""
    assert group.size > 1, "there is nothing to sum"
    if not _is_sent(x, group):
        return Transfer(None, out, x)
    return Transfer(_REDUCE_SCATTER(out, x, group=group.handle, async_op=True), out, x)


def begin_all_to_all_into(
    out: Tensor,
    x: Tensor,
    group: RankGroup,
    *,
    to_ranks: list[int] | None = None,
    from_ranks: list[int] | None = None,
) -> Transfer:
    """Begin to send each rank its rows of `x`; received rows are concatenated in `out`, in rank order.

    Args:
        to_ranks, from_ranks: number of rows to and from each rank; None: equally many.
    """
    if group.size == 1:
        out.copy_(x)
        return Transfer()
    if not _is_sent(x, group):
        return Transfer(None, out, x)
    work = dist.all_to_all_single(out, x, from_ranks, to_ranks, group=group.handle, async_op=True)
    return Transfer(work, out, x)


def all_to_all(x: Tensor, to_ranks: list[int], from_ranks: list[int], group: RankGroup) -> Tensor:
    """Send each rank its elements of `x`; returns the received elements concatenated, in rank order."""
    if group.size == 1:
        return x
    out = x.new_empty(sum(from_ranks))
    begin_all_to_all_into(out, x, group, to_ranks=to_ranks, from_ranks=from_ranks).wait()
    return out


def exchange(x: Tensor, group: RankGroup) -> Tensor:
    """Send each rank its part of dimension 0; returns the received parts concatenated, in rank order: [size * n, ...]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    begin_all_to_all_into(out, x, group).wait()
    return out


def begin_ring_shift(x: Tensor, out: Tensor, group: RankGroup) -> Transfer:
    """Begin to send `x` to the next rank of a ring, and to receive `out` from the previous one."""
    assert group.size > 1, "a ring needs two ranks"
    if not _is_sent(x, group):
        return Transfer(None, x, out)
    to_rank, from_rank = (group.ranks[(group.rank + step) % group.size] for step in (1, -1))
    both = [
        dist.P2POp(dist.isend, x, to_rank, group.handle),
        dist.P2POp(dist.irecv, out, from_rank, group.handle),
    ]
    return Transfer(dist.batch_isend_irecv(both), x, out)


def begin_send(x: Tensor, group: RankGroup, step: int) -> Transfer:
    """Begin to send `x` to the rank `step` positions later in the group."""
    if not _is_sent(x, group):
        return Transfer(None, x)
    return Transfer(dist.isend(x, group.ranks[group.rank + step], group=group.handle), x)


def begin_receive(x: Tensor, group: RankGroup, step: int) -> Transfer:
    """Begin to fill `x` from the rank `step` positions later in the group."""
    if not _is_sent(x, group):
        return Transfer(None, x)
    return Transfer(dist.irecv(x, group.ranks[group.rank + step], group=group.handle), x)


def gather_json(value: Any, group: RankGroup, device: torch.device | None = None) -> list[Any]:
    """Return every rank's JSON value, in rank order, on every rank of a group; `grid.messages` serve all ranks."""
    if group.size == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = all_gather(torch.tensor([text.numel()], device=device), group).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    rows = all_gather(padded[None], group).cpu()
    return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]
