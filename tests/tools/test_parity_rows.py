"""The rows of parity follow the table of features and the rules of `resolve`: every allowed pair, and no other."""

import functools
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest

from megatrain.config import ConfigError
from megatrain.config.schema.tree import settings
from megatrain.tools.main import parser
from megatrain.tools.parity import measure, results
from megatrain.tools.parity.choice import chosen_rows
from megatrain.tools.parity.covering_array import pairs_of
from megatrain.tools.parity.features import NUMBER_FORMATS
from megatrain.tools.parity.features import OPTIONS as FEATURE_OPTIONS
from megatrain.tools.parity.low_precision import (
    LowPrecisionComparer,
    fewest_ranks,
    is_supported_in,
    of_any_micro_batch,
    orders,
    rows_in,
    within,
)
from megatrain.tools.parity.measure import LOW_PRECISIONS, Job, Measured, Part, tiny_plan
from megatrain.tools.parity.measure import plan_of as plan_of_job
from megatrain.tools.parity.models import MODELS
from megatrain.tools.parity.results import Results
from megatrain.tools.parity.rows import MAX_RANKS, MICRO_BATCH, OPTIONS, WITHOUT_FORMATS, Layout
from megatrain.tools.parity.tables import PRODUCT, QUICK_ROWS, all_pairs, is_row, pairwise_rows, product_rows


@functools.cache
def plan_of(layout):
    return tiny_plan(layout, layout.world_size)


def test_a_word_belongs_to_one_option():
    words = Counter(word for option in OPTIONS.values() for word in option)
    assert [word for word, count in words.items() if count > 1] == []
    names = Counter(feature.name for option in FEATURE_OPTIONS for feature in option.features)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.nightly
@pytest.mark.parametrize("max_ranks", [1, 2, 4, MAX_RANKS])
def test_resolve_allows_each_row(max_ranks):
    for layout in pairwise_rows(max_ranks):
        assert layout.world_size <= max_ranks, layout.name
        assert plan_of(layout).derived.world_size == layout.world_size


@pytest.mark.nightly  # test_covering has small tables
def test_every_allowed_pair_of_words_is_in_a_row():
    assert {pair for layout in pairwise_rows() for pair in pairs_of(layout.table_words)} == all_pairs()


