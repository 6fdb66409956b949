"""Invalid blends and splits: each is an error that names the flag or the file, and the remedy."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from damaged_pairs import VOCAB, all_tokens, write_pair
from recorded import write_dataset

from megatrain.config import parse, resolve
from megatrain.config.derive.datasets import Blend, parse_blend
from megatrain.config.environment import LaunchEnvironment
from megatrain.config.errors import ConfigError
from megatrain.data.samples.blend import MAX_DATASETS, BlendedDataset, BlendIndex, build_blend_index
from megatrain.data.samples.build import SamplePlans, SplitBuilder
from megatrain.data.samples.dataset import PlannedDataset
from megatrain.data.samples.gpt_dataset import SampleOptions
from megatrain.training.batches import build_samples
from megatrain.training.launch.facts import gather_facts

pytestmark = pytest.mark.usefixtures("ends_soon")

RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --lr 1e-3 --micro-batch-size 1"
    " --global-batch-size 2 --swiglu --normalization RMSNorm --position-embedding-type rope --device cpu"
    " --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --eval-iters 1"
    f" --tokenizer-type NullTokenizer --vocab-size {VOCAB}"
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Datasets in the working folder: a and b are valid, the others contain few tokens or none."""
    monkeypatch.chdir(tmp_path)
    write_pair(tmp_path / "a", seed=1)
    write_pair(tmp_path / "b", seed=2)
    write_dataset(tmp_path / "one", [[[*range(1, 90)]]])
    write_dataset(tmp_path / "empty", [])
    write_dataset(tmp_path / "blank", [[[]], [[]], [[]]])
    write_dataset(tmp_path / "short", [[[1, 2]], [[3]], [[4, 5]]])
    write_dataset(tmp_path / "late", [[[]] for _ in range(10)] + [[[*range(50)]]])
    return tmp_path


def planned(flags):
    request = parse(f"{RUN} {flags}".split())
    facts = gather_facts(request, LaunchEnvironment())
    return resolve(request, facts), facts


def problems_of(flags):
    """Return all problems of a run that fails before it starts, or while its samples are built."""
    with pytest.raises(ConfigError) as caught:
        build_samples(*planned(flags))
    assert all(problem.fix for problem in caught.value.problems)
    return [str(problem) for problem in caught.value.problems]


EACH = r"fix: if {} is a weight: .* before its prefix, such as 0.3 a 0.7 b; if it is a prefix: "
ALL_TRAIN = "--split 1,0,0 --train-iters 4"
CASES = {
    "zero weight": ("--data-path 0 a 1 b", r"^--data-path: .* a .*0\n  fix: .*weight above 0"),
    "negative weight": ("--data-path 1 a -2 b", r"^--data-path: .* b .*-2\n  fix: "),
    "NaN weight": ("--data-path nan a 1 b", r"^--data-path: .* a .*nan\n  fix: "),
    "infinite weight": ("--data-path 1 a inf b", r"^--data-path: .* b .*inf\n  fix: "),
    "infinite sum": ("--data-path 1e308 a 1e308 b", r"^--data-path: .*infinity\n  fix: divide"),
    "weight of training data": ("--train-data-path 1 a 0 b", r"^--train-data-path: .* b .*0\n"),
    "a weight is missing": ("--data-path 0.5 a b", EACH.format("0.5")),
    "a prefix is missing": ("--data-path 1 a 3", EACH.format("3")),
    "a number for a prefix": ("--data-path 1 a 1 3", EACH.format("3")),
    "weights after prefixes": ("--data-path a 0.5 b 0.25", EACH.format("0.25")),
    "a weight alone": ("--data-path 0.5", EACH.format("0.5")),
    "split of 0": ("--data-path a --split 0,0,0", r"^--split '0,0,0' .*\n  fix: "),
    "split without training": ("--data-path a --split 0,1,1", r"train.*\n  fix: "),
    "split too large": (f"--data-path a --split {'9' * 400},1", r"^--split .*large.*\n  fix: "),
    "one document": ("--data-path one", r"one .*train 1, valid 0, test 0.*\n  fix: "),
    "no document": (f"--data-path empty {ALL_TRAIN}", r"empty .*train 0.*\n  fix: "),
    "no token": (f"--data-path blank {ALL_TRAIN}", r"^blank\.bin: the train data: sequences 0 to 3 .* no tokens\n  fix: .*--split"),
    "no token, weighted": (f"--data-path 1 a 1 blank {ALL_TRAIN}", r"^blank\.bin: the train data: .* no tokens"),
    "no token, by size": (f"--data-path a blank {ALL_TRAIN}", r"^blank\.bin: the train data: .* no tokens"),
    "no token in its split": ("--data-path late --split 9,1,1", r"^late\.bin: the train data: sequences 0 to 9 "),
    "no token to validate by": (
        "--train-data-path a --valid-data-path empty", r"^empty\.bin: the valid data: sequences 0 to 0 .* no tokens"
    ),
    "fewer samples than asked": (
        "--data-path a b --split 1,0,0 --train-iters 500",
        r"training data .*1000.*\n  fix: .*weight.*--train-iters",
    ),
    "fewer samples than asked to validate": (
        "--train-data-path 1 a --valid-data-path a b --eval-iters 100",
        r"validation data .*\n  fix: .*--eval-iters",
    ),
    "weights for all of the data": (
        "--train-data-path a --valid-data-path 1 a 2 b --full-validation", r"weights .*\n  fix: .*--full-validation.*weights"
    ),
    "too large a seed": (f"--data-path 1 a --seed {2**32}", r"^--seed 4294967296 .*\n  fix: "),
    "sets of too little text": (
        "--train-data-path a --valid-data-path b short --full-validation --multiple-validation-sets",
        r"^short\.bin: the valid data is shorter than .*--seq-length 8.*\n  fix: use more data",
    ),
    "too little text to validate by": (
        "--train-data-path a --valid-data-path short --full-validation", r"^short\.bin: the valid data is shorter than"
    ),
    "too little text in all datasets": (
        "--train-data-path a --valid-data-path short short --full-validation",
        r"^short\.bin and short\.bin: the valid data is shorter than one sample",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_invalid_blend_is_an_error(name):
    flags, pattern = CASES[name]
    problems = problems_of(flags if "--train-iters" in flags else f"{flags} --train-iters 4")
    assert any(re.search(pattern, problem) for problem in problems), problems
    assert len(problems) == len(set(problems))


@pytest.mark.parametrize(
    "name", ["zero weight", "weight of training data", "split of 0", "weights for all of the data"]
)
def test_a_problem_is_reported_once(name):
    assert len(problems_of(f"{CASES[name][0]} --train-iters 4")) == 1


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        ({"valid": ["a"]}, r"--per-split-data-args-path words\.json .*train"),
        ({"train": ["c"]}, r"^--per-split-data-args-path: c\.bin: .*\n  fix: "),
    ],
    ids=["nothing to train on", "a missing dataset"],
)
def test_a_file_of_splits_without_the_data_of_the_run_is_an_error(here, splits, expected):
    """Files that cannot be read at all: test_sources.py."""
    (here / "words.json").write_text(json.dumps(splits))
    (problem,) = problems_of("--per-split-data-args-path words.json --train-iters 4")
    assert re.search(expected, problem), problem


