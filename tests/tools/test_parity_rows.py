"""The rows of parity are what the table of features says, and what `resolve` allows: neither more nor less."""

import functools
from collections import Counter
from itertools import combinations

import pytest

from megatrain.config import features
from megatrain.config.features import REFUSED, features_of
from megatrain.config.tree import settings
from megatrain.config.unsupported import _MISSING
from megatrain.tools.covering import pairs_of
from megatrain.tools.parity_measure import tiny_plan
from megatrain.tools.parity_models import MODELS
from megatrain.tools.parity_rows import MAX_RANKS, OPTIONS, Layout, all_pairs, is_row, pairwise_rows


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
                is_idle = one.needs in _others(second, other) or other.needs in _others(first, one)
                pair = frozenset((one.name, other.name))
                assert (pair in proven) != (is_idle or pair in refused), sorted(pair)


def _others(option, feature):
    return {one.name for one in option.features if one is not feature}


def test_every_choice_of_a_model_is_in_a_model_of_parity_or_refused():
    used = {(path, plan.config.get(path)) for plan in _plans_of_models() for path in _model_choices()}
    missing = {(one.path, one.value) for one in _MISSING}
    for path, values in _model_choices().items():
        for value in values:
            assert ((path, value) in used) != ((path, value) in missing), (
                f"{path} {value}: add it to a model of megatrain/tools/parity_models.py"
            )


def _plans_of_models():
    return [plan_of(Layout.of(f"{model} {tied}")) for model in MODELS for tied in ("tied", "untied")]


def _model_choices():
    return {
        setting.path: (False, True) if setting.kind is bool else setting.choices
        for setting in settings()
        if setting.section == "model" and (setting.choices or setting.kind is bool)
    }


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
