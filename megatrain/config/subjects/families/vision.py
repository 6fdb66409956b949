"""Rules of vision-language models: what images need, and what is missing for them."""

from typing import Final

from megatrain.config.derive.vision import num_positions, pinpoints, text_length
from megatrain.config.errors import Problem
from megatrain.config.fixes import fewer_ranks, use
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import Notes, Problems, derives, note, overrides, rule
from megatrain.config.schema.tree import flag_of
from megatrain.config.subjects.ranks import TP

_TEXTS: Final = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_WITHOUT_FREEZING: Final = ("optimizer.optimizer_cpu_offload", "precision.fp8_format", "precision.fp4_format")


@derives("vision.vision_projection_norm")
def vision_projection_norm(draft: Draft) -> DerivedValue:
    if not _is_vlm(draft):
        return DerivedValue(False, "no images")
    if (kind := draft.config.vision.vision_model_type) != "like_language":
        return DerivedValue(
            kind == "internvit300M", "as in InternVL" if kind == "internvit300M" else "as in LLaVA"
        )
    if draft.is_given("model.transformer_impl") and draft.config.model.transformer_impl == "local":
        return DerivedValue(False, "as in Megatron-LM with --transformer-impl local")
    return DerivedValue(True, "as in Megatron-LM with Transformer Engine, its default")


@overrides("model.max_position_embeddings")
def max_position_embeddings(draft: Draft) -> DerivedValue | None:
    """Raise the number of positions to that of the tokens of a sample with its images, as Megatron-LM does."""
    given, length = draft.config.model.max_position_embeddings, num_positions(draft.config)
    if given == length:
        return None
    return DerivedValue(
        length, f"--max-position-embeddings is {length}, the tokens of a sample with its images, not {given}"
    )


def _is_vlm(draft: Draft) -> bool:
    return draft.config.model.model_family == "vlm"


@derives("vision.image_processor")
def image_processor(draft: Draft) -> DerivedValue:
    kind = draft.config.vision.vision_model_type
    if kind == "like_language":
        return DerivedValue("clip", "--vision-model-type like_language has none of its own")
    return DerivedValue(
        "internvl" if kind == "internvit300M" else kind, f"that of --vision-model-type {kind}"
    )


@overrides("data.use_packed_sequence")
def only_conversations_are_packed(draft: Draft) -> DerivedValue | None:
    """Ignore Megatron-LM's flag where a sample is already one sequence."""
    if not draft.config.data.use_packed_sequence or _is_vlm(draft):
        return None
    return DerivedValue(
        False,
        f"--use-packed-sequence has no effect with --model-family {draft.config.model.model_family}: a sample is one"
        " sequence, with its own attention, as in a packed one",
    )


@rule
def images_have_patches(draft: Draft) -> Problems:
    vision = draft.config.vision
    if _is_vlm(draft) and min(vision.img_h, vision.img_w) < vision.patch_dim:
        yield Problem(
            f"--img-h {vision.img_h} and --img-w {vision.img_w} are smaller than a patch (--patch-dim {vision.patch_dim})",
            f"use --img-h {max(vision.img_h, vision.patch_dim)} and --img-w {max(vision.img_w, vision.patch_dim)}",
        )
    for side, name in ((vision.img_h, "img_h"), (vision.img_w, "img_w")):
        is_cut = vision.vision_model_type == "siglip"  # as in its own towers: 384 pixels, patches of 14
        if _is_vlm(draft) and side % vision.patch_dim and side > vision.patch_dim and not is_cut:
            yield Problem(
                f"{flag_of(name)} {side} is not a multiple of --patch-dim {vision.patch_dim}",
                f"use {flag_of(name)} {side // vision.patch_dim * vision.patch_dim}",
            )


@rule
def pinpoints_are_whole_tiles(draft: Draft) -> Problems:
    vision, given = draft.config.vision, draft.config.vision.image_grid_pinpoints
    if not _is_vlm(draft) or not given:
        return
    sizes = pinpoints(vision)
    if len(sizes) < len(given) or any(
        h % vision.img_h or w % vision.img_w or not h or not w for h, w in sizes
    ):
        yield Problem(
            f"--image-grid-pinpoints {' '.join(given)} are not heights and widths of tiles of {vision.img_h} x {vision.img_w}",
            f"use --image-grid-pinpoints {vision.img_h}x{2 * vision.img_w}, or other multiples of --img-h and --img-w",
        )
    if vision.use_tiling:
        yield Problem("--use-tiling and --image-grid-pinpoints cut images in two ways", "remove --use-tiling")
    if vision.vision_model_type != "siglip" and not vision.disable_vision_class_token:
        yield Problem(
            "--image-grid-pinpoints places patches in rows, and the output of the class token is none",
            "add --disable-vision-class-token",
        )


