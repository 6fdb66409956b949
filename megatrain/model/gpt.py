"""The model: a spec becomes this rank's list of segments and the registry of its parameters.

stage 0                stage 1 .. p - 2       stage p - 1
embedding, layers      layers                 layers, head
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatrain.kernels.dtypes import wide
from megatrain.kernels.rotary import RotarySpec
from megatrain.model.branches import Chain, norm_weights
from megatrain.model.expert_bias import ExpertBiases
from megatrain.model.experts import Dispatcher, ExpertRanks
from megatrain.model.head import Head
from megatrain.model.implementations.leaves import Leaves, Pointwise
from megatrain.model.implementations.local import LocalLeaves
from megatrain.model.implementations.transformer_engine import TransformerEngineLeaves
from megatrain.model.layer import Rotation, TransformerLayer
from megatrain.model.layouts import positions_layout, vocab_layout
from megatrain.model.recompute import Recompute, layer_segments
from megatrain.model.specs import AttentionSpec, GptSpec
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.context import ContextParallel
from megatrain.parallel.context_attention import ContextAttention
from megatrain.parallel.experts import ExpertParallel
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.layout import Init, LaidOutModule, ParamLayout, ParamRegistry
from megatrain.parallel.tensor import TensorParallel, own_embedding, vocab_embedding
from megatrain.parallel.tokens import TokenSplit

EMBEDDING_NAME = "embedding.word_embeddings.weight"
POSITIONS_NAME = "embedding.position_embeddings.weight"
OUTPUT_NAME = "output_layer.weight"


@dataclass(frozen=True)
class Model:
    """This rank's part of the model. Its parameters have no memory before `FlatBuffers` gives it to them."""

    spec: GptSpec
    segments: list[nn.Module]
    registry: ParamRegistry
    tp: TensorParallel
    cp: ContextParallel
    hidden_dtype: torch.dtype
    """Of the residual stream."""
    expert_biases: ExpertBiases
    """Of the routers of all stages."""


