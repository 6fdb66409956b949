"""FLOPs and padded vocabularies equal Megatron-LM's; norms are recomputed by default where the cost is small."""

import json
from pathlib import Path

import pytest

from megatrain.config import Facts, ModelConfig, parse, resolve
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.subjects.data import padded_vocabulary
from megatrain.config.subjects.model import percent_of_layer
from megatrain.config.subjects.model_spec import describe_model

GOLDEN = Path(__file__).parents[2] / "golden"


def cases(name):
    return json.loads((GOLDEN / name).read_text())["cases"]


CASES = cases("flops.json")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_flops_equal_megatron_lm(case):
    arguments = case["arguments"]
    names = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "kv_channels",
        "padded_vocab_size",
        "swiglu",
        "attention_output_gate",
    )
    if arguments["multi_latent_attention"]:
        names += (
            "multi_latent_attention",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_head_dim",
            "qk_pos_emb_head_dim",
            "v_head_dim",
        )
    model = ModelConfig(
        **{name: arguments[name] for name in names},
        num_query_groups=arguments["num_query_groups"] or arguments["num_attention_heads"],
        heterogeneous_layers_config_encoded_json=None,
        mtp_num_layers=arguments["mtp_num_layers"],
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
    found = describe_model(model, experts, vocab_size=model.padded_vocab_size).training_flops(
        num_tokens=packed.get("total_real_tokens_in_batch", case["batch_size"] * length),
        sum_of_squared_lengths=packed.get("seqlen_squared_sum_in_batch", case["batch_size"] * length**2),
    )
    assert found == pytest.approx(case["flops"], rel=1e-12)


def test_flops_of_latent_experts_are_those_of_the_formula():
    """Megatron-LM: 4 l f k, times 3/2 if gated, and 4 h l for the projections; forward, per token, and times 3."""
    sizes = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_hidden_size": 96,
        "kv_channels": 16,
    }
    model = ModelConfig(
        **sizes,
        padded_vocab_size=128,
        swiglu=True,
        num_query_groups=4,
        heterogeneous_layers_config_encoded_json=None,
    )
    found = {}
    for latent in (None, 24):
        experts = ExpertsConfig(
            num_experts=8,
            moe_router_topk=3,
            moe_ffn_hidden_size=40,
            moe_shared_expert_intermediate_size=48,
            moe_latent_size=latent,
        )
        spec = describe_model(model, experts, vocab_size=128)
        found[latent] = spec.training_flops(num_tokens=10, sum_of_squared_lengths=100)
    routed = 4 * 3 * 40 * 3 // 2
    assert found[24] - found[None] == 3 * 10 * 2 * (routed * (24 - 64) + 4 * 64 * 24)


def test_enough_cases_are_compared():
    assert len(CASES) >= 12
    assert any(case["arguments"]["multi_latent_attention"] for case in CASES)
    assert sum(case["arguments"]["num_experts"] is not None for case in CASES) >= 4
    assert any(case["arguments"]["mtp_num_layers"] for case in CASES)


@pytest.mark.parametrize("case", cases("vocab_padding.json"))
def test_padded_vocabularies_equal_megatron_lm(case):
    found = padded_vocabulary(
        case["vocab_size"],
        divisible_by=case["make_vocab_size_divisible_by"],
        tp_size=case["tensor_model_parallel_size"],
    )
    assert found == case["padded_vocab_size"]


SHAPE = (
    "--num-layers 1 --num-attention-heads 4 --seq-length 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 99"
    " --micro-batch-size 1 --train-iters 1 --lr 1e-3 --position-embedding-type rope --bf16"
)


def plan(flags, device="cuda"):
    return resolve(parse([*SHAPE.split(), *flags.split()]), Facts(device=device, vocab_size=99, eod_id=98))


@pytest.mark.parametrize(
    ("flags", "device", "expected"),
    [
        ("--hidden-size 4096", "cuda", True),
        ("--hidden-size 8192", "cuda", True),
        ("--hidden-size 768", "cuda", False),
        ("--hidden-size 768 --recompute-norms", "cuda", True),
        ("--hidden-size 4096 --no-recompute-norms", "cuda", False),
        ("--hidden-size 4096", "cpu", False),
        ("--hidden-size 4096 --norm-position post", "cuda", False),
        ("--hidden-size 4096 --recompute-activations", "cuda", False),
    ],
)
def test_the_default_depends_on_the_cost(flags, device, expected):
    assert plan(flags, device).config.training.recompute_norms is expected


@pytest.mark.parametrize(
    ("flags", "device", "expected"),
    [
        ("--hidden-size 4096 --ffn-hidden-size 14336 --swiglu", "cuda", True),
        ("--hidden-size 4096 --ffn-hidden-size 14336 --swiglu --recompute-activations", "cuda", True),
        ("--hidden-size 2048", "cuda", False),
        ("--hidden-size 2048 --recompute-mlp-act", "cuda", True),
        ("--hidden-size 4096 --no-recompute-mlp-act", "cuda", False),
        ("--hidden-size 4096 --lora-rank 8", "cuda", False),
        ("--hidden-size 4096 --lora-rank 8 --recompute-mlp-act", "cuda", True),
        ("--hidden-size 4096 --qat int8", "cuda", False),
        ("--hidden-size 4096 --qat int4", "cuda", True),
        ("--hidden-size 4096", "cpu", False),
        (
            "--hidden-size 4096 --recompute-granularity full --recompute-method block --recompute-num-layers 1",
            "cuda",
            True,
        ),
    ],
)
def test_activations_are_recomputed_where_that_costs_little(flags, device, expected):
    assert plan(flags, device).config.training.recompute_mlp_act is expected


def test_a_note_has_the_cost_and_the_flag_against_it():
    (note,) = [note for note in plan("--hidden-size 4096").notes if "norms are recomputed" in note]
    assert "about 0.4 % of a step at --hidden-size 4096" in note
    assert "--no-recompute-norms" in note
    given = plan("--hidden-size 4096 --recompute-norms").notes
    assert not [note for note in given if "norms are recomputed" in note]


def test_the_cost_is_smaller_in_wider_models():
    assert percent_of_layer(8 * 4096, 4096) == pytest.approx(0.41, abs=0.01)
    assert percent_of_layer(8 * 8192, 8192) == pytest.approx(percent_of_layer(8 * 4096, 4096) / 2)