@rule
def patches_form_squares(draft: Draft) -> Problems:
    vision = draft.config.vision
    if not _is_vlm(draft) or not vision.pixel_shuffle:
        return
    if vision.vision_model_type != "siglip" and not vision.disable_vision_class_token:
        yield Problem(
            "--pixel-shuffle joins patches, and the output of the class token is none",
            "add --disable-vision-class-token",
        )
    factor, side = vision.pixel_shuffle_factor, vision.patch_dim * vision.pixel_shuffle_factor
    for pixels, name in ((vision.img_h, "img_h"), (vision.img_w, "img_w")):
        if (patches := pixels // vision.patch_dim) % factor:
            yield Problem(
                f"{flag_of(name)} {pixels} has {patches} patches of {vision.patch_dim} pixels, which do not form squares of"
                f" --pixel-shuffle-factor {factor}",
                f"use {flag_of(name)} {-(-pixels // side) * side}",
            )


@rule
def tower_has_sizes(draft: Draft) -> Problems:
    vision, tp = draft.config.vision, draft.config.parallel.tensor_model_parallel_size
    if not _is_vlm(draft) or vision.vision_model_type == "like_language":
        return
    width, heads = vision.vision_hidden_size, vision.vision_num_attention_heads
    for name, value in (("vision_hidden_size", width), ("vision_num_attention_heads", heads)):
        if value is None:
            yield Problem(
                f"--vision-model-type {vision.vision_model_type} requires {flag_of(name)}",
                "give it the width and the heads of the tower, such as --vision-hidden-size 1024"
                " --vision-num-attention-heads 16",
            )
    if width is not None and heads is not None and width % heads:
        yield Problem(
            f"--vision-hidden-size {width} is not divisible by --vision-num-attention-heads {heads}",
            f"use --vision-hidden-size {-(-width // heads) * heads}",
        )
    if heads is not None and heads % tp and not vision.spread_images:
        yield Problem(
            f"--vision-num-attention-heads {heads} is not divisible by {flag_of(TP.split('.')[1])} {tp}",
            f"{use(draft, fewer_ranks(draft, TP))}, or add --spread-images",
        )


@rule
def images_are_mock_data(draft: Draft) -> Problems:
    given = [flag_of(name) for name in _TEXTS if getattr(draft.config.data, name)]
    if _is_vlm(draft) and draft.facts.datasets and given:
        yield Problem(
            f"{' and '.join(given)} names text, which --model-family vlm does not read",
            f"remove {' and '.join(given)}, and use --mock-data, or name conversations with images by --image-data-path",
        )


@rule
def frozen_parts_have_no_gradients(draft: Draft) -> Problems:
    config, vision = draft.config, draft.config.vision
    if not _is_vlm(draft) or not (vision.freeze_lm or vision.freeze_vit):
        return
    flag = "--freeze-LM" if vision.freeze_lm else "--freeze-ViT"
    others = [flag_of(path.split(".")[1]) for path in _WITHOUT_FREEZING if config.get(path)]
    if config.optimizer.has_matrices:
        others.append(f"--optimizer {config.optimizer.optimizer}")
    if vision.freeze_lm and config.experts.num_experts:
        others.append("--num-experts")
    if vision.freeze_lm and draft.derived.transformer_impl != "local":
        others.append("--transformer-impl transformer_engine")
    for other in others:
        yield Problem(f"{flag} is not supported together with {other}", f"remove {flag} or {other}")


@note("result")
def tower_has_no_dropout(draft: Draft) -> Notes:
    model = draft.config.model
    if _is_vlm(draft) and (model.hidden_dropout or model.attention_dropout):
        yield "the vision tower and the projector have no dropout, unlike in Megatron-LM"


@note("result")
def text_has_its_own_length(draft: Draft) -> Notes:
    given = draft.config.data.dataloader_seq_length
    if _is_vlm(draft) and given is not None and given != draft.config.data.seq_length:
        yield f"samples have {text_length(draft.config)} tokens of text, by --dataloader-seq-length"
