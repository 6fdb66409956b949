"""Vision tower and projector: the segments before the language model.

    images [m, 3, height, width] ─ patches ─ + positions ─ norm ─> [patches, m, width]      VisionEmbedding
                                                 layers ─> the same
    vectors ─ norm ─ projector ─┐                                           (of squares of patches: `joined_squares`)
    tokens [b, s] ─ embedding ──┴─ token -1 - r has row r of its sample's vectors ─> hidden [s/tp, b, h]      ImagesInText

Context ranks share the images (`image_shares`), tensor ranks the heads and widths of the tower, not the sequence. A context
rank, and a tensor rank under sequence parallelism, uses the vectors at its own places, and their gradients are summed.
A frozen tower runs without autograd, in the segment that uses its vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.config.derive.vision import PROJECTOR, TOWER, is_frozen
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.model_spec.stack import Stack
from megatrain.config.model_spec.vision import CHANNELS, NEWLINE, VisionSpec
from megatrain.model.embedding import Embedding
from megatrain.model.families.image_shares import ImageShares, replicate
from megatrain.model.functions import weight_of
from megatrain.model.implementations.local_builder import LocalBuilder
from megatrain.model.layer_context import LayerContext
from megatrain.model.layouts import LinearLayout, norm_weights, replicated_layout, stream_layout
from megatrain.parallel.batch import Batch, EncoderTokens, PassInfo
from megatrain.parallel.layout import Init, ParamLayout, Piece, ShardedModule, whole_box
from megatrain.parallel.tensor_parallel import TensorParallel, enter_tp_region


class _Projector(ModelSpec):
    """The projector as a part of the tower, without a layer."""

    def layer_name(self, number: int) -> str:  # noqa: ARG002
        return TOWER


def tower_of(spec: ModelSpec) -> ModelSpec:
    """Return the tower of a vision-language model as a model of one stack, without a vocabulary."""
    vision = spec.vision
    assert vision is not None
    return ModelSpec(
        hidden_size=vision.hidden_size, vocab_size=0, padded_vocab_size=0, is_tied=False, norm=vision.norm,
        stacks=(Stack(name=TOWER, layers=vision.layers),),
        init_std=spec.init_std, output_init_std=spec.output_init_std,
    )  # fmt: skip


class VisionEmbedding(ShardedModule):
    """Images of a micro-batch -> hidden states of their patches [patches, m, width], after the class token's."""

    def __init__(
        self,
        spec: VisionSpec,
        norm: nn.Module | None,
        tp: TensorParallel,
        dtype: torch.dtype,
        shares: ImageShares,
    ) -> None:
        super().__init__()
        self.spec, self.norm, self.dtype, self.shares = spec, norm, dtype, shares
        width, side = spec.hidden_size, spec.patch_size
        bound = (CHANNELS * side**2) ** -0.5
        filters = Init(uniform=(-bound, bound))
        self._add("patches", "patch_embedding.weight", (width, CHANNELS, side, side), filters, tp)
        self._add("positions", "position_embeddings.weight", (spec.num_positions, width), Init(std=1.0), tp)
        if spec.has_class_token:
            self._add("class_token", "class_token.weight", (1, 1, width), Init(std=1.0), tp)
        if spec.has_patch_bias:
            self.add_weight("bias", stream_layout(f"{TOWER}.patch_embedding.bias", width, Init(), tp), dtype)

    def _add(self, attribute: str, name: str, shape: tuple[int, ...], init: Init, tp: TensorParallel) -> None:
        piece = Piece(f"{TOWER}.{name}", shape, whole_box(shape), copies=(tp.group.name,))
        layout = ParamLayout(shape=shape, pieces=(piece,), init=init, kind="positions")
        self.add_weight(attribute, layout, self.dtype)

    def forward(self, hidden: Tensor | None, batch: Batch, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a segment)
        assert batch.images is not None, "the batch of a model with images"
        images = self.shares.own(batch.images.flatten(0, 1)).to(self.dtype)
        side = self.spec.patch_size
        rows = F.unfold(images, side, stride=side).transpose(1, 2)  # [m, patches, channels * side * side]
        bias = weight_of(self, "bias") if self.spec.has_patch_bias else None
        x = F.linear(rows, weight_of(self, "patches").flatten(1), bias)
        if self.spec.has_class_token:
            x = torch.cat((weight_of(self, "class_token").expand(len(x), -1, -1), x), dim=1)
        x = (x + weight_of(self, "positions")).transpose(0, 1).contiguous()
        return x if self.norm is None else self.norm(x, info)


