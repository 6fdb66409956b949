"""LLaVA and its towers: the same logits as in transformers, tensors that come back, towers joined with language models, stages."""

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from canonical_weights import tensors_of
from safetensors.torch import save_file
from torch import Tensor

import pretrain
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.data.images.anyres import AnyRes
from megatrain.data.images.pixels import Tiling, decode
from megatrain.interop.hf.checkpoint import HfCheckpoint
from megatrain.model.gpt import Model
from megatrain.tools.compare_logits import logits_of_heads, logits_of_transformers, model_in_fp32, with_image
from megatrain.tools.main import main

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
VOCAB, IMAGE_TOKEN, DEPTH = 100, 97, 3
TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
LANGUAGE = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28]]
KINDS = {
    "CLIP, Llama": ("CLIPVisionConfig", "LlamaConfig", {}),
    "CLIP, whole": ("CLIPVisionConfig", "Qwen2Config", {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}),
    "SigLIP, Llama": ("SiglipVisionConfig", "LlamaConfig", {"vision_feature_select_strategy": "full", "vision_feature_layer": 1}),
    "NeXT, Mistral": ("CLIPVisionConfig", "MistralConfig", {"image_grid_pinpoints": PINPOINTS}),
}  # fmt: skip


def randomised(model: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return model.eval().float()


def llava(kind: str) -> Any:
    tower, language, keys = KINDS[kind]
    torch.manual_seed(0)
    config_class = transformers.LlavaNextConfig if "NeXT" in kind else transformers.LlavaConfig
    config = config_class(
        vision_config=getattr(transformers, tower)(**TOWER),
        text_config=getattr(transformers, language)(**LANGUAGE, tie_word_embeddings=False),
        image_token_index=IMAGE_TOKEN,
        **keys,
    )
    model = (
        transformers.LlavaNextForConditionalGeneration
        if "NeXT" in kind
        else transformers.LlavaForConditionalGeneration
    )
    return randomised(model(config))


SHUFFLED = {
    "Idefics3": ("Idefics3Config", {"scale_factor": 2}, {}),
    "SmolVLM": ("SmolVLMConfig", {"scale_factor": 4}, {}),
    "InternVL": ("InternVLConfig", {"tie_word_embeddings": False}, {"attention_bias": True}),
}


def shuffled(kind: str) -> Any:
    """Return a model whose projector reads squares of patches."""
    name, keys, of_tower = SHUFFLED[kind]
    torch.manual_seed(0)
    language = "qwen2" if kind == "InternVL" else "llama"
    config = getattr(transformers, name)(
        vision_config={**TOWER, "image_size": 56, **of_tower},
        text_config={"model_type": language, **LANGUAGE, "tie_word_embeddings": False},
        image_token_id=IMAGE_TOKEN,
        **keys,
    )
    return randomised(getattr(transformers, name.replace("Config", "ForConditionalGeneration"))(config))


def write(model: Any, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(llava("CLIP, Llama"), tmp_path_factory.mktemp("llava") / "theirs")


def model_of(checkpoint: Path) -> Model:
    with CheckpointReader(checkpoint) as reader:
        return model_in_fp32(reader, VOCAB)


def canonical(checkpoint: Path) -> dict[str, Tensor]:
    """Return all weights of a checkpoint of ours."""
    with CheckpointReader(checkpoint) as reader:
        return {name: reader.values(name, one.shape) for name, one in reader.manifest.model_tensors.items()}


@pytest.mark.parametrize("kind", [*KINDS, *SHUFFLED])
def test_a_model_has_the_same_logits_here_and_comes_back(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names in the files are those of the hub; the layers after the feature layer stay out."""
    theirs = llava(kind) if kind in KINDS else shuffled(kind)
    source = write(theirs, tmp_path / "theirs")
    assert main(["convert", "hf-to-megatrain", str(source), str(tmp_path / "ours")]) == 0
    model = model_of(tmp_path / "ours" / "iter_0000000")
    text = torch.randint(0, VOCAB, (2, 30), generator=torch.Generator().manual_seed(1))
    assert model.spec.vision is not None
    sizes = PINPOINTS if "NeXT" in kind else None
    tokens, images = with_image(text, model.spec.vision, IMAGE_TOKEN, sizes)
    [expected], [found] = (
        logits_of_transformers(theirs, tokens, images),
        logits_of_heads(model, tokens, images),
    )
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max().item())
    changed = logits_of_heads(model, tokens, images + 1)[0]
    assert (changed - found).abs().max() > 1e-2, "the image decides nothing"
    back = tmp_path / "back"
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "ours"), str(back)]) == 0
    output = capsys.readouterr().out
    assert "largest error" in output
    assert "not read" not in output, output
    if kind in SHUFFLED:  # the scales of InternVL come back as 1
        again = type(theirs).from_pretrained(back)
        torch.testing.assert_close(
            logits_of_transformers(again, tokens, images)[0], expected, rtol=0, atol=1e-5
        )
        return
    stored = tensors_of(source)
    for name, one in tensors_of(back).items():
        if "post_layernorm" not in name:
            alike = name.replace("vision_tower.vision_model.", "vision_tower.")
            assert torch.equal(stored.get(name, stored.get(alike)), one), name


PREFIXES = {
    "of the hub": [("vision_tower.", "vision_tower.vision_model.")],
    "of classes": [
        ("language_model.lm_head.", "lm_head."), ("language_model.model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower."), ("multi_modal_projector.", "model.multi_modal_projector."),
    ],
}  # fmt: skip


@pytest.mark.parametrize("names", PREFIXES)
def test_names_of_other_versions_are_read(names: str, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")

    def renamed(name: str) -> str:
        return next(
            (new + name.removeprefix(old) for old, new in PREFIXES[names] if name.startswith(old)), name
        )

    save_file({renamed(name): one for name, one in tensors_of(folder).items()}, copy / "model.safetensors")
    assert HfCheckpoint(copy).manifest.tensors == HfCheckpoint(folder).manifest.tensors


def test_sizes_that_a_file_leaves_out_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    """Files of the hub list what differs from the defaults of each part."""
    keys = json.loads((folder / "config.json").read_text())
    keys["text_config"] = {"model_type": "llama", "vocab_size": VOCAB, "num_hidden_layers": 1}
    keys["vision_config"] = {"model_type": "clip_vision_model", "image_size": 64}
    whole = transformers.LlavaConfig.from_dict(keys).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(keys))
    from megatrain.interop.hf.config_file import ConfigFile
    from megatrain.interop.hf.families.table import family_of
    from megatrain.interop.hf.settings import read_settings

    def settings(values: dict[str, Any]) -> dict[str, Any]:
        source = ConfigFile(
            tmp_path / "config.json", {**values, "architectures": ["LlavaForConditionalGeneration"]}
        )
        return read_settings(family_of(source), source)

    found, expected = settings(keys), settings(whole)
    assert found.pop("model.kv_channels", None) in (None, expected["model.kv_channels"])
    expected.pop("model.kv_channels")
    assert found == expected


REFUSALS = [
    ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer"),
    ({"vision_feature_layer": -9}, "vision_feature_layer"),
    ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"vision_config": {**TOWER, "hidden_act": "relu"}}, "hidden_act"),
    ({"vision_config": {**TOWER, "model_type": "pixtral"}}, "model_type"),
    ({"vision_config": 7}, "vision_config"),
]


@pytest.mark.parametrize(("keys", "word"), REFUSALS)
def test_other_models_are_refused_by_name(
    keys: dict[str, Any], word: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    changed = json.loads((copy / "config.json").read_text()) | keys
    (copy / "config.json").write_text(json.dumps(changed))
    assert main(["convert", "hf-to-megatrain", str(copy), str(tmp_path / "ours")]) == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"use_qk_norm": True}, "InternViT-6B"), ({"norm_type": "rms_norm"}, "InternViT-6B"),
        ({"attention_bias": False}, "InternViT-6B"), ({"use_mean_pooling": False}, "a norm after the layers"),
    ],
)  # fmt: skip
def test_other_towers_of_internvl_are_refused_by_name(
    keys: dict[str, Any], word: str, tmp_path: Path
) -> None:
    from megatrain.config.errors import InputError
    from megatrain.interop.hf.config_file import ConfigFile
    from megatrain.interop.hf.families.table import family_of
    from megatrain.interop.hf.settings import read_settings

    config = shuffled("InternVL").config.to_dict()
    config["vision_config"] |= keys
    source = ConfigFile(tmp_path, {**config, "architectures": ["InternVLForConditionalGeneration"]})
    with pytest.raises(InputError, match=word):
        read_settings(family_of(source), source)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two towers and a language model whose output layer is tied to the embedding."""
    base = tmp_path_factory.mktemp("parts")
    torch.manual_seed(0)
    text = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 50,
    }
    clip = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=TOWER))
    siglip = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**TOWER | {"image_size": 30}))
    language = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LANGUAGE, tie_word_embeddings=True))
    for name, model in (("clip", clip), ("siglip", siglip), ("language", language)):
        write(randomised(model), base / name)
    return base


