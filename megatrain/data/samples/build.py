"""Build the train, valid and test samples of a run from its datasets.

Sources -> for each split: a dataset per prefix (its sequences, build_index) -> blend -> the run's plans, concatenated

later phases                samples of their own, concatenated after those of the first phase

one prefix                  its samples
weights and prefixes        a blend, each dataset built with its share of the requested samples
prefixes                    a blend of one epoch of each, in proportion to their sizes
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from megatrain.config.derive.datasets import SPLIT_NAMES, Blend, require_sequences, split_ranges
from megatrain.config.errors import ConfigError, InputError
from megatrain.data.files import different_ends
from megatrain.data.indexed.reader import IndexedDataset, SequenceSource
from megatrain.data.samples.blend import (
    SURPLUS,
    BlendedDataset,
    BlendIndex,
    blend_counts,
    build_blend_index,
    build_exhaustive_blend_index,
    counts_with_surplus,
    normalized,
)
from megatrain.data.samples.conversations import (
    ConversationDataset,
    ConversationIndex,
    build_conversation_index,
)
from megatrain.data.samples.dataset import PlannedDataset, SampleDataset
from megatrain.data.samples.document_dataset import DocumentDataset, build_document_index
from megatrain.data.samples.gpt_dataset import GPTDataset, SampleOptions
from megatrain.data.samples.gpt_index import LengthFacts, build_index
from megatrain.data.samples.index_cache import EVERYTHING, Arrays, IndexCache, Share, all_built
from megatrain.data.samples.masked_dataset import MaskedDataset, MaskedSamples, build_masked_dataset
from megatrain.data.samples.mock import MOCK_SPLIT, MockSequences
from megatrain.data.samples.sentence_index import LONG_SENTENCE, SentenceIndex
from megatrain.data.samples.sources import dataset_digest, open_loss_mask, open_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class SamplePlans:
    """Requested samples of each split, plan by plan; None: one epoch. Plan k shuffles with seed + k."""

    train: tuple[int | None, ...]
    valid: tuple[int | None, ...]
    test: tuple[int | None, ...]
    seed: int


@dataclass(frozen=True, kw_only=True)
class PhaseSamples:
    """Training samples of a later phase."""

    from_iteration: int
    start: int
    """First sample of the phase."""
    plans: tuple[int, ...]
    """Samples of each plan, shuffled with the seeds that follow those of the phases before it."""
    blend: Blend
    is_split: bool
    """True if --split divides the data, and training reads the first part only."""


@dataclass(frozen=True)
class SplitDatasets:
    """Datasets by split; None: no samples are requested, or the split is empty."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None
    named_valid: Mapping[str, SampleDataset] = field(default_factory=dict)
    """The validation datasets one by one, in place of `valid`."""


Outcome = Literal["found", "built", "small"]
_MANY_ROWS: Final = 200_000_000
"""An index of so many sequences is announced before it is built."""
_ROWS_PER_SECOND: Final = 7e6
"""Sequences that one core shuffles and cuts in a second."""


@dataclass(frozen=True, kw_only=True)
class BuiltIndex:
    """Facts about a sample index or a blend index that is ready."""

    split: str
    seed: int
    source: str
    """`SequenceSource.name` of the dataset, or a name such as `blend of 3`."""
    num_samples: int
    seconds: float
    outcome: Outcome
    """Found in the cache, built (and cached if possible), or too small to cache."""
    num_sequences: int | None = None
    """None for a blend, here and below."""
    num_tokens: int | None = None
    """Tokens of one epoch."""
    num_epochs: int | None = None


class _Read(NamedTuple):
    """The sources of a split in one phase."""

    split: str
    sources: Sequence[SequenceSource]
    parts: Sequence[range]
    """The part of each source, in sequences, or documents for BERT and T5."""
    weights: Sequence[float] | None