class Projector(nn.Module):
    """From vectors of the tower to those of the language model, [n, m, width] -> [n, m, h]."""

    def __init__(self, spec: ModelSpec, context: LayerContext) -> None:
        super().__init__()
        assert spec.vision is not None
        part, tp = spec.vision.projector, context.tp
        self.width, self.dtype = spec.hidden_size, context.ranks.dtype
        norm = None if part.norm is None else norm_weights(f"{PROJECTOR}.norm", part.inputs, part.norm, tp)
        linears = {one.pieces[0].name: one for one in part.linears(spec.hidden_size)}
        if part.mlp is None:
            down = linears["down"]
            init = Init(std=spec.init_std)
            weight = replicated_layout([(f"{PROJECTOR}.down.weight", down.outputs)], down.inputs, init, tp)
            bias = stream_layout(f"{PROJECTOR}.down.bias", down.outputs, Init(), tp)
            self.fc1 = context.builder.replicated_linear(
                norm, LinearLayout(weight, bias if part.has_bias else None)
            )
            return
        first, second = linears.values()
        self.fc1 = context.column_linear(first, norm, has_bias=part.has_bias)
        self.fc2 = context.builder.activation_row_linear(
            part.mlp,
            context.row_weights(second, has_bias=part.has_bias),
            recompute_activation=context.recompute.has_part("mlp_act"),
        )

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        _, y = self.fc1(x, None, info)
        out: Tensor = self.fc2(y, info) if hasattr(self, "fc2") else y
        return out


class ImagesInText(nn.Module):
    """The segment that puts the vectors of images at the places of their tokens.

    Args:
        spec: of the tower.
        tower: its segments, if it is frozen; empty: they are segments before this one.
        norm: norm after the layers of the tower; None: there is none.
        embedding: of the text, with its output modules.
        shares: the ranks that share images.
    """

    def __init__(
        self,
        spec: VisionSpec,
        tower: Sequence[nn.Module],
        norm: nn.Module | None,
        projector: Projector,
        embedding: Embedding,
        shares: ImageShares,
    ) -> None:
        super().__init__()
        self.spec, self.tp, self.shares = spec, shares.tp, shares
        self.tower = nn.ModuleList(tower)
        self.norm, self.projector, self.embedding = norm, projector, embedding
        width, dtype = projector.width, projector.dtype
        self.newline = Newline(width, shares.tp, dtype) if spec.has_newline else None

    def vectors(self, hidden: Tensor | None, batch: Batch, info: PassInfo) -> Tensor:
        """Return the vectors of the images of this rank, [n, m / shares, h], from the output of the tower's segments."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.spec.is_tower_frozen):
            for segment in self.tower:
                hidden = segment(hidden, batch, info)
            assert hidden is not None
            if self.norm is not None:
                hidden = self.norm(hidden, info)
        if self.spec.has_class_token and not self.spec.keeps_class_token:
            hidden = hidden[1:]
        hidden = joined_squares(hidden, self.spec)
        vectors: Tensor = self.projector(hidden.contiguous(), info)
        return vectors

    def forward(self, hidden: Tensor | None, batch: Batch, info: PassInfo) -> Tensor:
        vectors = self.vectors(hidden, batch, info)
        text = EncoderTokens(batch.tokens.clamp(min=0), batch.position_ids)
        x: Tensor = self.embedding.output(self.embedding.embed(text, info), info)
        if self.tp.sequence_parallel and not self.shares.spreads_over_tp:
            # Each tensor rank has the gradients of its own rows.
            vectors = enter_tp_region(vectors, replace(self.tp, sequence_parallel=False))
        assert batch.images is not None, "the batch of a model with images"
        vectors = self.shares.gather(vectors, batch.images.shape[:2].numel())
        first = self.tp.first_row(len(x))
        tokens = batch.tokens.t()[first : first + len(x)]
        return put_vectors(x, vectors.to(x.dtype), tokens, self.newline)


class Newline(ShardedModule):
    """The trained vector after each row of patches."""

    def __init__(self, width: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        layout = stream_layout(f"{PROJECTOR}.newline", width, Init(std=width**-0.5), tp)
        self.add_weight("weight", layout, dtype)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return x [s, b, h] with the vector at its tokens [s, b]."""
        return torch.where((tokens == NEWLINE).unsqueeze(-1), weight_of(self, "weight").to(x.dtype), x)


class ToMessage(nn.Module):
    """Hidden states of the tower -> rows of the language model's width, for the next virtual stage: [rows, b, h]."""

    def __init__(self, spec: ModelSpec, shares: ImageShares, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.shares, self.dtype = spec, shares, dtype

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a segment)
        b = len(batch.tokens)
        rows = message_rows(self.spec, b, self.shares.size)
        flat = F.pad(hidden.flatten(), (0, rows * b * self.spec.hidden_size - hidden.numel()))
        return flat.view(rows, b, -1).to(self.dtype)


class FromMessage(ToMessage):
    """The same, back to [n, m, width]."""

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:  # noqa: ARG002
        vision = self.spec.vision
        assert vision is not None
        shape = _shape_in_tower(vision, len(batch.tokens), self.shares.size)
        return hidden.flatten()[: math.prod(shape)].view(shape).to(self.dtype)


