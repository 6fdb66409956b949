"""Hybrids and transformers: forms of config.json, limits of step sizes, runs with prediction heads, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, VOCAB, tiny_model, write

import pretrain
from megatrain.config import ConfigError
from megatrain.interop.hf.config_file import ConfigFile
from megatrain.interop.hf.families.table import FAMILIES
from megatrain.interop.hf.settings import plan_of, read_settings
from megatrain.tools.compare_logits import logits_of_transformers
from megatrain.tools.main import main

INFINITY = float("inf")
HUB = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "attention_head_dim": 8, "intermediate_size": 80,
    "max_position_embeddings": 64, "mamba_num_heads": 8, "mamba_head_dim": 4, "n_groups": 2, "ssm_state_size": 6,
    "num_hidden_layers": 4, "hybrid_override_pattern": "M-*M", "time_step_limit": [0.0, INFINITY], "rms_norm_eps": 1e-6,
}  # fmt: skip
"""The config.json of Nemotron-H on the hub has these keys."""
NEMOTRON, MAMBA2, BAMBA, FALCON = (MODELS[name] for name in ("Nemotron-H", "Mamba-2", "Bamba", "Falcon-H1"))
RUN = (
    "--model-family hybrid --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --normalization RMSNorm --disable-bias-linear"
    " --mamba-num-heads 8 --mamba-head-dim 4 --mamba-num-groups 2 --mamba-state-dim 6 --num-experts 6 --moe-router-topk 2"
    " --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-ffn-hidden-size 12 --hidden-dropout 0"
    " --attention-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 97 --micro-batch-size 2 --lr 1e-2"
    " --train-iters 1 --eval-iters 0 --device cpu"
).split()


def settings_of(architecture: str, keys: dict[str, Any]) -> dict[str, Any]:
    return read_settings(FAMILIES[architecture], ConfigFile(Path("config.json"), keys))


def test_the_pattern_of_the_hub_means_the_list_of_transformers() -> None:
    found = settings_of("NemotronHForCausalLM", HUB)
    assert found == settings_of(*NEMOTRON)
    assert found["model.hybrid_layer_pattern"] == "M-*M"
    older = {**NEMOTRON[1], "layers_block_type": ["mamba", "mlp", "attention", "mamba"]}
    assert settings_of("NemotronHForCausalLM", older) == found


def test_a_pattern_may_begin_with_an_mlp() -> None:
    found = settings_of(
        "NemotronHForCausalLM", {**NEMOTRON[1], "layers_block_type": ["mlp", "full_attention"]}
    )
    assert plan_of(found, VOCAB, Path("config.json")).config.model.hybrid_layer_pattern == "-*"


@pytest.mark.parametrize(
    ("model", "changes", "problem"),
    [
        (MODELS["Nemotron 3"], {"num_experts_per_tok": 1}, "norm_topk_prob is True.*that of one is not"),
        (MODELS["DeepSeek-V3"], {"norm_topk_prob": False}, "norm_topk_prob is False"),
        (NEMOTRON, {"layers_block_type": ["linear_attention", "sparse"]}, "'sparse' is not one of"),
        (NEMOTRON, {"layers_block_type": None, "hybrid_override_pattern": "MD"}, "M is Mamba-2, E experts"),
        (NEMOTRON, {"layer_norm_epsilon": 1e-6}, "the gated norm of Mamba-2 has 1e-05"),
        (NEMOTRON, {"conv_kernel": 3}, "the convolution of Mamba-2 reads 4 tokens"),
        (NEMOTRON, {"use_conv_bias": False}, "the convolution of Mamba-2 has biases"),
        (NEMOTRON, {"use_bias": True}, "use_bias is True"),
        (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'"),
        (NEMOTRON, {"tie_word_embeddings": True}, "transformers does not tie"),
        (NEMOTRON, {"time_step_limit": [0.0, 1.0]}, "step sizes have no limit"),
        (MAMBA2, {"time_step_limit": [0.1, INFINITY]}, "step sizes have no limit"),
        (MAMBA2, {"head_dim": 5}, r"num_heads 16, expand \* hidden_size gives 64"),
        (BAMBA, {"mamba_proj_bias": True}, "mamba_proj_bias is True"),
        (FALCON, {"tie_word_embeddings": True}, "the embedding and the output layer have factors"),
        (
            FALCON,
            {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            "norm of Mamba-2 follows the gate",
        ),
        (FALCON, {"mamba_d_head": 5}, "mamba_n_heads 8 have mamba_d_ssm 48"),
        (FALCON, {"ssm_multipliers": [1.0]}, "it has 5 numbers"),
        (BAMBA, {"attn_layer_indices": [3]}, "is not an integer of at least 0 and at most 2"),
    ],
)
def test_what_models_here_lack_is_refused(
    model: tuple[str, dict[str, Any]], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings_of(model[0], {"rms_norm_eps": 1e-5} | model[1] | changes)


@pytest.mark.filterwarnings("ignore")
def test_step_sizes_have_no_lower_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Transformers raises small steps of prompts: a note says so, and logits are those without that limit."""
    from test_hf_families import logits_here

    theirs = tiny_model("Nemotron-H")
    tokens = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    (expected,) = logits_of_transformers(theirs, tokens)
    for layer in (0, 2):
        theirs.model.layers[layer].mixer.time_step_limit = (0.05, INFINITY)
    theirs.config.time_step_min = 0.05
    (raised,) = logits_of_transformers(theirs, tokens)
    source = write(theirs, tmp_path / "theirs")
    file = source / "model.safetensors"  # names of both versions are read
    renamed = {name.replace("backbone.", "model."): tensor for name, tensor in load_file(file).items()}
    save_file(renamed | {"mtp.layers.0.norm.weight": torch.ones(32)}, file, metadata={"format": "pt"})
    keys = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(keys))
    assert main(["convert", "hf-to-megatrain", str(source), str(tmp_path / "ours")]) == 0
    output = capsys.readouterr().out
    assert "raises step sizes of Mamba-2 to time_step_min (0.05)" in output
    assert "layers of multi-token prediction are left out" in output
    (found,) = logits_here(tmp_path / "ours" / "iter_0000000", tokens)
    assert (found - expected).abs().max() < 1e-5
    assert (found - raised).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore")