class SplitBuilder:
    """Builds the datasets of a run. Each file is opened once, even if several splits read it."""

    def __init__(
        self,
        options: SampleOptions,
        *,
        cache_folder: str | Path | None = None,
        mmap: bool = True,
        index_cache: str | None = None,
        surplus: float = SURPLUS,
        digests: Mapping[str, str] | None = None,
        log: Callable[[str], None] = print,
        on_built: Callable[[BuiltIndex], None] | None = None,
        masked: MaskedSamples | None = None,
        share: Share = EVERYTHING,
    ) -> None:
        """Configure the builder.

        Args:
            options: options of all samples of a GPT.
            cache_folder: folder of cached indices; None: compute them at each start.
            mmap, index_cache: see `IndexedDataset`.
            surplus: share of extra samples that a blend's datasets are built with.
            digests: expected `content_digest` of the data under each prefix; None: not checked.
            log: receives a line for each unexpected condition that is not an error.
            on_built: called with each index when it is ready.
            masked: samples are of BERT or T5; None: of a GPT.
            share: see `IndexCache`.
        """
        self.options = options
        self.masked = masked
        self.cache = _RecordingCache(cache_folder, log, share=share)
        self._log = log
        self._on_built = on_built
        self._mmap, self._index_cache = mmap, index_cache
        self._surplus = surplus
        self._digests = digests or {}
        self._opened: dict[str, IndexedDataset] = {}
        self._logged: set[str] = set()

    def build(
        self,
        blends: Mapping[str, Blend],
        split: str,
        plans: SamplePlans,
        *,
        named_valid: Sequence[str] | None = None,
    ) -> SplitDatasets:
        """Build the three splits.

        Args:
            blends: one blend under `all`, divided by `split`, or blends under `train`, `valid`, `test`; empty: mock
                data, divided evenly.
            split: such as `969,30,1`; it divides sequences, or documents for BERT and T5.
            plans: the requested samples.
            named_valid: keep the datasets of the validation blend separate, under these names; empty: those of their files.

        Raises:
            ConfigError: samples are requested from a split without sequences, or a blend is invalid.
            InputError: files are missing, damaged or contain no token ids.
        """
        if not blends:
            assert self.masked is None, "the rule `sentences_come_from_files` reports it"
            vocab_size, eod = self.options.vocab_size or 1, self.options.eod or 0
            mock = MockSequences(vocab_size=vocab_size, eod=eod, lengths=self.options.mock_lengths)
            return self._divide([mock], None, MOCK_SPLIT, plans)
        if "all" in blends:
            blend = blends["all"]
            sources = [self._open(prefix) for prefix in blend.prefixes]
            return self._divide(sources, blend.weights, split, plans)
        return self._build_apart(blends, plans, named_valid)

    def _build_apart(
        self, blends: Mapping[str, Blend], plans: SamplePlans, named_valid: Sequence[str] | None
    ) -> SplitDatasets:
        """Build splits that have datasets of their own."""
        builds: dict[tuple[str, str | None], Callable[[], SampleDataset]] = {}
        for name in SPLIT_NAMES:
            wanted = getattr(plans, name)
            if name not in blends or wanted == (0,):
                continue
            blend = blends[name]
            sources = [self._open(prefix) for prefix in blend.prefixes]
            parts = [range(self._num_units(source)) for source in sources]
            if named_valid is not None and name == "valid":
                labels = named_valid or dataset_names(blend.prefixes)
                for label, source, part in zip(labels, sources, parts, strict=True):
                    read = _Read(name, [source], [part], None)
                    builds[name, label] = partial(self._build_split, read, wanted, plans.seed)
            else:
                # As in Megatron-LM, the weight of a single dataset is ignored here.
                read = _Read(name, sources, parts, blend.weights if len(sources) > 1 else None)
                builds[name, None] = partial(self._build_split, read, wanted, plans.seed)
        built = dict(zip(builds, all_built(builds.values()), strict=True))
        named = {label: built[name, label] for name, label in built if label is not None}
        train, valid, test = (built.get((name, None)) for name in SPLIT_NAMES)
        return SplitDatasets(train, valid, test, named)

    def with_phases(
        self, splits: SplitDatasets, phases: Sequence[PhaseSamples], split: str, plans: SamplePlans
    ) -> SplitDatasets:
        """Append the training samples of later phases; no change if training reads no samples.

        Raises:
            ConfigError, InputError: as `build`, or a phase holds fewer samples than it reads.
        """
        phases = [phase for phase in phases if phase.plans]
        if splits.train is None or not phases:
            return splits
        builds, seed = [], plans.seed + len(plans.train)
        for phase in phases:
            builds.append(partial(self._build_phase, phase, split, seed))
            seed += len(phase.plans)
        parts = [splits.train, *all_built(builds)]
        starts = [0, *(phase.start for phase in phases)]
        counts = [end - start for start, end in itertools.pairwise(starts)]
        for start, part, count in zip(
            [0, *(phase.from_iteration for phase in phases)], parts, counts, strict=False
        ):
            if len(part) < count:
                raise ConfigError(
                    f"the training data from iteration {start} on holds {len(part)} samples, but the phase reads"
                    f" {count}: datasets without weights are read once",
                    fix="give each dataset a weight, so that it is read as often as necessary, add data, or let the"
                    " next phase of --data-schedule start earlier",
                )
        return replace(splits, train=PlannedDataset(parts, [*counts, len(parts[-1])]))

    def _build_phase(self, phase: PhaseSamples, split: str, seed: int) -> SampleDataset:
        sources = [self._open(prefix) for prefix in phase.blend.prefixes]
        weights = phase.blend.weights
        ranges = [range(self._num_units(source)) for source in sources]
        if phase.is_split:
            self._require_units(split, sources, (True, False, False))
            ranges = [split_ranges(split, len(part))[0] or range(0) for part in ranges]
        elif len(sources) == 1:
            weights = None  # as in `build`
        return self._build_split(_Read("train", sources, ranges, weights), phase.plans, seed)

    def _divide(
        self,
        sources: Sequence[SequenceSource],
        weights: tuple[float, ...] | None,
        split: str,
        plans: SamplePlans,
    ) -> SplitDatasets:
        """Divide the same datasets between the three splits."""
        ranges = [split_ranges(split, self._num_units(source)) for source in sources]
        # As in Megatron-LM, `--split 100,0,0` means "do not evaluate", regardless of --eval-iters.
        is_asked = [
            getattr(plans, name) != (0,) and (ranges[0][number] is not None or name == "train")
            for number, name in enumerate(SPLIT_NAMES)
        ]
        self._require_units(split, sources, is_asked)
        builds = {}
        for number, name in enumerate(SPLIT_NAMES):
            if is_asked[number]:
                read = _Read(name, sources, [found[number] or range(0) for found in ranges], weights)
                builds[name] = partial(self._build_split, read, getattr(plans, name), plans.seed)
        built = dict(zip(builds, all_built(builds.values()), strict=True))
        return SplitDatasets(built.get("train"), built.get("valid"), built.get("test"))

    def _num_units(self, source: SequenceSource) -> int:
        """Return the number of what --split divides: documents of sentences, or sequences."""
        if self.masked is None:
            return len(source.lengths)
        assert isinstance(source, IndexedDataset), "mock data has no sentences"
        return source.num_documents

    def _require_units(self, split: str, sources: Sequence[SequenceSource], is_used: Sequence[bool]) -> None:
        unit = "sequences" if self.masked is None else "documents"
        require_sequences(split, {one.name: self._num_units(one) for one in sources}, is_used, unit=unit)

    def _build_split(self, read: _Read, wanted: Sequence[int | None], seed: int) -> SampleDataset:
        """Build all plans of one split and concatenate them."""
        if read.weights is None and len(read.sources) > 1 and None not in wanted:
            # Each dataset is read once, in an order that does not depend on the number of planned samples.
            wanted = [sum(number or 0 for number in wanted)]
        plans = all_built(
            partial(self._build_plan, read, number, seed + k) for k, number in enumerate(wanted)
        )
        if len(plans) == 1:
            return plans[0]
        return PlannedDataset(plans, [number or 0 for number in wanted])

    def _build_plan(self, read: _Read, wanted: int | None, seed: int) -> SampleDataset:
        name, sources, parts, weights = read

        def datasets_of(counts: Sequence[int | None]) -> list[SampleDataset]:
            return all_built(
                partial(self._build_dataset, source, part, count, seed, name)
                for source, part, count in zip(sources, parts, counts, strict=True)
            )

        if weights is None and len(sources) == 1:
            (alone,) = datasets_of([wanted])
            if wanted is None and not len(alone):
                raise self._too_short(name, *sources)
            return alone
        if weights is None:
            datasets = datasets_of([None] * len(sources))
            sizes = [len(one) for one in datasets]
            if not any(sizes):
                raise self._too_short(name, *sources)
            for source, size in zip(sources, sizes, strict=True):
                if not size:
                    self._log(f"{source.name}: left out, its {name} data is shorter than one sample")
            num_samples = sum(sizes) if wanted is None else min(wanted, sum(sizes))
            index = self._build_blend_index(sizes, num_samples, seed, name, is_exhaustive=wanted is None)
            return BlendedDataset(datasets, index)
        if wanted is None:
            raise ConfigError(
                f"weights divide a number of samples, but all {name} data is read",
                fix="leave out the weights, or leave out --full-validation",
            )
        counts = blend_counts(normalized(weights), wanted)
        datasets = datasets_of(counts_with_surplus(counts, self._surplus))
        index = self._build_blend_index(normalized(weights).tolist(), sum(counts), seed, name)
        return BlendedDataset(datasets, index, [source.name for source in sources])

    def _too_short(self, name: str, *sources: SequenceSource) -> ConfigError:
        return ConfigError(
            f"{' and '.join(source.name for source in sources)}: the {name} data is shorter than one sample"
            f" (--seq-length {self.options.seq_length} and one token)",
            fix="use more data, or a larger share in --split",
        )

    def _build_dataset(
        self, source: SequenceSource, part: range, num_samples: int | None, seed: int, name: str
    ) -> SampleDataset:
        start = self.cache.start()
        try:
            dataset = self._dataset(source, part, num_samples, seed, name)
        except InputError:
            raise  # it names the file
        except ConfigError as error:
            problem = error.problems[0]
            raise ConfigError(f"{source.name}: the {name} data: {problem.text}", fix=problem.fix) from error
        if self._on_built is not None:
            sequences = part
            if isinstance(dataset, MaskedDataset):
                sequences = range(*dataset.source.document_boundaries[[part.start, part.stop]].tolist())
            self._report(
                start,
                split=name,
                seed=seed,
                source=source.name,
                num_samples=len(dataset),
                num_sequences=len(sequences),
                num_tokens=LengthFacts.of(source, sequences).num_tokens,
                num_epochs=dataset.index.num_epochs,
            )
        return dataset

    def _report(self, start: float, **facts: Any) -> None:
        """Report an index that is ready; `facts`: other fields of `BuiltIndex`."""
        if self._on_built is not None:
            seconds = time.perf_counter() - start
            self._on_built(BuiltIndex(seconds=seconds, outcome=self.cache.outcome, **facts))

    def _dataset(
        self, source: SequenceSource, part: range, num_samples: int | None, seed: int, name: str
    ) -> GPTDataset | ConversationDataset | DocumentDataset | MaskedDataset:
        """Return the samples of a split of a dataset, of the kind that the run reads."""
        order: dict[str, Any] = {"seed": seed, "num_samples": num_samples, "cache": self.cache}
        if self.masked is not None:
            assert isinstance(source, IndexedDataset), "mock data has no sentences"
            masked = build_masked_dataset(source, part, self.masked, **order)
            self._log_left_out(source, len(part), masked.index, name)
            return masked
        order["seq_length"] = self.options.seq_length
        if self.options.packs_documents and not self.options.conversations:
            del order["cache"]  # the index is a few sums
            return DocumentDataset(source, build_document_index(source.lengths, part, **order), self.options)
        if not self.options.conversations:
            facts = LengthFacts.of(source, part)
            return GPTDataset(source, build_index(source.lengths, part, facts=facts, **order), self.options)
        assert isinstance(source, IndexedDataset), "mock data has no conversations"
        mask = open_loss_mask(source, mmap=self._mmap)
        is_packed = not self.options.packs_documents
        conversations = build_conversation_index(source.lengths, mask, part, is_packed=is_packed, **order)
        self._log_conversations(source, len(part), conversations, name)
        return ConversationDataset(source, mask, conversations, self.options)

    def _log_conversations(
        self, source: SequenceSource, count: int, index: ConversationIndex, name: str
    ) -> None:
        """Log once how many conversations of a split are not read, or not whole."""
        start = f"{source.name}: of {count:,} conversations of the {name} data"
        length = self.options.seq_length
        lines = [
            f"{start}, {index.num_left_out:,} are left out: no label of the assistant within --seq-length {length}",
            f"{start}, {index.num_cut:,} are cut at their end: longer than --seq-length {length}",
        ]
        for number, line in zip((index.num_left_out, index.num_cut), lines, strict=True):
            if number:
                self._log_once(line)

    def _log_left_out(self, source: SequenceSource, count: int, index: SentenceIndex, name: str) -> None:
        """Log once how many documents of a split have no samples."""
        short, long = index.num_short, index.num_long
        if len(index) and short + long:
            self._log_once(
                f"{source.name}: of {count:,} documents of the {name} data, {short + long:,} are left out: {short:,} have too few"
                f" sentences, {long:,} a sentence of more than {LONG_SENTENCE} tokens among several"
            )

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            self._log(line)

    def _build_blend_index(
        self, weights: Sequence[float], num_samples: int, seed: int, name: str, *, is_exhaustive: bool = False
    ) -> BlendIndex:
        def build() -> BlendIndex:
            if is_exhaustive:
                return build_exhaustive_blend_index([int(size) for size in weights])
            return build_blend_index(weights, num_samples)

        start = self.cache.start()
        if self.cache.should_cache(num_samples):
            key = {"weights": list(weights), "samples": num_samples, "is_exhaustive": is_exhaustive}
            arrays = self.cache.get_or_build("blend", key, lambda: _arrays_of(build()))
            index = BlendIndex(arrays["dataset"], arrays["sample"], arrays.get("counts"))
        else:
            index = build()
        source = f"blend of {len(weights)}"
        self._report(start, split=name, seed=seed, source=source, num_samples=num_samples)
        return index

    def _open(self, prefix: str) -> IndexedDataset:
        if prefix not in self._opened:
            opened = open_token_ids(
                prefix, mmap=self._mmap, index_cache=self._index_cache, cache_folder=self.cache.folder
            )
            if prefix in self._digests and self._digests[prefix] != dataset_digest(
                opened, conversations=self.options.conversations, sentences=self.masked is not None
            ):
                raise InputError(
                    f"{opened.name}: the file on this host differs from rank 0's:"
                    f" {len(opened)} sequences of {opened.num_tokens} tokens here",
                    fix="give all hosts the same files",
                )
            self._opened[prefix] = opened
        return self._opened[prefix]


