"""Builder of the model: makes this rank's list of segments and the registry of their parameters from a spec.

    virtual stage 0        stages 1 .. n - 2      stage n - 1
    embedding, layers      layers                 layers, head

A rank has one virtual stage, or several as model chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.rotary import RotarySpec
from megatrain.model.embedding import CastToDtype, Embedding, LearnedPositions, Scale
from megatrain.model.expert_bias import ExpertBiases
from megatrain.model.experts import DispatcherType, ExpertBranch, ExpertRanks
from megatrain.model.head import Head
from megatrain.model.implementations.leaves import Leaves, Pointwise
from megatrain.model.implementations.local_leaves import LocalLeaves
from megatrain.model.implementations.transformer_engine import TransformerEngineLeaves
from megatrain.model.latent_attention import LatentAttention
from megatrain.model.layer import Attention, Mlp, RotaryEmbedding, Sequential, TransformerLayer
from megatrain.model.layouts import norm_weights, positions_layout, vocab_layout
from megatrain.model.linear_attention import LinearAttention
from megatrain.model.recompute import Recompute, RecomputedModule, layer_segments
from megatrain.model.specs import AttentionSpec, ExpertsSpec, GptSpec, LinearAttentionSpec
from megatrain.parallel.context_attention import ContextAttention
from megatrain.parallel.context_parallel import ContextParallel, TokenSplit
from megatrain.parallel.expert_parallel import ExpertParallel
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.layout import Init, ParamLayout, ParamRegistry
from megatrain.parallel.pipeline.actions import Placement
from megatrain.parallel.tensor_parallel import TensorParallel

EMBEDDING_NAME = "embedding.word_embeddings.weight"
POSITIONS_NAME = "embedding.position_embeddings.weight"
OUTPUT_NAME = "output_layer.weight"


@dataclass(frozen=True)
class Model:
    """This rank's part of the model. Its parameters have no memory until `FlatBuffers` allocates it."""

    spec: GptSpec
    segments: list[nn.Module]
    chunks: list[range]
    """Numbers of the segments of each model chunk."""
    placement: Placement
    """The ranks of the virtual stages."""
    registry: ParamRegistry
    tp: TensorParallel
    cp: ContextParallel
    hidden_dtype: torch.dtype
    """Dtype of the residual stream."""
    expert_biases: ExpertBiases
    """Biases of the routers of all stages."""