@pytest.mark.nightly
def test_rows_take_one_micro_batch_or_as_many_as_their_pipeline_needs():
    rows = pairwise_rows()
    passes = Counter(layout.global_batch // (layout.dp * MICRO_BATCH) for layout in rows)
    assert {1, 2} < set(passes)
    of_stages = [layout for layout in rows if layout.pp > 1]
    assert sum(layout.global_batch > layout.dp * MICRO_BATCH for layout in of_stages) > len(of_stages) / 2


def test_every_pair_of_features_is_in_a_row_or_refused_or_without_meaning():
    """Rows can have every pair that `resolve` allows, although the sizes of rows are limited."""
    names = {word: feature.name for feature in FEATURES.values() for word in feature.words()}
    proven = {
        frozenset((names[first], names[second]))
        for _, first, _, second in all_pairs()
        if first in names and second in names
    }
    for first, second in combinations(FEATURE_OPTIONS, 2):
        for one in first.features:
            for other in second.features:
                is_idle = _is_idle(one, _others(second, other)) or _is_idle(other, _others(first, one))
                is_idle = is_idle or _needs_others(one, other)
                is_refused = other.name in one.excludes or one.name in other.excludes
                pair = frozenset((one.name, other.name))
                assert (pair in proven) != (is_idle or is_refused), sorted(pair)


def _is_idle(feature, excluded):
    return bool(feature.needs) and all(
        need in excluded or _is_idle(FEATURES[need], excluded) for need in feature.needs
    )


def _needs_others(one, other):
    """Return whether two features need different features of an option, such as one and several pipeline stages."""
    pairs = [{need, another} for need in one.needs for another in other.needs if need != another]
    return any(
        pair <= {feature.name for feature in option.features} for pair in pairs for option in FEATURE_OPTIONS
    )


FEATURES = {feature.name: feature for option in FEATURE_OPTIONS for feature in option.features}


def _others(option, feature):
    return {one.name for one in option.features if one is not feature}


def test_every_choice_of_a_model_is_in_a_model_of_parity():
    used = {(path, plan.config.get(path)) for plan in _plans_of_models() for path in _model_choices()}
    for path, values in _model_choices().items():
        for value in values:
            assert (path, value) in used or (path, value) in SYNONYMS, (
                f"{path} {value}: add it to a model of megatrain/tools/parity/models.py"
            )


NOT_IN_MODELS = {
    "model.attention_backend": "selects a kernel for the same computation",
    "model.mtp_use_repeated_layer": "a word of any model: mtprepeated",
    "model.transformer_impl": "likewise; its rows are those of `megatrain parity --device cuda --transformer-impl`",
}
"""Choices that no model of parity needs, and why."""
SYNONYMS = {("model.experimental_attention_variant", "gdn"): "another name of gated_delta_net"}


def _plans_of_models():
    return [plan_of(Layout.of(f"{model} {tied}")) for model in MODELS for tied in ("tied", "untied")]


def _model_choices():
    return {
        setting.path: (False, True) if setting.kind is bool else setting.choices
        for setting in settings()
        if setting.section == "model" and (setting.choices or setting.kind is bool)
        if setting.path not in NOT_IN_MODELS
    }


@pytest.mark.nightly
@pytest.mark.parametrize("max_ranks", [1, 2])
def test_fewer_ranks_have_rows_of_their_own(max_ranks):
    rows = pairwise_rows(max_ranks)
    assert max(layout.world_size for layout in rows) == max_ranks
    assert {pair for layout in rows for pair in pairs_of(layout.table_words)} == all_pairs(max_ranks)


@pytest.mark.nightly
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


@pytest.mark.parametrize("precision", LOW_PRECISIONS)
def test_low_precision_rows_are_rows(precision):
    for layout in rows_in(precision):
        assert is_row(layout.words)
        assert is_supported_in(precision, layout)
        plan_of_job(Job(layout, precision), layout.world_size)
    assert all(layout.world_size <= 2 for layout in rows_in(precision, max_ranks=2))


IN_LOW_PRECISION_ROWS = (
    "tp2 tp8 groups1 groups2 sp cp2 heads dp2 dp4 pp2 pp4 ppfirst zero1 zero2 zero3 instances2 overlap overlapgrads"
    " overlapweights uniform offload ep2 etp2 alltoall tied documents zloss scale sgd muon ignored hollow mixtral"
    " deepseek qwenmoe"
)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_low_precision_rows_include_the_risky_features(precision):
    words = {word for layout in rows_in(precision) for word in layout.words}
    assert set(IN_LOW_PRECISION_ROWS.split()) - words == set()


def test_every_number_format_is_in_a_row():
    used = {
        word
        for precision in ("fp64", *LOW_PRECISIONS)
        for layout in rows_in(precision)
        for word in layout.words
    }
    assert [word for option in NUMBER_FORMATS for word in option.words() if word not in used] == []


@pytest.mark.parametrize(
    ("words", "precisions"),
    [
        ("dp2", {"fp64", "fp32", "bf16", "fp16"}),
        ("dp2 sumsbf16", {"bf16"}),
        ("dp2 momentsbf16", {"fp32", "bf16", "fp16"}),
    ],
)
def test_a_format_is_supported_in_its_precisions(words, precisions):
    layout = Layout.of(f"tokens {words}")
    assert {one for one in ("fp64", *LOW_PRECISIONS) if is_supported_in(one, layout)} == precisions
    for one in precisions:
        plan_of_job(Job(layout, one), layout.world_size)


@pytest.mark.nightly
def test_tables_have_no_number_formats():
    for layout in (*pairwise_rows(), *product_rows()):
        assert layout == layout.but(WITHOUT_FORMATS)


@pytest.mark.parametrize(
    ("row", "fewest"),
    [
        ("dp8 zero1 overlap batch16", ""),
        ("tp2 sp dp3 zero1 batch12", "tp2 sp"),
        ("dp4 zero3 mixtral ep2 overlap", "dp2 mixtral ep2"),
        ("dp4 zero3 mixtral ep2 alltoall overlap", "dp2 mixtral ep2 alltoall"),
        ("tp2 sp dp2 pp2 zero1 deepseek ep2 etp2", "tp2 sp dp2 deepseek ep2 etp2"),
        ("tp2 sp dp2 pp2 zero1 deepseek ep2 etp2 alltoall", "tp2 sp dp2 deepseek ep2 etp2 alltoall"),
        ("cp4 a2aring pp2 tied", "cp4 a2aring tied"),
    ],
)
def test_a_low_precision_row_is_compared_with_the_same_split_on_the_fewest_ranks(row, fewest):
    layout = of_any_micro_batch(Layout.of(row))
    words = f"{fewest} {' '.join(layout.words_of('batch'))}"
    assert fewest_ranks(layout) == of_any_micro_batch(Layout.of(words))
    for job in orders(Job(fewest_ranks(layout), "bf16")):
        plan_of_job(job, job.layout.world_size)


def asked(*flags):
    return chosen_rows(parser("parity").parse_args(["parity", *flags]))


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [(), ("--full",)])
def test_every_word_is_in_a_row(flags):
    used = {word for _, layout in asked(*flags) for word in layout.words}
    assert [word for words in OPTIONS.values() for word in words if word not in used] == []