def message_rows(spec: ModelSpec, samples: int, shares: int) -> int:
    """Return the rows of a message between virtual stages of the tower; `shares`: ranks that share images."""
    assert spec.vision is not None
    return -(-math.prod(_shape_in_tower(spec.vision, samples, shares)) // (samples * spec.hidden_size))


def _shape_in_tower(vision: VisionSpec, samples: int, shares: int) -> tuple[int, int, int]:
    return vision.num_positions, -(-samples * vision.images_per_sample // shares), vision.hidden_size


def joined_squares(x: Tensor, spec: VisionSpec) -> Tensor:
    """Return the patches of an image [n, m, w], square by square: [n / side^2, m, side^2 w], the rows of a square one after the other."""
    side, (height, width) = spec.shuffle_side, spec.image_size
    if side == 1:
        return x
    rows, columns = height // spec.patch_size // side, width // spec.patch_size // side
    squares = x.view(rows, side, columns, side, *x.shape[1:]).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(rows * columns, x.shape[1], -1)


def put_vectors(x: Tensor, vectors: Tensor, tokens: Tensor, newline: Newline | None) -> Tensor:
    """Return x [s, b, h] with the vectors of its images where tokens [s, b] are below 0: of sample i, number -1 - token.

    Args:
        vectors: [n, b * images, h], the images of a sample one after the other.
        newline: at tokens `NEWLINE`; None: there are none.
    """
    n, _, h = vectors.shape
    b = x.shape[1]
    of_sample = vectors.reshape(n, b, -1, h).permute(2, 0, 1, 3).flatten(0, 1)  # [images * n, b, h]
    rows = (-1 - tokens).clamp(0, len(of_sample) - 1)
    found = of_sample[rows, torch.arange(b, device=x.device)]
    placed = torch.where((tokens < 0).unsqueeze(-1), found, x)
    return placed if newline is None else newline(placed, tokens)


def vision_segments(
    spec: ModelSpec,
    embedding: Embedding | None,
    layers: Sequence[nn.Module],
    context: LayerContext,
    builder: LocalBuilder,
    shares: ImageShares,
    *,
    is_first: bool,
    hidden_dtype: torch.dtype,
) -> list[nn.Module]:
    """Build the segments of a virtual stage of the tower; those of the last one end with the one that joins images and text.

    Args:
        spec: of the whole model.
        embedding: of the text, in the last one; None: the next stage continues the tower.
        layers: segments of the tower's layers.
        context: of the tower, whose tensor ranks do not split the sequence.
        builder: of its norms.
        shares: the ranks that share images.
        is_first: it begins with the patches.
        hidden_dtype: of messages between stages.
    """
    vision = spec.vision
    assert vision is not None

    def norm(name: str) -> nn.Module:
        weights = norm_weights(f"{TOWER}.{name}", vision.hidden_size, vision.norm, context.tp)
        module = builder.norm(weights, vision.norm)
        assert isinstance(module, nn.Module)
        return module

    dtype = context.ranks.dtype
    pre = norm("pre_norm") if vision.has_pre_norm and is_first else None
    start = (
        VisionEmbedding(vision, pre, context.tp, dtype, shares)
        if is_first
        else FromMessage(spec, shares, dtype)
    )
    tower = [start, *layers]
    if embedding is None:
        if shares.spreads_over_tp:
            replicate(tower, shares.tp)
        return [*tower, ToMessage(spec, shares, hidden_dtype)]
    norms = vision.projector.norm or vision.norm
    of_projector = replace(
        context,
        model=_Projector(**{**vars(context.model), "hidden_size": spec.hidden_size}),
        builder=replace(builder, norms=norms),
    )
    projector = Projector(spec, of_projector)
    final = norm("final_norm") if vision.has_final_norm else None
    if shares.spreads_over_tp:
        replicate([*tower, projector, *([] if final is None else [final])], shares.tp)
    is_inside = vision.is_tower_frozen
    joined = ImagesInText(vision, tower if is_inside else [], final, projector, embedding, shares)
    return [joined] if is_inside else [*tower, joined]


def freeze(segments: Sequence[nn.Module], spec: ModelSpec) -> None:
    """Mark the parameters of the parts that are not trained."""
    vision = spec.vision
    if vision is None:
        return
    modules = [one for segment in segments for one in segment.modules() if isinstance(one, ShardedModule)]
    for module in modules:
        for attribute, layout in module.layouts.items():
            names = [piece.name for piece in layout.pieces]
            tower, language = vision.is_tower_frozen, vision.is_language_frozen
            if names and is_frozen(names[0], tower=tower, language=language):
                module.layouts[attribute] = replace(layout, is_trained=False)
