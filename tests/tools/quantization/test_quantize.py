"""`megatrain quantize`: transformers opens each folder, with the logits of our model with the same weights; a stopped command continues."""

import json
from pathlib import Path
from typing import Any

import everyday
import numpy as np
import pytest
import torch
from canonical_weights import dequantized, tensors_of
from tiny_models import VOCAB, tiny_model, write
from torch import Tensor

from megatrain.config.schema.quantization import QUANTIZATION_FORMATS
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.interop.hf.checkpoint import HfCheckpoint
from megatrain.tools.calibration_set import read_samples
from megatrain.tools.compare_logits import logits_of_heads, model_in_fp32
from megatrain.tools.main import main
from megatrain.tools.quantization.layer import LayerRounding

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.arange(32)[None] * 7919 % VOCAB


def folder_of(name: str, tmp_path: Path, **sizes: Any) -> Path:
    model = tiny_model(name)
    if sizes:
        model = type(model)(type(model.config)(**model.config.to_dict() | sizes)).eval()
    return write(model, tmp_path / "model")


def dataset(tmp_path: Path, num_tokens: int = 600) -> str:
    tokens = np.random.default_rng(0).integers(0, VOCAB, num_tokens).astype(np.uint16)
    with IndexedWriter(tmp_path / "data", "uint16") as writer:
        writer.add_document([tokens])
    return str(tmp_path / "data")


def calibrated(tmp_path: Path, method: str) -> list[str]:
    flags = f"--method {method} --calibration-samples 16 --calibration-length 32 --calibration-data"
    return [*flags.split(), dataset(tmp_path)]


def calibration_tokens(tmp_path: Path, source: Path) -> Tensor:
    """Return the samples of `calibrated`."""
    sizes = {"count": 16, "length": 32, "vocab_size": VOCAB}
    return read_samples(str(tmp_path / "data"), HfCheckpoint(source), flag="", remedy="", **sizes)


def quantize(source: Path, target: Path, name: str, *flags: str) -> Path:
    groups = ["--group-size", "16"] if name == "int4" else []
    assert main(["quantize", f"hf:{source}", str(target), "--format", name, *groups, *flags]) == 0
    return target


def loaded(folder: Path) -> Any:
    """Return the folder's model in transformers, which has found each of its tensors, and no others."""
    pytest.importorskip("compressed_tensors")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@torch.no_grad()
def logits_there(folder: Path, *, rounds_inputs: bool = True) -> Tensor:
    model = loaded(folder)
    found = model(TOKENS, use_cache=False).logits  # decompresses the weights
    if rounds_inputs:
        return found
    for module in model.modules():
        module.quantization_enabled = False
    return model(TOKENS, use_cache=False).logits


def logits_here(folder: Path, tokens: Tensor = TOKENS) -> Tensor:
    return logits_of_heads(model_in_fp32(HfCheckpoint(folder), VOCAB), tokens)[0]


@torch.no_grad()
def first_layer(folder: Path, tokens: Tensor) -> Tensor:
    """Return the outputs of the first layer of a folder without quantized weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: Tensor = model.eval()(tokens, use_cache=False, output_hidden_states=True).hidden_states[1]
    return found


WITH_EXPERTS = ("Mixtral", "Qwen2-MoE")
EXPERTS = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 32)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("Llama 3", name) for name in QUANTIZATION_FORMATS),
        *(
            everyday.nightly("Mixtral", name)
            for name in ("fp8-tensor", "fp8-channel", "int8-weights", "int4")
        ),
        everyday.nightly("Qwen3.5", "int8"),
    ],
)
def test_transformers_opens_every_format_with_the_logits_of_our_model(
    family: str, name: str, tmp_path: Path
) -> None:
    sizes = EXPERTS if family in WITH_EXPERTS else {}
    if name == "fp8-block":
        sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
    source = folder_of(family, tmp_path, **sizes)
    folder = quantize(source, tmp_path / "quantized", name)
    ours = logits_here(dequantized(folder, name, tmp_path / "dequantized"))
    theirs = logits_there(folder, rounds_inputs=False)
    assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())
    rounded = logits_there(folder)
    exact = logits_here(source)
    limit = 0.5 if name == "int4" else 0.15
    assert float((rounded - exact).norm()) < limit * float(exact.norm())
    described = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "compressed-tensors"


ADDS_UP = {("awq", "Llama, tied")}
"""AWQ lowers the error of a layer's outputs, which it compares. Here it does so in the first three layers, and not in the logits."""
FAMILIES = [
    "Pythia",
    "Qwen2-MoE",
    *map(
        everyday.nightly,
        ("Llama 2", "Phi-3", "Llama, tied", "Gemma 2", "Qwen3", "OLMo-2", "Qwen2", "Mixtral"),
    ),
]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibrated_methods_are_better_than_rounding(name: str, method: str, tmp_path: Path) -> None:
    source = folder_of(name, tmp_path, **EXPERTS if name in WITH_EXPERTS else {})
    rounded = quantize(source, tmp_path / "rtn", "int4")
    folder = quantize(source, tmp_path / method, "int4", *calibrated(tmp_path, method))
    tokens = calibration_tokens(tmp_path, source)
    plain = [dequantized(one, "int4", tmp_path / f"{one.name}-plain") for one in (folder, rounded)]
    for outputs in (
        *([first_layer] if method == "awq" else []),
        *([] if (method, name) in ADDS_UP else [logits_here]),
    ):
        exact = outputs(source, tokens)
        error, by_rounding = (float((outputs(one, tokens) - exact).norm()) for one in plain)
        assert error < by_rounding
    assert float((logits_there(folder) - logits_here(tmp_path / f"{method}-plain")).abs().max()) < 1e-4


