"""Sums over ranks in the order of the ranks, rounded once, as an all-to-all and a sum of its rows give them.

A reduce-scatter of NCCL adds in the order of its ring and rounds 16-bit numbers after each term. --deterministic-mode pays for
memory of all terms, so that a run has the same bits with either dispatcher of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.kernels.sums import sum_parts
from megatrain.parallel.collectives import Transfer, begin_all_to_all_into
from megatrain.parallel.grid import RankGroup


def begin_ordered_sum(x: Tensor, group: RankGroup) -> tuple[Tensor, Transfer]:
    """Begin to sum over the ranks and to keep this rank's part of dimension 0: [n * size, ...] -> [n, ...]."""
    if group.size == 1:
        return x, Transfer()
    x = x.contiguous()
    received = torch.empty_like(x)
    sent = begin_all_to_all_into(received, x, group)
    parts = received.unflatten(0, (group.size, -1))
    out = torch.empty_like(parts[0])
    return out, Transfer(_Sum(out, parts, group.rank, sent))


@dataclass(frozen=True)
class _Sum:
    """A sum of received parts, computed when its result is waited for."""

    out: Tensor
    parts: Tensor
    rank: int
    sent: Transfer

    def wait(self) -> None:
        self.sent.wait()
        sum_parts(self.parts, self.parts[self.rank], self.rank, self.out)
