"""LLaVA and its vision towers: CLIP's or SigLIP's layers up to the feature layer, two linear layers, a language model.

    vision_config   the tower; its layers after `vision_feature_layer`, its last norm and its pooling are left out
    text_config     the language model, by the table of its own family

Files are read with the names of every version of transformers, and written with the names of the hub.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from megatrain.config.derive.families import num_layers
from megatrain.config.derive.vision import pinpoints, tokens_per_image
from megatrain.config.schema.tree import Config
from megatrain.interop.hf.config_file import ConfigFile
from megatrain.interop.hf.families.llama import LLAMA, MISTRAL
from megatrain.interop.hf.families.qwen import QWEN2, QWEN3
from megatrain.interop.hf.family import (
    COUNT,
    Choice,
    ConfigPart,
    Family,
    Fixed,
    Fused,
    Implied,
    LeftOut,
    Nested,
    Value,
    in_layers,
)
from megatrain.storage.untrusted_json import integer

_TOWER_IN_LLAVA: Final = "vision_tower.vision_model."
_TOWER_ALONE: Final = "vision_model."
_FEATURES: Final = "vision_feature_layer"
_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 32,
}  # fmt: skip
LANGUAGE_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip
_PINPOINTS: Final = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
TOWER_LAYER: Final[dict[str, str | Fused]] = {
    "layer_norm1": "attention.norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.out_proj": "attention.proj",
    "layer_norm2": "mlp.norm",
    "mlp.fc1": "mlp.up",
    "mlp.fc2": "mlp.down",
}


@dataclass(frozen=True)
class Square:
    """The side of a square, a number or a list of two."""

    theirs: str
    ours: tuple[str, ...]
    is_list: bool = False
    """It is written as a list."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        value = source.get(self.theirs)
        if isinstance(value, list) and value == value[:1] * 2:
            side = ConfigFile(source.path, {self.theirs: value[0]}).checked(self.theirs, check=COUNT)
        else:
            side = source.checked(self.theirs, check=COUNT)
        return dict.fromkeys(self.ours, side)

    def write(self, config: Config) -> dict[str, Any]:
        side = config.get(self.ours[0])
        return {self.theirs: [side, side] if self.is_list else side}


class Widths:
    """Layers of the tower and the width of its MLPs, which settings may leave open."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        return {
            "vision.vision_num_layers": source.checked("num_hidden_layers", check=COUNT),
            "vision.vision_ffn_hidden_size": source.checked("intermediate_size", check=COUNT),
        }

    def write(self, config: Config) -> dict[str, Any]:
        vision, width = config.vision, config.vision.vision_hidden_size
        return {
            "num_hidden_layers": vision.vision_num_layers or config.model.num_layers,
            "intermediate_size": vision.vision_ffn_hidden_size or (width and 4 * width),
        }


class _FeatureLayer:
    """The layers of the tower whose output the projector reads: of -2, all but the last one."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        depth = _depth(source)
        value = source.get(_FEATURES, default=-2)
        kept = value if isinstance(value, int) and value >= 0 else None
        if isinstance(value, int) and value < 0:
            kept = depth + 1 + value
        if kept is None or isinstance(value, bool) or not 1 <= kept <= depth:
            raise source.refusal(_FEATURES, value, f"one layer, of a tower of {depth}")
        return {"vision.vision_num_layers": kept}

    def write(self, config: Config) -> dict[str, Any]:  # noqa: ARG002 (the signature of a part)
        return {_FEATURES: -1}


@dataclass(frozen=True)
class ImageTokens:
    """The token that stands for a vector of an image."""

    default: int = 32_000

    def read(self, source: ConfigFile) -> dict[str, Any]:
        names, check = ("image_token_index", "image_token_id"), integer(0, 1 << 31)
        source.get("image_seq_length")
        return {"vision.image_token_id": source.checked(*names, check=check, default=self.default)}

    def write(self, config: Config) -> dict[str, Any]:
        vision = config.vision
        names = ("image_token_index", "image_token_id")
        return {
            **dict.fromkeys(names, vision.image_token_id),
            "image_seq_length": tokens_per_image(vision),
        }


class _WithoutPooling:
    """SigLIP's head of the pooled image, which is left out."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        source.get("vision_use_head")
        return {}

    def write(self, config: Config) -> dict[str, Any]:
        return {"vision_use_head": False} if config.vision.vision_model_type == "siglip" else {}


@dataclass(frozen=True)
class Untied:
    """The output layer of a vision-language model, which is never the embedding's."""

    default: bool = False

    def read(self, source: ConfigFile) -> dict[str, Any]:
        key = "tie_word_embeddings"
        for one, default in ((source, self.default), (source.nested("text_config"), False)):
            if one.get(key, default=default) is not False:
                raise one.refusal(key, one.get(key), "an output layer tied to the embedding")
        return {}

    def write(self, config: Config) -> dict[str, Any]:  # noqa: ARG002 (the signature of a part)
        return {"tie_word_embeddings": False}