@pytest.mark.parametrize(("kind", "depth"), [("clip", DEPTH - 1), ("siglip", DEPTH)])
def test_a_tower_and_a_language_model_are_joined(
    kind: str, depth: int, parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is a LLaVA of transformers, whose tower alone is exported too."""
    ours, whole, alone = tmp_path / "ours", tmp_path / "whole", tmp_path / "alone"
    words = [str(parts / kind), str(parts / "language"), str(ours)]
    assert main(["convert", "combine", *words]) == 0
    assert main(["convert", "megatrain-to-hf", str(ours), str(whole)]) == 2
    assert "--image-token-id" in capsys.readouterr().err
    assert main(["convert", "megatrain-to-hf", str(ours), str(whole), "--image-token-id", "97"]) == 0
    assert "LlavaForConditionalGeneration" in capsys.readouterr().out
    architecture = {"clip": "CLIPVisionModel", "siglip": "SiglipVisionModel"}[kind]
    assert main(["convert", "megatrain-to-hf", str(ours), str(alone), "--architecture", architecture]) == 0
    found = canonical(ours / "iter_0000000")
    assert torch.equal(found["output_layer.weight"], found["embedding.word_embeddings.weight"])
    assert found["vision.projector.up.weight"].std() > 0
    kind_of_tower = getattr(transformers, architecture)
    images = torch.randn(2, 3, 30, 30)[..., : 28 if kind == "clip" else 30, : 28 if kind == "clip" else 30]
    one, other = (
        kind_of_tower.from_pretrained(path)(images, output_hidden_states=True).hidden_states
        for path in (parts / kind, alone)
    )
    assert len(other) == depth + 1
    torch.testing.assert_close(one[depth], other[depth], rtol=0, atol=1e-6)


def test_parts_in_the_wrong_place_are_refused(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tower, language, ours = parts / "clip", parts / "language", tmp_path / "ours"
    wrong = {
        ("combine", language, language, ours): "no vision tower",
        ("combine", tower, tower, ours): "a vision tower alone",
        ("hf-to-megatrain", tower, ours): "convert combine",
        ("combine", tower, language, ours, "--feature-layer", "-4"): "--feature-layer -1",
    }
    for words, error in wrong.items():
        assert main(["convert", *map(str, words)]) == 2
        assert error in capsys.readouterr().err


def trained(words: str, folder: Path) -> dict[str, Tensor]:
    """Return the weights after two iterations."""
    flags = (
        "--use-checkpoint-args --mock-data --seq-length 16 --micro-batch-size 2 --global-batch-size 2 --train-iters 2"
        f" --lr 1e-2 --lr-warmup-iters 0 --eval-iters 0 --load {folder} --save {folder} {words}"
    )
    assert pretrain.main(flags.split()) == 0
    return canonical(folder / "iter_0000002")


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> Iterator[str]:
    """Yield the parts with a changed tensor."""
    for name, one in before.items():
        if not torch.equal(one, after[name]):
            yield "projector" if "projector" in name else name.split(".")[0]


def test_a_joined_model_is_trained_in_stages(parts: Path, folder: Path, tmp_path: Path) -> None:
    """The projector alone, then all but the tower; a folder of transformers starts a run without a conversion."""
    ours = tmp_path / "ours"
    assert main(["convert", "combine", str(parts / "clip"), str(parts / "language"), str(ours)]) == 0
    first = trained(f"--pretrained-checkpoint {ours} --freeze-LM --freeze-ViT", tmp_path / "first")
    before = canonical(ours / "iter_0000000")
    assert {*changed(before, first)} == {"projector"}
    second = trained(f"--pretrained-checkpoint {tmp_path / 'first'} --freeze-ViT", tmp_path / "second")
    assert {*changed(first, second)} == {"projector", "embedding", "decoder", "output_layer"}
    direct = trained(f"--pretrained-checkpoint hf:{folder} --freeze-LM --freeze-ViT", tmp_path / "direct")
    assert main(["convert", "hf-to-megatrain", str(folder), str(tmp_path / "theirs")]) == 0
    assert {*changed(canonical(tmp_path / "theirs" / "iter_0000000"), direct)} == {"projector"}


def test_an_export_has_the_context_of_text_and_images(tmp_path: Path) -> None:
    flags = (
        "--model-family vlm --num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --normalization RMSNorm --swiglu"
        " --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --device cpu"
        " --vision-model-type siglip --vision-hidden-size 16 --vision-num-attention-heads 2 --img-h 8 --img-w 8 --patch-dim 4"
        " --mock-data --tokenizer-type NullTokenizer --vocab-size 40 --seq-length 16 --micro-batch-size 1 --train-iters 1"
        f" --lr 1e-3 --eval-iters 0 --save {tmp_path / 'run'}"
    )
    assert pretrain.main(flags.split()) == 0
    words = ["megatrain-to-hf", tmp_path / "run", tmp_path / "theirs", "--image-token-id", 5, "--no-compare"]
    assert main(["convert", *map(str, words)]) == 0
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    assert config["text_config"]["max_position_embeddings"] == 16 + (8 // 4) ** 2


def test_text_after_an_image_is_that_of_transformers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two prompts run together, each with an image of its own; a third has none."""
    image = pytest.importorskip("PIL.Image")
    model, expected, lines = llava("CLIP, Llama"), [], []
    generator = torch.Generator().manual_seed(2)
    texts = ["5 <image> 6 7", "8 9 10 <image>", "11 12"]
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.png"
        colours = torch.randint(0, 256, (28, 28, 3), generator=generator, dtype=torch.uint8)
        image.fromarray(colours.numpy()).save(path)
        has_image = "<image>" in text
        ids = [int(one) for one in text.replace("<image>", f"{IMAGE_TOKEN} " * 4).split()]
        tiling = Tiling(processor="clip", height=28, width=28)
        pixels = torch.from_numpy(tiling.tiles(decode(path.read_bytes(), "x"), 1))
        given = {"pixel_values": pixels} if has_image else {}
        found = model.generate(
            torch.tensor([ids]), **given, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        expected.append(found[0, len(ids) :].tolist())
        lines.append(json.dumps({"prompt": text} | ({"images": [path.name]} if has_image else {})))
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    words = f"generate --load hf:{folder} --prompt-file {tmp_path}/prompts.jsonl --json --temperature 0 --max-new-tokens 8"
    assert main([*words.split(), "--termination-id", "99", "--device", "cpu"]) == 0
    found = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]
    assert found == expected
    assert expected[0] != expected[1]
    single = f"generate --load hf:{folder} --image {tmp_path}/0.png --json --temperature 0 --max-new-tokens 8 --termination-id 99"
    assert main([*single.split(), "--device", "cpu", "--prompt", texts[0]]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == expected[0]


def test_text_after_tiles_is_that_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two images of other shapes in a prompt of LLaVA-NeXT, whose files give their tiles."""
    image = pytest.importorskip("PIL.Image")
    model, colours = llava("NeXT, Mistral"), torch.Generator().manual_seed(3)
    folder, sizes = write(model, tmp_path / "theirs"), [(60, 25), (30, 31)]
    for number, (height, width) in enumerate(sizes):
        pixels = torch.randint(0, 256, (height, width, 3), generator=colours, dtype=torch.uint8)
        image.fromarray(pixels.numpy()).save(tmp_path / f"{number}.png")
    theirs = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=PINPOINTS
    )
    read = theirs([image.open(tmp_path / f"{number}.png") for number in range(2)], return_tensors="pt")
    anyres = AnyRes(tuple((height, width) for height, width in PINPOINTS), (28, 28))
    counts = [len(anyres.rows(one, 99, (2, 2))) for one in sizes]
    ids = [5, *[IMAGE_TOKEN] * counts[0], 6, *[IMAGE_TOKEN] * counts[1], 7]
    found = model.generate(
        torch.tensor([ids]), **read, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    prompt = {"prompt": "5 <image> 6 <image> 7", "images": ["0.png", "1.png"]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(prompt))
    words = f"generate --load hf:{folder} --prompt-file {tmp_path}/prompts.jsonl --json --temperature 0 --max-new-tokens 6"
    assert main([*words.split(), "--termination-id", "99", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == found[0, len(ids) :].tolist()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--prompt", "5 <image> <image>"], "2 <image> for 1 images"),
        (["--prompt-file", "absent.jsonl"], "--prompt-file"),
    ],
)
def test_images_without_their_place_are_refused(
    words: list[str], error: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (28, 28)).save(tmp_path / "one.png")
    flags = ["generate", "--load", f"hf:{folder}", "--device", "cpu", "--image", str(tmp_path / "one.png")]
    assert main([*flags, *words]) == 2
    assert error in capsys.readouterr().err