class Embedding(LaidOutModule):
    """The first segment: token ids [b, s] -> [s/tp, b, h].

    Args:
        layout: of the table.
        positions: adds what is known of the tokens' places.
        end: the parts between the table and the first layer.
    """

    weight: Tensor

    def __init__(
        self, layout: ParamLayout, positions: nn.Module, end: Chain, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.tp = tp
        self.positions = positions
        self.end = end
        self.add_weight("weight", layout, dtype)

    def forward(self, hidden: Tensor | None, batch: Batch, info: PassInfo) -> Tensor:  # noqa: ARG002 (a segment gets it)
        tokens = vocab_embedding(
            batch.tokens.t(), self.weight, self.weight_grads.get("weight"), self.tp, info
        )
        out: Tensor = self.end(self.positions(tokens, batch, info), info)
        return out


class NoPositions(nn.Module):
    """Nothing is known of places before the first layer."""

    def forward(self, x: Tensor, batch: Batch, info: PassInfo) -> Tensor:  # noqa: ARG002
        return x


class LearnedPositions(LaidOutModule):
    """Adds a learned vector for each place, by the batch's position ids."""

    weight: Tensor

    def __init__(self, layout: ParamLayout, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp = tp
        self.add_weight("weight", layout, dtype)

    def forward(self, x: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        rows = x.shape[0]
        first = self.tp.first_row(rows)
        ids = batch.position_ids.t()[first : first + rows]
        return x + own_embedding(ids, self.weight, self.weight_grads.get("weight"), info)


class Scaled(nn.Module):
    """x times a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002
        return x * self.factor


class Widened(nn.Module):
    """The residual stream in a dtype of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002
        return x.to(self.dtype)


class OutputWeight(LaidOutModule):
    """The head's own weight, where it is not the embedding's."""

    weight: Tensor

    def __init__(self, layout: ParamLayout, dtype: torch.dtype) -> None:
        super().__init__()
        self.add_weight("weight", layout, dtype)


class HeadSegment(nn.Module):
    """The head with its own output weight beside it."""

    def __init__(self, output: OutputWeight, head: Head) -> None:
        super().__init__()
        self.output = output
        self.head = head

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        loss: Tensor = self.head(hidden, batch, info)
        return loss

    def logits(self, hidden: Tensor, info: PassInfo) -> Tensor:
        return self.head.logits(hidden, info)


def stage_layers(num_layers: int, stage: int, num_stages: int) -> range:
    """Global numbers of a pipeline stage's layers."""
    per_stage = num_layers // num_stages
    return range(stage * per_stage, (stage + 1) * per_stage)


def build_model(
    spec: GptSpec,
    grid: RankGrid,
    *,
    seq_length: int,
    sequence_parallel: bool,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    implementation: str = "local",
    attention: str = "sdpa",
    context_ways: Sequence[str] = ("p2p",),
    recompute: Recompute = Recompute(),  # noqa: B008 (frozen)
    dispatcher: Dispatcher = "allgather",
) -> Model:
    """This rank's part of the model that `spec` describes.

    Args:
        seq_length: longest sample; positions are tabulated up to it.
        dtype: of the weights and of the computation.
        device: of the position tables (weights have no memory yet).
        seed: of dropout.
        implementation: of the leaves, as --transformer-impl names it.
        attention: its kernel, as `derived.attention_backend` names it.
        context_ways: how it reaches across context ranks, as --cp-comm-type names it, in all layers or in each.
        recompute: what runs twice, to keep less.
        dispatcher: how tokens travel to experts on other ranks.
    """
    tp, cp = TensorParallel(grid.tp, grid.kv, sequence_parallel), ContextParallel(grid.cp)

    def leaves_of(layer: int) -> Leaves:
        over = ContextAttention.of(context_ways[layer % len(context_ways)], grid)
        if implementation == "transformer_engine":
            return TransformerEngineLeaves(tp, cp, dtype, spec.norm, seed, over)
        return LocalLeaves(tp, cp, dtype, spec.norm, seed, attention, over)

    leaves = leaves_of(0)
    rotations = _Rotations(cp.places(seq_length // cp.size, device), dtype)
    hidden_dtype = wide(dtype) if spec.is_residual_wide else dtype
    ranks = ExpertRanks(
        split=TokenSplit(tp, cp),
        dp=grid.dp,
        parallel=ExpertParallel(grid.ep, grid.etp),
        dispatcher=dispatcher,
        dtype=dtype,
        seed=seed,
    )
    segments: list[nn.Module] = []
    if grid.pp.is_first:
        segments.append(_embedding(spec, grid, tp, leaves, dtype, hidden_dtype))
    layers: list[nn.Module] = []
    for number in stage_layers(len(spec.layers), grid.pp.rank, grid.pp.size):
        layer = spec.layers[number]
        rotation = rotations.of(layer.mixer)
        layers.append(TransformerLayer(layer, spec, number, leaves_of(number), ranks, rotation, recompute))
    segments += layer_segments(layers, recompute)
    if grid.pp.is_last:
        segments.append(_head(spec, grid, tp, leaves, dtype, segments[0]))
    biases = ExpertBiases(spec.routers, dtype=wide(dtype), device=device)
    biases.give_to(segments)
    return Model(spec, segments, ParamRegistry.of(segments), tp, cp, hidden_dtype, biases)


def _embedding(
    spec: GptSpec,
    grid: RankGrid,
    tp: TensorParallel,
    leaves: Leaves,
    dtype: torch.dtype,
    hidden_dtype: torch.dtype,
) -> Embedding:
    std = spec.init_std if spec.embedding_init_std is None else spec.embedding_init_std
    positions: nn.Module = NoPositions()
    if spec.num_positions is not None:
        layout = positions_layout(POSITIONS_NAME, spec.num_positions, spec.hidden_size, Init(std=std), tp)
        positions = LearnedPositions(layout, tp, dtype)
    end: list[Pointwise] = []
    if spec.embedding_multiplier != 1.0:
        end.append(Scaled(torch.tensor(spec.embedding_multiplier, dtype=dtype).item()))
    if spec.width_multiplier != 1.0:
        end.append(Scaled(spec.width_multiplier))
    if hidden_dtype != dtype:
        end.append(Widened(hidden_dtype))
    if spec.hidden_dropout:
        end.append(leaves.dropout(spec.hidden_dropout, "embedding.hidden"))
    return Embedding(_vocab(spec, EMBEDDING_NAME, grid, tp), positions, Chain(end), tp, dtype)


def _head(
    spec: GptSpec, grid: RankGrid, tp: TensorParallel, leaves: Leaves, dtype: torch.dtype, first: nn.Module
) -> nn.Module:
    norm = leaves.norm(norm_weights("decoder.final_norm", spec.hidden_size, spec.norm, tp), spec.norm)
    assert isinstance(norm, nn.Module)
    if spec.is_tied and grid.pp.is_first:
        assert isinstance(first, Embedding)
        return Head(norm, first, spec, tp)
    name = EMBEDDING_NAME if spec.is_tied else OUTPUT_NAME
    output = OutputWeight(_vocab(spec, name, grid, tp), dtype)
    return HeadSegment(output, Head(norm, output, spec, tp))


def _vocab(spec: GptSpec, name: str, grid: RankGrid, tp: TensorParallel) -> ParamLayout:
    is_embedding = name == EMBEDDING_NAME
    std = spec.embedding_init_std if is_embedding else spec.head_init_std
    is_shared = spec.is_tied and grid.pp.size > 1
    return vocab_layout(
        name,
        spec.vocab_size,
        spec.padded_vocab_size,
        spec.hidden_size,
        Init(std=spec.init_std if std is None else std),
        tp,
        is_shared=is_shared,
        kind="embedding" if is_embedding else "output",
    )


class _Rotations:
    """Tables that layers share."""

    def __init__(self, places: Tensor, dtype: torch.dtype) -> None:
        self.places, self.dtype = places, wide(dtype)
        self.made: dict[tuple[RotarySpec, int], Rotation] = {}

    def of(self, attention: AttentionSpec | None) -> Rotation | None:
        if attention is None or attention.rotary is None:
            return None
        spec, head_channels = attention.rotary, attention.head_channels
        if (spec, head_channels) not in self.made:
            self.made[spec, head_channels] = Rotation(spec, head_channels, self.places, self.dtype)
        return self.made[spec, head_channels]
