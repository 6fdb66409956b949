"""Folders of transformers, without that library: recorded logits, names, vocabulary, dtypes, and files that are wrong or hostile."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from canonical_weights import assert_same_tensors, check_damage, stored_values, tensors_of
from hand_made_folders import CONFIGS, LLAMA, LOGITS, TOKENS, VOCAB, made, write_folder
from safetensors.torch import save_file

from megatrain.checkpoint.reader import CheckpointReader
from megatrain.config.errors import ConfigError
from megatrain.interop.hf.checkpoint import HfCheckpoint
from megatrain.interop.hf.family import Fused
from megatrain.interop.hf.tensors import their_tensors
from megatrain.tools.compare_logits import logits_of_heads, model_in_fp32
from megatrain.tools.main import main


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("theirs") / "llama", made("llama"), LLAMA, num_files=2)


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_that_transformers_computed(kind: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "theirs", made(kind), CONFIGS[kind])
    assert main(["convert", "hf-to-megatrain", str(source), str(tmp_path / "ours")]) == 0
    path = tmp_path / "ours" / "iter_0000000"
    with CheckpointReader(path) as reader:
        model = model_in_fp32(reader, VOCAB)
    found = logits_of_heads(model, TOKENS)[0][0, -2:, :3]
    assert (found - torch.tensor(LOGITS[kind])).abs().max() < 5e-6
    back = tmp_path / "back"
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "ours"), str(back), "--no-compare"]) == 0
    assert_same_tensors(tensors_of(back), made(kind))


SIZES = {"num_attention_heads": 2}


def test_fused_tensors_have_their_parts_in_order() -> None:
    ours = {f"decoder.layers.3.attention.{x}.weight": (4, 8) for x in "qkv"}
    names = tuple(f"decoder.layers.{{}}.attention.{x}" for x in "qkv")
    by_head = their_tensors({"h.{}.qkv": Fused(names, heads="num_attention_heads")}, ours, SIZES)[
        "h.3.qkv.weight"
    ]
    assert by_head.shape == (12, 8)
    assert by_head.parts[1].rows == (slice(2, 4), slice(8, 10))
    turned = their_tensors({"h.{}.qkv": Fused(names, is_transposed=True)}, ours, SIZES)
    assert turned["h.3.qkv.weight"].shape == (8, 12)
    with pytest.raises(KeyError, match=r"attention\.q\.weight"):
        their_tensors({}, ours, SIZES)


def test_a_box_of_a_transposed_and_fused_weight_is_read(tmp_path: Path) -> None:
    reader = HfCheckpoint(write_folder(tmp_path / "theirs", made("gpt2"), CONFIGS["gpt2"]))
    out = reader.values("decoder.layers.1.attention.k.weight", (16, 16), ((2, 5), (1, 6)))
    assert torch.equal(out, made("gpt2")["transformer.h.1.attn.c_attn.weight"].t()[16:32][2:5, 1:6])


def test_files_without_the_prefix_and_with_masks_are_read(tmp_path: Path) -> None:
    """The files of GPT-2 itself are so."""
    plain = {name.removeprefix("transformer."): tensor for name, tensor in made("gpt2").items()}
    plain["h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.uint8)
    reader = HfCheckpoint(write_folder(tmp_path / "theirs", plain, CONFIGS["gpt2"]))
    assert torch.equal(stored_values(reader)["weight/decoder.final_norm.weight"], plain["ln_f.weight"])


def test_rows_of_the_vocabulary_can_be_left_out(llama: Path) -> None:
    reader = HfCheckpoint(llama, vocab_size=20)
    assert reader.manifest.tensors["output_layer.weight"].shape == (20, 16)
    assert torch.equal(
        stored_values(reader)["weight/output_layer.weight"], made("llama")["lm_head.weight"][:20]
    )
    with pytest.raises(ConfigError, match="has 23 rows"):
        HfCheckpoint(llama, vocab_size=24)


def test_a_tied_output_weight_in_the_files_must_equal_the_embedding(tmp_path: Path) -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs"):
        HfCheckpoint(write_folder(tmp_path / "wrong", made("llama"), tied))
    equal = made("llama")
    equal["lm_head.weight"] = equal["model.embed_tokens.weight"].clone()
    assert (
        "output_layer.weight"
        not in HfCheckpoint(write_folder(tmp_path / "equal", equal, tied)).manifest.tensors
    )


GLM = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_key_value_heads": 4, "moe_intermediate_size": 8,
    "first_k_dense_replace": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["OtherForCausalLM"]}, "'OtherForCausalLM' is not converted"),
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, "rotary positions of rows and columns"),
        ({"architectures": ["FalconForCausalLM"]}, "one norm for both branches"),
        ({**GLM, "index_topk_freq": 2}, "index_topk_freq is 2"),
        ({**GLM, "index_topk_pattern": "FS"}, "share the selection of another layer"),
        ({**GLM, "indexer_types": ["full", "shared"]}, "indexer_types is "),
        ({"architectures": None}, "is not converted"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map names code"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor of RoPE is None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1.5}}, "factor of RoPE is 1.5"),
        ({"num_hidden_layers": 1 << 30}, "1073741824 num_layers for"),
        ({"num_hidden_layers": 3}, "missing: model.layers.2.self_attn.q_proj.weight"),
        ({"num_hidden_layers": 1}, "unused: model.layers.1.self_attn.q_proj.weight"),
        ({"hidden_size": 1 << 31}, "is not an integer|shape|describes no model|divide"),
        ({"hidden_size": "16"}, "hidden_size '16' is not an integer"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"intermediate_size": 25}, "shape .* instead of"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"num_attention_heads": 3}, "config.json"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"vocab_size": 22}, "shape"),
    ],
)  # fmt: skip
def test_a_config_without_an_equal_is_refused(
    llama: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    copy = Path(shutil.copytree(llama, tmp_path / "copy"))
    (copy / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    with pytest.raises(ConfigError, match=problem) as raised:
        HfCheckpoint(copy)
    assert "fix: " in str(raised.value)


def test_a_missing_output_layer_has_the_key_that_ties_it_as_its_remedy(tmp_path: Path) -> None:
    alone = {name: tensor for name, tensor in made("llama").items() if name != "lm_head.weight"}
    with pytest.raises(ConfigError, match=r"missing: lm_head\.weight") as raised:
        HfCheckpoint(write_folder(tmp_path / "untied", alone, LLAMA))
    assert 'set "tie_word_embeddings" to true in config.json' in str(raised.value)
    HfCheckpoint(write_folder(tmp_path / "tied", alone, {**LLAMA, "tie_word_embeddings": True}))


def test_all_missing_and_unused_tensors_are_named(llama: Path, tmp_path: Path) -> None:
    wrong = {f"x{name}" if "mlp" in name else name: tensor for name, tensor in made("llama").items()}
    with pytest.raises(ConfigError) as raised:
        HfCheckpoint(write_folder(tmp_path / "wrong", wrong, LLAMA))
    for name in made("llama"):
        assert (f"missing: {name}\n" in f"{raised.value}\n") == ("mlp" in name)
        assert (f"unused: x{name}\n" in f"{raised.value}\n") == ("mlp" in name)


def test_pickled_and_missing_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "theirs", made("llama"), LLAMA)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    command = ["convert", "hf-to-megatrain", str(folder), str(tmp_path / "ours")]
    assert main(command) == 2
    assert "pytorch_model.bin" in (text := capsys.readouterr().err)
    assert "save_pretrained" in text
    (folder / "config.json").unlink()
    assert main(command) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_names_and_links_that_leave_the_folder_are_refused(llama: Path, tmp_path: Path) -> None:
    index = "model.safetensors.index.json"
    copy = Path(shutil.copytree(llama, tmp_path / "copy"))
    (copy / index).write_text((llama / index).read_text().replace("model-00001", "../model-00001"))
    with pytest.raises(ConfigError, match="is not the name of a file"):
        HfCheckpoint(copy)
    shutil.copy(llama / index, copy / index)
    file = copy / "model-00001-of-00002.safetensors"
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match="link that leaves the folder"):
        HfCheckpoint(copy)


def test_links_of_the_hub_s_cache_are_followed(llama: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "a1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(llama.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert stored_values(HfCheckpoint(snapshot)).keys() == stored_values(HfCheckpoint(llama)).keys()


def test_integers_are_no_weights(tmp_path: Path) -> None:
    wrong = {**made("llama"), "model.norm.weight": torch.ones(16, dtype=torch.int32)}
    with pytest.raises(ConfigError, match="dtype 'I32'"):
        HfCheckpoint(write_folder(tmp_path / "wrong", wrong, LLAMA))


def test_damage_is_found_or_harmless(llama: Path, tmp_path: Path) -> None:
    def end_of_header(file: Path) -> int:
        """Return the bytes before the weights, which have no checksum."""
        is_weights = file.suffix == ".safetensors"
        return 8 + int.from_bytes(file.read_bytes()[:8], "little") if is_weights else file.stat().st_size

    files = sorted(path.name for path in llama.iterdir())
    check_damage(
        llama, tmp_path / "copy", HfCheckpoint, files, ConfigError, num_faults=200, end=end_of_header
    )


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_an_export_has_the_requested_dtype_and_files(
    llama: Path, tmp_path: Path, dtype: str, expected: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "hf-to-megatrain", str(llama), str(tmp_path / "ours")]) == 0
    back = tmp_path / "back"
    words = ["--dtype", dtype, "--max-file-gb", "0.000003", "--no-compare"]
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "ours"), str(back), *words]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    found, index = tensors_of(back), json.loads((back / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert all(torch.equal(found[name], one.to(expected)) for name, one in made("llama").items())
    keys = json.loads((back / "config.json").read_text())
    assert keys["torch_dtype"] == str(expected).removeprefix("torch.")
    assert keys["eos_token_id"] == 2
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "ours"), str(back)]) == 2


def test_a_model_of_no_family_is_refused_with_the_difference(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "hf-to-megatrain", str(llama), str(tmp_path / "ours")]) == 0
    command = ["convert", "megatrain-to-hf", str(tmp_path / "ours"), str(tmp_path / "back"), "--no-compare"]
    assert main([*command, "--architecture", "Qwen3ForCausalLM"]) == 2
    assert "--qk-layernorm is off here, on there" in capsys.readouterr().err
    assert main([*command, "--architecture", "Qwen9ForCausalLM"]) == 2
    assert "unknown" in capsys.readouterr().err


def test_a_tokenizer_of_the_vocabulary_s_size_is_used_and_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "theirs", made("llama"), LLAMA)
    vocab = {chr(97 + number): number for number in range(VOCAB)}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"},
                 "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None, "post_processor": None,
                 "decoder": None}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "c"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "top_k": 7}))
    assert main(["convert", "hf-to-megatrain", str(folder), str(tmp_path / "ours")]) == 0
    with CheckpointReader(tmp_path / "ours" / "iter_0000000") as reader:
        assert reader.manifest.config["tokenizer"]["tokenizer_type"] == "HuggingFaceTokenizer"
    back = tmp_path / "back"
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "ours"), str(back), "--no-compare"]) == 0
    assert json.loads((back / "config.json").read_text())["eos_token_id"] == 2
    assert json.loads((back / "generation_config.json").read_text())["top_k"] == 7
    assert json.loads((back / "tokenizer_config.json").read_text())["eos_token"] == "c"
    assert "the tokenizer" in capsys.readouterr().out
    (folder / "tokenizer_config.json").unlink()
    alone = tmp_path / "alone"
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "ours"), str(alone), "--no-compare"]) == 0
    assert (alone / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert "eos_token" not in json.loads((alone / "tokenizer_config.json").read_text())
    capsys.readouterr()
    del vocab["w"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["convert", "hf-to-megatrain", str(folder), str(tmp_path / "fewer")]) == 0
    assert "the 22 rows of the tokenizer's tokens are kept, the other 1 are not" in capsys.readouterr().out
    with CheckpointReader(tmp_path / "fewer" / "iter_0000000") as reader:
        assert reader.manifest.config["tokenizer"]["tokenizer_model"] == str(folder)
        assert reader.manifest.tensors["output_layer.weight"].shape == (22, 16)
    whole_vocabulary = ["--vocab-size", str(VOCAB)]
    assert main(["convert", "hf-to-megatrain", str(folder), str(tmp_path / "all"), *whole_vocabulary]) == 0
    with CheckpointReader(tmp_path / "all" / "iter_0000000") as reader:
        assert reader.manifest.config["tokenizer"]["tokenizer_type"] == "NullTokenizer"
        assert reader.manifest.tensors["output_layer.weight"].shape == (VOCAB, 16)


def test_a_second_weight_of_the_same_bytes_is_no_weight(llama: Path, tmp_path: Path) -> None:
    """Overlapping ranges, with which small files would describe large tensors, are refused."""
    copy = write_folder(tmp_path / "copy", made("llama"), LLAMA)
    file = copy / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["model.norm.weight"]["data_offsets"] = header["lm_head.weight"]["data_offsets"]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(ConfigError, match="in bytes"):
        HfCheckpoint(copy)


def test_files_in_bf16_stay_bf16(tmp_path: Path) -> None:
    halves = {name: tensor.bfloat16() for name, tensor in made("llama").items()}
    folder = write_folder(tmp_path / "theirs", halves, LLAMA)
    save_file(halves, folder / "model.safetensors")
    manifest = HfCheckpoint(folder).manifest
    assert {tensor.kinds["weight"].dtype for tensor in manifest.tensors.values()} == {"BF16"}
