"""Vision tower and projector of a vision-language model as data.

    image ─ patches ─ + positions ─ norm ─ layers ─ norm ─ projector ─> vectors at the places of the image in the sequence
            class token ┘                   (each of the norms, and the class token, where a tower has it)

Source: Liu et al., arXiv:2304.08485; Radford et al., arXiv:2103.00020 (CLIP).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.linear import Linear, Piece
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.norm import NormSpec
from megatrain.config.model_spec.part import Part, Role

CHANNELS = 3
"""Colours of an image."""
NEWLINE = -(1 << 30)
"""Token of the trained vector after a row of patches; tokens from -1 down to it are vectors of images."""


@dataclass(frozen=True, kw_only=True)
class ProjectorSpec(Part):
    """From the tower's width to that of the language model: down(act(up x)), gated as an MLP, or one linear layer."""

    name: ClassVar[str] = "projector"
    role: ClassVar[Role] = "mlp"

    inputs: int
    """Width of the tower, of all patches of a square that is one vector."""
    mlp: MlpSpec | None
    """None: one linear layer, `affine`."""
    norm: NormSpec | None = None
    """Norm of its inputs; None: there is none."""
    has_bias: bool = True

    def linears(self, hidden_size: int) -> Iterator[Linear]:
        """Yield its GEMMs; `hidden_size` is that of the language model."""
        output = (Piece("down", hidden_size),)
        if self.mlp is None:
            yield Linear(part=self.name, pieces=output, inputs=self.inputs, split="none")
            return
        width, kinds = self.mlp.ffn_hidden_size, ("gate", "up") if self.mlp.is_gated else ("up",)
        pieces = tuple(Piece(kind, width) for kind in kinds)
        yield Linear(
            part=self.name, pieces=pieces, inputs=self.inputs, split="outputs", writes="the projector"
        )
        yield Linear(part=self.name, pieces=output, inputs=width, split="inputs", reads="the projector")


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """Vision tower, projector, and which parts of the model are trained."""

    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    image_size: tuple[int, int]
    """Height and width in pixels."""
    patch_size: int
    projector: ProjectorSpec
    images_per_sample: int = 1
    has_class_token: bool = True
    keeps_class_token: bool = True
    """Its output is one of the image's vectors."""
    has_patch_bias: bool = False
    has_pre_norm: bool = True
    has_final_norm: bool = False
    has_newline: bool = False
    """A trained vector follows each row of patches of a tiled image."""
    shuffle_side: int = 1
    """Patches in a row of a square that is one vector."""
    is_spread_over_tp: bool = False
    """Tensor ranks hold the tower and the projector whole, and share the images of a micro-batch."""
    is_tower_frozen: bool = False
    is_language_frozen: bool = False

    @property
    def num_patches(self) -> int:
        height, width = self.image_size
        return (height // self.patch_size) * (width // self.patch_size)

    @property
    def num_positions(self) -> int:
        """Tokens of an image in the tower."""
        return self.num_patches + self.has_class_token

    @property
    def tokens_per_image(self) -> int:
        """Vectors of an image in the language model."""
        squares = self.num_patches // self.shuffle_side**2
        return squares + (self.has_class_token and self.keeps_class_token)

    @property
    def image_shape(self) -> tuple[int, int, int, int]:
        """Shape of the images of a sample: [images, channels, height, width]."""
        return self.images_per_sample, CHANNELS, *self.image_size

    def flops_of_layers(self, hidden_size: int) -> list[int]:
        """Return the FLOPs of a sample's images in each layer, forward and backward; a frozen tower has no backward pass.

        The first layer counts with the patches, the last one with the projector.
        """
        tokens, h, passes = self.num_positions, self.hidden_size, 1 if self.is_tower_frozen else 3
        layers = [2 * tokens * one.active_weights(h) + tokens**2 * one.pair_channels for one in self.layers]
        layers[0] += 2 * self.num_patches * CHANNELS * self.patch_size**2 * h
        found = [passes * flops for flops in layers]
        projector = sum(one.active_weights for one in self.projector.linears(hidden_size))
        found[-1] += 6 * self.tokens_per_image * projector
        return [self.images_per_sample * flops for flops in found]