def test_weights_here_hold_the_factors_of_falcon_h1(tmp_path: Path) -> None:
    """Logits are those with factors; a folder that is written has none, and the same logits in transformers."""
    from test_hf_families import logits_here

    one = "embedding lm_head key attention_in attention_out ssm_in ssm_out".split()
    factors = {f"{name}_multiplier": 1.1 + 0.2 * number for number, name in enumerate(one)}
    factors |= {"mlp_multipliers": [0.6, 1.4], "ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 2.0]}
    theirs = tiny_model("Falcon-H1", **factors)
    tokens = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    (expected,) = logits_of_transformers(theirs, tokens)
    (without,) = logits_of_transformers(tiny_model("Falcon-H1"), tokens)
    assert (expected - without).abs().max() > 1e-2
    source, back = write(theirs, tmp_path / "theirs"), tmp_path / "back"
    assert main(["convert", "hf-to-megatrain", str(source), str(tmp_path / "ours")]) == 0
    (found,) = logits_here(tmp_path / "ours" / "iter_0000000", tokens)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "ours"), str(back)]) == 0
    keys = json.loads((back / "config.json").read_text())
    assert {keys[f"{name}_multiplier"] for name in one} == {1.0}
    again = type(theirs).from_pretrained(back, dtype=torch.float32)
    assert (logits_of_transformers(again, tokens)[0] - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.filterwarnings("ignore")
def test_a_run_with_prediction_heads_is_exported_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--hybrid-layer-pattern", "ME*-/*E/*E", "--position-embedding-type", "none", "--squared-relu"]
    words += ["--untie-embeddings-and-output-weights", "--moe-shared-expert-intermediate-size", "20"]
    pretrain.main([*RUN, *words, "--save", str(tmp_path / "run")])
    capsys.readouterr()
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "run"), str(tmp_path / "back")]) == 0
    output = capsys.readouterr().out
    assert "NemotronHForCausalLM" in output
    assert "largest error" in output
    assert "multi-token prediction are left out" in output


@pytest.mark.parametrize(
    ("pattern", "words", "problem"),
    [
        (
            "MG*-",
            "--squared-relu --untie-embeddings-and-output-weights",
            "hybrid_override_pattern is 'MG\\*-'",
        ),
        ("M*-", "--squared-relu", "transformers does not tie"),
        ("ME", "--untie-embeddings-and-output-weights --squared-relu", "moe_shared_expert_intermediate_size"),
        (
            "M*-",
            "--untie-embeddings-and-output-weights --quick-geglu",
            r"differs: --quick-geglu is on here, off there\n",
        ),
    ],
)
def test_an_export_names_the_difference(pattern: str, words: str, problem: str, tmp_path: Path) -> None:
    from megatrain.config import Facts, parse, resolve
    from megatrain.interop.hf.settings import fitting_family

    flags = [*RUN, "--hybrid-layer-pattern", pattern, "--position-embedding-type", "none", *words.split()]
    plan = resolve(parse(flags), Facts(world_size=1, vocab_size=97, eod_id=0))
    with pytest.raises(ConfigError, match=problem):
        fitting_family(plan.config, 97, tmp_path, "NemotronHForCausalLM")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pattern", ["G-G-*-", "*-G-"])
def test_delta_nets_and_mlps_in_turns_are_a_qwen(
    pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--position-embedding-type rope --rotary-percent 0.25 --swiglu --qk-layernorm --apply-layernorm-1p"
        " --attention-output-gate --untie-embeddings-and-output-weights --init-method-std 0.2 --linear-key-head-dim 8"
        " --linear-value-head-dim 6 --linear-num-key-heads 2 --linear-num-value-heads 4 --ffn-hidden-size 64"
    )
    run = ["--hybrid-layer-pattern", pattern, *words.split(), "--save", str(tmp_path / "run")]
    assert pretrain.main([*RUN, *run]) == 0
    capsys.readouterr()
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "run"), str(tmp_path / "theirs")]) == 0
    assert "Qwen3_5ForCausalLM" in (printed := capsys.readouterr().out)
    assert "largest error" in printed
    assert main(["convert", "hf-to-megatrain", str(tmp_path / "theirs"), str(tmp_path / "back")]) == 0
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "back"), str(tmp_path / "again")]) == 0
    stored, again = (
        {
            name: one
            for file in (tmp_path / folder).glob("*.safetensors")
            for name, one in load_file(file).items()
        }
        for folder in ("theirs", "again")
    )
    assert stored.keys() == again.keys() != set()
    assert all(torch.equal(one, again[name]) for name, one in stored.items())
