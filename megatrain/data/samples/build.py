"""From what a run reads to the samples of train, valid and test.

Sources -> for each split: a dataset for each prefix (its sequences, build_index) -> blended -> one plan by another

one prefix                  its samples
weights and prefixes        a blend, each dataset built for its share of the samples wanted
prefixes                    a blend of one epoch of each, in proportion to their sizes
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatrain.config.derive.blends import Blend
from megatrain.config.derive.splits import SPLIT_NAMES, require_sequences, split_ranges
from megatrain.config.errors import ConfigError, InputError
from megatrain.data.indexed.reader import IndexedDataset, SequenceSource
from megatrain.data.samples.blend import (
    SURPLUS,
    BlendedSamples,
    Draw,
    blend_counts,
    draw_exhaustive,
    draw_weighted,
    longer_counts,
    normalized,
)
from megatrain.data.samples.dataset import PlannedSamples, Samples
from megatrain.data.samples.gpt import GptSamples, SampleRules
from megatrain.data.samples.gpt_index import build_index
from megatrain.data.samples.index_cache import Arrays, IndexCache
from megatrain.data.samples.mock import MOCK_SPLIT, MockSequences
from megatrain.data.samples.sources import content_digest, open_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

Built = GptSamples | BlendedSamples


@dataclass(frozen=True, kw_only=True)
class Plans:
    """How many samples of each split are wanted, plan by plan; None: one epoch. Plan k shuffles with seed + k."""

    train: tuple[int | None, ...]
    valid: tuple[int | None, ...]
    test: tuple[int | None, ...]
    seed: int


@dataclass(frozen=True)
class Splits:
    """Samples by purpose. None: none were asked for, or no share of the data is theirs."""

    train: Samples | None
    valid: Samples | None
    test: Samples | None
    named_valid: Mapping[str, Samples] = field(default_factory=dict)
    """Instead of `valid`: each validation dataset on its own."""


Outcome = Literal["found", "built", "small"]


@dataclass(frozen=True, kw_only=True)
class BuiltIndex:
    """An order of samples that is ready: a dataset's, or that of a blend."""

    split: str
    seed: int
    source: str
    """Where the tokens come from, or `blend of 3`."""
    num_sequences: int | None
    """None, here and below: a blend has none of its own."""
    num_tokens: int | None
    """Of one epoch."""
    num_epochs: int | None
    num_samples: int
    seconds: float
    outcome: Outcome
    """Found in the cache, built (and kept there if that is possible), or too small to be kept."""