def equal_stages(num_layers: int, num_stages: int) -> list[range]:
    """Return the numbers of the layers of each virtual stage, for stages of equally many."""
    per_stage = num_layers // num_stages
    return [range(stage * per_stage, (stage + 1) * per_stage) for stage in range(num_stages)]


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
    cp_comm_types: Sequence[str] = ("p2p",),
    recompute: Recompute = Recompute(),  # noqa: B008 (frozen)
    dispatcher: DispatcherType = "allgather",
    placement: Placement | None = None,
    stages: Sequence[range] | None = None,
) -> Model:
    """Build this rank's part of the model that `spec` describes.

    Args:
        seq_length: length of the longest sample; RoPE tables cover it.
        dtype: dtype of the weights and of the computation.
        device: device of the RoPE tables and the router biases (weights have no memory yet).
        seed: seed of dropout.
        implementation: implementation of the leaves, a value of --transformer-impl.
        attention: attention kernel, a value of `derived.attention_backend`.
        cp_comm_types: values of --cp-comm-type, one for all layers or one per layer.
        recompute: activations to recompute.
        dispatcher: token dispatcher, a value of --moe-token-dispatcher-type.
        placement: virtual stages of the pipeline; None: one per rank.
        stages: numbers of the layers of each virtual stage; None: equally many.
    """
    placement = placement or Placement(grid.pp.size)
    stages = stages or equal_stages(len(spec.layers), placement.num_stages)
    tp, cp = TensorParallel(grid.tp, grid.kv, sequence_parallel), ContextParallel(grid.cp)

    def leaves_of(layer: int) -> Leaves:
        context = ContextAttention.of(cp_comm_types[layer % len(cp_comm_types)], grid)
        if implementation == "transformer_engine":
            return TransformerEngineLeaves(
                tp, cp, dtype, spec.norm, seed, attention, context, spec.is_residual_fp32
            )
        return LocalLeaves(tp, cp, dtype, spec.norm, seed, attention, context)

    ranks = ExpertRanks(
        split=TokenSplit(tp, cp),
        dp=grid.dp,
        parallel=ExpertParallel(grid.ep, grid.etp),
        dispatcher=dispatcher,
        dtype=dtype,
        seed=seed,
    )
    ropes = _RotaryEmbeddings(cp.positions(seq_length // cp.size, device), dtype)
    builder = _StageBuilder(spec, placement, grid.pp.rank, leaves_of, ranks, ropes, recompute)
    segments: list[nn.Module] = []
    chunks: list[range] = []
    for chunk in range(placement.num_chunks):
        stage = placement.stage(grid.pp.rank, chunk)
        own = builder.segments(stage, stages[stage], segments)
        chunks.append(range(len(segments), len(segments) + len(own)))
        segments += own
    biases = ExpertBiases(spec.routers, dtype=accumulation_dtype(dtype), device=device)
    biases.attach_to(segments)
    registry = ParamRegistry.of(segments)
    return Model(spec, segments, chunks, placement, registry, tp, cp, builder.hidden_dtype, biases)


@dataclass(frozen=True)
class _StageBuilder:
    """Builder of the segments of this rank's virtual stages."""

    spec: GptSpec
    placement: Placement
    rank: int
    """Pipeline rank."""
    leaves_of: Callable[[int], Leaves]
    """Returns the leaves of a layer, by its number."""
    ranks: ExpertRanks
    ropes: _RotaryEmbeddings
    recompute: Recompute

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Dtype of the residual stream."""
        dtype = self.ranks.dtype
        return accumulation_dtype(dtype) if self.spec.is_residual_fp32 else dtype

    def segments(self, stage: int, layers: range, earlier: Sequence[nn.Module]) -> list[nn.Module]:
        """Build the segments of a virtual stage; `earlier`: those of this rank's earlier stages."""
        spec, tp, dtype = self.spec, self.ranks.split.tp, self.ranks.dtype
        found: list[nn.Module] = []
        if stage == 0:
            leaves = self.leaves_of(0)
            found.append(_embedding(spec, self.placement, tp, leaves, dtype, self.hidden_dtype))
        modules = [
            _layer(
                spec, number, self.leaves_of(number), self.ranks, self.ropes.of(spec.layers[number].mixer), self.recompute
            )
            for number in layers
        ]  # fmt: skip
        found += layer_segments(modules, self.recompute)
        if stage == self.placement.num_stages - 1:
            first = next(iter([*earlier, *found]), None)
            found.append(_head(spec, self.placement, self.rank, tp, self.leaves_of(0), dtype, first))
        return found


def _embedding(
    spec: GptSpec,
    placement: Placement,
    tp: TensorParallel,
    leaves: Leaves,
    dtype: torch.dtype,
    hidden_dtype: torch.dtype,
) -> Embedding:
    std = spec.init_std if spec.embedding_init_std is None else spec.embedding_init_std
    positions = None
    if spec.num_positions is not None:
        layout = positions_layout(POSITIONS_NAME, spec.num_positions, spec.hidden_size, Init(std=std), tp)
        positions = LearnedPositions(layout, tp, dtype)
    output: list[Pointwise] = []
    if spec.embedding_multiplier != 1.0:
        output.append(Scale(torch.tensor(spec.embedding_multiplier, dtype=dtype).item()))
    if spec.width_multiplier != 1.0:
        output.append(Scale(spec.width_multiplier))
    if hidden_dtype != dtype:
        output.append(CastToDtype(hidden_dtype))
    if spec.hidden_dropout:
        output.append(leaves.dropout(spec.hidden_dropout, "embedding.hidden"))
    return Embedding(
        _vocab_layout(spec, EMBEDDING_NAME, placement, tp), positions, Sequential(output), tp, dtype
    )


def _layer(
    spec: GptSpec,
    number: int,
    leaves: Leaves,
    ranks: ExpertRanks,
    rope: RotaryEmbedding | None,
    recompute: Recompute,
) -> TransformerLayer:
    layer, tp, prefix = spec.layers[number], ranks.split.tp, f"decoder.layers.{number}"
    position = layer.norm_position
    branches: list[nn.Module] = []
    if isinstance(layer.mixer, AttentionSpec):
        attention = Attention if layer.mixer.latent is None else LatentAttention
        branches.append(
            attention(layer.mixer, spec, position, f"{prefix}.attention", leaves, tp, rope, recompute)
        )
    elif layer.mixer is not None:
        name = f"{prefix}.linear_attention"
        branches.append(
            LinearAttention(layer.mixer, spec, position, name, leaves, tp, recompute, ranks.dtype)
        )
    if isinstance(layer.mlp, ExpertsSpec):
        branches.append(ExpertBranch(layer.mlp, spec, number, position, leaves, ranks, recompute))
    elif layer.mlp is not None:
        is_recomputed = recompute.has_part("mlp")
        recompute_norm = recompute.has_part("layernorm") and not is_recomputed
        mlp = Mlp(layer.mlp, spec, position, f"{prefix}.mlp", leaves, tp, recompute_norm=recompute_norm)
        branches.append(RecomputedModule(mlp) if is_recomputed else mlp)
    return TransformerLayer(branches)


def _head(
    spec: GptSpec,
    placement: Placement,
    rank: int,
    tp: TensorParallel,
    leaves: Leaves,
    dtype: torch.dtype,
    first: nn.Module | None,
) -> Head:
    norm = leaves.norm(norm_weights("decoder.final_norm", spec.hidden_size, spec.norm, tp), spec.norm)
    assert isinstance(norm, nn.Module)
    if spec.is_tied and placement.rank(0) == rank:
        assert isinstance(first, Embedding)
        return Head(norm, None, first, spec, tp, dtype)
    layout = _vocab_layout(spec, EMBEDDING_NAME if spec.is_tied else OUTPUT_NAME, placement, tp)
    return Head(norm, layout, None, spec, tp, dtype)


def _vocab_layout(spec: GptSpec, name: str, placement: Placement, tp: TensorParallel) -> ParamLayout:
    is_embedding = name == EMBEDDING_NAME
    std = spec.embedding_init_std if is_embedding else spec.head_init_std
    return vocab_layout(
        name,
        spec.vocab_size,
        spec.padded_vocab_size,
        spec.hidden_size,
        Init(std=spec.init_std if std is None else std),
        tp,
        is_shared=spec.is_tied and not placement.has_head(placement.rank(0)),
        kind="embedding" if is_embedding else "output",
    )


class _RotaryEmbeddings:
    """RoPE modules of the layers; layers with the same spec share one."""

    def __init__(self, positions: Tensor, dtype: torch.dtype) -> None:
        self.positions, self.dtype = positions, accumulation_dtype(dtype)
        self.modules: dict[tuple[RotarySpec, int], RotaryEmbedding] = {}

    def of(self, mixer: AttentionSpec | LinearAttentionSpec | None) -> RotaryEmbedding | None:
        """Return the module of a layer, if it has RoPE."""
        if not isinstance(mixer, AttentionSpec) or mixer.rotary is None:
            return None
        key = (mixer.rotary, mixer.rope_channels)
        if key not in self.modules:
            self.modules[key] = RotaryEmbedding(*key, self.positions, self.dtype)
        return self.modules[key]
