"""The interface of all sample datasets, and datasets that concatenate and shift sample plans.

`GPTDataset` cuts samples out of token sequences, `MaskedDataset` masks sentences, `BlendedDataset` mixes several datasets, `PlannedDataset` concatenates
the plans of one run, `ShiftedDataset` counts those of a phase from its first sample on; `BatchLoader` reads any of them.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatrain.data.indexed.reader import SequenceSource

Integers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Sample:
    """One sample of s tokens."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    """1 where the label counts."""
    position_ids: npt.NDArray[np.int64]
    document_starts: npt.NDArray[np.int64]
    """Offsets at which attention restarts, ascending, the first is 0."""

    @property
    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return the arrays of the batch, by name."""
        return {name: getattr(self, name) for name in ("tokens", "labels", "loss_mask", "position_ids")}


@dataclass(frozen=True)
class FamilySample:
    """One sample of BERT, T5 or a vision-language model."""

    arrays: Mapping[str, npt.NDArray[Any]]
    """By Megatron-LM's names: a value for each token, or one for the sample."""
    document_starts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    """See `Sample`."""


AnySample = Sample | FamilySample


@dataclass(frozen=True)
class TokenSpan:
    """A contiguous part of a stored sequence that belongs to a sample."""

    source: str
    """`SequenceSource.name` of the dataset."""
    document: int
    sequence: int
    offset: int
    """Offset of the first token in the sequence."""
    length: int
    """Tokens. The last token of a sample may serve as a label only."""


def check_ids(source: SequenceSource, sequence: int, offset: int, ids: Integers, size: int | None) -> None:
    """Raise InputError if an id of a sequence, from `offset` on, is outside a vocabulary of this size; None: it is not known."""
    if size is None or not len(ids) or 0 <= ids.min() <= ids.max() < size:
        return
    first = int(np.argmax((ids < 0) | (ids >= size)))
    raise InputError(
        f"{source.name}: document {source.document_of(sequence)} (sequence {sequence}, token {offset + first}) has id"
        f" {ids[first]}, outside the vocabulary of {size}",
        fix="use the tokenizer that the data was made with, or the right --vocab-size",
    )


class SampleDataset(Protocol):
    """Indexed samples. Sample k is the same whenever and wherever it is read."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, k: int, /) -> AnySample:
        """Return sample k."""

    def spans(self, k: int, /) -> list[TokenSpan]:
        """Return the stored token spans of sample k, in order."""


@runtime_checkable
class MeasuredDataset(Protocol):
    """Samples whose lengths are read many at a time."""

    def lengths(self, numbers: Integers, /) -> Integers:
        """Return the tokens of samples, [n]."""


def lengths_of(samples: SampleDataset, numbers: Integers) -> Integers:
    """Return the tokens of samples, [n], from their index."""
    if isinstance(samples, MeasuredDataset):
        return samples.lengths(numbers)
    return np.array([sum(span.length for span in samples.spans(k)) for k in numbers.tolist()], np.int64)


def lengths_of_parts(parts: Sequence[SampleDataset], part: Integers, numbers: Integers) -> Integers:
    """Return the tokens of samples, [n], each of the dataset `part` and its sample `numbers`."""
    found = np.zeros(len(numbers), np.int64)
    for one in np.unique(part).tolist():
        is_own = part == one
        found[is_own] = lengths_of(parts[one], numbers[is_own])
    return found


class PlannedDataset:
    """The samples of a first plan, followed by those of the plans appended when training was extended or by a later phase. Implements `MeasuredDataset`."""

    def __init__(self, plans: Sequence[SampleDataset], num_planned: Sequence[int]) -> None:
        """Concatenate plans: the first `num_planned` samples of each plan, but all samples of the last one.

        Raises:
            ConfigError: a plan has fewer samples.
        """
        for number, (plan, planned) in enumerate(zip(plans[:-1], num_planned[:-1], strict=True)):
            if len(plan) < planned:
                raise ConfigError(
                    f"plan {number} of the checkpoint has {planned} samples, but the data gives {len(plan)}",
                    fix="use the data of the first run, or start from scratch without --load and with another --save",
                )
        self.plans = tuple(plans)
        self._starts = [0, *itertools.accumulate(num_planned[:-1])]

    def __len__(self) -> int:
        """Return the samples of all plans."""
        return self._starts[-1] + len(self.plans[-1])

    def __getitem__(self, k: int) -> AnySample:
        """Return sample k, counted from the first plan on."""
        plan, index = self._locate(k)
        return plan[index]

    def spans(self, k: int) -> list[TokenSpan]:
        plan, index = self._locate(k)
        return plan.spans(index)

    def lengths(self, numbers: Integers) -> Integers:
        plan = np.searchsorted(self._starts, numbers, side="right") - 1
        return lengths_of_parts(self.plans, plan, numbers - np.array(self._starts)[plan])

    def _locate(self, k: int) -> tuple[SampleDataset, int]:
        """Return the plan that contains sample k, and the sample's index in it."""
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        plan = bisect.bisect_right(self._starts, k) - 1
        return self.plans[plan], k - self._starts[plan]


class ShiftedDataset:
    """The samples of a phase of training, numbered from its first sample on; those of earlier phases cannot be read. Implements `MeasuredDataset`."""

    def __init__(self, samples: SampleDataset, start: int) -> None:
        """Give the first of `samples` the number `start`."""
        self._samples, self._start = samples, start

    def __len__(self) -> int:
        """Return the number of samples, those of earlier phases included."""
        return self._start + len(self._samples)

    def __getitem__(self, k: int) -> AnySample:
        """Return sample k of the run. Raises ConfigError for a sample of an earlier phase."""
        return self._samples[self._index(k)]

    def spans(self, k: int) -> list[TokenSpan]:
        return self._samples.spans(self._index(k))

    def lengths(self, numbers: Integers) -> Integers:
        self._index(int(numbers.min(initial=self._start)))
        return lengths_of(self._samples, numbers - self._start)

    def _index(self, k: int) -> int:
        if k < self._start:
            raise ConfigError(
                f"sample {k} is of an earlier phase of training, which ended before sample {self._start}"
                " (--phase-transition-iterations)",
                fix="give the data flags of that phase, and the checkpoint of its time with --ckpt-step",
            )
        return k - self._start
