"""A calibration set has the tokens of the model's tokenizer, and enough of them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.config.errors import InputError
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.tools.calibration_set import read_samples


def read(prefix: Path, fingerprint: str | None, **sizes: int) -> torch.Tensor:
    reader: Any = SimpleNamespace(manifest=SimpleNamespace(state={"tokenizer_fingerprint": fingerprint}))
    sizes = {"count": 3, "length": 5, "vocab_size": 20} | sizes
    return read_samples(str(prefix), reader, flag="--data", remedy="lower --count", **sizes)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with IndexedWriter(str(tmp_path / "data"), "uint16") as writer:
        writer.add_document([np.arange(20)])
    description = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_fingerprint": "ids:a"}
    (tmp_path / "data.json").write_text(json.dumps(description))
    return tmp_path / "data"


def test_samples_are_at_equal_distances_from_the_first_to_the_last_token(prefix: Path) -> None:
    expected = torch.tensor([0, 7, 15])[:, None] + torch.arange(5)
    for fingerprint in (None, "ids:a", "file:b:ids:a"):
        assert torch.equal(read(prefix, fingerprint), expected)


@pytest.mark.parametrize(
    ("fingerprint", "sizes", "problem"),
    [
        ("other:b", {}, "another tokenizer"),
        ("ids:a", {"vocab_size": 19}, "has the token 19, and the model has 19"),
        ("ids:a", {"count": 5}, "fix: lower --count, or name a longer dataset"),
    ],
)
def test_other_and_too_few_tokens_are_refused(
    prefix: Path, fingerprint: str, sizes: dict[str, int], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        read(prefix, fingerprint, **sizes)