@pytest.mark.nightly
def test_slices_are_the_table_once():
    table = asked("--full")
    slices = [asked("--full", "--slice", f"{number}/3") for number in (1, 2, 3)]
    assert Counter(row for part in slices for row in part) == Counter(table)


def test_rows_are_chosen_by_their_words_and_precision():
    rows = asked("--quick", "--layouts", "tp2", "sp")
    assert {precision for precision, _ in rows} == {"fp64"}
    assert len(rows) > 1
    assert all(layout.has("tp2") and layout.has("sp") for _, layout in rows)
    assert {precision for precision, _ in asked("--quick")} == {"fp64"}
    assert len(asked("--quick")) == QUICK_ROWS
    rows = asked("--quick", "--precision", "bf16")
    assert {precision for precision, _ in rows} == {"bf16"}
    assert all(is_row(layout.words) and layout == of_any_micro_batch(layout) for _, layout in rows)
    assert {layout.has("tokens") for _, layout in rows if layout.family != "bert"} == {True}
    assert {layout.has("means") for _, layout in rows if layout.family == "bert"} == {True}


@pytest.mark.parametrize(
    ("words", "flags", "precisions"),
    [
        ("tp2 sp", (), ["fp64", "fp32", "bf16"]),
        ("tp2 sp dp2 zero3 muon neox", (), ["fp64", "fp32", "bf16"]),
        ("tp2 sp dp2 zero3 muon neox", ("--precision", "fp16"), ["fp16"]),
        ("tp4 groups2 sp dp2 zero2 instances2 muon", ("--slice", "1/2"), ["fp64", "bf16"]),
        ("tp2 sp dp2 zero3 instances2 sumsbf16 momentsbf16", (), ["bf16"]),
        ("tp2 sp dp2 mixtral ep2 dropping zero3 muon", (), ["fp64"]),
    ],
)
def test_layouts_runs_exactly_the_layout_of_its_words(words, flags, precisions):
    rows = asked("--layouts", *words.split(), *flags)
    assert [precision for precision, _ in rows] == precisions
    for precision, layout in rows:
        assert layout == Layout.of(words if precision == "fp64" else f"{words} tokens")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--layouts", "tp2", "tp4"],
            "--layouts tp2 tp4: these words form no layout\n  fix: leave out words that exclude each other",
        ),
        (["--layouts", "tp2", "sq"], "--layouts tp2 sq: unknown: sq\n  fix: use the words 1f1b, a2agather,"),
        (["--layouts", "sp", "dp8"], "--layouts sp dp8: these words form no layout"),
        (
            ["--layouts", "dp2", "sumsbf16", "zero3", "--precision", "fp32"],
            "--layouts dp2 sumsbf16 zero3 cannot run with --precision fp32\n  fix: leave out --precision",
        ),
        (
            ["--quick", "--layouts", *"tp2 sp dp2 zero3 muon neox".split()],
            "no row of the table has these words\n  fix: leave out --quick and --full",
        ),
        (
            ["--slice", "3/2"],
            "--slice 3/2 is not of the form K/N with 1 <= K <= N\n  fix: use for example --slice 1/4",
        ),
        (["--slice", "two"], "--slice two is not of the form K/N"),
    ],
)
def test_an_impossible_selection_is_an_error(flags, words):
    with pytest.raises(ConfigError) as caught:
        asked(*flags)
    assert words in str(caught.value)


@pytest.mark.nightly
def test_a_layout_that_needs_more_ranks_is_an_error():
    flags = ["parity", "--layouts", *"tp2 sp dp2 zero3 muon neox".split()]
    with pytest.raises(ConfigError, match="needs 4 ranks, but only 2 are available"):
        chosen_rows(parser("parity").parse_args(flags), max_ranks=2)


ENGINE = ("--transformer-impl", "transformer_engine", "--device", "cuda")


@pytest.fixture
def has_engine(monkeypatch):
    monkeypatch.setattr(measure, "library_versions", lambda: {"transformer_engine": "2.20.2"})


@pytest.mark.usefixtures("has_engine")
@pytest.mark.nightly
def test_transformer_engine_has_few_rows_by_default():
    few = asked(*ENGINE)
    assert {precision for precision, _ in few} == {"bf16"}
    for words in ("documents", "mup", "tp2", "sp", "dp2", "pp2"):
        assert any(layout.has(words) for _, layout in few)


