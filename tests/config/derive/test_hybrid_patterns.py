"""Patterns of hybrid models: what Megatron-LM parses them to, recorded."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from megatrain.config import ConfigError, Facts, parse, resolve
from megatrain.config.derive.hybrid_pattern import (
    LETTERS,
    has_same_layers,
    parse_hybrid_pattern,
    pattern_of_shares,
)
from megatrain.config.derive.patterns import PatternError
from megatrain.config.subjects.pipeline import layer_ranges

RECORDED: Final = json.loads((Path(__file__).parents[2] / "golden/hybrid_patterns.json").read_text())
RAISES: Final = {"raises": "ValueError"}
FLAGS: Final = (
    "--model-family hybrid --hidden-size 8 --num-attention-heads 2 --mamba-num-heads 2 --mamba-head-dim 4"
    " --mamba-num-groups 1 --mamba-state-dim 4 --position-embedding-type none --micro-batch-size 1"
    " --max-position-embeddings 16 --seq-length 16 --lr 1e-3 --train-iters 2 --mock-data --tokenizer-type NullTokenizer"
    " --vocab-size 100"
)


def test_letters_are_the_recorded_ones() -> None:
    assert {*LETTERS, "|", "/"} == set(RECORDED["symbols"])


@pytest.mark.parametrize("one", RECORDED["patterns"], ids=lambda one: one["pattern"])
def test_patterns_parse_as_recorded(one: dict[str, Any]) -> None:
    if one["parsed"] == RAISES:
        with pytest.raises(PatternError):
            parse_hybrid_pattern(one["pattern"])
        return
    found = parse_hybrid_pattern(one["pattern"])
    assert [found.main, found.head, found.num_depths] == one["parsed"]
    assert len(found.layers) == one["layers"]
    assert len(found.stages) == one["segments"]
    assert found.counts == one["counts"]


@pytest.mark.parametrize("one", RECORDED["ratios"], ids=str)
def test_shares_stand_for_the_recorded_patterns(one: dict[str, Any]) -> None:
    if isinstance(one["pattern"], dict):
        with pytest.raises(PatternError):
            pattern_of_shares(one["layers"], one["attention"], one["mlp"])
    else:
        assert pattern_of_shares(one["layers"], one["attention"], one["mlp"]) == one["pattern"]


@pytest.mark.parametrize("one", RECORDED["stages"], ids=str)
def test_stages_have_the_recorded_layers(one: dict[str, Any]) -> None:
    pp, chunk = one["stages"], one["virtual_stage"]
    flags = [*FLAGS.split(), "--hybrid-layer-pattern", one["main"], "--pipeline-model-parallel-size", str(pp)]
    for end in ("first", "last"):
        if one[f"{end}_stage_layers"] is not None:
            flags += [f"--decoder-{end}-pipeline-num-layers", str(one[f"{end}_stage_layers"])]
    if chunk is not None and "|" not in one["main"]:
        flags += ["--num-virtual-stages-per-pipeline-rank", "2"]
    flags += ["--global-batch-size", str(2 * pp)]
    if one["result"] == RAISES:
        with pytest.raises(ConfigError, match=r"--hybrid-layer-pattern|--decoder-first-pipeline-num-layers"):
            resolve(parse(flags), Facts(world_size=pp))
        return
    plan = resolve(parse(flags), Facts(world_size=pp))
    numbers = layer_ranges(plan.derived.pipeline_layers)[(chunk or 0) * pp + one["rank"]]
    layers = parse_hybrid_pattern(one["main"]).layers
    assert [layers[numbers.start : numbers.stop], numbers.start] == one["result"]


def test_stages_may_change_and_heads_may_be_dropped_on_resume() -> None:
    assert has_same_layers("M*|M-", "M|*|M-")
    assert has_same_layers("M*/M/M", "M*")
    assert not has_same_layers("M*/M", "M*/-")
    assert not has_same_layers("M*", "M-")


def test_only_a_given_pattern_overrides_the_shares() -> None:
    flags = [
        *FLAGS.split(),
        "--num-layers",
        "4",
        "--hybrid-attention-ratio",
        "0.25",
        "--hybrid-mlp-ratio",
        "0",
    ]
    for pattern, words in (
        ([], []),
        (["--hybrid-layer-pattern", "M*"], ["--hybrid-attention-ratio 0.25 has", "--num-layers 4 has"]),
    ):
        notes = resolve(parse([*flags, *pattern]), Facts(world_size=1)).notes
        of_shares = [note for note in notes if "--hybrid" in note]
        assert [note.partition(" no effect")[0] for note in of_shares] == words


def test_a_pattern_with_latent_attention_turns_it_on() -> None:
    plan = resolve(parse([*FLAGS.split(), "--hybrid-layer-pattern", "M+-"]), Facts(world_size=1))
    assert plan.config.model.multi_latent_attention
    assert plan.derived.model_spec.layers[1].attention.latent is not None
