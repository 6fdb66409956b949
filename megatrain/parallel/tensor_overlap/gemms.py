"""GEMMs that overlap the communication before and after them, over `PeerMemory`.

    all-gather, GEMM        send x to the peers | GEMM of local rows            | GEMMs of received rows
    GEMM, reduce-scatter    GEMM of peers' rows | send it, GEMM of local rows   | sum of both

The gather of a small backward GEMM, an attention's output projection, takes longer than the GEMM: half of a weight gradient overlaps it.

Copy engines send while the SMs multiply. Ranks' parts are summed in the order of the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatrain.kernels.linear import accumulate_weight_gradient
from megatrain.kernels.sums import sum_parts
from megatrain.parallel.collectives import Transfer
from megatrain.parallel.tensor_overlap.peer_memory import PeerMemory, ReceivedParts
from megatrain.parallel.tensor_overlap.terms import PendingTerm


def gathered_gemm(x: Tensor, weight: Tensor, peers: PeerMemory, bias: Tensor | None = None) -> Tensor:
    """Multiply the rows of all ranks: [n, ..., i] and [i, o] -> [n * size, ..., o]. Gathered rows are not kept."""
    return _gemm_of_received(x, peers.send((rank, x) for rank in peers.peers), weight, peers, bias)


def all_gather_gemm(x: Tensor, weight: Tensor, peers: PeerMemory) -> tuple[Tensor, Tensor]:
    """Gather the ranks' rows and multiply them: [n, ..., i] and [i, o] -> [n * size, ..., i] and [n * size, ..., o].

    The third send after this one overwrites the gathered rows.
    """
    received = _gather(x, peers)
    while peers.late:
        peers.late.pop(0)()
    out = _gemm_of_received(x, received, weight, peers)
    received.wait()
    return received.parts.flatten(0, 1), out


def begin_gather(x: Tensor, peers: PeerMemory) -> tuple[Tensor, Transfer]:
    """Begin to concatenate the ranks' rows: [n, ...] -> [n * size, ...]; the third send after this one overwrites them."""
    received = _gather(x, peers)
    return received.parts.flatten(0, 1), Transfer(received)


def first_half(grad: Tensor, dy: Tensor, x: Tensor, peers: PeerMemory) -> tuple[Tensor, Tensor]:
    """Return the first half of the rows of a weight gradient, with their dy; the next `all_gather_gemm` adds the other half.

    Args:
        dy: gradient of the output, [..., o].
        x: input, [..., i]; gathered rows are those of the send before the last one.
    """
    half = len(grad) // 2
    first, second = dy.flatten(0, -2).split((half, len(grad) - half), dim=1)
    peers.late.append(partial(accumulate_weight_gradient, grad[half:], second, x.flatten(0, -2)))
    return grad[:half], first


def gemm_reduce_scatter(
    x: Tensor, weight: Tensor, peers: PeerMemory, *, returns_partial_sums: bool = False
) -> Tensor:
    """Sum x @ weight over the ranks, and keep this rank's rows: [n * size, ..., i] and [i, o] -> [n, ..., o].

    The ranks' terms are rounded to the dtype of `x` before they are summed.

    Args:
        returns_partial_sums: return the terms, [size, n, ..., o], without their sum; the third send after this one overwrites them.
    """
    size, own = peers.group.size, peers.group.rank
    rows, shape = x.unflatten(0, (size, -1)).flatten(1, -2).unbind(), (-1, *x.shape[1:-1], weight.shape[1])
    received = peers.send((rank, torch.matmul(rows[rank], weight)) for rank in peers.peers)
    if returns_partial_sums:
        torch.matmul(rows[own], weight, out=received.parts[own])
        received.wait()
        return received.parts.view(size, *shape).detach()  # detached, it is no view of the slots for autograd
    local = torch.matmul(rows[own], weight)
    _sum_into(local, local, received, peers)
    return local.view(shape)


def begin_reduction(x: Tensor, peers: PeerMemory, term: PendingTerm | None = None) -> tuple[Tensor, Transfer]:
    """Begin to sum `x` over the ranks and to keep this rank's rows: [n * size, ...] -> [n, ...].

    Two ranks with a `term` do not compute the sum: they return this rank's rows of `x`, and the term is the rows of the other rank.
    """
    rows = x.unflatten(0, (peers.group.size, -1))
    received = peers.send((rank, rows[rank]) for rank in peers.peers)
    local = rows[peers.group.rank]
    if term is not None and peers.group.size == 2:
        return local, Transfer(_Term(term, received, peers))
    out = torch.empty_like(local)
    return out, Transfer(_Sum(out, local, received, peers))


def _gather(x: Tensor, peers: PeerMemory) -> ReceivedParts:
    return peers.send((rank, x) for rank in (*peers.peers, peers.group.rank))


def _gemm_of_received(
    x: Tensor, received: ReceivedParts, weight: Tensor, peers: PeerMemory, bias: Tensor | None = None
) -> Tensor:
    """Multiply this rank's rows, then the rows of the others as they arrive, into one result in the order of the ranks."""
    group, x = peers.group, x.flatten(0, -2)
    out = x.new_empty((group.size, len(x), weight.shape[1]))
    parts = out.unbind()
    for rank in (group.rank, *reversed(peers.peers)):
        rows = x if rank == group.rank else received.from_rank(rank).flatten(0, -2)
        if bias is None:
            torch.matmul(rows, weight, out=parts[rank])
        else:
            torch.addmm(bias, rows, weight, out=parts[rank])
    return out.view(-1, *received.parts.shape[2:-1], weight.shape[1])


@dataclass(frozen=True)
class _Sum:
    """A sum of received parts, computed when its result is waited for."""

    out: Tensor
    local: Tensor
    received: ReceivedParts
    peers: PeerMemory

    def wait(self) -> None:
        _sum_into(self.out, self.local, self.received, self.peers)


@dataclass(frozen=True)
class _Term:
    """Rows that another rank sends; they become a term when they are waited for."""

    term: PendingTerm
    received: ReceivedParts
    peers: PeerMemory

    def wait(self) -> None:
        self.term.value = self.received.from_rank(self.peers.peers[0])


def _sum_into(out: Tensor, local: Tensor, received: ReceivedParts, peers: PeerMemory) -> None:
    received.wait()
    sum_parts(received.parts, local.contiguous(), peers.group.rank, out)
