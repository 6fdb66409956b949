"""GPT samples: recorded tokens, labels, masks and positions, and the checks of token ids."""

from __future__ import annotations

import numpy as np
import pytest
from recorded import EXPECTED, GPT_CASES, digest, write_dataset

from megatrain.config.derive.datasets import SPLIT_NAMES, split_ranges
from megatrain.config.errors import InputError
from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.samples.gpt_dataset import GPTDataset, SampleOptions, document_starts, effective_pad
from megatrain.data.samples.gpt_index import build_index

WITHOUT_TEXT = [case for case in GPT_CASES if case["dataset"].startswith("dtypes/")]


def recorded_samples(folder, case, name):
    dataset = IndexedDataset(folder / case["dataset"])
    index = build_index(
        dataset.lengths,
        split_ranges(case["split"], len(dataset))[SPLIT_NAMES.index(name)],
        seq_length=case["sequence_length"],
        seed=case["seed"],
        num_samples=case["splits"][name]["num_samples_requested"],
    )
    sample_options = SampleOptions(
        seq_length=case["sequence_length"],
        eod=case["eod"],
        pad=case["pad"],
    )
    return GPTDataset(dataset, index, sample_options)


def check_samples(folder, case):
    for name in SPLIT_NAMES:
        if not case["splits"][name]:
            continue
        samples = recorded_samples(folder, case, name)
        for recorded in case["splits"][name]["samples"]:
            sample = samples[recorded["k"]]
            assert len(sample.tokens) == recorded["n"]
            assert digest(sample.tokens) == recorded["tokens_sha256"]
            assert digest(sample.labels) == recorded["labels_sha256"]
            assert sample.loss_mask.sum() == recorded["loss_mask_sum"]


@pytest.mark.parametrize("case", WITHOUT_TEXT, ids=lambda case: case["name"])
def test_recorded_samples_of_numbers(golden, case):
    check_samples(golden, case)


@pytest.mark.parametrize("case", GPT_CASES, ids=lambda case: case["name"])
def test_recorded_samples(golden_text, case):
    check_samples(golden_text, case)


def check_sample(sample, recorded):
    for field in ("tokens", "labels", "loss_mask", "position_ids"):
        if field in recorded:
            assert getattr(sample, field).tolist() == recorded[field], field


@pytest.mark.parametrize(
    "variant", EXPECTED["masks"]["variants"], ids=lambda v: "-".join(k for k in v if v[k] is True)
)
def test_recorded_masks(golden_text, variant):
    masks = EXPECTED["masks"]
    samples = mask_samples(golden_text, masks, masks["pad"], variant, masks["num_samples"])
    for recorded, text in zip(variant["samples"], masks["samples"], strict=True):
        sample = samples[recorded["k"]]
        assert text["k"] == recorded["k"]
        check_sample(sample, text | recorded)
        assert sample.document_starts.tolist() == recorded["attention_block_starts"]


@pytest.mark.parametrize(
    "case",
    [case for case in EXPECTED["masks"]["inter_document_masking"] if case["add_extra_token_to_sequence"]],
)
def test_recorded_inter_document_masking(golden_text, case):
    options = case | {"inter_document_masking": True}
    samples = mask_samples(golden_text, case, case["pad"], options, case.get("num_samples"))
    for recorded in case["samples"]:
        sample = samples[recorded["k"]]
        check_sample(sample, recorded)
        assert [*sample.document_starts.tolist(), case["sequence_length"]] == recorded["cu_seqlens"]
        assert np.diff(recorded["cu_seqlens"]).max() == recorded["max_seqlen"]


@pytest.mark.parametrize(
    "case",
    [case for case in EXPECTED["pad"]["cases"] if case["options"].get("add_extra_token_to_sequence", True)],
    ids=lambda case: case["label"],
)
def test_recorded_pads(golden_text, case):
    recorded, options = EXPECTED["pad"], case["options"]
    pad = effective_pad(
        case["tokenizer_pad"],
        {case["tokenizer_eod"]},
        allow_ambiguous=options.get("allow_ambiguous_pad_tokens", False),
    )
    assert pad == case["effective_pad"]
    samples = mask_samples(golden_text, recorded | {"eod": case["tokenizer_eod"]}, pad, options, None)
    check_sample(samples[case["sample"]["k"]], case["sample"])


