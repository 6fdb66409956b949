"""Blends: recorded indices, blends built from files, and the index against its rule, one position at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import EXPECTED, check_array, digest

from megatrain.config.derive.datasets import SPLIT_NAMES, Blend, parse_blend
from megatrain.config.errors import ConfigError
from megatrain.data.samples.blend import (
    MIN_CHUNK,
    BlendedDataset,
    BlendIndex,
    _ChunkedBlend,
    blend_counts,
    build_blend_index,
    build_exhaustive_blend_index,
    counts_with_surplus,
    normalized,
)
from megatrain.data.samples.build import SamplePlans, SplitBuilder, dataset_names
from megatrain.data.samples.gpt_dataset import SampleOptions


@pytest.mark.parametrize("case", EXPECTED["blend_arguments"], ids=lambda case: " ".join(case["arguments"]))
def test_recorded_words(case):
    blend = parse_blend(case["arguments"])
    assert list(blend.prefixes) == case["result"]["prefixes"]
    assert blend.weights == (case["result"]["weights"] and tuple(case["result"]["weights"]))


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "0.0"])
def test_a_weight_is_a_positive_number(weight):
    with pytest.raises(ConfigError, match=r"--data-path: the weight of b is .*\n  fix: give every"):
        parse_blend(["1", "a", weight, "b"])


@pytest.mark.parametrize("case", EXPECTED["blending_indices"]["weighted"])
def test_recorded_weighted_draws(case):
    index = build_blend_index(case["weights"], case["size"])
    check_array(index.dataset_index, case["dataset_index"])
    check_array(index.dataset_sample_index, case["dataset_sample_index"])


@pytest.mark.parametrize("case", EXPECTED["blending_indices"]["exhaustive"])
def test_recorded_exhaustive_draws(case):
    index = build_exhaustive_blend_index(case["sizes"])
    check_array(index.dataset_index, case["dataset_index"])
    check_array(index.dataset_sample_index, case["dataset_sample_index"])


@pytest.mark.parametrize("case", EXPECTED["blending_indices"]["sizes_per_dataset"])
def test_recorded_sizes_of_datasets(case):
    shares = normalized(case["weights"])
    found = [counts_with_surplus(blend_counts(shares, size), case["surplus"]) for size in case["sizes"]]
    assert np.transpose(found).tolist() == case["result"]


@pytest.mark.parametrize("case", EXPECTED["blending_indices"]["normalize"])
def test_recorded_shares(case):
    assert normalized(case["weights"]).tolist() == case["result"]


def one_by_one(weights, size, *, is_exhaustive=False):
    shares = np.asarray(weights, np.float64) / np.sum(weights)
    counts = np.zeros(len(shares))
    order = []
    for position in range(size):
        deficit = shares * max(position, 1) - counts
        if is_exhaustive:
            deficit[counts >= weights] = -np.inf
        taken = int(deficit.argmax())
        order.append((taken, int(counts[taken])))
        counts[taken] += 1
    return order


def check_index(weights, size):
    assert pairs(build_blend_index(weights, size)) == one_by_one(weights, size)


def pairs(index):
    return list(zip(index.dataset_index.tolist(), index.dataset_sample_index.tolist(), strict=True))


LONG = 6 * MIN_CHUNK + 17


@pytest.mark.parametrize(
    "weights",
    [
        [1.0, 1.0, 1.0],
        [0.5, 0.3, 0.2],
        [1e-6, 1.0, 3.0, 1e-4, 1e-5],
        [0.1] * 9 + [1.0],
        list(np.random.default_rng(0).random(40)),
        list(10.0 ** -np.random.default_rng(1).uniform(0, 6, 30)),
        [*range(1, 300)],
        [1.0] * 300,
        list(10.0 ** -np.random.default_rng(2).uniform(0, 6, 700)),
    ],
    ids=["equal", "three", "tiny", "one large", "random", "skewed", "many", "many equal", "many skewed"],
)
def test_chunks_equal_a_computation_one_by_one(weights):
    check_index(weights, LONG)


@settings(max_examples=25)
@given(
    weights=st.lists(st.floats(1e-7, 1e3) | st.sampled_from([0.25, 1.0, 3.0]), min_size=1, max_size=9),
    size=st.integers(2 * MIN_CHUNK, 4 * MIN_CHUNK),
)
def test_any_weights_in_chunks(weights, size):
    check_index(weights, size)


def test_a_selection_of_many_datasets_has_the_largest_deficits(monkeypatch):
    """Few of them are compared at a position."""
    found = []
    original = _ChunkedBlend._compared
    monkeypatch.setattr(
        _ChunkedBlend, "_compared", lambda *given: found.append(original(*given)) or found[-1]
    )
    check_index(list(np.random.default_rng(3).random(1000)), 20_000)
    assert np.median([compared.shape[1] for compared in found]) < 400
    sizes = np.random.default_rng(4).integers(0, 40, 600)
    found.clear()
    index = build_exhaustive_blend_index(sizes.tolist())
    assert pairs(index) == one_by_one(sizes, int(sizes.sum()), is_exhaustive=True)
    assert np.median([compared.shape[1] for compared in found]) < 400


def test_an_exhaustive_blend_takes_each_sample_once():
    sizes = [3000, 1, 40, 5000, 999]
    index = build_exhaustive_blend_index(sizes)
    for number, size in enumerate(sizes):
        assert index.dataset_sample_index[index.dataset_index == number].tolist() == list(range(size))


BLENDS = [case for case in EXPECTED["blends"] if case["options"].get("add_extra_token_to_sequence", True)]


def builder_of(case, *, surplus=None):
    options = case["options"]
    sample_options = SampleOptions(
        seq_length=case["sequence_length"],
        eod=case["eod"],
        pad=case["pad"],
    )
    named = (
        {"surplus": options["mid_level_dataset_surplus"]} if "mid_level_dataset_surplus" in options else {}
    )
    return SplitBuilder(sample_options, **named)


def blend_of(folder, blend):
    paths = [str(folder / prefix) for prefix in blend["prefixes"]]
    return Blend(tuple(paths), blend["weights"] and tuple(blend["weights"]))


def check_gpt(samples, recorded, folder):
    assert samples.source.prefix == str(folder / recorded["dataset"])
    assert samples.index.epochs.count == recorded["num_epochs"]
    assert samples.index.epochs.is_last_separate == recorded["separate_final_epoch"]
    assert len(samples) == recorded["length"]
    for array in ("document_index", "sample_index", "shuffle_index"):
        check_array(getattr(samples.index, array), recorded[array])


def check_split(samples, recorded, folder):
    if recorded["type"] == "gpt":
        check_gpt(samples, recorded, folder)
    else:
        assert isinstance(samples, BlendedDataset)
        assert len(samples) == recorded["length"]
        check_array(samples.index.dataset_index, recorded["dataset_index"])
        check_array(samples.index.dataset_sample_index, recorded["dataset_sample_index"])
        assert samples.index.counts(len(samples.datasets)).tolist() == recorded["counts"]
        for dataset, described in zip(samples.datasets, recorded["mid_level"], strict=True):
            check_gpt(dataset, described, folder)
    for item in recorded["samples"]:
        sample = samples[item["k"]]
        assert digest(sample.tokens) == item["tokens_sha256"]
        assert digest(sample.labels) == item["labels_sha256"]
        assert sample.loss_mask.sum() == item["loss_mask_sum"]
        if "dataset_id" in item:
            assert samples.index.dataset_index[item["k"]] == item["dataset_id"]


@pytest.mark.parametrize("case", BLENDS, ids=lambda case: case["name"])
def test_recorded_blends(golden_text, case):
    plans = SamplePlans(
        **{name: (size,) for name, size in zip(SPLIT_NAMES, case["sizes"], strict=True)}, seed=case["seed"]
    )
    if "blend" in case:
        blends = {"all": blend_of(golden_text, case["blend"])}
    else:
        blends = {
            name: blend_of(golden_text, blend)
            for name, blend in zip(SPLIT_NAMES, case["per_split"], strict=True)
            if blend
        }
    named_valid = () if case["options"].get("multiple_validation_sets", False) else None
    splits = builder_of(case).build(blends, case.get("split", ""), plans, named_valid=named_valid)
    for name, size in zip(SPLIT_NAMES, case["sizes"], strict=True):
        recorded = case["splits"].get(name)
        if not recorded or size == 0:
            assert getattr(splits, name) is None
        elif recorded["type"] == "list":
            assert list(splits.named_valid) == [item["dataset"] for item in recorded["datasets"]]
            for samples, item in zip(splits.named_valid.values(), recorded["datasets"], strict=True):
                check_split(samples, item, golden_text)
        else:
            check_split(getattr(splits, name), recorded, golden_text)


def test_a_blend_that_needs_missing_samples_is_an_error():
    datasets = [range(5), range(3)]
    index = BlendIndex(np.array([0, 1, 1, 1, 1], np.int16), np.array([0, 0, 1, 2, 3]))
    with pytest.raises(
        ConfigError, match=r"dataset 1 of the blend has 3 samples.* 4\n  fix: .*--mid-level-dataset-surplus"
    ):
        BlendedDataset(datasets, index)


@pytest.mark.parametrize(
    ("prefixes", "names"),
    [
        (["/a/b", "/a/c"], ["b", "c"]),
        (["/a/x/d", "/b/x/d", "/b/y/d"], ["a/x/d", "b/x/d", "b/y/d"]),
        (["d", "d"], ["d#0", "d#1"]),
        (["d"], ["d"]),
    ],
)
def test_dataset_names_are_unique(prefixes, names):
    assert dataset_names(prefixes) == names