class LanguageModel(Nested):
    """The config.json of the language model, which has a depth of its own."""

    def write(self, config: Config) -> dict[str, Any]:
        model = config.model
        depth = num_layers(model) if model.model_family == "vlm" else model.num_layers
        untied = model.replaced({"num_layers": depth, "untie_embeddings_and_output_weights": True})
        return super().write(replace(config, model=untied))


def _depth(source: ConfigFile) -> int:
    found: int = source.nested("vision_config", _SIZES).checked("num_hidden_layers", check=COUNT)
    return found


def _layers_after_features(source: ConfigFile, config: Config) -> range:
    kept = config.vision.vision_num_layers
    assert kept is not None
    return range(kept, _depth(source))


def tower_parts(kind: str, activation: str, epsilon: float) -> tuple[ConfigPart, ...]:
    return (
        Value("hidden_size", "vision.vision_hidden_size"),
        Value("num_attention_heads", "vision.vision_num_attention_heads"),
        Square("patch_size", ("vision.patch_dim",)),
        Widths(),
        Square("image_size", ("vision.img_h", "vision.img_w")),
        Choice("num_channels", {3: {}}),
        Choice("hidden_act", {activation: {}}),
        Choice("layer_norm_eps", {epsilon: {}}),
        Choice("attention_dropout", {0.0: {}}),
        _WithoutPooling(),
        Implied(("projection_dim", "initializer_factor")),
        Fixed({"vision.vision_model_type": kind}),
    )


def _tower_modules(kind: str, prefix: str) -> dict[str, str | Fused]:
    only_of_clip: dict[str, str | Fused] = {
        f"{prefix}embeddings.class_embedding": Fused(("vision.class_token.weight",), is_flat=True),
        f"{prefix}pre_layrnorm": "vision.pre_norm",
    }
    return {
        f"{prefix}embeddings.patch_embedding": "vision.patch_embedding",
        f"{prefix}embeddings.position_embedding": "vision.position_embeddings",
        **(only_of_clip if kind == "clip" else {}),
        **in_layers(f"{prefix}encoder.layers", TOWER_LAYER, "vision"),
    }


def _left_out(prefix: str) -> tuple[str, ...]:
    dotted = prefix.replace(".", r"\.")
    return (rf"{dotted}head\..*", rf"{dotted}embeddings\.position_ids")


def _unused(prefix: str) -> dict[str, float]:
    return {f"{prefix}post_layernorm.weight": 1.0, f"{prefix}post_layernorm.bias": 0.0}


_TOWERS: Final[dict[str, tuple[str, str, tuple[ConfigPart, ...]]]] = {
    "clip": ("CLIPVisionModel", "clip_vision_model", tower_parts("clip", "quick_gelu", 1e-5)),
    "siglip": (
        "SiglipVisionModel",
        "siglip_vision_model",
        tower_parts("siglip", "gelu_pytorch_tanh", 1e-6),
    ),
}
_CLASS_TOKEN: Final = {
    "clip": Choice(
        "vision_feature_select_strategy",
        {
            "default": {"vision.disable_vision_class_token": True},
            "full": {"vision.disable_vision_class_token": False},
        },
    ),
    "siglip": Choice(
        "vision_feature_select_strategy",
        {"full": {}},
        default="default",
        reason="a SigLIP tower has no class token to leave out",
    ),
}
_SMALL_LANGUAGE: Final = {
    "model.model_family": "vlm",
    "model.num_layers": 1,
    "model.hidden_size": 8,
    "model.num_attention_heads": 1,
    "model.max_position_embeddings": 1 << 20,
    "model.position_embedding_type": "rope",
}
"""A model around a tower that is read alone."""


def _tower(kind: str) -> Family:
    """Return the family of a tower alone."""
    architecture, model_type, parts = _TOWERS[kind]
    nested = Nested("vision_config", model_type, parts, _SIZES)
    around = Fixed({**_SMALL_LANGUAGE, "vision.disable_vision_class_token": kind == "clip"})
    text = (r"text_model\..*", "logit_scale", "logit_bias", r"(visual|text)_projection\.weight")
    alone = Family(
        architecture=architecture,
        model_type=model_type,
        auto_class=architecture,
        config=(*parts, around),
        modules=_tower_modules(kind, _TOWER_ALONE),
        buffers=(*_left_out(_TOWER_ALONE), *text),
        unused=_unused(_TOWER_ALONE),
        renamed={name: f"{_TOWER_ALONE}{name}" for name in ("embeddings.", "encoder.", "pre_", "post_", "head.")},
        is_tower=True,
    )  # fmt: skip
    with_text = replace(
        alone, config=(nested, Implied(("text_config",)), Choice("tie_word_embeddings", {True: {}, False: {}}), around)
    )  # fmt: skip
    return replace(alone, variants=(with_text,), is_of=lambda source: source.get("vision_config") is None)


