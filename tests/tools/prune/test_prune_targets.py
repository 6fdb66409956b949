"""Targets of `megatrain prune`: wrong ones get one sentence before a model is loaded, and a parameter count becomes sizes."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from tiny_models import VOCAB, tiny_model, write

from megatrain.data.indexed.writer import IndexedWriter
from megatrain.interop.hf.checkpoint import HfCheckpoint
from megatrain.tools.main import main
from megatrain.tools.prune import measure
from megatrain.tools.prune.sizes import (
    EXPERT_FFN,
    EXPERTS,
    FFN,
    HIDDEN,
    LAYERS,
    SHARED_FFN,
    Source,
    indivisible,
    target_sizes,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with models of transformers by name, and calibration sets of this vocabulary and of a larger one."""
    made = tmp_path_factory.mktemp("sources")
    for name in ("Qwen3", "Pythia", "Qwen2-MoE", "DeepSeek-V3", "T5 v1.1"):
        write(tiny_model(name), made / name.partition(" ")[0])
    for prefix, tokens in {"text": VOCAB, "other": 200}.items():
        with IndexedWriter(str(made / prefix), "uint16") as writer:
            writer.add_document([np.arange(1000) % tokens])
    return made


WRONG = {
    "Qwen3 --num-layers 5": ("--num-layers 5", "has 4"),
    "Qwen3 --ffn-hidden-size 0": ("--ffn-hidden-size 0", "1 to 80"),
    "Qwen3 --num-experts 2": ("no such part", "remove --num-experts"),
    "Qwen3 --hidden-size 32": ("no size is smaller",),
    "Qwen3": ("no size is smaller", "--parameters"),
    "Qwen3 --num-attention-heads 3": ("3 heads in 2 query groups", "--num-query-groups"),
    "Qwen3 --num-query-groups 1": ("4 heads in 1 query groups", "at most 2"),
    "Pythia --num-query-groups 2": ("4 heads in 2 query groups",),
    "Qwen2-MoE --num-experts 1": ("selects 2 experts", "from 2 to 6"),
    "DeepSeek-V3 --num-experts 20": (
        "8 experts a token within 4 of 6 groups",
        "multiple of 6, from 12 to 24",
    ),
    "T5 --num-layers 1": ("--model-family t5", "name the checkpoint of a GPT"),
    "Qwen3 --num-layers 2 --samples 100": ("1000 tokens", "100 samples of 65 are 6500", "--samples"),
    "Qwen3 --num-layers 2 --samples 0": ("--samples 0",),
    "Qwen3 --num-layers 2 --data-path other": ("token 199", "model has 97", "tokenizer"),
    "Qwen3 --num-layers 2 --data-path none": ("none.bin", "no such file"),
    "Qwen3 --parameters 1e9": ("no size is smaller", "61920 parameters"),
    "Qwen3 --parameters 100": ("--parameters 100", "smallest", "more --parameters"),
    "Qwen3 --parameters 1e4 --hidden-size 16 --ffn-hidden-size 16": (
        "smallest model",
        "has 18736",
        "--num-layers",
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_targets_end_with_exit_code_2(
    words: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    name, *flags = words.split()
    given = f"prune --load hf:{name} --save {tmp_path}/pruned --data-path text --samples 4 --device cpu"
    with mock.patch.object(measure, "build_model", side_effect=AssertionError("a model is loaded")):
        assert main([*given.split(), *flags]) == 2
    printed = capsys.readouterr().err
    assert printed.count("fix: ") == 1
    assert [one for one in WRONG[words] if one not in printed] == [], printed
    assert not (tmp_path / "pruned").exists()


def source_of(folder: Path, name: str) -> Source:
    return Source.of(HfCheckpoint(folder / name))


def test_a_parameter_count_narrows_the_model_and_then_fills_its_mlps(folder: Path) -> None:
    source = source_of(folder, "Qwen3")
    sizes = target_sizes(source, {}, 38_000)
    assert sizes[LAYERS] == 4
    assert sizes[HIDDEN] % 4 == 0  # a multiple of the heads
    assert sizes[HIDDEN] < 32
    found = source.resized(sizes).num_parameters
    wider = source.resized({**sizes, FFN: sizes[FFN] + 4}).num_parameters
    assert found <= 38_000 < wider
    assert target_sizes(source, {LAYERS: 2}, 60_000) == source.sizes | {LAYERS: 2}
    sizes = target_sizes(source, {LAYERS: 2, HIDDEN: 32}, 30_000)
    assert sizes[HIDDEN] == 32
    assert source.with_layers([0, 1]).resized({FFN: sizes[FFN]}).num_parameters <= 30_000


def test_all_widths_of_experts_shrink_alike(folder: Path) -> None:
    source = source_of(folder, "Qwen2-MoE")
    sizes = target_sizes(source, {EXPERTS: 4}, 50_000)
    assert sizes[EXPERTS] == 4
    assert all(sizes[path] < source.sizes[path] for path in (HIDDEN, EXPERT_FFN, SHARED_FFN))
    assert source.resized(sizes).num_parameters <= 50_000


def test_patterns_follow_the_layers(folder: Path) -> None:
    """Layers 1 and 3 of a model have experts."""
    source = source_of(folder, "Qwen2-MoE")
    source = Source(
        source.path,
        source.config.with_values({"experts.moe_layer_freq": "[0,1]*2", "model.no_rope_freq": "2"}),
        97,
    )
    spec = source.with_layers([1, 2, 3]).spec
    assert [layer.experts is not None for layer in spec.layers] == [True, False, True]
    assert [layer.attention and layer.attention.rotary is not None for layer in spec.layers] == [
        False,
        True,
        False,
    ]
    assert source.spec.layers[1:] == spec.layers


def test_sizes_that_do_not_divide_are_named(folder: Path) -> None:
    source = source_of(folder, "Qwen2-MoE")
    found = list(indivisible(source.with_layers([0, 1, 3]).resized({EXPERTS: 6, EXPERT_FFN: 18}).spec))
    assert found == [
        "3 layers do not divide over --pipeline-model-parallel-size 2, 4, 8",
        "18 channels of a routed expert do not divide over --tensor-model-parallel-size 4, 8",
        "6 experts do not divide over --expert-model-parallel-size 4, 8",
        "4 heads do not divide over --tensor-model-parallel-size 8",
    ]
