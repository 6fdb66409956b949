"""Whole documents as samples, and the packs of a rank: every label once, in an order of the seed, from any step on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.config.errors import ConfigError, InputError, MegatrainError
from megatrain.data.samples.blend import BlendedDataset, BlendIndex
from megatrain.data.samples.dataset import PlannedDataset, ShiftedDataset, lengths_of
from megatrain.data.samples.document_dataset import DocumentDataset, build_document_index
from megatrain.data.samples.gpt_dataset import SampleOptions
from megatrain.data.samples.pack_loader import PackLoader, PackSettings
from megatrain.parallel.packs.context import PackBatch
from megatrain.parallel.packs.schedule import PackCosts, PackDomain, balanced_packs

LIMIT = 8
LENGTHS = np.array([5, 1, 9, 10, 2, 30, 0, 17, 3], np.int32)
NUM_SAMPLES = 1 + 1 + 2 + 1 + 4 + 2 + 1


class Source:
    """Documents whose tokens are 100 * document + place."""

    name = "source"
    lengths = LENGTHS
    num_read = 0

    def document_of(self, sequence: int) -> int:
        return sequence

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> Any:
        self.num_read += 1
        return (100 * sequence + np.arange(self.lengths[sequence]))[
            offset : None if length is None else offset + length
        ]


def dataset(
    seed: int = 3, *, part: range = range(9), num_samples: int | None = None, **options: Any
) -> DocumentDataset:
    index = build_document_index(LENGTHS, part, seq_length=LIMIT, seed=seed, num_samples=num_samples)
    return DocumentDataset(Source(), index, SampleOptions(seq_length=LIMIT, eod=None, **options))


def test_every_label_is_read_once_in_each_epoch() -> None:
    samples = dataset(num_samples=NUM_SAMPLES + 1)
    assert len(samples) == 2 * NUM_SAMPLES
    for epoch in range(2):
        own = [samples[k] for k in range(epoch * NUM_SAMPLES, (epoch + 1) * NUM_SAMPLES)]
        labels = np.concatenate([sample.labels for sample in own])
        wanted = [100 * d + place for d, length in enumerate(LENGTHS) for place in range(1, length)]
        assert sorted(labels.tolist()) == wanted
    assert all(np.array_equal(sample.tokens + 1, sample.labels) for sample in own)
    assert all(len(sample.tokens) <= LIMIT for sample in own)


def test_only_documents_above_the_limit_are_cut() -> None:
    samples = dataset()
    pieces = sorted(
        (span.document, span.offset, span.length) for k in range(len(samples)) for span in samples.spans(k)
    )
    assert pieces == [
        (0, 0, 4), (2, 0, 8), (3, 0, 8), (3, 8, 1), (4, 0, 1), (5, 0, 8), (5, 8, 8), (5, 16, 8), (5, 24, 5), (7, 0, 8),
        (7, 8, 8), (8, 0, 2),
    ]  # fmt: skip


def test_the_order_follows_from_the_seed_alone() -> None:
    def order(seed: int, num_samples: int | None = None) -> list[Any]:
        samples = dataset(seed, num_samples=num_samples)
        return [samples.spans(k)[0] for k in range(NUM_SAMPLES)]

    assert order(3) == order(3, 5 * NUM_SAMPLES)
    assert order(3) != order(4)


def test_lengths_are_known_without_reading() -> None:
    samples = dataset()
    assert [samples.spans(k)[0].length for k in range(len(samples))]
    assert samples.source.num_read == 0  # type: ignore[attr-defined]


def test_lengths_of_many_samples_are_those_of_their_spans() -> None:
    """Of several plans, after a phase, and of a blend, in any order."""
    parts = [dataset(num_samples=3 * NUM_SAMPLES), dataset(4)]
    plans = PlannedDataset([ShiftedDataset(parts[0], 7), *parts], [20, 15, 5])
    random = np.random.default_rng(0)
    index = BlendIndex(
        np.tile([0, 1, 2], 8).astype(np.int16), np.repeat(np.arange(8), 3) + np.tile([0, 0, 7], 8)
    )
    blend = BlendedDataset([*parts, plans], index)
    for samples, first in ((parts[0], 0), (plans, 7), (blend, 0)):
        numbers = random.permutation(np.arange(first, len(samples)))
        expected = [sum(span.length for span in samples.spans(k)) for k in numbers.tolist()]
        assert lengths_of(samples, numbers).tolist() == expected
    with pytest.raises(ConfigError, match="earlier phase"):
        lengths_of(plans, np.array([9, 6]))


def test_a_step_of_a_hundred_thousand_documents_is_scheduled_in_a_second() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(7, 1.5, 200_000), 16, 131_072).astype(np.int32)
    index = build_document_index(lengths, range(len(lengths)), seq_length=131_072, seed=1, num_samples=None)
    samples = DocumentDataset(Source(), index, SampleOptions(seq_length=131_072, eod=None))
    settings = PackSettings(
        scheduler=balanced_packs,
        costs=PackCosts(pair=1 / 50_000, each=100),
        domain=PackDomain(num_ranks=64, sizes=(1, 2, 4, 8, 16, 32, 64), tokens_per_rank=32_768, multiple=64),
        seq_length=131_072,
        documents_per_pass=1,
    )
    loader = PackLoader(samples, len(samples), settings, rank=0, device=torch.device("cpu"), num_workers=0)
    for attempt in range(3):  # other processes share the processor's caches
        start = time.process_time()
        found, packs = loader.schedule(50_000, 100_000)
        if time.process_time() - start < 1:
            break
        assert attempt < 2, "slower than a second three times"
    assert sum(pack.num_tokens for pack in packs) == found.sum()


def test_a_split_without_two_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="two tokens"):
        dataset(part=range(1, 2))


def test_an_id_outside_the_vocabulary_names_the_document() -> None:
    samples = dataset(vocab_size=500)
    with pytest.raises(
        InputError, match=r"document (5|7|8) \(sequence \1, token \d+\) has id \1\d\d, outside"
    ):
        list(map(samples.__getitem__, range(len(samples))))


Loaders = Callable[..., list[PackLoader]]


@pytest.fixture
def loaders() -> Loaders:
    def make(
        *, sizes: tuple[int, ...] = (1, 2), has_equal_passes: bool = False, num_workers: int = 0
    ) -> list[PackLoader]:
        samples = dataset(num_samples=4 * NUM_SAMPLES)
        settings = PackSettings(
            scheduler=balanced_packs,
            costs=PackCosts(pair=0.1),
            domain=PackDomain(
                num_ranks=2,
                sizes=sizes,
                tokens_per_rank=6,
                multiple=2,
                num_in_step=2 if has_equal_passes else 1,
            ),
            seq_length=LIMIT,
            documents_per_pass=2,
        )
        device = torch.device("cpu")
        return [
            PackLoader(samples, len(samples), settings, rank=rank, device=device, num_workers=num_workers)
            for rank in range(2)
        ]

    return make


def documents_of(batch: PackBatch) -> list[tuple[list[int], list[int], list[int], list[int]]]:
    """Return labels, positions, indices in the run and loss mask of each document of a pack."""
    assert batch.documents is not None
    bounds = batch.documents.cu_seqlens.tolist()
    names = (batch.labels, batch.position_ids, batch.token_ids, batch.loss_mask)
    return [tuple(x[0, a:b].tolist() for x in names) for a, b in itertools.pairwise(bounds)]  # type: ignore[misc]


def test_packs_of_all_ranks_hold_each_document_of_the_step(loaders: Loaders) -> None:
    samples, whole = dataset(num_samples=4 * NUM_SAMPLES), []
    for rank, loader in enumerate(loaders()):
        for batch in loader.microbatches(10, 5):
            assert batch.tokens.shape[1] % (2 * batch.group_size) == 0
            assert batch.tokens.shape[1] <= 6 * batch.group_size
            whole += [
                one for one in documents_of(batch) if any(one[3]) and (batch.group_size == 1 or rank == 0)
            ]
    found = {tuple(ids): (labels, positions) for labels, positions, ids, _ in whole}
    assert len(found) == len(whole) == 10
    for k in range(10, 20):
        labels = samples[k].labels.tolist()
        assert found[tuple(range(k * LIMIT, k * LIMIT + len(labels)))] == (labels, list(range(len(labels))))


def test_a_step_is_the_same_whatever_was_read_before(loaders: Loaders) -> None:
    def read(loader: PackLoader, *steps: int) -> list[list[Any]]:
        found = [[documents_of(batch) for batch in loader.microbatches(step * 8, 4)] for step in steps]
        loader.close()
        return found

    assert read(loaders(num_workers=1)[0], 0, 1, 2)[2] == read(loaders()[0], 2)[0]
    assert read(loaders(num_workers=1)[1], 0, 2, 1)[1] == read(loaders()[1], 2)[0]


def test_a_rank_without_documents_runs_an_empty_pack(loaders: Loaders) -> None:
    batches = [loader.microbatches(0, 1) for loader in loaders(has_equal_passes=True)]
    assert len(batches[0]) == len(batches[1])
    counts = [sum(batch.loss_mask.sum().item() for batch in one) for one in batches]
    assert all(len(one) for one in batches)
    assert sum(counts) > 0
    _, packs = loaders()[0].schedule(0, 2)
    idle = [rank for rank in range(2) if not any(rank in pack.ranks for pack in packs)]
    for rank in idle:
        assert counts[rank] == 0


def test_a_step_after_the_last_sample_is_refused(loaders: Loaders) -> None:
    with pytest.raises(MegatrainError, match="the dataset has 48"):
        loaders()[0].microbatches(46, 2)
