"""Packed conversations: whole ones in samples, loss on the assistant's tokens, the same samples in any run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.config.derive.datasets import Blend
from megatrain.config.errors import ConfigError, InputError
from megatrain.data.indexed.reader import loss_mask_of
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.data.samples.build import SamplePlans, SplitBuilder
from megatrain.data.samples.conversations import OPEN_SAMPLES, packed
from megatrain.data.samples.dataset import lengths_of
from megatrain.data.samples.gpt_dataset import SampleOptions

SEQ_LENGTH = 32


def write(prefix, conversations, dtype_of_ids="uint16"):
    """Write conversations: lists of (id, has_loss)."""
    for path, column, dtype in ((prefix, 0, dtype_of_ids), (loss_mask_of(str(prefix)), 1, "uint8")):
        with IndexedWriter(path, dtype) as writer:
            for conversation in conversations:
                writer.add_document([[pair[column] for pair in conversation]])
    return str(prefix)


def random_conversations(count=60, longest=30):
    random = np.random.default_rng(0)
    return [
        [
            (int(random.integers(1, 99)), int(random.random() < 0.5))
            for _ in range(random.integers(2, longest))
        ]
        for _ in range(count)
    ]


def build(prefix, num_samples=None, *, split="1,0,0", plans=None, **options):
    builder = SplitBuilder(
        SampleOptions(seq_length=SEQ_LENGTH, eod=99, vocab_size=100, conversations=True), **options
    )
    train = plans or (num_samples,)
    return builder.build(
        {"all": Blend((prefix,))}, split, SamplePlans(train=train, valid=(0,), test=(0,), seed=3)
    ).train


def found_in(sample):
    """Return the conversations of a sample as pairs of id and loss, without the loss of the first token."""
    ends = [*sample.document_starts[1:], len(sample.tokens)]
    parts = []
    for start, end in zip(sample.document_starts, ends, strict=True):
        assert (sample.position_ids[start:end] == np.arange(end - start)).all()
        assert (sample.tokens[start + 1 : end] == sample.labels[start : end - 1]).all()
        ids = [*sample.tokens[start:end].tolist(), int(sample.labels[end - 1])]
        parts.append(list(zip(ids, [0, *sample.loss_mask[start:end].astype(int).tolist()], strict=True)))
    return parts


def test_every_conversation_is_whole_and_read_once_an_epoch(tmp_path):
    conversations = random_conversations(longest=12)
    samples = build(write(tmp_path / "a", conversations))
    expected = [[(one[0][0], 0), *one[1:]] for one in conversations if any(loss for _, loss in one[1:])]
    found = []
    for k in range(len(samples)):
        sample = samples[k]
        parts = found_in(sample)
        if (
            not sample.loss_mask[sample.document_starts[-1] :].any()
            and not sample.tokens[sample.document_starts[-1] :].any()
        ):
            parts = parts[:-1]  # padding
        assert parts
        assert sum(span.length for span in samples.spans(k)) == sum(len(part) - 1 for part in parts)
        found += parts
    assert sorted(found) == sorted(expected)
    positions = sum(len(one) - 1 for one in expected)
    assert len(samples) < 1.1 * positions / SEQ_LENGTH + 2, "little padding"


def test_samples_of_a_longer_order_start_with_those_of_a_shorter_one(tmp_path):
    """Epochs are built one after the other, each in another order."""
    prefix = write(tmp_path / "a", random_conversations())
    one, many = build(prefix), build(prefix, 100)
    assert len(many) >= 100
    rows = [many[k].tokens.tolist() for k in range(len(many))]
    assert rows[: len(one)] == [one[k].tokens.tolist() for k in range(len(one))]
    assert rows[: len(one)] != rows[len(one) : 2 * len(one)]
    assert many.index.num_epochs == 1 + (99 // len(one))


def test_lengths_of_many_samples_are_those_of_their_spans(tmp_path):
    samples = build(write(tmp_path / "a", random_conversations(longest=2 * SEQ_LENGTH)))
    numbers = np.random.default_rng(1).permutation(len(samples))
    expected = [sum(span.length for span in samples.spans(k)) for k in numbers.tolist()]
    assert lengths_of(samples, numbers).tolist() == expected


def test_a_long_conversation_is_cut_at_its_end(tmp_path):
    long = [(number % 98 + 1, int(number > 10)) for number in range(100)]
    only_late = [(1, int(number > 80)) for number in range(100)]
    samples = build(write(tmp_path / "a", [long, only_late]))
    assert len(samples) == 1, "the second has no loss in its first part"
    assert found_in(samples[0]) == [long[: SEQ_LENGTH + 1]]


@pytest.mark.parametrize("wrong", [-1, 100])
def test_an_id_outside_the_vocabulary_names_its_place(tmp_path, wrong):
    samples = build(write(tmp_path / "a", [[(1, 0), (2, 1), (wrong, 1)]], "int32"))
    with pytest.raises(InputError, match=rf"document 0 \(sequence 0, token 2\) has id {wrong}, outside the"):
        samples[0]


def test_conversations_that_are_left_out_or_cut_are_counted_once(tmp_path):
    long = [(number % 98 + 1, int(number > 10)) for number in range(100)]
    silent = [(1, int(number > 80)) for number in range(100)]
    prefix = write(tmp_path / "a", [long, silent, long, [(1, 0), (2, 1)]])
    logged: list[str] = []
    build(prefix, plans=(20, 15), log=logged.append)
    assert [line.partition("of 4 conversations of the train data, ")[2] for line in logged] == [
        "1 are left out: no label of the assistant within --seq-length 32",
        "2 are cut at their end: longer than --seq-length 32",
    ]
    logged.clear()
    build(write(tmp_path / "b", random_conversations()), log=logged.append)
    assert not [line for line in logged if "cut" in line], "a conversation of the length of a sample is whole"


def test_a_cached_index_equals_a_built_one(tmp_path, monkeypatch):
    prefix = write(tmp_path / "a", random_conversations())
    monkeypatch.setattr("megatrain.data.samples.index_cache.CACHED_ROWS", 1, raising=False)
    monkeypatch.setattr("megatrain.data.samples.index_cache.IndexCache.should_cache", lambda *_: True)
    built = build(prefix, 50, cache_folder=tmp_path / "cache")
    assert list((tmp_path / "cache").glob("conversations-*.index"))
    found = build(prefix, 50, cache_folder=tmp_path / "cache")
    assert (built.index.sequences == found.index.sequences).all()
    assert (built.index.starts == found.index.starts).all()
    assert (built.index.num_left_out, built.index.num_cut) == (found.index.num_left_out, found.index.num_cut)


def test_plans_and_splits_hold_for_conversations(tmp_path):
    prefix = write(tmp_path / "a", random_conversations())
    first, both = build(prefix, 20), build(prefix, plans=(20, 15))
    assert [both[k].tokens.tolist() for k in range(20)] == [first[k].tokens.tolist() for k in range(20)]
    assert len(both) >= 35
    part = build(prefix, split="1,1,0")
    sequences = {span.sequence for k in range(len(part)) for span in part.spans(k)}
    assert max(sequences) < 30


def test_data_without_a_loss_mask_is_an_error(tmp_path):
    prefix = write(tmp_path / "a", random_conversations())
    (tmp_path / "a_loss_mask.idx").unlink()
    with pytest.raises(InputError, match="has no loss mask"):
        build(prefix)
    write(tmp_path / "b", random_conversations(count=59))
    for suffix in ("bin", "idx"):
        (tmp_path / f"b_loss_mask.{suffix}").replace(tmp_path / f"a_loss_mask.{suffix}")
    with pytest.raises(InputError, match="its sequences are not those of"):
        build(prefix)
    silent = write(tmp_path / "c", [[(1, 0), (2, 0)]])
    with pytest.raises(ConfigError, match="no label of the assistant within --seq-length 32"):
        build(silent)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 10), max_size=60))
def test_packing_is_first_fit(sizes):
    bins = packed(np.array(sizes, np.int64), 10)
    assert sorted(item for one in bins for item in one) == list(range(len(sizes)))
    assert all(sum(sizes[item] for item in one) <= 10 for one in bins)
    left: list[int] = []
    for item, size in enumerate(sizes):
        number = next((k for k, free in enumerate(left) if free >= size), len(left))
        left += [10] * (number == len(left))
        left[number] -= size
        assert item in bins[number]


def test_only_the_newest_samples_are_open():
    """A small conversation does not go back to a sample that is complete."""
    sizes = np.array([9] + [10] * OPEN_SAMPLES + [1], np.int64)
    assert packed(sizes, 10)[-1] == [len(sizes) - 1]
    assert packed(np.delete(sizes, 1), 10)[0] == [0, len(sizes) - 2]


def test_with_packs_of_documents_each_conversation_is_a_sample_without_padding(tmp_path):
    prefix = write(tmp_path / "a", random_conversations(longest=40))
    options = SampleOptions(seq_length=SEQ_LENGTH, eod=99, conversations=True, packs_documents=True)
    plans = SamplePlans(train=(None,), valid=(0,), test=(0,), seed=3)
    samples = SplitBuilder(options).build({"all": Blend((prefix,))}, "1,0,0", plans).train
    packed_samples = build(prefix)
    rows = [found_in(samples[k]) for k in range(len(samples))]
    assert all(len(parts) == 1 for parts in rows)
    assert all(
        len(samples[k].tokens) == sum(span.length for span in samples.spans(k)) for k in range(len(samples))
    )
    others = [part for k in range(len(packed_samples)) for part in found_in(packed_samples[k])]
    wholes = [part for part in others if any(loss for _, loss in part)]
    assert sorted(parts[0] for parts in rows) == sorted(wholes)
