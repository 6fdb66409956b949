"""Parameters of BERT and T5 by Megatron-LM's names: what is read from them is written under the same names and shapes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatrain.interop.megatron.arguments import plan_of
from megatrain.interop.megatron.names import FusedRows, family_of, parts_of
from megatrain.interop.megatron.their_tensors import their_tensors

CASES = {"bert": ("bert", "bert_mlm"), "t5": ("t5", "t5_relative")}
IN_CHECKPOINTS = {
    r"layers\.\d+\.": "layers.",
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    r"lm_head\.output_layer": "output_layer",
}
"""Parts of names in a model, and in checkpoints of uniform layers."""
ARGUMENTS: dict[str, Any] = {
    "num_layers": 2, "encoder_num_layers": 2, "hidden_size": 24, "num_attention_heads": 2, "padded_vocab_size": 256,
    "world_size": 1, "seq_length": 48, "encoder_seq_length": 48, "max_position_embeddings": 64, "lr": 1e-3,
    "micro_batch_size": 2, "global_batch_size": 4, "train_iters": 12, "swiglu": False, "add_bias_linear": True,
    "params_dtype": None, "decoder_seq_length": None, "mock_data": True,
}  # fmt: skip


@pytest.mark.parametrize(("family", "case"), [(family, case) for family in CASES for case in CASES[family]])
def test_names_are_written_as_they_are_read(family: str, case: str, families: Path) -> None:
    recorded = json.loads((families / family / f"{case}.parameters.json").read_text())
    shapes = {line["name"]: tuple(line["shape"]) for line in recorded}
    heads = 2 if case == "bert_mlm" else 4
    fused = FusedRows(heads, heads, is_gated=case == "t5_relative")
    canonical = {part.name: part.shape for name in shapes for part in parts_of(name, shapes[name], fused)}
    num_layers = 3 if case == "bert" else 2
    expected = {}
    for name, shape in shapes.items():
        stored = name
        for pattern, replacement in IN_CHECKPOINTS.items():
            stored = re.sub(pattern, replacement, stored)
        expected[stored] = (num_layers, *shape) if ".layers." in name else shape
    found = their_tensors(
        canonical,
        fused,
        is_latent=False,
        is_hybrid=False,
        is_uniform=True,
        padded_vocab_size=256 if family == "bert" else 352,
    )
    assert {tensor.name: tensor.shape for tensor in found} == expected
    assert family_of(expected) == family_of(shapes) == family


@pytest.mark.parametrize("has_head", [True, False])
def test_the_head_for_the_order_of_sentences_is_an_argument(*, has_head: bool, tmp_path: Path) -> None:
    plan = plan_of({**ARGUMENTS, "bert_binary_head": has_head}, "bert", tmp_path)
    assert plan.config.model.bert_no_binary_head is not has_head


def test_settings_of_the_tokenizer_are_no_part_of_the_plan(tmp_path: Path) -> None:
    """The plan has token ids alone; `tokenizer_settings` reads the others."""
    given = {"tokenizer_type": "BertWordPieceLowerCase", "tokenizer_hf_no_include_special_tokens": True}
    assert (
        plan_of({**ARGUMENTS, **given}, "bert", tmp_path).config.tokenizer.tokenizer_type == "NullTokenizer"
    )


def test_a_pattern_of_a_checkpoint_may_begin_with_an_mlp(tmp_path: Path) -> None:
    pattern = {"hybrid_layer_pattern": "-*", "position_embedding_type": "none"}
    assert plan_of({**ARGUMENTS, **pattern}, "hybrid", tmp_path).config.model.hybrid_layer_pattern == "-*"
