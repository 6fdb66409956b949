"""Megatron-LM's own numbers: operations per iteration and padded vocabularies."""

import json
from pathlib import Path

import pytest

from megatrain.config import ModelConfig
from megatrain.config.derive.layer_sizes import layer_table
from megatrain.config.derive.model import padded_vocabulary, training_flops
from megatrain.config.schema.experts import ExpertsConfig

GOLDEN = Path(__file__).parents[1] / "golden"
LATER = (
    "mtp_num_layers",
    "multi_latent_attention",
    "hybrid_layer_pattern",
    "attention_output_gate",
)


def cases(name):
    return json.loads((GOLDEN / name).read_text())["cases"]


THERE = [case for case in cases("flops.json") if not any(case["arguments"].get(name) for name in LATER)]


@pytest.mark.parametrize("case", THERE, ids=lambda case: case["name"])
def test_flops_are_megatrons(case):
    arguments = case["arguments"]
    names = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "kv_channels",
        "padded_vocab_size",
        "swiglu",
    )
    model = ModelConfig(
        **{name: arguments[name] for name in names},
        num_query_groups=arguments["num_query_groups"] or arguments["num_attention_heads"],
        heterogeneous_layers_config_encoded_json=None,
    )
    freq = arguments["moe_layer_freq"]
    experts = ExpertsConfig(
        num_experts=arguments["num_experts"],
        moe_layer_freq=str(freq),
        moe_router_topk=arguments["moe_router_topk"],
        moe_ffn_hidden_size=arguments["moe_ffn_hidden_size"] or arguments["ffn_hidden_size"],
        moe_shared_expert_intermediate_size=arguments["moe_shared_expert_intermediate_size"],
    )
    length, packed = arguments["seq_length"], case.get("packed", {})
    found = training_flops(
        model,
        layer_table(model, experts),
        num_tokens=packed.get("total_real_tokens_in_batch", case["batch_size"] * length),
        sum_of_squared_lengths=packed.get("seqlen_squared_sum_in_batch", case["batch_size"] * length**2),
    )
    assert found == pytest.approx(case["flops"], rel=1e-12)


def test_enough_cases_are_compared():
    assert len(THERE) >= 11
    assert sum(case["arguments"]["num_experts"] is not None for case in THERE) >= 4


@pytest.mark.parametrize("case", cases("vocab_padding.json"))
def test_padded_vocabularies_are_megatrons(case):
    found = padded_vocabulary(
        case["vocab_size"],
        divisible_by=case["make_vocab_size_divisible_by"],
        tp_size=case["tensor_model_parallel_size"],
    )
    assert found == case["padded_vocab_size"]
