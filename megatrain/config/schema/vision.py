"""Settings of the vision tower and the projector of a vision-language model (`--model-family vlm`)."""

from dataclasses import dataclass
from typing import Final, Literal

from megatrain.config.schema.model import LINEAR_ATTENTION
from megatrain.config.schema.needs import above, conflict, on, one_of
from megatrain.config.schema.resume_class import ORDER, SAFE, SHAPE, STEPS
from megatrain.config.schema.setting import EVALUATION, Section, setting
from megatrain.config.schema.values import AUTO

VLM: Final = one_of("model.model_family", "vlm")
_OWN: Final = (VLM, one_of("vision.vision_model_type", "clip", "siglip", "internvit300M"))
_FILES: Final = on("data.image_data_path")
_PLAIN_TOWER: Final = tuple(
    conflict(
        path,
        *values,
        of=("like_language",),
        when=VLM,
        why=": the vision tower has plain attention and MLPs",
        fix="use --vision-model-type clip with --vision-hidden-size 1024 and --vision-num-attention-heads 16",
    )
    for path, *values in (
        ("model.multi_latent_attention",),
        ("model.experimental_attention_variant", *LINEAR_ATTENTION),
        ("experts.num_experts",),
    )
)


@dataclass(frozen=True, kw_only=True)
class VisionConfig(Section, on_resume=SHAPE, taken_by=EVALUATION):
    """Vision tower and projector: images, sizes, frozen parts."""

    img_h: int = setting(224, at_least=1, unit="pixels", needs=VLM)
    """Height of an image."""
    img_w: int = setting(224, at_least=1, unit="pixels", needs=VLM)
    """Width of an image."""
    patch_dim: int = setting(16, at_least=1, unit="pixels", needs=VLM)
    """Side of a patch."""
    images_per_sample: int = setting(1, at_least=1, needs=VLM)
    """Most images of a sample; with --use-tiling, most tiles. Not in Megatron-LM, whose samples have one."""
    image_processor: Literal["clip", "siglip", "internvl"] = setting(AUTO, on_resume=ORDER, needs=_FILES)
    """How images are resized and normalized, as by the processors of transformers. clip: the shorter side fills the image, whose middle is kept; siglip, internvl: each side is scaled. auto: that of --vision-model-type, else clip."""
    use_tiling: bool = setting(False, on_resume=ORDER, needs=(_FILES, above("vision.images_per_sample", 1)))
    """Cut an image into tiles, each of --img-h and --img-w, in the grid most like its shape."""
    max_num_tiles: int = setting(1, at_least=1, on_resume=ORDER, needs=on("vision.use_tiling"))
    """Most tiles of an image. The images of a sample share --images-per-sample tiles evenly."""
    use_thumbnail: bool = setting(False, on_resume=ORDER, needs=on("vision.use_tiling"))
    """The whole image, scaled to one tile, follows the tiles of an image that has several."""
    image_grid_pinpoints: tuple[str, ...] = setting((), needs=VLM, unit="pixels")
    """Tiles of LLaVA-NeXT: sizes such as 336x672 672x336 (height x width), in multiples of --img-h and --img-w. An image is scaled into the one that holds most of it; the whole image goes before its tiles, a trained vector after each row of patches. none: images are not cut so."""
    vision_model_type: Literal["like_language", "clip", "siglip", "internvit300M"] = setting(
        "like_language", needs=VLM, conflicts=_PLAIN_TOWER
    )
    """Vision tower. like_language: all sizes and options of the language model, as in Megatron-LM's pretrain_vlm.py; clip: LayerNorm, biases, quick GELU, a class token, a norm before the layers; siglip: LayerNorm, biases, GELU by tanh, a bias of patches; internvit300M: LayerNorm, biases, GELU, a class token, a bias of patches."""
    vision_num_layers: int | None = setting(None, at_least=1, needs=VLM)
    """Layers of the vision tower. none: --encoder-num-layers."""
    vision_hidden_size: int | None = setting(None, at_least=1, needs=_OWN)
    """Width of a tower of its own sizes."""
    vision_ffn_hidden_size: int | None = setting(None, at_least=1, needs=_OWN)
    """Width of its MLPs. none: 4 * --vision-hidden-size."""
    vision_num_attention_heads: int | None = setting(None, at_least=1, needs=_OWN)
    """Its attention heads."""
    vision_final_norm: bool = setting(False, needs=VLM)
    """A norm follows the layers of the tower."""
    disable_vision_class_token: bool = setting(False, needs=VLM)
    """Drop the output of the class token: an image has one token less in the language model."""
    pixel_shuffle: bool = setting(False, needs=VLM)
    """Join squares of patches along their channels before the projector: an image has fewer tokens. In Megatron-LM a flag of examples/multimodal."""
    pixel_shuffle_factor: int = setting(2, at_least=2, unit="patches", needs=on("vision.pixel_shuffle"))
    """Side of such a square."""
    vision_projection_type: Literal["mlp", "affine"] = setting("mlp", needs=VLM)
    """Projector. mlp: two linear layers with an activation; affine: one linear layer, without a bias with --disable-bias-linear."""
    vision_projection_norm: bool = setting(AUTO, needs=VLM)
    """A norm precedes the projector. auto: with internvit300M and like_language, there except for --transformer-impl local, as in Megatron-LM."""
    spread_images: bool = setting(
        False, on_resume=SAFE, needs=(VLM, above("parallel.tensor_model_parallel_size", 1))
    )
    """Every tensor rank holds the whole vision tower and projector and computes a share of the images of a micro-batch, instead of a share of each layer: more memory, and less communication. Context ranks always share images. Not in Megatron-LM."""
    image_token_id: int | None = setting(None, at_least=0, on_resume=SAFE, needs=VLM)
    """Token that stands for a vector of an image in folders of transformers; no text has it. none: <image> of the tokenizer."""
    freeze_vit: bool = setting(False, on_resume=STEPS, needs=VLM)
    """Do not train the vision tower: it has no gradients and no optimizer state. --freeze-ViT in Megatron-LM."""
    freeze_lm: bool = setting(False, on_resume=STEPS, needs=VLM)
    """Do not train the language model. --freeze-LM in Megatron-LM."""
