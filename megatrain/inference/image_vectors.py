r"""Images in generated text: the vectors of a prompt's images stand at their places, and the tower computes nothing else.

"USER: <image>\nWhat is it?" ─> tokens  11 9 -1 -2 .. -n 7 4 ..      token -1 - r: row r of the prompt's vectors
images [k, 3, height, width] ─> tower, projector ─> vectors [k n, h]  in each pass that has such tokens
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.model import ModelSpec
from megatrain.data.images.pixels import Processor, Tiling, decode
from megatrain.data.images.rows import MARK
from megatrain.data.tokenizers.build import Tokenizer
from megatrain.model.families.vision import ImagesInText, put_vectors
from megatrain.parallel.batch import Batch, EncoderTokens, PassInfo


class CachedImages(nn.Module):
    """Segment before the language model, in place of the tower and of the one that joins images and text.

    Raises:
        ConfigError: the model has learned positions, in which an image counts as one token.
    """

    def __init__(self, spec: ModelSpec, tower: Sequence[nn.Module], joined: ImagesInText) -> None:
        super().__init__()
        if spec.num_positions is not None:
            raise ConfigError(
                "a model with images and --position-embedding-type learned_absolute generates no text here",
                fix="train it with --position-embedding-type rope",
            )
        self.tower, self.joined = nn.ModuleList(tower), joined
        self.vectors: Tensor | None = None
        """Vectors [n, h] of the images in the next pass."""

    @torch.no_grad()
    def compute(self, images: Sequence[Tensor], device: torch.device) -> None:
        """Compute the vectors of images [k, 3, height, width] of several prompts, one after the other; none: there are none."""
        self.vectors = None
        if images:
            pixels = torch.cat(tuple(images)).to(device)
            unused = torch.zeros(1, 1, dtype=torch.int64, device=device)
            batch = Batch(
                tokens=unused,
                labels=unused,
                loss_mask=unused.float(),
                position_ids=unused,
                images=pixels[None],
            )
            info, hidden = PassInfo(is_training=False), None
            for segment in self.tower:
                hidden = segment(hidden, batch, info)
            self.vectors = self.joined.vectors(hidden, batch, info).transpose(0, 1).flatten(0, 1)

    def forward(self, hidden: Tensor | None, batch: Batch, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a segment)
        embedding = self.joined.embedding
        text = EncoderTokens(batch.tokens.clamp(min=0), batch.position_ids)
        x: Tensor = embedding.output(embedding.embed(text, info), info)
        if self.vectors is None:
            return x
        return put_vectors(x, self.vectors.to(x.dtype).unsqueeze(1), batch.tokens.t())


def with_places(
    text: str, num_images: int, tokenizer: Tokenizer, tokens_per_image: int, before: Sequence[int] = ()
) -> list[int]:
    """Return the tokens of a text, with those of its images at the marks <image>, or first if it has none.

    Args:
        before: tokens before the text; its images follow theirs.

    Raises:
        ValueError: it has another number of marks, or is not text of this tokenizer.
    """
    text.encode()
    pieces = text.split(MARK)
    if len(pieces) == 1:
        pieces = [*([""] * num_images), text]
    if len(pieces) != num_images + 1:
        raise ValueError(f"{len(pieces) - 1} {MARK} for {num_images} images")
    ids: list[int] = []
    start = min([-1, *(token - 1 for token in before)])
    for number, piece in enumerate(pieces):
        if number:
            first = start - (number - 1) * tokens_per_image
            ids += range(first, first - tokens_per_image, -1)
        ids += tokenizer.encode(piece) if piece else []
    return ids


def pixels_of(files: Sequence[tuple[bytes, str]], spec: ModelSpec, processor: Processor) -> Tensor:
    """Return images [k, 3, height, width] of files, each its content and its name.

    Raises:
        ConfigError: the model reads no images.
        InputError: a file holds no image.
    """
    if spec.vision is None:
        raise ConfigError("images are given, and the model reads text alone", fix="remove the images")
    height, width = spec.vision.image_size
    tiling = Tiling(processor=processor, height=height, width=width)
    return torch.cat([torch.from_numpy(tiling.tiles(decode(data, name), 1)) for data, name in files])