def test_validation_alone_needs_no_training_data(here):
    (here / "words.json").write_text(json.dumps({"valid": ["a"]}))
    plan, facts = planned("--per-split-data-args-path words.json --skip-train --train-iters 4 --eval-iters 1")
    assert build_samples(plan, facts).train is None


def blended(blend, *, log=print, num_samples=30):
    builder = SplitBuilder(SampleOptions(seq_length=8, eod=0, vocab_size=VOCAB), log=log)
    plans = SamplePlans(train=(num_samples,), valid=(0,), test=(0,), seed=1)
    return builder.build({"all": blend}, "1,0,0", plans).train


def test_the_same_prefix_twice_is_read_twice():
    """As in Megatron-LM: both are shuffled with the same seed, so every sample occurs twice."""
    alone = all_tokens(blended(Blend(("a",)), num_samples=15))
    twice = blended(Blend(("a", "a"), (1.0, 1.0)), num_samples=30)
    assert all_tokens(twice)[::2] == all_tokens(twice)[1::2] == alone[:15]


def test_a_dataset_too_short_for_a_sample_is_left_out():
    logged = []
    samples = blended(Blend(("a", "short")), num_samples=5, log=logged.append)
    (line,) = logged
    assert line.startswith("short.bin: left out")
    assert all_tokens(samples) == all_tokens(blended(Blend(("a",)), num_samples=5))[:5]


def test_a_single_document_is_repeated():
    tokens = all_tokens(blended(Blend(("one",)), num_samples=100))
    assert len(tokens) >= 100
    stored = [*range(1, 90)] * 12
    assert sorted(tokens) == sorted(stored[8 * k : 8 * k + 9] for k in range(len(tokens)))


def test_weights_may_have_any_scale():
    assert parse_blend(["1e-300", "a", "3e-300", "b"]).weights == (1e-300, 3e-300)
    small, plain = (build_blend_index(weights, 400) for weights in ([1e-300, 3e-300], [0.25, 0.75]))
    assert small.counts(2).tolist() == plain.counts(2).tolist() == [100, 300]


def test_a_blend_that_needs_missing_samples_names_the_dataset():
    index = BlendIndex(np.array([0, 1, 1], np.int16), np.array([0, 0, 1]))
    pattern = r"\(b\.bin\) has 1 samples.* 2\n  fix: use a larger --mid-level-dataset-surplus"
    with pytest.raises(ConfigError, match=pattern):
        BlendedDataset([range(5), range(1)], index, ["a.bin", "b.bin"])


def test_too_many_datasets_are_an_error():
    with pytest.raises(ConfigError, match=r"32769 datasets.*32768\n  fix: merge"):
        build_blend_index(np.ones(MAX_DATASETS + 1), 10)


def test_a_stored_plan_that_the_data_does_not_fill_is_an_error():
    with pytest.raises(ConfigError, match=r"plan 1 .*20 samples.* 19\n  fix: .*--load"):
        PlannedDataset([range(30), range(19), range(5)], [30, 20, 5])
    assert len(PlannedDataset([range(30), range(20), range(5)], [25, 20, 99])) == 50