@pytest.mark.nightly
@pytest.mark.usefixtures("has_engine")
def test_transformer_engine_has_all_rows_in_bf16():
    many = asked(*ENGINE, "--precision", "bf16")
    assert {precision for precision, _ in many} == {"bf16"}
    assert {name for name in MODELS if any(row.has(name) for _, row in many)} == {*MODELS}


@pytest.mark.usefixtures("has_engine")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param(ENGINE[:2], "needs a GPU", marks=pytest.mark.nightly),
        ([*ENGINE, "--precision", "fp32"], "bf16 and fp16 only"),
    ],
)
def test_rows_that_transformer_engine_cannot_compute_are_an_error(flags, words):
    with pytest.raises(ConfigError, match=words):
        asked(*flags)


def test_rows_of_transformer_engine_are_compared_with_local():
    jobs = []

    class Pool:
        device = "cuda"

        def run(self, world_size, _measure, job=None):
            if job is None:
                return [jobs.append("library loaded")]
            jobs.append((world_size, job.implementation, job.precision))
            part = Part("a", ((0, 1),), np.ones(1))
            return [Measured([1.0], [1.0], [part], [part], [part])] * world_size

    LowPrecisionComparer(Pool(), "bf16", "transformer_engine").compare(Layout.of("tp2 sp dp2"))
    assert jobs[:2] == ["library loaded", (4, "transformer_engine", "bf16")]
    assert {job for job in jobs[2:] if job[0] == 1} == {(1, "local", "fp64"), (1, "local", "bf16")}
    assert {job for job in jobs[2:] if job[0] > 1} == {(2, "transformer_engine", "bf16")}


@pytest.mark.parametrize(
    "other",
    [
        {"implementation": "transformer_engine"},
        {"device": "cuda"},
        {"identity": {"megatrain's code": "0.1 (other files)", "torch": "2.13.0"}},
        {"identity": {"megatrain's code": "0.1 (files)", "torch": "2.12.0"}},
    ],
    ids=["implementation", "device", "code", "library"],
)
def test_rows_that_passed_elsewhere_or_by_other_code_run_again(tmp_path, monkeypatch, other):
    path, layout = str(tmp_path / "rows.jsonl"), Layout.of("tp2")

    def read(*, identity=None, **known):
        own = identity or {"megatrain's code": "0.1 (files)", "torch": "2.13.0"}
        monkeypatch.setattr(results, "identity", lambda: own)
        return Results.read(path, **known)

    read().add("bf16", layout, is_good=True, numbers=(1.0, 2.0, 3.0, 4.0), seconds=0.5)
    assert read().has_passed("bf16", layout)
    assert not read(**other).has_passed("bf16", layout)
    assert (read().num_of_others, read(**other).num_of_others) == (0, 1)


def test_rows_of_unknown_origin_run_again(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"precision": "fp64", "layout": "tp2", "passed": true}\n')
    results = Results.read(str(tmp_path / "rows.jsonl"))
    assert not results.has_passed("fp64", Layout.of("tp2"))
    assert results.num_of_others == 1


def test_results_are_appended_after_a_truncated_line_and_failures_run_again(tmp_path):
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
def test_a_distance_is_compared_with_its_noise(distances, noises, is_within):
    assert within(distances, noises) == is_within


def test_combinations_that_are_no_row():
    assert is_row(Layout.of("tp2 sp").words)
    assert not is_row(Layout.of("tp8 dp2").words)
    assert not is_row(Layout.of("sp").words)
    assert not is_row(Layout.of("zero1").words)
    assert not is_row(Layout.of("dp3").words)
    assert is_row(Layout.of("dp3 batch12").words)
    assert not is_row(Layout.of("batch16").words)
    assert is_row(Layout.of("dp2 sumsbf16 momentsbf16").words)
    assert not is_row(Layout.of("sumsbf16").words)
    assert not is_row(Layout.of("sgd momentsbf16").words)
    assert not is_row(Layout.of("muonfp32").words)
    assert not is_row(Layout.of("routersfp64").words)


def test_a_layout_is_named_by_its_differences_from_one_process():
    layout = Layout.of("dp2 gpt2 tp2 sp zero1")
    assert layout.name == "tp2 sp dp2 zero1 gpt2"
    assert (layout.tp, layout.dp, layout.pp, layout.world_size, layout.global_batch) == (2, 2, 1, 4, 8)
    assert layout.alone == Layout.of("gpt2")
    assert Layout.of("").name == "one process"
    assert layout.but("batch16 nosp") == Layout.of("tp2 dp2 zero1 gpt2 batch16")
