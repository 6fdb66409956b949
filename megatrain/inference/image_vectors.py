r"""Images in generated text: the vectors of a prompt's images stand at their places, and the tower computes nothing else.

"USER: <image>\nWhat is it?" ─> tokens  11 9 -1 -2 .. -n 7 4 ..      token -1 - r: row r of the prompt's vectors
images [k, 3, height, width] ─> tower, projector ─> vectors [k n, h]  in each pass that has such tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.model_spec.vision import NEWLINE
from megatrain.data.images.pixels import Tiling, read_image, tokens_of
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
        vectors = self.vectors.to(x.dtype).unsqueeze(1)
        return put_vectors(x, vectors, batch.tokens.t(), self.joined.newline)


@dataclass(frozen=True)
class PromptImages:
    """The images of a prompt: their tiles [k, 3, height, width], and the tokens of the vectors of each image."""

    tiles: Tensor
    tokens: list[list[int]]


def prompt_images(files: Sequence[tuple[bytes, str]], spec: ModelSpec, tiling: Tiling) -> PromptImages:
    """Return the images of files, each its content and its name. They share the tiles of a sample, those of LLaVA-NeXT have as many each.

    Raises:
        ConfigError: the model reads no images.
        InputError: a file holds no image.
    """
    if spec.vision is None:
        raise ConfigError("images are given, and the model reads text alone", fix="remove the images")
    sharing = len(files) if tiling.anyres is None else 1
    most = max(1, spec.vision.images_per_sample // sharing)
    read = [read_image(data, name, tiling, most) for data, name in files]
    tiles = torch.cat([torch.from_numpy(one.tiles) for one in read])
    return PromptImages(tiles, [one.tolist() for one in tokens_of(read, tiling)])


def with_places(text: str, images: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a text, with those of its images at the marks <image>, or first if it has none.

    Raises:
        ValueError: it has another number of marks, or is not text of this tokenizer.
    """
    text.encode()
    pieces = text.split(MARK)
    if len(pieces) == 1:
        pieces = [*([""] * len(images)), text]
    if len(pieces) != len(images) + 1:
        raise ValueError(f"{len(pieces) - 1} {MARK} for {len(images)} images")
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        if number:
            ids += images[number - 1]
        ids += tokenizer.encode(piece) if piece else []
    return ids


def shifted(tokens: Sequence[int], first: int) -> list[int]:
    """Return tokens whose vectors follow `first` others."""
    return [token - first if NEWLINE < token < 0 else token for token in tokens]
