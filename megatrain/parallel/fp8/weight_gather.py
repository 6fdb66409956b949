"""All-gather of weights as FP8 codes (--fp8-param-gather): one byte per element of FP8 linear layers whose weight has one scale.

    this rank's shard ─┬─ FP8 weights: largest values ─> maximum over ranks ─> scale of the whole weight ─> codes ─┬─> bytes
                       └─ other elements, as they are ──────────────────────────────────────────────────────────────┘
    bytes of all ranks ── decode ──> full bucket, in the dtype of the weights

The linear layer casts decoded values to the same codes again: the same scale maps them close to the codes that they came from,
and the scale is the same, since the largest value decodes to itself. So losses and gradients equal the ones of a gather in the
dtype of the weights, bit for bit. With delayed scales the history takes the largest values here, before the cast.

A rank keeps its own shard as it is, where the shard is a part of the full bucket: the optimizer updates it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.kernels.fp8.quantize import amax, quantize, scale_of_one
from megatrain.parallel.buckets import Bucket, BucketParam, Shard
from megatrain.parallel.collectives import Transfer, all_reduce, begin_all_gather_into
from megatrain.parallel.data_parallel import BucketMemory, WeightAllGather
from megatrain.parallel.fp8.scaling import CurrentScaling, DelayedScaling, Fp8Linear
from megatrain.parallel.grid import RankGroup

_ALIGNMENT = 64
"""Bytes; each part of a rank's bytes begins at a multiple."""


@dataclass(frozen=True)
class _Part:
    """The elements of a parameter in a rank's shard."""

    elements: slice
    """Their range in the bucket."""
    weight: int | None
    """Number of the FP8 weight; None: it is sent as it is."""
    bytes: slice
    """Their range in the rank's bytes."""


class _Layout:
    """The FP8 weights of a bucket, and the bytes that each rank sends."""

    def __init__(self, bucket: Bucket, num_ranks: int, element_size: int) -> None:
        self.weights: list[CurrentScaling | DelayedScaling] = []
        numbers: dict[int, int] = {}
        for param in bucket.params:
            scaling = _scaling_of(param)
            if scaling is not None:
                numbers[param.start] = len(self.weights)
                self.weights.append(scaling)
        size = bucket.size // num_ranks
        self.parts: list[list[_Part]] = []
        for rank in range(num_ranks):
            parts, at = [], 0
            for param, part in Shard(bucket, rank * size, (rank + 1) * size).parts():
                weight, count = numbers.get(param.start), part.stop - part.start
                num_bytes = count * (element_size if weight is None else 1)
                elements = slice(rank * size + part.start, rank * size + part.stop)
                parts.append(_Part(elements, weight, slice(at, at + num_bytes)))
                at += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            self.parts.append(parts)
        self.num_bytes = max(parts[-1].bytes.stop if parts else 0 for parts in self.parts)
        self.num_bytes = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT


def _scaling_of(param: BucketParam) -> CurrentScaling | DelayedScaling | None:
    """Return the scaling of the weight of an FP8 linear layer if it has one scale."""
    fp8 = getattr(param.entry.module, "fp8", None)
    if param.entry.attribute != "weight" or not isinstance(fp8, Fp8Linear):
        return None
    return fp8.weight if isinstance(fp8.weight, CurrentScaling | DelayedScaling) else None