def test_scaled_channels_leave_the_function_as_it_is(tmp_path: Path) -> None:
    """With 8 bits only the scaling of AWQ could change the outputs by more than the rounding."""
    source = folder_of("Llama 2", tmp_path)
    folder = quantize(source, tmp_path / "awq", "int8-weights", *calibrated(tmp_path, "awq"))
    assert not torch.equal(
        *(tensors_of(one)["model.layers.0.input_layernorm.weight"] for one in (source, folder))
    )
    assert float((logits_there(folder) - logits_here(source)).abs().max()) < 0.1


def test_scales_of_the_cache_are_those_of_the_largest_keys_and_values(tmp_path: Path) -> None:
    source = folder_of("Llama 3", tmp_path)
    flags = [*calibrated(tmp_path, "rtn"), "--kv-cache-scales"]
    folder = quantize(source, tmp_path / "quantized", "fp8-channel", *flags)
    found = tensors_of(folder)
    scale = found["model.layers.0.self_attn.v_scale"]
    tokens = calibration_tokens(tmp_path, source)
    layer = transformers.AutoModelForCausalLM.from_pretrained(source).model
    values = layer.layers[0].self_attn.v_proj(layer.layers[0].input_layernorm(layer.embed_tokens(tokens)))
    assert float(scale) == pytest.approx(float(values.abs().max()) / 448, rel=1e-5)
    assert all(f"model.layers.{number}.self_attn.k_scale" in found for number in range(4))
    assert torch.equal(loaded(folder).model.layers[0].self_attn.v_scale.data, scale)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_killed_command_continues_with_the_layer_that_it_had_not_finished(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, flags = folder_of("Llama 3", tmp_path), calibrated(tmp_path, method)
    whole = quantize(source, tmp_path / "whole", "int4", *flags)
    target, layers, rounded = tmp_path / "killed", list[int](), LayerRounding.files_tensors

    def stopping(self: LayerRounding, layer: int, statistics: Any) -> dict[str, Tensor]:
        layers.append(layer)
        if layers == [0, 1, 2]:
            raise KeyboardInterrupt
        return rounded(self, layer, statistics)

    monkeypatch.setattr(LayerRounding, "files_tensors", stopping)
    words = ["quantize", f"hf:{source}", str(target), "--format", "int4", "--group-size", "16", *flags]
    assert main(words) == 130
    assert not target.exists()
    assert main([*words, "--dtype", "bf16"]) == 2
    assert "has been begun with other settings" in capsys.readouterr().err
    assert main(words) == 0
    assert layers == [0, 1, 2, 2, 3]
    assert {file.name: file.read_bytes() for file in target.iterdir()} == {
        file.name: file.read_bytes() for file in whole.iterdir()
    }


WRONG = {
    "--format int3": "use --format with one of",
    "--format int4": "use --group-size 16",
    "--format fp8-block": "use --format fp8-channel",
    "--format fp8-channel --method gptq --calibration-data DATA": "use --method rtn",
    "--format fp8-channel --group-size 16": "remove --group-size",
    "--format int4 --group-size 0": "give --group-size",
    "--format int8 --method gptq": "add --calibration-data",
    "--format int8 --kv-cache-scales": "add --calibration-data",
    "--format int8 --calibration-data DATA": "use --method gptq or awq",
    "--format int8 --method awq --calibration-data DATA": "lower --calibration-samples",
    "--format int8 --method awq --calibration-data DATA --calibration-length 65": "use --calibration-length 64 or less",
    "--format int8 --method awq --calibration-data DATA --calibration-samples 0": "give --calibration-samples",
    "--format int8 --method awq --calibration-data NONE": "correct the path",
}


def test_wrong_pairs_are_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, data = folder_of("Llama 3", tmp_path), dataset(tmp_path)
    monkeypatch.setattr(HfCheckpoint, "read_box", None)
    for flags, fix in WRONG.items():
        words = flags.replace("DATA", data).replace("NONE", str(tmp_path / "none")).split()
        assert main(["quantize", f"hf:{source}", str(tmp_path / "target"), *words]) == 2, flags
        assert fix in capsys.readouterr().err.partition("fix:")[2], flags
    assert {path.name for path in tmp_path.iterdir()} == {"model", "data.bin", "data.idx"}


@pytest.mark.parametrize(
    ("name", "problem"),
    {
        "GPT-2": "is not quantized",
        "gpt-oss": "its experts are stacked",
        "Mixtral": "use --format with one of fp8-tensor",
        "T5 v1.1": "is not quantized",
        "Megatron BERT": "is not quantized",
    }.items(),
)
def test_families_that_no_reader_has_are_refused(
    name: str,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = folder_of(name, tmp_path)
    monkeypatch.setattr(HfCheckpoint, "read_box", None)
    assert main(["quantize", f"hf:{source}", str(tmp_path / "target"), "--format", "int8"]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())
