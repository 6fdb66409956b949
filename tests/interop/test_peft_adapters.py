"""Adapters in the format of peft: read with their base, written back, and the function of W + alpha / r * B A."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from canonical_weights import assert_same_tensors
from hand_made_folders import LLAMA, TOKENS, VOCAB, made, write_folder
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatrain.checkpoint.reader import CheckpointReader
from megatrain.tools.compare_logits import logits_of_heads, model_in_fp32
from megatrain.tools.main import main

RANK, ALPHA = 2, 6
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "down_proj"], "bias": "none",
    "modules_to_save": None, "use_dora": False, "rank_pattern": {}, "lora_dropout": 0.1,
}  # fmt: skip


def adapters_of(base: dict[str, Tensor]) -> dict[str, Tensor]:
    generator, found = torch.Generator().manual_seed(0), {}
    for name, weight in base.items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{module}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=generator)
            found[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=generator) / 8
    return found


def write_peft(folder: Path, tensors: dict[str, Tensor], **changed: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changed}))
    return folder


def logits(path: Path) -> Tensor:
    with CheckpointReader(path / "iter_0000000") as reader:
        return logits_of_heads(model_in_fp32(reader, VOCAB), TOKENS)[0]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("base") / "llama", made("llama"), LLAMA)


def test_a_folder_of_peft_is_read_computed_and_written_back(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = adapters_of(made("llama"))
    folder = write_peft(tmp_path / "peft", tensors)
    assert (
        main(["convert", "peft-to-megatrain", str(folder), str(tmp_path / "ours"), "--base", str(base)]) == 0
    )
    flags = "--lora-rank 2 --lora-alpha 6 --lora-dropout 0.1 --lora-target-modules q_proj down_proj"
    assert flags in capsys.readouterr().out
    merged = made("llama")
    for key, b in tensors.items():
        if key.endswith(".lora_B.weight"):
            name = key.removeprefix("base_model.model.").replace(".lora_B", "")
            merged[name] = merged[name] + ALPHA / RANK * b @ tensors[key.replace("lora_B", "lora_A")]
    write_folder(tmp_path / "merged", merged, LLAMA)
    assert main(["convert", "hf-to-megatrain", f"{tmp_path}/merged", f"{tmp_path}/expected"]) == 0
    torch.testing.assert_close(logits(tmp_path / "ours"), logits(tmp_path / "expected"), rtol=0, atol=1e-5)
    back = tmp_path / "back"
    assert main(["convert", "megatrain-to-peft", f"{tmp_path}/ours", str(back), "--base", "org/llama"]) == 0
    found = load_file(back / "adapter_model.safetensors")
    assert_same_tensors(found, tensors)
    written = json.loads((back / "adapter_config.json").read_text())
    assert written["target_modules"] == ["mlp.down_proj", "self_attn.q_proj"]
    expected = {"r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": "org/llama", "peft_type": "LORA"}
    assert {key: written[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("changed", "dropped", "expected"),
    [
        ({"use_dora": True}, "", "use_dora True is not supported"),
        ({"peft_type": "IA3"}, "", "peft_type IA3 with r 2"),
        ({"rank_pattern": {"q_proj": 4}}, "", "rank_pattern .* is not supported"),
        ({"r": 3}, "", r"has shape \[2, .*, not \[3, "),
        (
            {},
            "layers.0.self_attn.q_proj.lora",
            "decoder.layers.0.attention.q.weight and 0 more have no adapter",
        ),
        ({}, "rename", "adapts no linear layer of"),
    ],
)
def test_other_adapters_are_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], dropped: str, expected: str
) -> None:  # fmt: skip
    tensors = adapters_of(made("llama"))
    if dropped == "rename":
        tensors = {name.replace("q_proj", "x_proj"): value for name, value in tensors.items()}
    tensors = {name: value for name, value in tensors.items() if not dropped or dropped not in name}
    folder = write_peft(tmp_path / "peft", tensors, **changed)
    assert main(["convert", "peft-to-megatrain", str(folder), f"{tmp_path}/ours", "--base", str(base)]) == 2
    error = capsys.readouterr().err
    assert re.search(expected, error), error
    assert "fix: " in error


def test_a_checkpoint_without_adapters_and_a_folder_without_files_are_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "hf-to-megatrain", str(base), f"{tmp_path}/plain"]) == 0
    assert main(["convert", "megatrain-to-peft", f"{tmp_path}/plain", f"{tmp_path}/peft"]) == 2
    assert "has no adapters\n  fix: " in capsys.readouterr().err
    assert (
        main(["convert", "peft-to-megatrain", f"{tmp_path}/plain", f"{tmp_path}/x", "--base", str(base)]) == 2
    )
    assert "has no adapter_config.json and adapter_model.safetensors\n  fix: " in capsys.readouterr().err