class _RecordingCache(IndexCache):
    """An index cache that records the outcome of the last request."""

    outcome: Outcome = "small"

    def start(self) -> float:
        """Reset the outcome; return the time."""
        self.outcome = "small"
        return time.perf_counter()

    def get_or_build(self, kind: str, key: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:

        def recorded() -> Arrays:
            self.outcome = "built"
            start, stop = key.get("sequences", (0, 0))
            num_rows = key.get("epochs", 1) * (stop - start)
            if num_rows >= _MANY_ROWS:
                seconds = num_rows / _ROWS_PER_SECOND
                self._log(f"building the index of {num_rows:,} sequences, about {seconds:.0f} s of a core")
            return build()

        self.outcome = "found"
        return super().get_or_build(kind, key, recorded)


def _arrays_of(index: BlendIndex) -> Arrays:
    """Return the arrays of a blend index under their names in cache files."""
    return {
        "dataset": index.dataset_index,
        "sample": index.dataset_sample_index,
        "counts": index.counts(int(index.dataset_index.max()) + 1),
    }


def dataset_names(prefixes: Sequence[str]) -> list[str]:
    """Return unique short names of datasets: the fewest trailing components of each path that differ."""
    found = different_ends([prefix.strip("/").split("/") for prefix in prefixes])
    return found or [f"{prefix}#{number}" for number, prefix in enumerate(prefixes)]
