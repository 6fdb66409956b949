"""Folders of models with an encoder: what differs from the models here is refused by name, in and out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MASKED, VOCAB, tiny_model, write

from megatrain.config.errors import ConfigError
from megatrain.interop.hf.checkpoint import HfCheckpoint
from megatrain.interop.hf.config_file import ConfigFile
from megatrain.interop.hf.families.table import FAMILIES
from megatrain.interop.hf.settings import fitting_family, plan_of, read_settings

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
BERT, BERT_MASKED, T5 = "Megatron BERT", "Megatron BERT without next-sentence head", "T5 v1.1"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(tiny_model(name), tmp_path_factory.mktemp("theirs")) for name in MASKED}


def changed(folder: Path, copy: Path, **keys: Any) -> Path:
    """Return a copy of a folder with other values in config.json."""
    copy.mkdir()
    (copy / "model.safetensors").symlink_to(folder / "model.safetensors")
    found = json.loads((folder / "config.json").read_text()) | keys
    (copy / "config.json").write_text(json.dumps(found))
    return copy


@pytest.mark.parametrize(
    ("name", "keys", "problem"),
    [
        (BERT, {"architectures": ["BertForPreTraining"]}, "norms of the residual stream after each branch"),
        (BERT, {"architectures": ["ModernBertForMaskedLM"]}, "a norm of the embedding, GEGLU"),
        (BERT, {"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'.* the GELU of its head is exact"),
        (BERT, {"is_decoder": True}, "is_decoder is True"),
        (BERT, {"type_vocab_size": 3}, "type_vocab_size is 3"),
        (BERT, {"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        (BERT, {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        (T5, {"architectures": ["UMT5ForConditionalGeneration"]}, "a table of relative positions for each layer"),
        (T5, {"feed_forward_proj": "relu"}, "feed_forward_proj is 'relu'.* ReLU, of v1.0, is missing"),
        (T5, {"feed_forward_proj": ["gated-gelu"]}, "feed_forward_proj is"),
        (T5, {"dense_act_fn": "gelu"}, "dense_act_fn is 'gelu'"),
        (T5, {"num_decoder_layers": 3}, "num_decoder_layers is 3.*equally deep"),
        (T5, {"scale_decoder_outputs": True}, "tied logits have a bias here, none in T5, and a factor in v1.0"),
        (T5, {"is_encoder_decoder": False}, "is_encoder_decoder is False"),
    ],
)  # fmt: skip
def test_a_folder_of_another_model_is_refused(
    folders: dict[str, Path], tmp_path: Path, name: str, keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        HfCheckpoint(changed(folders[name], tmp_path / "copy", **keys))
    assert "fix: " in str(raised.value)


def test_token_types_need_the_next_sentence_head(folders: dict[str, Path], tmp_path: Path) -> None:
    found = load_file(folders[BERT_MASKED] / "model.safetensors")
    found["bert.embeddings.token_type_embeddings.weight"][1, 3] = 0.5
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_bytes((folders[BERT_MASKED] / "config.json").read_bytes())
    save_file(found, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"token_type_embeddings\.weight is not 0"):
        HfCheckpoint(copy)


@pytest.mark.parametrize(
    ("name", "aliases"),
    [
        (BERT, {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
                "cls.predictions.decoder.bias": "cls.predictions.bias"}),
        (T5, {f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")}),
    ],
)  # fmt: skip
def test_second_names_of_tensors_are_read(
    folders: dict[str, Path], tmp_path: Path, name: str, aliases: dict[str, str]
) -> None:
    """Older versions of transformers stored them."""
    found = load_file(folders[name] / "model.safetensors")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_bytes((folders[name] / "config.json").read_bytes())
    save_file(
        found | {alias: found[one].clone() for alias, one in aliases.items()}, copy / "model.safetensors"
    )
    assert HfCheckpoint(copy).manifest.tensors == HfCheckpoint(folders[name]).manifest.tensors


@pytest.mark.parametrize("is_tied", [True, False], ids=["of transformers 5", "of transformers 4"])
def test_a_t5_without_an_output_layer_begins_with_the_embedding(
    folders: dict[str, Path], tmp_path: Path, *, is_tied: bool
) -> None:
    """A T5 that transformers 5 built, and has not read, is tied and stored so; the key does not matter: it ties a missing head."""
    copy = changed(folders[T5], tmp_path / "copy", tie_word_embeddings=is_tied)
    found = load_file(copy / "model.safetensors")
    del found["lm_head.weight"]
    (copy / "model.safetensors").unlink()
    save_file(found, copy / "model.safetensors", metadata={"format": "pt"})
    theirs, reader = transformers.T5ForConditionalGeneration.from_pretrained(copy), HfCheckpoint(copy)
    for name, weight in (("output_layer", theirs.lm_head), ("embedding.word_embeddings", theirs.shared)):
        assert torch.equal(reader.values(f"{name}.weight", weight.weight.shape), weight.weight)
    assert "no lm_head.weight: it begins as a copy of shared.weight" in "".join(reader.notes)
    assert not HfCheckpoint(folders[T5]).notes


def test_rows_of_the_bias_are_left_out_with_those_of_the_vocabulary(folders: dict[str, Path]) -> None:
    reader = HfCheckpoint(folders[BERT], vocab_size=90)
    out = reader.values("output_layer.bias", (90,))
    assert torch.equal(out, load_file(folders[BERT] / "model.safetensors")["cls.predictions.bias"][:90])


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        (BERT, {"model.no_bias_gelu_fusion": False}, "MegatronBertForPreTraining.*--no-bias-gelu-fusion is off here, on there"),
        (BERT, {"model.untie_embeddings_and_output_weights": True}, "--untie-embeddings-and-output-weights is on here, off there"),
        (BERT, {"experts.num_experts": 4, "experts.moe_aux_loss_coeff": (0.01,)}, r"differs: --num-experts is 4 here, none there\n"),
        (T5, {"model.softmax_scale": None}, "T5ForConditionalGeneration.*--softmax-scale is none here, 1.0 there"),
        (T5, {"model.untie_embeddings_and_output_weights": False}, "tied logits have a bias here"),
        (T5, {"model.position_embedding_type": "learned_absolute"}, "--position-embedding-type is learned_absolute here, relative there"),
    ],
)  # fmt: skip
def test_a_model_that_their_class_lacks_is_refused(
    folders: dict[str, Path], name: str, changes: dict[str, Any], problem: str
) -> None:
    family, path = FAMILIES[MASKED[name][0]], folders[name] / "config.json"
    settings = read_settings(family, ConfigFile(path, json.loads(path.read_text())))
    assert fitting_family(plan_of(settings, VOCAB, path).config, VOCAB, path)[0] is family
    config = plan_of(settings | changes, VOCAB, path).config
    with pytest.raises(ConfigError, match=problem):
        fitting_family(config, VOCAB, path, family.architecture)
    if "there" in problem:
        with pytest.raises(ConfigError, match=problem):
            fitting_family(config, VOCAB, path)
