"""The rows of parity are what the table of features says, and what `resolve` allows: neither more nor less."""

import functools
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest

from megatrain.config import ConfigError, features
from megatrain.config.features import REFUSED, features_of
from megatrain.config.tree import settings
from megatrain.tools import parity_measure
from megatrain.tools.covering import pairs_of
from megatrain.tools.main import _parser
from megatrain.tools.parity import chosen_rows, run
from megatrain.tools.parity_measure import Job, Measured, Part, tiny_plan
from megatrain.tools.parity_measure import plan_of as plan_of_job
from megatrain.tools.parity_models import MODELS
from megatrain.tools.parity_narrow import ROWS as NARROW_ROWS
from megatrain.tools.parity_narrow import NarrowComparer, fewest_ranks, of_any_micro_batch, orders, within
from megatrain.tools.parity_results import Results
from megatrain.tools.parity_rows import (
    MAX_RANKS,
    OPTIONS,
    PRODUCT,
    QUICK_ROWS,
    Layout,
    all_pairs,
    is_row,
    pairwise_rows,
    product_rows,
)


@functools.cache
def plan_of(layout):
    return tiny_plan(layout, layout.world_size)


def test_a_word_belongs_to_one_option():
    words = Counter(word for option in OPTIONS.values() for word in option)
    assert [word for word, count in words.items() if count > 1] == []
    names = Counter(feature.name for option in features.OPTIONS for feature in option.features)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("layout", pairwise_rows(), ids=lambda layout: layout.name)
def test_resolve_allows_a_row_and_finds_the_features_that_it_names(layout):
    assert layout.world_size <= MAX_RANKS
    named = {
        feature.name
        for option in features.OPTIONS
        for feature in option.features
        if any(layout.has(word) for word in feature.words())
    }
    assert set(features_of(plan_of(layout))) == named


def test_every_pair_of_words_that_can_meet_does():
    assert {pair for layout in pairwise_rows() for pair in pairs_of(layout.words)} == all_pairs()


def test_every_pair_of_features_is_proven_or_refused_or_without_meaning():
    """Whatever sizes rows are kept to: what `resolve` allows is what the rows prove."""
    proven = {
        frozenset(pair)
        for layout in pairwise_rows()
        for pair in combinations(features_of(plan_of(layout)), 2)
    }
    refused = {frozenset(one.pair) for one in REFUSED}
    for first, second in combinations(features.OPTIONS, 2):
        for one in first.features:
            for other in second.features:
                is_idle = _is_idle(one, _others(second, other)) or _is_idle(other, _others(first, one))
                pair = frozenset((one.name, other.name))
                assert (pair in proven) != (is_idle or pair in refused), sorted(pair)


def _is_idle(feature, excluded):
    return bool(feature.needs) and all(
        need in excluded or _is_idle(FEATURES[need], excluded) for need in feature.needs
    )


FEATURES = {feature.name: feature for option in features.OPTIONS for feature in option.features}


def _others(option, feature):
    return {one.name for one in option.features if one is not feature}


def test_every_choice_of_a_model_is_in_a_model_of_parity():
    used = {(path, plan.config.get(path)) for plan in _plans_of_models() for path in _model_choices()}
    for path, values in _model_choices().items():
        for value in values:
            assert (path, value) in used, (
                f"{path} {value}: add it to a model of megatrain/tools/parity_models.py"
            )


APART = {
    "model.attention_backend": "picks a kernel for one and the same mathematics",
    "model.transformer_impl": "the same; its rows are those of `megatrain parity --device cuda --transformer-impl`",
}
"""Choices that no model of parity needs, and why."""


def _plans_of_models():
    return [plan_of(Layout.of(f"{model} {tied}")) for model in MODELS for tied in ("tied", "untied")]


def _model_choices():
    return {
        setting.path: (False, True) if setting.kind is bool else setting.choices
        for setting in settings()
        if setting.section == "model" and (setting.choices or setting.kind is bool)
        if setting.path not in APART
    }


@pytest.mark.parametrize("max_ranks", [1, 2])
def test_fewer_ranks_have_rows_of_their_own(max_ranks):
    rows = pairwise_rows(max_ranks)
    assert max(layout.world_size for layout in rows) == max_ranks
    assert {pair for layout in rows for pair in pairs_of(layout.words)} == all_pairs(max_ranks)


