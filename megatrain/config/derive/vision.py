"""The vision tower and the projector that settings describe (`--model-family vlm`), and the lengths of samples with images.

    like_language   width, heads, norm, activation and biases of the language model: Megatron-LM's pretrain_vlm.py
    clip, siglip, internvit300M    those of these towers, with LLaVA's projector: two linear layers with biases and an exact GELU

Source: Megatron-LM, pretrain_vlm.py, core/models/multimodal, core/models/vision.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from megatrain.config.derive.layer_blocks import LayersError
from megatrain.config.model_spec.activation import Activation
from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.lora import is_adapter
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.norm import NormSpec
from megatrain.config.model_spec.vision import CHANNELS, ProjectorSpec, VisionSpec
from megatrain.config.schema.quantization import SCALE_PREFIX
from megatrain.config.schema.tree import flag_of

if TYPE_CHECKING:
    from megatrain.config.schema.model import ModelConfig
    from megatrain.config.schema.tree import Config
    from megatrain.config.schema.vision import VisionConfig

TOWER, PROJECTOR = "vision", "vision.projector"
"""Prefixes of the names of their tensors."""
_ACTIVATIONS: Final[dict[str, Activation]] = {
    "clip": "quick_gelu",
    "siglip": "gelu_tanh",
    "internvit300M": "gelu",
}
_EPSILONS: Final = {"clip": 1e-5, "siglip": 1e-6, "internvit300M": 1e-6}


def text_length(config: Config) -> int:
    """Return the tokens of the text of a sample."""
    data = config.data
    if config.model.model_family != "vlm":
        return data.seq_length
    return data.dataloader_seq_length or data.seq_length


def length_setting(config: Config) -> str:
    """Return the path of the setting that decides `text_length`."""
    is_own = config.model.model_family == "vlm" and config.data.dataloader_seq_length is not None
    return "data.dataloader_seq_length" if is_own else "data.seq_length"


def length_in_words(config: Config) -> str:
    """Return the length of samples with its flag, for messages."""
    flag, text = flag_of(length_setting(config).split(".")[1]), text_length(config)
    images = sample_length(config) - text
    return f"{flag} {text}" + (f" with {images} tokens of images, {text + images}," if images else "")


def sample_length(config: Config) -> int:
    """Return the tokens of a sample in the first stack of the model: those of its text, and of its images."""
    if config.model.model_family != "vlm":
        return config.data.seq_length
    return text_length(config) + tokens_of_images(config.vision)


def rank_length(config: Config) -> int:
    """Return the tokens of a sample, or the most of a pack, on a context rank."""
    parallel = config.parallel
    return parallel.max_seqlen_per_dp_cp_rank or sample_length(config) // parallel.context_parallel_size


def tokens_of_images(vision: VisionConfig) -> int:
    """Return the most tokens of the images of a sample, with those that end rows of patches."""
    return vision.images_per_sample * tokens_per_image(vision) + _most_newlines(vision)


def pinpoints(vision: VisionConfig) -> tuple[tuple[int, int], ...]:
    """Return the sizes of --image-grid-pinpoints, height and width; a rule refuses others."""
    found = (re.fullmatch(r"(\d+)x(\d+)", one) for one in vision.image_grid_pinpoints)
    return tuple((int(one[1]), int(one[2])) for one in found if one is not None)


def _most_newlines(vision: VisionConfig) -> int:
    """Return the most rows of patches of the tiles of a sample; an image of one tile has one newline."""
    rows, most = vision.img_h // (vision.patch_dim * shuffle_side(vision)), 1.0
    for height, width in pinpoints(vision):
        down, across = height // vision.img_h, width // vision.img_w
        most = max(most, down * rows / (1 + down * across))
    return math.ceil(vision.images_per_sample * most) if vision.image_grid_pinpoints else 0


def num_positions(config: Config) -> int | None:
    """Return the rows of learned positions, at least as many as a sample with its images has tokens, as in Megatron-LM."""
    given = config.model.max_position_embeddings
    return given if given is None or config.model.model_family != "vlm" else max(given, sample_length(config))


def tokens_per_image(vision: VisionConfig) -> int:
    """Return the vectors of an image in the language model."""
    side = vision.patch_dim * shuffle_side(vision)
    patches = (vision.img_h // side) * (vision.img_w // side)
    return patches + (vision.vision_model_type != "siglip" and not vision.disable_vision_class_token)


def shuffle_side(vision: VisionConfig) -> int:
    """Return the side of the squares of patches that are one vector in the language model."""
    return vision.pixel_shuffle_factor if vision.pixel_shuffle else 1


def image_shape(config: Config) -> tuple[int, int, int, int] | None:
    """Return the shape of the images of a sample; None: the model reads text alone."""
    vision = config.vision
    if config.model.model_family != "vlm":
        return None
    return vision.images_per_sample, CHANNELS, vision.img_h, vision.img_w


def is_frozen(name: str, *, tower: bool, language: bool) -> bool:
    """Return whether a canonical tensor is not trained, if the tower or the language model is not."""
    if name.startswith(f"{PROJECTOR}."):
        return False
    return tower if name.startswith(f"{TOWER}.") else language


def is_frozen_in(config: Mapping[str, Any], name: str) -> bool:
    """Return the same for a stored configuration; scales of --qat are never trained, and with --lora-rank adapters alone."""
    vision = config.get("vision", {})
    if name.startswith(SCALE_PREFIX):
        return True
    if config.get("adapters", {}).get("lora_rank"):
        return not is_adapter(name)
    return is_frozen(name, tower=vision.get("freeze_vit", False), language=vision.get("freeze_lm", False))


def vision_spec(model: ModelConfig, vision: VisionConfig, layer: LayerSpec, norm: NormSpec) -> VisionSpec:
    """Return the vision tower and the projector.

    Args:
        layer: a layer of the language model, without experts and latents.
        norm: the norm of the language model.

    Raises:
        LayersError: a size of the tower is missing.
    """
    kind = vision.vision_model_type
    own = _like_language(model, layer) if kind == "like_language" else _own_layer(vision)
    hidden_size = model.hidden_size if kind == "like_language" else vision.vision_hidden_size
    assert hidden_size is not None
    return VisionSpec(
        hidden_size=hidden_size,
        layers=(own,) * (vision.vision_num_layers or model.num_layers),
        norm=norm if kind == "like_language" else NormSpec(kind="LayerNorm", epsilon=_EPSILONS[kind]),
        image_size=(vision.img_h, vision.img_w),
        patch_size=vision.patch_dim,
        images_per_sample=vision.images_per_sample,
        has_class_token=kind != "siglip",
        keeps_class_token=kind == "siglip" or not vision.disable_vision_class_token,
        has_patch_bias=kind in ("siglip", "internvit300M"),
        has_pre_norm=kind in ("like_language", "clip"),
        has_newline=bool(vision.image_grid_pinpoints),
        shuffle_side=shuffle_side(vision),
        has_final_norm=vision.vision_final_norm,
        projector=_projector(model, vision, hidden_size * shuffle_side(vision) ** 2, own, norm),
        is_spread_over_tp=vision.spread_images,
        is_tower_frozen=vision.freeze_vit,
        is_language_frozen=vision.freeze_lm,
    )


def _like_language(model: ModelConfig, layer: LayerSpec) -> LayerSpec:
    """Return a layer of the language model that attends to all tokens, without positions and dropout."""
    if layer.attention is None or layer.attention.latent is not None or layer.dense is None:
        raise LayersError("the vision tower has no attention or no MLP of the language model")
    attention = replace(
        layer.attention, mask="padding", rotary=None, window=None, sink="none", softcap=None, dropout=0.0,
        num_query_groups=model.num_query_groups,
    )  # fmt: skip
    mlp = replace(layer.dense, ffn_hidden_size=model.ffn_hidden_size)
    return LayerSpec(parts=(attention, mlp), norm_position=layer.norm_position)


def _own_layer(vision: VisionConfig) -> LayerSpec:
    width, heads = vision.vision_hidden_size, vision.vision_num_attention_heads
    if width is None or heads is None or width % heads:
        raise LayersError("--vision-hidden-size or --vision-num-attention-heads is none")
    attention = AttentionSpec(
        num_heads=heads, num_query_groups=heads, head_dim=width // heads, mask="padding",
        has_qkv_bias=True, has_bias=True,
    )  # fmt: skip
    mlp = MlpSpec(
        ffn_hidden_size=vision.vision_ffn_hidden_size or 4 * width,
        activation=_ACTIVATIONS[vision.vision_model_type],
        has_bias=True,
    )
    return LayerSpec(parts=(attention, mlp))


def _projector(
    model: ModelConfig, vision: VisionConfig, inputs: int, layer: LayerSpec, norm: NormSpec
) -> ProjectorSpec:
    is_like_language = vision.vision_model_type == "like_language"
    mlp: MlpSpec | None = layer.dense
    if not is_like_language:
        mlp = MlpSpec(ffn_hidden_size=model.hidden_size, activation="gelu", has_bias=True)
    is_mlp = vision.vision_projection_type == "mlp"
    own_norm = norm if is_like_language else NormSpec(kind="LayerNorm", epsilon=1e-5)
    return ProjectorSpec(
        inputs=inputs,
        mlp=mlp if is_mlp else None,
        norm=own_norm if vision.vision_projection_norm else None,
        has_bias=(is_mlp and not is_like_language) or not model.disable_bias_linear,
    )
