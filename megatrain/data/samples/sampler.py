"""Samplers: the samples that each data-parallel rank reads, in order.

    single:  consumed -> | rank 0: m | rank 1: m | .. | rank d-1: m | rank 0: m | ..     (m = micro-batch size)
                         `------------- micro-batch 0 ------------' `- micro-batch 1 ..
    cyclic:  the same layout over a new permutation in each epoch, without end
    full:    the same layout, each sample once; the last micro-batches are smaller or empty

Each sampler is a function of the consumed samples: resuming needs one integer. The tensor, pipeline and context ranks
of a replica read the same samples.

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
class DataShard:
    """The part of each global micro-batch that one data-parallel rank reads."""

    micro_batch_size: int
    dp_rank: int
    dp_size: int

    @property
    def global_micro_batch_size(self) -> int:
        """Samples that all ranks together read in one micro-batch."""
        return self.micro_batch_size * self.dp_size


class Sampler(Protocol):
    """The sample indices of one rank."""

    @property
    def shard(self) -> DataShard:
        """The rank's part of each micro-batch."""

    def indices(self, consumed_samples: int, microbatch: int) -> Sequence[int]:
        """Return the sample indices of micro-batch `microbatch` of the step that starts after `consumed_samples`."""

    @property
    def end(self) -> int | None:
        """Consumed samples after which none are left; None: endless."""


@dataclass(frozen=True)
class SingleSampler:
    """Samples in order, each once. A remainder that does not fill a micro-batch on all ranks is dropped. Implements `Sampler`."""

    shard: DataShard
    total_samples: int

    def indices(self, consumed_samples: int, microbatch: int) -> range:
        global_start = consumed_samples + microbatch * self.shard.global_micro_batch_size
        if global_start + self.shard.global_micro_batch_size > self.total_samples:
            return range(0)
        start = global_start + self.shard.dp_rank * self.shard.micro_batch_size
        return range(start, start + self.shard.micro_batch_size)

    @property
    def end(self) -> int:
        return self.total_samples


class CyclicSampler:
    """Samples in a new order in each epoch, without end. The epoch number alone seeds the order, as in Megatron-LM. Implements `Sampler`."""

    def __init__(self, shard: DataShard, total_samples: int, *, data_sharding: bool = True) -> None:
        """Sample from `total_samples`.

        Args:
            shard: the rank's part of each micro-batch.
            total_samples: samples of the dataset.
            data_sharding: each rank shuffles its own contiguous range of samples; else all ranks split one permutation.

        Raises:
            ConfigError: an epoch has no micro-batch for each rank, or more micro-batches for some ranks than others.
        """
        self.shard = shard
        self.total_samples = total_samples
        self.data_sharding = data_sharding
        self.epoch_samples = total_samples - total_samples % shard.global_micro_batch_size
        if not self.epoch_samples:
            raise ConfigError(
                f"the dataset has {total_samples} samples, fewer than one micro-batch on all ranks"
                f" ({shard.global_micro_batch_size})",
                fix="use more data, a smaller --micro-batch-size or fewer data-parallel ranks",
            )
        self._permutations: dict[int, torch.Tensor] = {}
        most_microbatches = -(-self._num_shuffled // shard.dp_size) // shard.micro_batch_size
        if not data_sharding and most_microbatches * shard.global_micro_batch_size != self.epoch_samples:
            raise ConfigError(
                f"--no-data-sharding: {total_samples} samples in micro-batches of {shard.micro_batch_size} do not divide"
                f" evenly over {shard.dp_size} data-parallel ranks, which would get out of step",
                fix="leave out --no-data-sharding, or use another --micro-batch-size",
            )

    @property
    def end(self) -> None:
        """See `Sampler`."""

    @property
    def _num_shuffled(self) -> int:
        """Samples in the permutation that all ranks split (without data sharding)."""
        return self.total_samples // self.shard.micro_batch_size * self.shard.micro_batch_size

    def indices(self, consumed_samples: int, microbatch: int) -> list[int]:
        shard = self.shard
        epoch, done = divmod(
            consumed_samples + microbatch * shard.global_micro_batch_size, self.epoch_samples
        )
        if self.data_sharding:
            first, offset = done // shard.dp_size, shard.dp_rank * (self.epoch_samples // shard.dp_size)
            positions = slice(first, first + shard.micro_batch_size)
        else:
            offset = 0
            positions = slice(done + shard.dp_rank, done + shard.global_micro_batch_size, shard.dp_size)
        found: list[int] = (self._permutation(epoch)[positions] + offset).tolist()
        assert len(found) == shard.micro_batch_size, "a global micro-batch starts at a multiple of its size"
        return found

    def _permutation(self, epoch: int) -> torch.Tensor:
        if epoch not in self._permutations:
            size = self.epoch_samples // self.shard.dp_size if self.data_sharding else self._num_shuffled
            permutation = torch.randperm(size, generator=torch.Generator().manual_seed(epoch))
            # A step spans two epochs at most. Replace the dict: loader threads may still read the old one.
            previous = {number: kept for number, kept in self._permutations.items() if number == epoch - 1}
            self._permutations = previous | {epoch: permutation}
        return self._permutations[epoch]


@dataclass(frozen=True)
class FullSampler:
    """Each sample once, for full validation. One micro-batch may be smaller, and those of later ranks empty. Implements `Sampler`.

    So the samples of a micro-batch do not depend on the number of ranks. With micro-batches of one sample this is
    Megatron-LM's order, which records one sample at a time.
    """

    shard: DataShard
    total_samples: int

    @property
    def num_microbatches(self) -> int:
        """Micro-batches after which all ranks have read everything."""
        return -(-self.total_samples // self.shard.global_micro_batch_size)

    @property
    def end(self) -> int:
        return self.num_microbatches * self.shard.global_micro_batch_size

    def indices(self, consumed_samples: int, microbatch: int) -> range:
        size = self.shard.micro_batch_size
        start = consumed_samples + microbatch * self.shard.global_micro_batch_size + self.shard.dp_rank * size
        return range(start, max(start, min(start + size, self.total_samples)))