def test_the_full_table_has_each_combination_once():
    rows = product_rows()
    assert all(is_row(layout.words) for layout in rows)
    fixed = [layout.words_of(*PRODUCT) for layout in rows]
    assert len({tuple(words) for words in fixed}) == len(rows) > 1000
    by_hand = 0
    for words in product(*PRODUCT.values()):
        layout, others = Layout.of(" ".join(words)), product(OPTIONS["context parallelism"], OPTIONS["batch"])
        by_hand += any(is_row(layout.but(" ".join(other)).words) for other in others)
    assert len(rows) == by_hand


def test_rows_of_narrow_formats_are_rows():
    assert all(is_row(layout.words) for layout in NARROW_ROWS)


@pytest.mark.parametrize(
    ("row", "fewest"),
    [
        ("dp8 zero1 overlap batch16", ""),
        ("tp2 sp dp3 zero1 batch12", "tp2 sp"),
        ("dp4 zero3 mixtral ep2 overlap", "dp2 mixtral ep2"),
        ("dp4 zero3 mixtral ep2 alltoall overlap", "dp2 mixtral ep2 alltoall"),
        ("tp2 sp dp2 pp2 zero1 deepseek ep2 etp2", "tp2 sp dp2 deepseek ep2 etp2"),
        ("tp2 sp dp2 pp2 zero1 deepseek ep2 etp2 alltoall", "tp2 sp dp2 deepseek ep2 etp2 alltoall"),
        ("cp4 tworings pp2 tied", "cp4 tworings tied"),
    ],
)
def test_a_narrow_row_is_held_to_the_same_split_on_the_fewest_ranks(row, fewest):
    layout = of_any_micro_batch(Layout.of(row))
    words = f"{fewest} {' '.join(layout.words_of('batch'))}"
    assert fewest_ranks(layout) == of_any_micro_batch(Layout.of(words))
    for job in orders(Job(fewest_ranks(layout), "bf16")):
        plan_of_job(job, job.layout.world_size)


def asked(*flags):
    return chosen_rows(_parser().parse_args(["parity", *flags]))


def test_slices_are_the_table_once():
    table = asked("--full")
    slices = [asked("--full", "--slice", f"{number}/3") for number in (1, 2, 3)]
    assert Counter(row for part in slices for row in part) == Counter(table)


def test_rows_are_chosen_by_their_words_and_precision():
    rows = asked("--layouts", "tp2", "sp")
    assert {precision for precision, _ in rows} == {"fp64", "fp32", "bf16"}
    assert all(layout.has("tp2") and layout.has("sp") for _, layout in rows)
    assert {precision for precision, _ in asked("--quick")} == {"fp64"}
    assert len(asked("--quick")) == QUICK_ROWS
    assert {(precision, layout.has("tokens")) for precision, layout in asked("--precision", "bf16")} == {
        ("bf16", True)
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--layouts", "tp2", "tp4"],
            "--layouts tp2 tp4: no layout has all of these words\n  fix: the words are adam,",
        ),
        (["--slice", "3/2"], "--slice 3/2 is no part of a whole\n  fix: use --slice 1/4, for example"),
        (["--slice", "two"], "--slice two is no part of a whole"),
    ],
)
def test_what_cannot_be_chosen_is_told(flags, words):
    with pytest.raises(ConfigError) as caught:
        asked(*flags)
    assert words in str(caught.value)


ENGINE = ("--transformer-impl", "transformer_engine", "--device", "cuda")


@pytest.fixture
def has_engine(monkeypatch):
    monkeypatch.setattr(parity_measure, "library_versions", lambda: {"transformer_engine": "2.20.2"})


@pytest.mark.usefixtures("has_engine")
def test_rows_of_transformer_engine_are_those_that_it_computes():
    few, many = asked(*ENGINE), asked(*ENGINE, "--precision", "bf16")
    assert {precision for precision, _ in (*few, *many)} == {"bf16"}
    assert {name for name in MODELS if any(row.has(name) for _, row in many)} == {"llama", "mup", "puzzle"}
    for words in ("documents", "mup", "tp2", "sp", "dp2", "pp2"):
        assert any(layout.has(words) for _, layout in few)


@pytest.mark.usefixtures("has_engine")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (ENGINE[:2], "computes on GPUs, and this run on cpu"),
        ([*ENGINE, "--precision", "fp32"], "computes in bf16 or fp16, and this run in float32"),
    ],
)
def test_rows_that_transformer_engine_has_nowhere_are_told(flags, words):
    with pytest.raises(ConfigError, match=words):
        asked(*flags)


