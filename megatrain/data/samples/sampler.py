"""Which data-parallel rank reads which samples, in which order.

    single:  consumed -> | rank 0: m | rank 1: m | .. | rank d-1: m | rank 0: m | ..     (m = micro-batch size)
                         `------------- micro-batch 0 ------------' `- micro-batch 1 ..
    cyclic:  the same places, filled from a new permutation in each epoch, without end
    whole:   each sample once, rank r has r, r + d, r + 2d, ..

All are functions of the consumed samples: resuming needs one integer. Tensor, pipeline and context ranks of a replica
read the same samples.

Source: Megatron-LM, training/datasets/data_samplers.py; rules in tests/golden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from megatrain.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of each step that one data-parallel rank reads."""

    micro_batch_size: int
    dp_rank: int
    dp_size: int

    @property
    def pass_size(self) -> int:
        """Samples that all ranks together read in a micro-batch."""
        return self.micro_batch_size * self.dp_size


class Order(Protocol):
    """The samples of one rank."""

    @property
    def share(self) -> Share:
        """What the order is cut for."""

    def numbers(self, consumed_samples: int, microbatch: int) -> Sequence[int]:
        """Sample numbers of micro-batch `microbatch` of the step that starts behind `consumed_samples`."""

    @property
    def end(self) -> int | None:
        """Consumed samples behind which there are none; None: it goes on for ever."""


@dataclass(frozen=True)
class SingleOrder:
    """Samples in order and never twice. A rest that does not fill a micro-batch on all ranks is dropped, or, without
    `drop_last`, handed out the same way: some ranks get fewer or none.
    """

    share: Share
    total_samples: int
    drop_last: bool = True

    def numbers(self, consumed_samples: int, microbatch: int) -> range:
        """See `Order`."""
        size, total = self.share.micro_batch_size, self.total_samples
        group_start = consumed_samples + microbatch * self.share.pass_size
        if self.drop_last and group_start + self.share.pass_size > total:
            return range(0)
        start = group_start + self.share.dp_rank * size
        return range(min(start, total), min(start + size, total))

    @property
    def end(self) -> int:
        """See `Order`."""
        return self.total_samples


class CyclicOrder:
    """Samples in a new order in each epoch, without end. The epoch's number alone seeds its order, as in Megatron-LM."""

    def __init__(self, share: Share, total_samples: int, *, data_sharding: bool = True) -> None:
        """Hand out `total_samples`.

        Args:
            share: the rank's.
            total_samples: of the dataset.
            data_sharding: each rank keeps to a bucket of samples of its own; else all share one permutation.

        Raises:
            ConfigError: an epoch holds no micro-batch for each rank, or would hold more for some than for others.
        """
        self.share = share
        self.total_samples = total_samples
        self.data_sharding = data_sharding
        self.epoch_samples = total_samples - total_samples % share.pass_size
        if not self.epoch_samples:
            raise ConfigError(
                f"the dataset has {total_samples} samples, and a micro-batch on all ranks takes {share.pass_size}",
                fix="use more data, a smaller --micro-batch-size or fewer data-parallel ranks",
            )
        self._orders: dict[int, torch.Tensor] = {}
        longest = -(-self._shared_samples // share.dp_size) // share.micro_batch_size
        if not data_sharding and longest * share.pass_size != self.epoch_samples:
            raise ConfigError(
                f"--no-data-sharding: {total_samples} samples in micro-batches of {share.micro_batch_size} do not come "
                f"out even over {share.dp_size} data-parallel ranks, which would drift apart",
                fix="leave out --no-data-sharding, or use another --micro-batch-size",
            )

    @property
    def end(self) -> None:
        """See `Order`."""

    @property
    def _shared_samples(self) -> int:
        """Samples that ranks without buckets share out."""
        return self.total_samples // self.share.micro_batch_size * self.share.micro_batch_size

    def numbers(self, consumed_samples: int, microbatch: int) -> list[int]:
        """See `Order`."""
        share = self.share
        epoch, done = divmod(consumed_samples + microbatch * share.pass_size, self.epoch_samples)
        if self.data_sharding:
            first, start = done // share.dp_size, share.dp_rank * (self.epoch_samples // share.dp_size)
            places = slice(first, first + share.micro_batch_size)
        else:
            start = 0
            places = slice(done + share.dp_rank, done + share.pass_size, share.dp_size)
        found: list[int] = (self._permutation(epoch)[places] + start).tolist()
        assert len(found) == share.micro_batch_size, "a pass begins at a multiple of its size"
        return found

    def _permutation(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            size = self.epoch_samples // self.share.dp_size if self.data_sharding else self._shared_samples
            order = torch.randperm(size, generator=torch.Generator().manual_seed(epoch))
            # A step reads at the border of two epochs at most; readers in other threads keep what they hold.
            self._orders = {number: kept for number, kept in self._orders.items() if number == epoch - 1} | {
                epoch: order
            }
        return self._orders[epoch]


@dataclass(frozen=True)
class WholeOrder:
    """Each sample once. Some ranks have one fewer, and the last micro-batch may be smaller or empty."""

    share: Share
    total_samples: int

    @property
    def num_microbatches(self) -> int:
        """Micro-batches in which all ranks have read everything."""
        return -(-self.total_samples // self.share.pass_size)

    @property
    def end(self) -> int:
        """See `Order`."""
        return self.num_microbatches * self.share.pass_size

    def numbers(self, consumed_samples: int, microbatch: int) -> range:
        """See `Order`."""
        share = self.share
        start = consumed_samples + microbatch * share.pass_size + share.dp_rank
        return range(start, min(start + share.pass_size, self.total_samples), share.dp_size)
