"""Reads of a loader do not hold Python's lock while a page comes from a slow file system."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.data.samples.blend import BlendedDataset, BlendIndex
from megatrain.data.samples.conversations import ConversationDataset, build_conversation_index
from megatrain.data.samples.gpt_dataset import GPTDataset, SampleOptions
from megatrain.data.samples.gpt_index import build_index

OPTIONS = SampleOptions(seq_length=16, eod=None, vocab_size=100)


class Mapped(np.ndarray):  # type: ignore[type-arg]
    """An array of a file, whose elements are read as `take` does: `array[place]` holds the lock during a page fault."""

    file: np.ndarray[Any, Any] | None = None

    def __array_finalize__(self, array: Any) -> None:
        """Views know the file, too."""
        self.file = getattr(array, "file", None)

    def __getitem__(self, place: Any) -> Any:
        """Return elements of a copy."""
        assert self.file is None or not np.may_share_memory(self, self.file), (
            f"an index [{place}] of a mapped file"
        )
        return super().__getitem__(place)


def mapped(array: np.ndarray[Any, Any]) -> Mapped:
    found = array.view(Mapped)
    found.file = array
    return found


@pytest.fixture
def source(tmp_path: Path) -> IndexedDataset:
    with IndexedWriter(tmp_path / "set", "uint16") as writer:
        for number in range(60):
            writer.add_document([np.arange(3 + number % 7)])
    dataset = IndexedDataset(tmp_path / "set")
    dataset.lengths, dataset.offsets = mapped(dataset.lengths), mapped(dataset.offsets)
    return dataset


def test_samples_take_elements_of_mapped_files(source: IndexedDataset) -> None:
    plain = np.asarray(source.lengths)
    index = build_index(plain, range(60), seq_length=16, seed=1, num_samples=None)
    names = ("document_index", "sample_index", "shuffle_index")
    slow = dataclasses.replace(index, **{name: mapped(getattr(index, name)) for name in names})
    samples = GPTDataset(source, slow, OPTIONS)
    order = np.arange(len(samples))
    blend = BlendedDataset([samples], BlendIndex(np.zeros(len(order), np.int16), order))
    blend.index = BlendIndex(mapped(blend.index.dataset_index), mapped(order))
    plainly = GPTDataset(IndexedDataset(source.prefix), index, OPTIONS)
    for k in range(len(samples)):
        assert blend[k].tokens.tolist() == plainly[k].tokens.tolist()
    assert source.read_several(range(3, 5)).tolist() == [*range(6), *range(7)]
    assert f"{source.prefix}.bin" not in Path("/proc/self/maps").read_text()


def test_conversations_take_elements_of_mapped_files(source: IndexedDataset) -> None:
    mask = IndexedDataset(source.prefix)
    index = build_conversation_index(
        np.asarray(source.lengths), mask, range(60), seq_length=16, seed=1, num_samples=None
    )
    slow = dataclasses.replace(index, starts=mapped(index.starts), sequences=mapped(index.sequences))
    plainly = ConversationDataset(IndexedDataset(source.prefix), mask, index, OPTIONS)
    samples = ConversationDataset(source, mask, slow, OPTIONS)
    for k in range(len(samples)):
        assert samples[k].tokens.tolist() == plainly[k].tokens.tolist()
