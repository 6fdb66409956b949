"""Every family: a tiny model of transformers has the same logits here, and comes back with equal tensors."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from canonical_weights import assert_same_tensors, tensors_of
from metrics_files import logged_losses
from safetensors.torch import save_file
from tiny_models import MASKED, MODELS, VOCAB, tiny_model, write
from torch import Tensor
from transformers_reference import LEARNING_RATE, TRAINING, global_batches, training_losses

import pretrain
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.config import ConfigError, Facts, parse, resolve
from megatrain.interop.hf.config_file import ConfigFile
from megatrain.interop.hf.families.table import FAMILIES
from megatrain.interop.hf.family import Family
from megatrain.interop.hf.settings import fitting_family, read_settings
from megatrain.tools.checkpoint import rewrite
from megatrain.tools.compare_logits import logits_of_heads, logits_of_transformers, model_in_fp32
from megatrain.tools.main import main

transformers = pytest.importorskip("transformers")
FLAGS = ["--use-checkpoint-args", *TRAINING, *"--micro-batch-size 1 --global-batch-size 1".split()]
EVERY = MODELS | MASKED
REQUIRED = {
    *"hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings rms_norm_eps".split(),
    *"moe_intermediate_size n_embd n_layer n_head".split(),
    *"d_model d_ff d_kv num_layers num_heads".split(),
}
"""Keys without which a config.json is refused, although transformers has defaults."""
REQUIRED_BY = {
    "GPT-2": {"n_positions"},
    "GPT-2, exact GELU": {"n_positions"},
    **{name: {"feed_forward_proj", "scale_decoder_outputs"} for name in MASKED if name.startswith("T5")},
    "DeepSeek-V2": {"num_experts_per_tok"},
    "DeepSeek-V2, groups": {"num_experts_per_tok", "topk_group"},
    "DeepSeek-V3": {"num_key_value_heads"},
    "DeepSeek-V3.2": {"num_key_value_heads"},
    "GLM-5": {"num_key_value_heads"},
    "Mamba-2": {"num_heads", "head_dim"},
    "Bamba": {"mamba_n_heads"},
    "Falcon-H1": {"mamba_n_heads", "mamba_d_ssm"},
    "Falcon-H1 with norms": {"mamba_n_heads", "mamba_d_ssm", "mamba_norm_before_gate"},
}
OPTIONAL_BY = {name: {"num_hidden_layers", "moe_intermediate_size"} for name in ("Nemotron-H", "Nemotron 3")}
"""The kinds of layers give their number, and models without experts have no sizes of them."""
pytestmark = pytest.mark.filterwarnings("ignore")


ALWAYS = (
    "Llama 3",
    "Qwen2-MoE",
    "Qwen3-Next",
    "Nemotron 3",
    "Bamba",
    "GPT-2",
    "Pythia",
    "Gemma 3",
    "Phi-3",
    "DeepSeek-V3",
    "gpt-oss",
    *MASKED,
)
"""Models of every test run: each kind of fused tensor, experts, windows. Nightly runs have all."""
every_model = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.nightly) for name in EVERY]
)


def logits_here(checkpoint: Path, tokens: Tensor) -> list[Tensor]:
    with CheckpointReader(checkpoint) as reader:
        return logits_of_heads(model_in_fp32(reader, VOCAB), tokens)


@every_model
def test_a_model_has_the_same_logits_here_and_comes_back(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are read and written in pieces of a few rows."""
    monkeypatch.setattr(rewrite, "CHUNK_BYTES", 1000)
    theirs = tiny_model(name)
    source = write(theirs, tmp_path / "theirs")
    tokens = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = logits_of_transformers(theirs, tokens)
    assert main(["convert", "hf-to-megatrain", str(source), str(tmp_path / "ours")]) == 0
    found = logits_here(tmp_path / "ours" / "iter_0000000", tokens)
    for one, other in zip(found, expected, strict=True):
        assert other.std() > 0.1
        assert (one - other).abs().max() < 1e-5 * max(1.0, other.abs().max().item())
    back = tmp_path / "back"
    words = ["--architecture", EVERY[name][0]]
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "ours"), str(back), *words]) == 0
    output = capsys.readouterr().out
    assert "largest error" in output
    assert "not read" not in output, output
    assert_same_tensors(tensors_of(back), tensors_of(source))


def steps_here(folder: Path, tmp_path: Path) -> list[float]:
    """Return the losses of five iterations that start from a converted checkpoint."""
    metrics = tmp_path / "metrics.jsonl"
    flags = [*FLAGS, "--pretrained-checkpoint", str(folder), "--load", str(tmp_path / "run")]
    flags += ["--save", str(tmp_path / "run"), "--metrics-file", str(metrics)]
    assert pretrain.main(flags) == 0
    return logged_losses(metrics)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "DeepSeek-V3" else pytest.mark.nightly) for name in MODELS],
)
def test_five_iterations_have_the_losses_of_transformers(name: str, tmp_path: Path) -> None:
    """Both sides drop nothing."""
    theirs = tiny_model(name)
    assert (
        main(["convert", "hf-to-megatrain", str(write(theirs, tmp_path / "theirs")), str(tmp_path / "ours")])
        == 0
    )
    batches = global_batches([*FLAGS, "--load", str(tmp_path / "ours"), "--finetune"], num_samples=1)
    untrained = training_losses(theirs, batches, lr=0.0)
    expected = training_losses(theirs, batches, lr=LEARNING_RATE)
    found = steps_here(tmp_path / "ours", tmp_path)
    assert max(abs(one - other) for one, other in zip(expected, untrained, strict=True)) > 1e-3
    assert found == pytest.approx(expected, rel=1e-5)


