"""Vision-language models whose projector reads squares of patches (`--pixel-shuffle`): Idefics3, SmolVLM and InternVL.

    Idefics3, SmolVLM    SigLIP's layers and their last norm, one linear layer without bias, a Llama
    InternVL             InternViT-300M with its scales of the branches' outputs, which ours hold multiplied into the weights
                         before them; a norm and two linear layers; a Qwen2, Qwen3 or Llama

Source: Laurençon et al., arXiv:2408.12637; Chen et al., arXiv:2404.16821.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from megatrain.config.schema.tree import Config
from megatrain.interop.hf.config_file import ConfigFile
from megatrain.interop.hf.families.llama import LLAMA
from megatrain.interop.hf.families.qwen import QWEN2, QWEN3
from megatrain.interop.hf.families.vision import (
    LANGUAGE_SIZES,
    TOWER_LAYER,
    ImageTokens,
    LanguageModel,
    Square,
    Untied,
    Widths,
    tower_parts,
)
from megatrain.interop.hf.family import (
    Choice,
    ConfigPart,
    Family,
    Fixed,
    Fused,
    Implied,
    Nested,
    Value,
    in_layers,
)

_SHUFFLED: Final = {
    "model.model_family": "vlm",
    "vision.pixel_shuffle": True,
    "vision.disable_vision_class_token": True,
}


def _idefics3(architecture: str, model_type: str) -> Family:
    tower_type = f"{model_type}_vision"
    sizes = {"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
             "image_size": 224, "patch_size": 32}  # fmt: skip
    tower, connector = "model.vision_model.", "model.connector.modality_projection.proj"
    language = {
        theirs.replace("model.", "model.text_model.", 1): ours for theirs, ours in LLAMA.modules.items()
    }
    return Family(
        architecture=architecture,
        model_type=model_type,
        auto_class="AutoModelForImageTextToText",
        config=(
            LanguageModel("text_config", "llama", LLAMA.config, {**LANGUAGE_SIZES, "rms_norm_eps": 1e-5}),
            Nested("vision_config", tower_type, tower_parts("siglip", "gelu_pytorch_tanh", 1e-6), sizes),
            Value("scale_factor", "vision.pixel_shuffle_factor", default=2),
            ImageTokens(128_257),
            Untied(),
            Implied(("_pad_token_id",)),
            Fixed(
                {**_SHUFFLED, "vision.disable_vision_class_token": False, "vision.vision_final_norm": True, "vision.vision_projection_type": "affine"}
            ),
        ),
        modules={
            **language,
            connector: "vision.projector.down",
            f"{tower}embeddings.patch_embedding": "vision.patch_embedding",
            f"{tower}embeddings.position_embedding": "vision.position_embeddings",
            f"{tower}post_layernorm": "vision.final_norm",
            **in_layers(f"{tower}encoder.layers", TOWER_LAYER, "vision"),
        },
        of_text="text_config",
    )  # fmt: skip


class _Shuffle:
    """Part of an image's width and height that is left."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        ratio = source.get("downsample_ratio", default=0.5)
        side = round(1 / ratio) if isinstance(ratio, float) and 0 < ratio < 1 else 0
        if side < 2 or 1 / side != ratio:
            raise source.refusal("downsample_ratio", ratio, "one over a number of patches")
        return {"vision.pixel_shuffle_factor": side}

    def write(self, config: Config) -> dict[str, Any]:
        return {"downsample_ratio": 1 / config.vision.pixel_shuffle_factor}


_INTERN_VIT: Final[tuple[ConfigPart, ...]] = (
    Value("hidden_size", "vision.vision_hidden_size"),
    Value("num_attention_heads", "vision.vision_num_attention_heads"),
    Widths(),
    Square("image_size", ("vision.img_h", "vision.img_w"), is_list=True),
    Square("patch_size", ("vision.patch_dim",), is_list=True),
    Choice("num_channels", {3: {}}),
    Choice("hidden_act", {"gelu": {}}),
    Choice("layer_norm_eps", {1e-6: {}}),
    Choice("norm_type", {"layer_norm": {}}, reason="norms of queries and keys over all heads, as in InternViT-6B"),
    Choice("attention_bias", {True: {}}, default=False, reason="attention without biases, as in InternViT-6B"),
    Choice("use_qk_norm", {False: {}}, reason="norms of queries and keys over all heads, as in InternViT-6B"),
    Choice("use_mask_token", {False: {}}),
    Choice("use_absolute_position_embeddings", {True: {}}),
    Choice("use_mean_pooling", {True: {}}, reason="a norm after the layers"),
    *(Choice(key, {0.0: {}}) for key in ("attention_dropout", "hidden_dropout_prob", "projection_dropout")),
    Implied(("layer_scale_init_value",)),
    Fixed({"vision.vision_model_type": "internvit300M"}),
)  # fmt: skip
_INTERN_VIT_SIZES: Final = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
         "image_size": [448, 448], "patch_size": [14, 14]}  # fmt: skip


def _internvl(language: Family) -> Family:
    tower = "vision_tower."
    layers = f"{tower}encoder.layer"
    layer: dict[str, str | Fused] = {
        "layernorm_before": "attention.norm",
        **{f"attention.{one}_proj": f"attention.{one}" for one in "qkv"},
        "attention.projection_layer": Fused(("attention.proj",), scale=f"{layers}.{{}}.lambda_1"),
        "layernorm_after": "mlp.norm",
        "mlp.fc1": "mlp.up",
        "mlp.fc2": Fused(("mlp.down",), scale=f"{layers}.{{}}.lambda_2"),
    }
    return Family(
        architecture="InternVLForConditionalGeneration",
        model_type="internvl",
        auto_class="AutoModelForImageTextToText",
        config=(
            LanguageModel("text_config", language.model_type, language.config),
            Nested("vision_config", "internvl_vision", _INTERN_VIT, _INTERN_VIT_SIZES),
            _Shuffle(),
            ImageTokens(151_667),
            Untied(default=True),
            Choice("projector_hidden_act", {"gelu": {}}),
            Choice("vision_feature_layer", {-1: {}}),
            Choice("vision_feature_select_strategy", {"default": {}}),
            Fixed({**_SHUFFLED, "vision.vision_projection_norm": True}),
        ),
        modules={
            **{f"language_model.{theirs}": ours for theirs, ours in language.modules.items()},
            "multi_modal_projector.layer_norm": "vision.projector.norm",
            "multi_modal_projector.linear_1": "vision.projector.up",
            "multi_modal_projector.linear_2": "vision.projector.down",
            f"{tower}embeddings.cls_token": "vision.class_token.weight",
            f"{tower}embeddings.patch_embeddings.projection": "vision.patch_embedding",
            f"{tower}embeddings.position_embeddings": Fused(
                ("vision.position_embeddings.weight",), has_one_row=True
            ),
            **in_layers(layers, layer, "vision"),
        },
        buffers=tuple(rf"language_model\.{one}" for one in language.buffers),
        renamed={
            "model.language_model.": "language_model.model.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "model.vision_tower.": tower,
            "lm_head.": "language_model.lm_head.",
        },
        of_text="text_config",
        is_of=lambda source: (
            source.nested("text_config").get("model_type", default="qwen2") == language.model_type
        ),
    )


IDEFICS3: Final = _idefics3("Idefics3ForConditionalGeneration", "idefics3")
SMOLVLM: Final = _idefics3("SmolVLMForConditionalGeneration", "smolvlm")
_INTERNVL: Final = tuple(map(_internvl, (QWEN2, QWEN3, LLAMA)))
INTERNVL: Final = replace(_INTERNVL[0], variants=_INTERNVL[1:])