def mask_samples(folder, described, pad, options, num_samples):
    dataset = IndexedDataset(folder / described["dataset"])
    seq_length = described["sequence_length"]
    index = build_index(
        dataset.lengths,
        range(len(dataset)),
        seq_length=seq_length,
        seed=described["seed"],
        num_samples=num_samples,
    )
    masks = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "inter_document_masking")
    sample_options = SampleOptions(
        seq_length=seq_length,
        eod=described["eod"],
        pad=pad,
        **{name: options[name] for name in masks if name in options},
    )
    return GPTDataset(dataset, index, sample_options)


EOD = 0


@pytest.fixture
def dataset(tmp_path):
    return write_dataset(tmp_path / "data", [[[5, 6, EOD]], [], [[7, EOD], [8, 9, 10, EOD]], [[EOD]]])


def samples_of(dataset, *, seq_length=4, **options):
    index = build_index(
        dataset.lengths,
        range(len(dataset)),
        seq_length=seq_length,
        seed=1,
        num_samples=None,
    )
    return GPTDataset(dataset, index, SampleOptions(seq_length=seq_length, eod=EOD, **options))


def text_of(samples):
    return [int(i) for k in samples.index.document_index for i in samples.source.read(int(k))]


def test_samples_cover_the_text_in_order(dataset):
    samples = samples_of(dataset)
    text = text_of(samples)
    for k, number in enumerate(samples.index.shuffle_index.tolist()):
        assert samples[k].tokens.tolist() == text[number * 4 : number * 4 + 4]
        assert samples[k].labels.tolist() == text[number * 4 + 1 : number * 4 + 5]
        assert samples[k].loss_mask.tolist() == [1] * 4
        assert samples[k].position_ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("mmap", [True, False])
def test_samples_are_copies(tmp_path, mmap):
    write_dataset(tmp_path / "data", [[[5, 6, EOD]], [[7, 3, EOD], [8, 9, 3, EOD]]])
    samples = samples_of(IndexedDataset(tmp_path / "data", mmap=mmap), pad=3)
    first = [samples[k] for k in range(len(samples))]
    for k in reversed(range(len(samples))):
        again = samples[k]
        for field in ("tokens", "labels", "loss_mask", "position_ids"):
            assert np.array_equal(getattr(again, field), getattr(first[k], field))
        again.tokens[:] = -5
        again.loss_mask[:] = -5
    assert [sample.tokens.tolist() for sample in first] == [
        samples[k].tokens.tolist() for k in range(len(samples))
    ]


@pytest.mark.parametrize(
    ("tokens", "starts"),
    [
        ([1, 2, 3], [0]),
        ([EOD, 1, 2], [0, 1]),
        ([1, EOD, EOD, 2], [0, 2, 3]),
        ([1, 2, EOD], [0]),
        ([EOD], [0]),
    ],
)
def test_documents_start_after_end_of_document_tokens(tokens, starts):
    assert document_starts(np.array(tokens), EOD).tolist() == starts


def test_ids_outside_the_vocabulary_name_their_document(dataset):
    good = samples_of(dataset, vocab_size=11)
    assert [good[k].tokens.max() <= 10 for k in range(len(good))]
    bad = samples_of(dataset, vocab_size=10)
    with pytest.raises(InputError, match=r"data.bin: document 2 \(sequence 2, token 2\) has id 10, .* of 10"):
        [bad[k] for k in range(len(bad))]


def test_negative_ids_are_errors(tmp_path):
    samples = samples_of(write_dataset(tmp_path / "data", [[[1, 2, 3, -7, 4]]], "int32"), vocab_size=10)
    with pytest.raises(InputError, match=r"document 0 \(sequence 0, token 3\) has id -7"):
        samples[0]


@pytest.mark.parametrize("k", [-1, 2])
def test_indices_out_of_range_are_errors(dataset, k):
    with pytest.raises(IndexError):
        samples_of(dataset)[k]