def test_differences_are_named_by_their_flags() -> None:
    """And no flag that changes only training, or has no effect here."""
    flags = (
        "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
        " --swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights"
        " --num-experts 2 --moe-ffn-hidden-size 24 --disable-bias-linear --init-method-std 0.1 --mtp-num-layers 1"
        " --attention-dropout 0.1 --moe-z-loss-coeff 0.1 --qk-layernorm --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 97"
    )
    plan = resolve(parse(flags.split()), Facts(world_size=1, vocab_size=VOCAB, eod_id=0))
    with pytest.raises(ConfigError) as error:
        fitting_family(plan.config, VOCAB, Path("run"), "LlamaForCausalLM")
    named = str(error.value).partition("differs: ")[2].partition("\n")[0]
    assert named == "--qk-layernorm is on here, off there; --num-experts is 2 here, none there"


def settings_of(family: Family, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a config.json; the head's channels follow from the sizes if they are left open."""
    found = read_settings(family, ConfigFile(Path("config.json"), keys))
    found.setdefault("model.kv_channels", found["model.hidden_size"] // found["model.num_attention_heads"])
    return found


@every_model
def test_absent_keys_mean_what_they_mean_to_transformers(name: str) -> None:
    """Leave out one key after the other: the settings are those of the whole config.json of transformers."""
    kind = getattr(transformers, EVERY[name][0])
    family, config = FAMILIES[EVERY[name][0]], kind.config_class(**EVERY[name][1])
    whole = json.loads(config.to_json_string(use_diff=False))
    for key in sorted(whole):
        fewer = {other: value for other, value in whole.items() if other != key}
        if key in (REQUIRED | REQUIRED_BY.get(name, set())) - OPTIONAL_BY.get(name, set()):
            with pytest.raises(ConfigError, match=key):
                settings_of(family, fewer)
            continue
        found = settings_of(family, fewer)
        decoded = kind.config_class._decode_special_floats(fewer)
        completed = json.loads(kind.config_class.from_dict(decoded).to_json_string(use_diff=False))
        assert found == settings_of(family, completed), key


def test_the_comparison_of_logits_finds_a_wrong_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tiny_model("Llama 3"), tmp_path / "theirs")
    assert main(["convert", "hf-to-megatrain", str(source), str(tmp_path / "ours")]) == 0
    family = FAMILIES["LlamaForCausalLM"]
    gate, up = (f"model.layers.{{}}.mlp.{name}_proj" for name in ("gate", "up"))
    swapped = {**family.modules, gate: family.modules[up], up: family.modules[gate]}
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", dataclasses.replace(family, modules=swapped))
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "ours"), str(tmp_path / "back")]) == 1
    assert "do not use the folder" in capsys.readouterr().err


def test_experts_in_mxfp4_are_read_as_transformers_decodes_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    kind, settings = MODELS["gpt-oss"]
    config = getattr(transformers, kind).config_class(**{**settings, "intermediate_size": 32})
    source = write(getattr(transformers, kind)(config).float(), tmp_path / "theirs")
    expected = tensors_of(source)
    stored, generator = dict(expected), torch.Generator().manual_seed(3)
    for name in [name for name in expected if name.endswith("_proj") and ".experts." in name]:
        experts, columns, rows = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator)
        scales = torch.randint(110, 130, (experts, rows, columns // 32), generator=generator)
        stored |= {f"{name}_blocks": blocks.byte(), f"{name}_scales": scales.byte()}
        decoded = convert_moe_packed_tensors(blocks.byte(), scales.byte())
        expected[name] = decoded if decoded.shape == (experts, columns, rows) else decoded.transpose(1, 2)
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    keys = json.loads((source / "config.json").read_text())
    keys["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (source / "config.json").write_text(json.dumps(keys))
    assert main(["convert", "hf-to-megatrain", str(source), str(tmp_path / "ours")]) == 0
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert_same_tensors(tensors_of(tmp_path / "back"), expected)


def test_layers_of_multi_token_prediction_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tiny_model("DeepSeek-V3"), tmp_path / "theirs")
    found = tensors_of(source)
    extra = {f"model.layers.4.{name}": torch.ones(3) for name in ("eh_proj.weight", "enorm.weight")}
    save_file(found | extra, source / "model.safetensors", metadata={"format": "pt"})
    keys = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(keys))
    assert main(["convert", "hf-to-megatrain", str(source), str(tmp_path / "ours")]) == 0
    assert "1 layers of multi-token prediction are left out" in capsys.readouterr().out
