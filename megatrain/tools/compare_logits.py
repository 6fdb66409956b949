"""Logits of an exported folder in transformers, compared with the logits of the checkpoint it comes from, in fp32 on the CPU.

checkpoint ─> our model, weights rounded to the dtype of the folder ─┐
folder ─> from_pretrained ─────────────────────────────────────────────┴─> largest difference

An encoder before a decoder reads the same tokens from the last to the first. With token types, the second half has the second one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from megatrain.checkpoint.manifest import DTYPES
from megatrain.checkpoint.reader import CheckpointReader, TensorReader
from megatrain.config.errors import MegatrainError
from megatrain.config.model_spec.vision import VisionSpec
from megatrain.data.images.anyres import AnyRes
from megatrain.data.images.vectors import vector_tokens
from megatrain.inference.cached_model import hidden_states
from megatrain.inference.stored_model import ModelOptions, build_stored_model
from megatrain.model.families.cross_attention import split_memory
from megatrain.model.gpt import Model
from megatrain.model.head import Head
from megatrain.parallel.batch import Batch, EncoderTokens, PassInfo

_NUM_TOKENS: Final = 64
_LIMIT: Final = 1e-4
"""Largest difference, relative to the largest logit: sums in another order stay below 1e-5 of it."""


def compare_logits(
    reader: CheckpointReader, folder: Path, *, vocab_size: int, dtype: str | None, auto_class: str
) -> str:
    """Return a sentence about the largest difference.

    Args:
        auto_class: class of transformers that loads the folder.
        dtype: name of the folder's dtype in safetensors; None: the dtype of the checkpoint.

    Raises:
        MegatrainError: it is too large.
    """
    if find_spec("transformers") is None:
        return (
            "logits were not compared: the package transformers is not installed (pip install transformers)"
        )
    num_tokens = min(_NUM_TOKENS, reader.manifest.config["data"]["seq_length"])
    tokens = torch.arange(num_tokens)[None] * 7919 % vocab_size  # a prime: tokens of the whole vocabulary
    model, images, other = model_in_fp32(reader, vocab_size, dtype), None, _load(folder, auto_class)
    if model.spec.vision is not None:
        pinpoints = getattr(other.config, "image_grid_pinpoints", None)
        tokens, images = with_image(tokens, model.spec.vision, other.config.image_token_id, pinpoints)
    theirs = logits_of_transformers(other, tokens, images)
    ours = logits_of_heads(model, tokens, images)
    error = max(float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True))
    largest = float(theirs[0].abs().max())
    found = f"largest error {error:.3g} of logits up to {largest:.3g}, over {num_tokens} tokens, against transformers"
    if not error <= _LIMIT * max(largest, 1.0):
        raise MegatrainError(
            f"{folder}: {found}",
            fix="do not use the folder; report its config.json, with the configuration of the checkpoint",
        )
    return found


def with_image(
    tokens: Tensor, vision: VisionSpec, image_token: int, pinpoints: Sequence[Sequence[int]] | None = None
) -> tuple[Tensor, Tensor]:
    """Return tokens with those of an image after the first one, [b, s + n], and an image for each row, [b, tiles, 3, height, width].

    Args:
        image_token: token of transformers for an image, which no text has.
        pinpoints: heights and widths of LLaVA-NeXT; None: an image is one tile.
    """
    b = len(tokens)
    tokens = torch.where(tokens == image_token, int(image_token == 0), tokens)
    rows, num_tiles = np.arange(vision.tokens_per_image), 1
    if pinpoints:
        sizes = AnyRes(tuple((height, width) for height, width in pinpoints), vision.image_size)
        image, most = _high_image(vision.image_size), 1 << 30
        side = vision.patch_size * vision.shuffle_side
        rows = sizes.rows(image, most, (vision.image_size[0] // side, vision.image_size[1] // side))
        num_tiles = sizes.num_tiles(image, most)
    places = torch.from_numpy(vector_tokens(rows, 0)).expand(b, -1)
    shape = (b, *replace(vision, images_per_sample=num_tiles).image_shape)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return torch.cat((tokens[:, :1], places, tokens[:, 1:]), dim=1), images


def _high_image(tile: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width of an image that needs padding in most sizes."""
    return 2 * tile[0], 3 * tile[1] // 5


def model_in_fp32(reader: TensorReader, vocab_size: int, dtype: str | None = None) -> Model:
    """Return the model of a checkpoint on the CPU, with weights rounded to `dtype`; None: as they are stored."""
    options = ModelOptions(device=torch.device("cpu"), dtype=torch.float32)
    model = build_stored_model(reader, options, vocab_size=vocab_size)
    if dtype is not None:
        with torch.no_grad():
            for segment in model.segments:
                for weight in segment.parameters():
                    weight.copy_(weight.to(DTYPES[dtype]))
    return model


def _load(folder: Path, auto_class: str) -> Any:
    """Return the folder's model; no code of the folder runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers  # noqa: PLC0415 (optional)

        transformers.utils.logging.disable_progress_bar()
        return getattr(transformers, auto_class).from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )


@torch.no_grad()
def logits_of_transformers(model: Any, tokens: Tensor, images: Tensor | None = None) -> list[Tensor]:
    """Return the logits of each head of a model of transformers: [b, s, v], and [b, 2] of a next-sentence head."""
    if images is not None:
        ids = torch.where(tokens < 0, model.config.image_token_id, tokens)
        kind, more = model.config.model_type, {}
        if kind == "llava_next":
            more["image_sizes"] = torch.tensor(
                [_high_image((images.shape[-2], images.shape[-1]))] * len(images)
            )
        pixels = images if kind in ("idefics3", "smolvlm", "llava_next") else images.flatten(0, 1)
        return [model.eval()(ids, pixel_values=pixels, use_cache=False, **more).logits]
    if model.config.is_encoder_decoder:
        return [model.eval()(tokens.flip(1), decoder_input_ids=tokens, use_cache=False).logits]
    if not hasattr(model.config, "type_vocab_size"):
        return [model.eval()(tokens, use_cache=False).logits]
    found = model.eval()(tokens, token_type_ids=_types(tokens))
    return [
        found[name] for name in ("logits", "prediction_logits", "seq_relationship_logits") if name in found
    ]


@torch.no_grad()
def logits_of_heads(model: Model, tokens: Tensor, images: Tensor | None = None) -> list[Tensor]:
    """Return the logits of each head of a model of megatrain, for `tokens` [b, s]; see `logits_of_transformers`."""
    info, spec = PassInfo(is_training=False), model.spec
    positions, unused = _positions(tokens), torch.zeros_like(tokens)
    batch = Batch(
        tokens=tokens,
        labels=unused,
        loss_mask=unused.float(),
        position_ids=positions,
        encoder=EncoderTokens(tokens.flip(1), positions) if len(spec.stacks) > 1 else None,
        types=None if spec.num_token_types is None else _types(tokens),
        images=images,
    )
    hidden = hidden_states(model, batch, info)
    if batch.encoder is not None:
        hidden, _ = split_memory(hidden, batch, model.tp)
    head = model.segments[-1]
    assert isinstance(head, Head)
    found = [head.logits(hidden, info).transpose(0, 1)]
    if head.binary is not None:
        assert head.norm is not None
        found.append(head.binary.logits(head.norm(hidden, info)))
    return found


def _positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


def _types(tokens: Tensor) -> Tensor:
    return _positions(tokens) * 2 // tokens.shape[1]