class SplitBuilder:
    """Builds the samples of a run. Datasets are opened once, whatever number of splits read them."""

    def __init__(
        self,
        rules: SampleRules,
        *,
        cache_folder: str | Path | None = None,
        mmap: bool = True,
        surplus: float = SURPLUS,
        digests: Mapping[str, str] | None = None,
        keeps_partial_valid: bool = False,
        say: Callable[[str], None] = print,
        on_built: Callable[[BuiltIndex], None] | None = None,
    ) -> None:
        """Say how samples are made.

        Args:
            rules: of all samples.
            cache_folder: where sample indices are kept between runs; None: they are computed at each start.
            mmap: see `IndexedDataset`.
            surplus: share by which a blend's datasets are built longer.
            digests: of what must lie under each prefix, see `content_digest`; None: anything may.
            keeps_partial_valid: give the last tokens of validation data a padded sample of their own.
            say: gets a line for what went otherwise than expected.
            on_built: told of each index as soon as it is there.
        """
        self.rules = rules
        self.cache = _WatchedCache(cache_folder, say)
        self._say = say
        self._on_built = on_built
        self._mmap = mmap
        self._surplus = surplus
        self._digests = digests or {}
        self._keeps_partial_valid = keeps_partial_valid
        self._opened: dict[str, IndexedDataset] = {}

    def build(
        self, blends: Mapping[str, Blend], split: str, plans: Plans, *, named_valid: bool = False
    ) -> Splits:
        """The samples of the three splits.

        Args:
            blends: one under `all`, shared out by `split`, or those of `train`, `valid`, `test`; empty: mock data,
                which always split evenly.
            split: such as `969,30,1`.
            plans: the samples that are wanted.
            named_valid: keep the datasets of the validation blend apart, under the names of their files.

        Raises:
            ConfigError: samples are asked of a split without sequences, or a blend is not one.
            InputError: files are missing, broken or hold no token ids.
        """
        if not blends:
            mock = MockSequences(vocab_size=self.rules.vocab_size or 1, eod=self.rules.eod or 0)
            return self._shared([mock], None, MOCK_SPLIT, plans)
        if "all" in blends:
            blend = blends["all"]
            return self._shared(
                [self._open(prefix) for prefix in blend.prefixes], blend.weights, split, plans
            )
        built: dict[str, Samples | None] = dict.fromkeys(SPLIT_NAMES)
        named: dict[str, Samples] = {}
        for name in SPLIT_NAMES:
            wanted = getattr(plans, name)
            if name not in blends or wanted == (0,):
                continue
            blend = blends[name]
            sources = [self._open(prefix) for prefix in blend.prefixes]
            parts = [range(len(source.lengths)) for source in sources]
            if named_valid and name == "valid":
                for label, source, part in zip(dataset_names(blend.prefixes), sources, parts, strict=True):
                    named[label] = self._planned([source], [part], None, wanted, plans.seed, name)
            else:
                weights = (
                    blend.weights if len(sources) > 1 else None
                )  # as in Megatron-LM, one needs no weight here
                built[name] = self._planned(sources, parts, weights, wanted, plans.seed, name)
        return Splits(built["train"], built["valid"], built["test"], named)

    def _shared(
        self, sources: Sequence[SequenceSource], weights: tuple[float, ...] | None, split: str, plans: Plans
    ) -> Splits:
        """Splits that share their datasets."""
        ranges = [split_ranges(split, len(source.lengths)) for source in sources]
        built: dict[str, Samples | None] = dict.fromkeys(SPLIT_NAMES)
        # As in Megatron-LM, `--split 100,0,0` means "do not evaluate", whatever --eval-iters asks for.
        is_asked = [
            getattr(plans, name) != (0,) and (ranges[0][number] is not None or name == "train")
            for number, name in enumerate(SPLIT_NAMES)
        ]
        require_sequences(split, {source.name: len(source.lengths) for source in sources}, is_asked)
        for number, name in enumerate(SPLIT_NAMES):
            if is_asked[number]:
                parts = [found[number] or range(0) for found in ranges]
                built[name] = self._planned(sources, parts, weights, getattr(plans, name), plans.seed, name)
        return Splits(built["train"], built["valid"], built["test"])

    def _planned(
        self,
        sources: Sequence[SequenceSource],
        parts: Sequence[range],
        weights: Sequence[float] | None,
        wanted: Sequence[int | None],
        seed: int,
        name: str,
    ) -> Samples:
        """The plans of one split, one by another."""
        if weights is None and len(sources) > 1 and None not in wanted:
            # Each dataset is read once, in an order that does not depend on how many samples are planned.
            wanted = [sum(number or 0 for number in wanted)]
        plans = [
            self._one_plan(sources, parts, weights, number, seed + k, name) for k, number in enumerate(wanted)
        ]
        if len(plans) == 1:
            return plans[0]
        return PlannedSamples(plans, [number or 0 for number in wanted])

    def _one_plan(
        self,
        sources: Sequence[SequenceSource],
        parts: Sequence[range],
        weights: Sequence[float] | None,
        wanted: int | None,
        seed: int,
        name: str,
    ) -> Built:
        def dataset(number: int, num_samples: int | None) -> GptSamples:
            return self._samples(sources[number], parts[number], num_samples, seed, name)

        if weights is None and len(sources) == 1:
            alone = dataset(0, wanted)
            if wanted is None and not len(alone):
                raise self._too_short(name, *sources)
            return alone
        if weights is None:
            datasets = [dataset(number, None) for number in range(len(sources))]
            sizes = [len(one) for one in datasets]
            if not any(sizes):
                raise self._too_short(name, *sources)
            for source, size in zip(sources, sizes, strict=True):
                if not size:
                    self._say(f"{source.name}: left out, its {name} data is shorter than a sample")
            num_samples = sum(sizes) if wanted is None else min(wanted, sum(sizes))
            draw = self._draw(sizes, num_samples, seed, name, is_exhaustive=wanted is None)
            return BlendedSamples(datasets, draw)
        if wanted is None:
            raise ConfigError(
                f"weights ask for shares of a number of samples, and {name} data is read whole",
                fix="leave out the weights, or --full-validation",
            )
        counts = blend_counts(normalized(weights), wanted)
        longer = longer_counts(counts, self._surplus)
        datasets = [dataset(number, count) for number, count in enumerate(longer)]
        draw = self._draw(normalized(weights).tolist(), sum(counts), seed, name)
        return BlendedSamples(datasets, draw, [source.name for source in sources])

    def _too_short(self, name: str, *sources: SequenceSource) -> ConfigError:
        return ConfigError(
            f"{' and '.join(source.name for source in sources)}: the {name} data is shorter than one sample of"
            f" --seq-length {self.rules.seq_length} and a token",
            fix="use more data, or a --split that gives it more",
        )

    def _samples(
        self, source: SequenceSource, part: range, num_samples: int | None, seed: int, name: str
    ) -> GptSamples:
        start = self.cache.watch()
        try:
            index = build_index(
                source.lengths,
                part,
                seq_length=self.rules.seq_length,
                seed=seed,
                num_samples=num_samples,
                add_extra_token=self.rules.add_extra_token,
                drop_last_partial=not (self._keeps_partial_valid and name == "valid"),
                cache=self.cache,
            )
        except ConfigError as error:
            problem = error.problems[0]
            raise ConfigError(f"{source.name}: the {name} data: {problem.text}", fix=problem.fix) from error
        if self._on_built is not None:
            built = BuiltIndex(
                split=name,
                seed=seed,
                source=source.name,
                num_sequences=len(part),
                num_tokens=int(source.lengths[part.start : part.stop].sum(dtype=np.int64)),
                num_epochs=index.epochs.count,
                num_samples=len(index),
                seconds=time.perf_counter() - start,
                outcome=self.cache.outcome,
            )
            self._on_built(built)
        return GptSamples(source, index, self.rules)

    def _draw(
        self, weights: Sequence[float], num_samples: int, seed: int, name: str, *, is_exhaustive: bool = False
    ) -> Draw:
        def arrays() -> Arrays:
            draw = (
                draw_exhaustive([int(size) for size in weights])
                if is_exhaustive
                else draw_weighted(weights, num_samples)
            )
            return {"dataset": draw.dataset, "sample": draw.sample}

        start = self.cache.watch()
        if self.cache.is_worth(num_samples):
            key = {"weights": list(weights), "samples": num_samples, "is_exhaustive": is_exhaustive}
            draw = Draw(**self.cache.find_or_make("blend", key, arrays))
        else:
            draw = Draw(**arrays())
        if self._on_built is not None:
            built = BuiltIndex(
                split=name,
                seed=seed,
                source=f"blend of {len(weights)}",
                num_sequences=None,
                num_tokens=None,
                num_epochs=None,
                num_samples=num_samples,
                seconds=time.perf_counter() - start,
                outcome=self.cache.outcome,
            )
            self._on_built(built)
        return draw

    def _open(self, prefix: str) -> IndexedDataset:
        if prefix not in self._opened:
            opened = open_token_ids(prefix, mmap=self._mmap)
            if prefix in self._digests and content_digest(opened) != self._digests[prefix]:
                raise InputError(
                    f"{opened.name}: is not what rank 0 has under this path, on this host:"
                    f" {len(opened)} sequences of {opened.num_tokens} tokens here",
                    fix="give all hosts the same files",
                )
            self._opened[prefix] = opened
        return self._opened[prefix]


class _WatchedCache(IndexCache):
    """Knows what became of the last index that was asked for."""

    outcome: Outcome = "small"

    def watch(self) -> float:
        """From now on; returns the time."""
        self.outcome = "small"
        return time.perf_counter()

    def find_or_make(self, kind: str, key: Mapping[str, Any], make: Callable[[], Arrays]) -> Arrays:
        """See `IndexCache`."""

        def made() -> Arrays:
            self.outcome = "built"
            return make()

        self.outcome = "found"
        return super().find_or_make(kind, key, made)


def dataset_names(prefixes: Sequence[str]) -> list[str]:
    """Short names of datasets, none twice: the end of each path, as far as it takes to tell them apart."""
    parts = [prefix.strip("/").split("/") for prefix in prefixes]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{prefix}#{number}" for number, prefix in enumerate(prefixes)]
