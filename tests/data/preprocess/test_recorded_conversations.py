"""Conversations of `preprocess_data.py --sft` against samples of Megatron-LM, put together from ours as it does."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from preprocessing import run

from megatrain.config.derive.datasets import Blend
from megatrain.data.indexed.reader import IndexedDataset, loss_mask_of
from megatrain.data.samples.build import SamplePlans, SplitBuilder
from megatrain.data.samples.gpt_dataset import SampleOptions

pytestmark = pytest.mark.usefixtures("without_fsync")

FORMATS = ("identity", "nemotron-h-aligned", "nemotron-nano-v2", "default")
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
MASKED = -100


@pytest.fixture
def sentences(golden_text):
    folder = golden_text.parent / "families" / "sentences"
    if not (folder / "sft.json").is_file():
        pytest.skip("the recording of conversations is not there")
    return folder


def conversations_of(prefix, prompt_format, eod):
    """Return the tokens and targets of the conversations of each line, as Megatron-LM has them.

    It has no end token after a conversation, unless the prompt format writes one, and a loss on all text of a chat template.
    """
    tokens, mask = IndexedDataset(prefix), IndexedDataset(loss_mask_of(str(prefix)))
    lines = []
    for start, end in zip(tokens.document_boundaries[:-1], tokens.document_boundaries[1:], strict=True):
        line = []
        for number in range(int(start), int(end)):
            ids, has_loss = tokens.read(number), mask.read(number)
            assert (ids[-1], has_loss[-1]) == (eod, 1)
            if prompt_format == "default":
                line.append((ids.tolist(), ids.tolist()))
            else:
                line.append((ids[:-1].tolist(), np.where(has_loss, ids.astype(int), MASKED)[:-1].tolist()))
        lines.append(line)
    return lines


def sample_of(line, case):
    """Return the sample that Megatron-LM makes of the conversations of a line."""
    length, pad = case["sequence_length"], case["pad"]
    multiple = 2 * case["context_parallel_size"] if case["context_parallel_size"] > 1 else 1
    tokens, targets, positions, bounds = [], [], [], [0]

    def add_padding(count):
        tokens.extend([pad] * count)
        targets.extend([pad] * count)
        positions.extend(range(positions[-1] + 1, positions[-1] + 1 + count))

    for ids, wanted in line:
        tokens += ids
        targets += wanted
        positions += range(len(ids))
        add_padding(-len(tokens) % multiple)
        bounds.append(len(tokens))
        if len(tokens) > length:
            break
    add_padding(max(length + 1 - len(tokens), 0))
    tokens[length:], targets[length:], bounds[-1] = [pad], [pad], length
    labels = targets[1:]
    loss_mask = [int(label not in (pad, MASKED)) for label in labels]
    return dict(zip(FIELDS, (tokens[:-1], labels, loss_mask, positions[:length]), strict=True)) | {
        "cu_seqlens": sorted(set(bounds)),
        "max_seqlen": int(np.diff(bounds).max()),
    }


@pytest.mark.parametrize("prompt_format", FORMATS)
def test_conversations_are_those_of_megatron_lm(sentences, tmp_path, prompt_format):
    recorded = json.loads((sentences / "sft.json").read_text())["cases"]
    cases = [case for case in recorded if case["prompt_format"] == prompt_format]
    assert len(cases) == 3
    flags = ["--sft", "--sft-tokenizer-prompt-format", prompt_format]
    flags += ["--tokenizer-model", sentences / "sft-tokenizer"]
    assert run("--input", sentences / "conversations.jsonl", *flags, prefix=tmp_path / "out") == 0
    lines = conversations_of(tmp_path / "out_messages_document", prompt_format, cases[0]["eod"])
    for case in cases:
        samples = [sample_of(lines[k % len(lines)], case) for k in range(case["length"])]
        for sample in case["samples"]:
            found = samples[sample["k"]]
            assert found == {name: sample[name] for name in found}
        for name in FIELDS:
            stacked = np.array([sample[name] for sample in samples], "<i8")
            assert hashlib.sha256(stacked.tobytes()).hexdigest() == case["all"][name]


def test_packed_samples_have_the_tokens_labels_and_masks_of_megatron_lm(sentences, tmp_path):
    """The packing is ours: each conversation is in one sample, with positions and attention of its own."""
    prompt_format, eod = "nemotron-nano-v2", 2
    flags = ["--sft", "--sft-tokenizer-prompt-format", prompt_format]
    flags += ["--tokenizer-model", sentences / "sft-tokenizer"]
    assert run("--input", sentences / "conversations.jsonl", *flags, prefix=tmp_path / "out") == 0
    prefix = str(tmp_path / "out_messages_document")
    options = SampleOptions(seq_length=256, eod=eod, vocab_size=420, conversations=True)
    plans = SamplePlans(train=(1,), valid=(0,), test=(0,), seed=1)
    samples = SplitBuilder(options, log=pytest.fail).build({"all": Blend((prefix,))}, "1,0,0", plans).train
    found = []
    for sample in (samples[k] for k in range(len(samples))):
        for start, end in zip(sample.document_starts, [*sample.document_starts[1:], 256], strict=True):
            assert sample.position_ids[start:end].tolist() == list(range(end - start))
            labels = np.where(sample.loss_mask, sample.labels, MASKED)[start:end]
            if sample.tokens[start:end].any():  # else padding
                found.append((sample.tokens[start:end].tolist(), labels.tolist()))
    expected = [
        (ids, [*targets[1:], eod])
        for line in conversations_of(prefix, prompt_format, eod)
        for ids, targets in line
    ]
    assert sorted(found) == sorted(expected)
