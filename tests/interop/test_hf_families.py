"""Every family: a tiny model of transformers has the same logits here, and comes back with equal tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import MODELS, VOCAB, tiny_model, write
from torch import Tensor

from megatrain.checkpoint.reader import CheckpointReader
from megatrain.inference.generate import all_logits
from megatrain.inference.stored_model import build_stored_model
from megatrain.tools.main import main

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def logits_here(checkpoint: Path, tokens: Tensor) -> Tensor:
    with CheckpointReader(checkpoint) as reader:
        model = build_stored_model(
            checkpoint, reader.manifest, vocab_size=VOCAB, spec=(), device=torch.device("cpu"), dtype=torch.float32
        )
    return all_logits(model, tokens).transpose(0, 1)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_same_logits_here_and_comes_back(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tiny_model(name)
    source = write(theirs, tmp_path / "theirs")
    tokens = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens, use_cache=False).logits
    assert main(["convert", "hf-to-megatrain", str(source), str(tmp_path / "ours")]) == 0
    found = logits_here(tmp_path / "ours" / "iter_0000000", tokens)
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max().item())
    back = tmp_path / "back"
    words = ["--architecture", MODELS[name][0]]
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "ours"), str(back), *words]) == 0
    output = capsys.readouterr().out
    assert "largest error" in output
    assert "not read" not in output, output
    assert_same(tensors(back), tensors(source))