class Fp8WeightGather(WeightAllGather):
    """All-gathers buckets of weights, FP8 weights as codes.

    Args:
        buckets: the buckets of `memory`.
        tp: ranks over which weights are split.
    """

    def __init__(
        self,
        memory: BucketMemory,
        groups: Sequence[RankGroup],
        buckets: Sequence[Bucket],
        tp: RankGroup,
        *,
        overlap: bool,
    ) -> None:
        super().__init__(memory, groups, overlap=overlap)
        self.tp = tp
        size = torch.empty((), dtype=memory.dtype).element_size()
        self.layouts = [
            _Layout(bucket, group.size, size) for bucket, group in zip(buckets, groups, strict=True)
        ]
        self._known_amaxes: dict[int, Tensor] = {}
        """Largest values by bucket, until its shard is written again."""

    def all_gather(self, number: int) -> None:
        self._known_amaxes.pop(number, None)
        super().all_gather(number)

    def begin(self, number: int) -> Transfer:
        """Allocate a bucket and begin to gather it."""
        layout, group = self.layouts[number], self.groups[number]
        if not layout.weights:
            return super().begin(number)
        amaxes = self._amaxes(number)
        self.memory.allocate(number)
        full, shard = self.memory.full[number].data, self.memory.shards[number]
        casts = [_scale_and_factor(s, a, full.dtype) for s, a in zip(layout.weights, amaxes, strict=True)]
        sent = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=shard.device)
        first = group.rank * shard.numel()
        for part in layout.parts[group.rank]:
            values = shard[part.elements.start - first : part.elements.stop - first]
            if part.weight is not None:
                values = _codes(values, casts[part.weight][0], _current(layout.weights[part.weight]).dtype)
            sent[part.bytes].copy_(values.view(torch.uint8))
        received = sent.new_empty(group.size * layout.num_bytes)
        skipped = group.rank if self.memory.is_kept_full[number] else None

        def decode() -> None:
            for rank, parts in enumerate(layout.parts):
                for part in parts if rank != skipped else ():
                    place, start = part.bytes, rank * layout.num_bytes
                    values = received[start + place.start : start + place.stop]
                    if part.weight is None:
                        full[part.elements].copy_(values.view(full.dtype))
                    else:
                        factor = casts[part.weight][1]
                        codes = values.view(_current(layout.weights[part.weight]).dtype)
                        full[part.elements].copy_(codes.to(factor.dtype) * factor)

        return _Decoding(begin_all_gather_into(received, sent, group), decode)

    def _amaxes(self, number: int) -> Tensor:
        """Return the largest absolute values of the FP8 weights of a bucket, fp32 [weights]; delayed scaling notes them."""
        if number not in self._known_amaxes:
            self._known_amaxes[number] = self._computed_amaxes(number)
        found = self._known_amaxes[number]
        for scaling, largest in zip(self.layouts[number].weights, found, strict=True):
            if isinstance(scaling, DelayedScaling):
                scaling.note(largest)
        return found

    def _computed_amaxes(self, number: int) -> Tensor:
        layout, group, shard = self.layouts[number], self.groups[number], self.memory.shards[number]
        first, found = group.rank * shard.numel(), torch.zeros(len(layout.weights), device=shard.device)
        for part in layout.parts[group.rank]:
            if part.weight is not None:
                found[part.weight] = amax(shard[part.elements.start - first : part.elements.stop - first])
        for ranks in (group, self.tp):
            all_reduce(found, ranks, "max")
        return found


class _Decoding(Transfer):
    """A transfer of codes, which the wait decodes."""

    def __init__(self, transfer: Transfer, decode: Callable[[], None]) -> None:
        super().__init__()
        self.transfer, self.decode = transfer, decode

    def wait(self) -> None:
        self.transfer.wait()
        self.decode()


def _current(scaling: CurrentScaling | DelayedScaling) -> CurrentScaling:
    return scaling.current if isinstance(scaling, DelayedScaling) else scaling


def _scale_and_factor(
    scaling: CurrentScaling | DelayedScaling, largest: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the scale of a weight, fp32 [2], and the factor that decodes its codes to values in `dtype`."""
    wide = torch.float32 if dtype.itemsize == 2 else torch.float64
    known = scaling.history.scale(scaling.number) if isinstance(scaling, DelayedScaling) else None
    if known is not None:
        return known, known[1].to(wide).reciprocal()
    number_format = _current(scaling).dtype
    # The largest code decodes to the largest value, which the inverse of the scale would miss by a rounding.
    return scale_of_one(largest, number_format), largest.to(wide) / torch.finfo(number_format).max


def _codes(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast contiguous elements of a weight, in the order in which they are stored."""
    columns = _ALIGNMENT if values.numel() % _ALIGNMENT == 0 else values.numel()
    codes = quantize(values.view(-1, columns), scale, dtype, columns=False).rows
    assert codes is not None
    return codes.flatten()