class _Pinpoints:
    """The sizes to which images are scaled before they are cut into tiles."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        key = "image_grid_pinpoints"
        sizes = source.get(key)
        sizes = _PINPOINTS if sizes is None else sizes
        side = source.nested("vision_config", _SIZES).checked("image_size", check=COUNT)
        if not isinstance(sizes, list) or not sizes or not all(_is_size(one, side) for one in sizes):
            raise source.refusal(key, sizes, f"heights and widths in multiples of {side}")
        return {
            "vision.image_grid_pinpoints": tuple(f"{height}x{width}" for height, width in sizes),
            "vision.images_per_sample": max(1 + height * width // side**2 for height, width in sizes),
        }

    def write(self, config: Config) -> dict[str, Any]:
        return {"image_grid_pinpoints": [list(one) for one in pinpoints(config.vision)] or None}


def _is_size(value: Any, side: int) -> bool:
    """Return whether a value is a height and a width in multiples of a side."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(one) is int and one > 0 and one % side == 0 for one in value)
    )


def _llava(kind: str, language: Family, *, is_next: bool) -> Family:
    _, tower_type, parts = _TOWERS[kind]
    sizes = LANGUAGE_SIZES if language is LLAMA else {}
    text = LanguageModel("text_config", language.model_type, language.config, sizes)

    def is_of(source: ConfigFile) -> bool:
        of_tower = source.nested("vision_config", _SIZES).get("model_type", default="clip_vision_model")
        nested = source.nested("text_config", sizes)
        return (of_tower, nested.get("model_type", default="llama")) == (tower_type, language.model_type)

    return Family(
        architecture="LlavaNextForConditionalGeneration" if is_next else "LlavaForConditionalGeneration",
        model_type="llava_next" if is_next else "llava",
        auto_class="AutoModelForImageTextToText",
        config=(
            text,
            Nested("vision_config", tower_type, parts, _SIZES),
            _FeatureLayer(),
            _CLASS_TOKEN[kind],
            ImageTokens(),
            Untied(),
            Choice("projector_hidden_act", {"gelu": {}}),
            Choice("multimodal_projector_bias", {True: {}}),
            *((_Pinpoints(),) if is_next else ()),
            Fixed({"model.model_family": "vlm"}),
        ),
        modules={
            **({"image_newline": "vision.projector.newline"} if is_next else {}),
            **{f"language_model.{theirs}": ours for theirs, ours in language.modules.items()},
            "multi_modal_projector.linear_1": "vision.projector.up",
            "multi_modal_projector.linear_2": "vision.projector.down",
            **_tower_modules(kind, _TOWER_IN_LLAVA),
        },
        buffers=(*_left_out(_TOWER_IN_LLAVA), *(rf"language_model\.{one}" for one in language.buffers)),
        unused=_unused(_TOWER_IN_LLAVA),
        renamed={
            "model.image_newline": "image_newline",
            "model.language_model.": "language_model.model.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "lm_head.": "language_model.lm_head.",
            "model.vision_tower.vision_model.": _TOWER_IN_LLAVA,
            "model.vision_tower.": _TOWER_IN_LLAVA,
            _TOWER_IN_LLAVA: _TOWER_IN_LLAVA,
            "vision_tower.": _TOWER_IN_LLAVA,
        },
        more_layers=LeftOut(
            f"{_TOWER_IN_LLAVA}encoder.layers",
            "layers of the tower after the feature layer",
            _layers_after_features,
        ),
        of_text="text_config",
        is_of=is_of,
    )


def _llavas(*, is_next: bool) -> Family:
    languages, towers = (LLAMA, MISTRAL, QWEN2, QWEN3), ("clip", "siglip")
    first, *others = (_llava(kind, language, is_next=is_next) for language in languages for kind in towers)
    return replace(first, variants=tuple(others))


LLAVA: Final = _llavas(is_next=False)
LLAVA_NEXT: Final = _llavas(is_next=True)
CLIP_TOWER: Final = _tower("clip")
SIGLIP_TOWER: Final = _tower("siglip")
