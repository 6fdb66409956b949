"""Fill in the middle: the recorded samples id by id, and samples that depend on their number alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from recorded import digest

from megatrain.config.derive.datasets import split_ranges
from megatrain.config.errors import ConfigError
from megatrain.config.schema.data import DataConfig
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.fill_in_middle import FillInMiddle, fill_in_middle
from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.samples.gpt_dataset import GPTDataset, SampleOptions
from megatrain.data.samples.gpt_index import build_index

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def config_of(golden: Path, special: list[str]) -> TokenizerConfig:
    return TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(golden),
        tokenizer_special_tokens=tuple(special),
    )


def middle_of(golden: Path, special: list[str], seed: int, options: dict[str, Any]) -> FillInMiddle:
    data = DataConfig(seq_length=8, fim_data=True, **options)
    return fill_in_middle(data, config_of(golden, special), seed)


def samples_of(golden: Path, case: dict[str, Any], rewrite: Callable[..., Any] | None) -> GPTDataset:
    source = IndexedDataset(golden / "corpus_text_document")
    length = case["sequence_length"]
    part = split_ranges(case["split"], len(source))[0]
    assert part is not None
    index = build_index(
        source.lengths, part, seq_length=length, seed=case["seed"], num_samples=case["samples"]
    )
    return GPTDataset(source, index, SampleOptions(seq_length=length, eod=0, rewrite=rewrite))


@pytest.mark.parametrize("number", range(5))
def test_samples_equal_the_recorded_ones_read_in_the_same_order(
    golden_text: Path, families: Path, number: int
) -> None:
    recorded = json.loads((families / "sentences" / "fim.json").read_text())
    tokens, case = recorded["tokenizer"], recorded["cases"][number]
    middle = middle_of(golden_text, tokens["added_special_tokens"], case["seed"], case["options"])
    assert [middle.prefix, middle.middle, middle.suffix, middle.pad] == tokens["ids"]
    draws = np.random.RandomState(case["seed"])
    samples = samples_of(golden_text, case, lambda ids, _: middle.rewritten(ids, draws))
    plain = samples_of(golden_text, case, None)
    read = [samples[k] for k in range(case["samples"])]
    for sample in case["first"]:
        k = sample["k"]
        assert plain[k].tokens.tolist() == sample["plain"]
        assert read[k].tokens.tolist() == sample["tokens"], f"sample {k}"
        assert read[k].labels[-1] == sample["last_label"]
    for field in ("tokens", "labels", "loss_mask"):
        found = np.stack([getattr(sample, field) for sample in read])
        assert digest(found) == case[f"{field}_sha256"], field
    assert digest(samples[0].tokens) == case["sample_0_read_again_sha256"]


def test_a_sample_is_the_same_in_any_order(golden_text: Path) -> None:
    special = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"]
    case = {"sequence_length": 64, "split": "1,0,0", "seed": 3, "samples": 40}
    one, other = (
        samples_of(golden_text, case, middle_of(golden_text, special, seed, {"fim_rate": 0.9}))
        for seed in (3, 4)
    )
    first = [one[k].tokens.tolist() for k in range(20)]
    assert [one[k].tokens.tolist() for k in reversed(range(20))] == first[::-1]
    assert [other[k].tokens.tolist() for k in range(20)] != first, "it depends on the seed"
    assert sum(3000 in tokens for tokens in first) > 10


def test_a_tokenizer_without_the_tokens_is_named_with_the_remedy(golden_text: Path) -> None:
    with pytest.raises(ConfigError, match=r"--fim-prefix-token <fim_prefix> is \d+ tokens") as error:
        middle_of(golden_text, [], 1, {})
    assert "--tokenizer-special-tokens" in error.value.problems[0].fix