@pytest.mark.usefixtures("has_engine")
def test_what_is_left_out_of_transformer_engines_rows_is_told(capsys):
    rows = asked(*ENGINE, "--quick")
    (said,) = [
        line for line in capsys.readouterr().out.splitlines() if "the others have what it lacks" in line
    ]
    assert said.startswith(f"transformer_engine computes {len(rows)} of ")
    assert 0 < len(rows) < QUICK_ROWS


def test_faults_are_not_planted_in_transformer_engine():
    with pytest.raises(ConfigError, match="--self-test plants faults in --transformer-impl local"):
        run(_parser().parse_args(["parity", "--self-test", *ENGINE]))


def test_rows_of_transformer_engine_are_held_against_local():
    jobs = []

    class Pool:
        device = "cuda"

        def run(self, world_size, _measure, job=None):
            if job is None:
                return [jobs.append("the library is loaded")]
            jobs.append((world_size, job.implementation, job.precision))
            part = Part("a", ((0, 1),), np.ones(1))
            return [Measured([1.0], [1.0], [part], [part], [part])] * world_size

    NarrowComparer(Pool(), "bf16", "transformer_engine").compare(Layout.of("tp2 sp dp2"))
    assert jobs[:2] == ["the library is loaded", (4, "transformer_engine", "bf16")]
    assert {job for job in jobs[2:] if job[0] == 1} == {(1, "local", "fp64"), (1, "local", "bf16")}
    assert {job for job in jobs[2:] if job[0] > 1} == {(2, "transformer_engine", "bf16")}


def test_results_of_another_implementation_are_not_ours(tmp_path):
    path, layout = str(tmp_path / "rows.jsonl"), Layout.of("tp2")
    Results.read(path, "transformer_engine").add(
        "bf16", layout, is_good=True, numbers=(1.0, 2.0, 3.0, 4.0), seconds=0.5
    )
    assert Results.read(path, "transformer_engine").has_passed("bf16", layout)
    assert not Results.read(path).has_passed("bf16", layout)


def test_results_go_on_behind_a_cut_line_and_failures_run_again(tmp_path):
    path = str(tmp_path / "rows.jsonl")
    good, bad, cut = Layout.of("tp2"), Layout.of("pp2"), Layout.of("dp2")
    results = Results.read(path)
    results.add("fp64", good, is_good=True, numbers=(1.0, 2.0, 3.0, 4.0), seconds=0.5)
    results.add("fp64", bad, is_good=False, numbers=(float("inf"), 2.0, 3.0, 4.0), seconds=0.5)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"precision": "fp64", "layout": "dp')
    for _ in range(2):
        results = Results.read(path)
        assert [results.has_passed("fp64", one) for one in (good, bad, cut)] == [True, False, False]
        assert not results.has_passed("bf16", good)
    results.add("fp64", cut, is_good=True, numbers=(1.0, 2.0, 3.0, 4.0), seconds=0.5)
    assert Results.read(path).has_passed("fp64", cut)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("distances", "noises", "is_within"),
    [
        ((4e-3, 0.0), (1e-3, 0.0), True),
        ((4.1e-3, 0.0), (1e-3, 0.0), False),
        ((0.0, 9e-7), (1e-3, 0.0), True),
        ((0.0, 1e-6), (1e-3, 0.0), False),
        ((float("inf"), 0.0), (1.0, 1.0), False),
        ((float("nan"), 0.0), (1.0, 1.0), False),
        ((float("inf"), 0.0), (float("inf"), 1.0), False),
    ],
)
def test_a_distance_is_held_against_its_noise(distances, noises, is_within):
    assert within(distances, noises) == is_within


def test_what_is_no_row():
    assert is_row(Layout.of("tp2 sp").words)
    assert not is_row(Layout.of("tp8 dp2").words)
    assert not is_row(Layout.of("sp").words)
    assert not is_row(Layout.of("zero1").words)
    assert not is_row(Layout.of("dp3").words)
    assert is_row(Layout.of("dp3 batch12").words)
    assert not is_row(Layout.of("batch16").words)


def test_a_layout_is_named_by_what_differs_from_one_process():
    layout = Layout.of("dp2 gpt2 tp2 sp zero1")
    assert layout.name == "tp2 sp dp2 zero1 gpt2"
    assert (layout.tp, layout.dp, layout.pp, layout.world_size, layout.global_batch) == (2, 2, 1, 4, 8)
    assert layout.alone == Layout.of("gpt2")
    assert Layout.of("").name == "one process"
    assert layout.but("batch16 nosp") == Layout.of("tp2 dp2 zero1 gpt2 batch16")
