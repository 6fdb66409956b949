"""Mock data: the recorded sequences and samples."""

from __future__ import annotations

import pytest
from recorded import EXPECTED, check_array, digest

from megatrain.data.samples.build import SamplePlans, SplitBuilder
from megatrain.data.samples.gpt_dataset import SampleOptions
from megatrain.data.samples.mock import MockSequences

MOCK = EXPECTED["mock"]


pytestmark = pytest.mark.usefixtures("whole_mock_data")


@pytest.fixture(scope="module")
def splits(whole_mock_data):
    sizes = MOCK["sizes"][0] if isinstance(MOCK["sizes"][0], list) else MOCK["sizes"]
    sample_options = SampleOptions(
        seq_length=MOCK["sequence_length"], eod=MOCK["eod"], vocab_size=MOCK["vocab_size"]
    )
    plans = SamplePlans(train=(sizes[0],), valid=(sizes[1],), test=(sizes[2],), seed=MOCK["seed"])
    return SplitBuilder(sample_options).build({}, "969,30,1", plans)


def test_recorded_sequences():
    mock = MockSequences(vocab_size=MOCK["vocab_size"], eod=MOCK["eod"])
    assert len(mock) == MOCK["low_level"]["num_sequences"]
    check_array(mock.lengths, MOCK["low_level"]["sequence_lengths"])
    assert digest(mock.read(0)) == MOCK["low_level"]["sequence_0_sha256"]
    assert mock.read(0)[-4:].tolist() == MOCK["low_level"]["sequence_0_last"]
    assert mock.read(0, 5, 3).tolist() == [6, 7, 8]
    assert mock.read(0, int(mock.lengths[0]) - 1).tolist() == [MOCK["eod"]]


@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_recorded_samples(splits, name):
    samples, recorded = getattr(splits, name), MOCK["splits"][name]
    assert len(samples) == recorded["length"]
    assert samples.index.epochs.count == recorded["num_epochs"]
    for array in ("document_index", "sample_index", "shuffle_index"):
        check_array(getattr(samples.index, array), recorded[array])
    for one in recorded["samples"]:
        sample = samples[one["k"]]
        assert digest(sample.tokens) == one["tokens_sha256"]
        assert digest(sample.labels) == one["labels_sha256"]
        assert sample.loss_mask.sum() == one["loss_mask_sum"]
