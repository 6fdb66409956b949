"""What a run reads of each dataset, as far as the headers of its files tell: no index is built.

Tokens of a split are its share of the sequences, as if all were equally long; so epochs are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatrain.config import Facts, Plan
from megatrain.config.derive.datasets import SPLIT_NAMES, split_fractions
from megatrain.config.facts import DatasetFacts
from megatrain.data.samples.blend import blend_counts, normalized
from megatrain.data.samples.mock import MOCK_SPLIT


@dataclass(frozen=True, kw_only=True)
class DatasetUse:
    """A dataset in a split."""

    split: str
    dataset: str
    """Its prefix, or `mock data`."""
    samples: int | None
    """That are wanted of it; None: all of one epoch."""
    plans: tuple[int | None, ...]
    """Samples of the whole split, plan by plan."""
    tokens: int | None
    """Of the dataset in this split, by its share of the sequences; None: not known."""
    epochs: float | None
    """How often it is read; None: not known."""


def dataset_uses(plan: Plan, facts: Facts) -> Iterator[DatasetUse]:
    """Every dataset in every split that reads it."""
    for number, split in enumerate(SPLIT_NAMES):
        wanted = getattr(plan.derived, f"requested_{split}_samples")
        plans = getattr(plan.derived, f"{split}_plan")
        if wanted == 0 or (split == "train" and plan.config.training.skip_train):
            continue
        if not facts.datasets:
            if split_fractions(MOCK_SPLIT)[number]:
                yield DatasetUse(
                    split=split, dataset="mock data", samples=wanted, plans=plans, tokens=None, epochs=None
                )
            continue
        read = [dataset for dataset in facts.datasets if dataset.split in (split, "all")]
        shares = [split_fractions(plan.config.data.split)[number] if one.split == "all" else 1.0 for one in read]
        tokens = [round(one.num_tokens * share) for one, share in zip(read, shares, strict=True)]
        if not any(shares):
            continue
        samples = _samples(read, tokens, wanted, plan.config.data.seq_length)
        for dataset, size, count in zip(read, tokens, samples, strict=True):
            epochs = 1.0 if count is None else count * plan.config.data.seq_length / max(1, size)
            yield DatasetUse(
                split=split, dataset=dataset.prefix, samples=count, plans=plans, tokens=size, epochs=epochs
            )


def _samples(
    read: Sequence[DatasetFacts], tokens: Sequence[int], wanted: int | None, seq_length: int
) -> list[int | None]:
    """By weight; without weights each dataset is read once at most, in proportion to its size."""
    if wanted is None:
        return [None] * len(read)
    if len(read) == 1:
        return [wanted]
    if any(one.weight is None for one in read):
        wanted = min(wanted, sum(size // seq_length for size in tokens))
        return list(blend_counts(normalized([max(1, size) for size in tokens]), wanted))
    return list(blend_counts(normalized([one.weight or 0.0 for one in read]), wanted))
