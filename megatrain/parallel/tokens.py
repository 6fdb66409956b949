"""Which tokens of a micro-batch a rank has between layers: rows of every sample, split over cp, and under sp over tp.

    8 places, cp 2, tp 2 with sp:    cp 0: 0 1 6 7    cp 1: 2 3 4 5    -> tp 0 of cp 0: 0 1, tp 1: 6 7 ...

What Megatron-LM defines by a rank's tokens is defined here over the micro-batch: `sum` and `gather` bring its ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.parallel.collectives import all_gather, all_reduce
from megatrain.parallel.context import ContextParallel
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class TokenSplit:
    """How the tokens of a micro-batch are split. `rows` are a rank's of a sample: s, s/cp or s/(cp tp)."""

    tp: TensorParallel
    cp: ContextParallel

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """Ranks that have different tokens of the same micro-batch."""
        return (*((self.tp.group,) if self.tp.sequence_parallel else ()), self.cp.group)

    @property
    def num_ranks(self) -> int:
        """How many share a micro-batch's tokens."""
        return self.cp.size * (self.tp.size if self.tp.sequence_parallel else 1)

    def places(self, rows: int, device: torch.device) -> Tensor:
        """The place in the sample of each of this rank's rows: int64 [rows]."""
        first = self.tp.first_row(rows)
        return self.cp.places(self.tp.whole_length(rows), device)[first : first + rows]

    def numbers(self, rows: int, samples: int, *, first_sample: int, device: torch.device) -> Tensor:
        """A number for each token, the same under every layout, that no other token of the run has: int64 [rows, samples].

        Args:
            first_sample: number of the micro-batch's first sample in the run.
        """
        length = self.tp.whole_length(rows) * self.cp.size
        sample = torch.arange(samples, device=device) + first_sample
        return self.places(rows, device)[:, None] + sample * length

    def order(self, rows: int, samples: int, device: torch.device) -> Tensor:
        """Where each token stands in the micro-batch as [s, b] has it, flat: int64 [rows * samples]."""
        places = self.places(rows, device)[:, None] * samples
        return (places + torch.arange(samples, device=device)).flatten()

    def sum(self, x: Tensor) -> Tensor:
        """`x` summed over the ranks, in place."""
        for group in self.groups:
            all_reduce(x, group)
        return x

    def gather(self, x: Tensor, order: Tensor) -> Tensor:
        """All tokens' rows of a tensor, in the order of the micro-batch: [t, ...] -> [T, ...].

        Args:
            order: of this rank's tokens.
        """
        if self.num_ranks == 1:
            return x
        for group in self.groups:
            x, order = all_gather(x, group), all_gather(order, group)
        whole = torch.empty_like(x)
        whole[order] = x
        return whole
