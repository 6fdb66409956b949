"""Builder of the model: makes this rank's list of segments and the registry of their parameters from a spec.

    virtual stage 0        stages 1 .. n - 2      stage n - 1
    embedding, layers      layers                 layers, multi-token prediction, head

    with two stacks, before the first layer of the decoder: final norm of the encoder, embedding of the decoder's tokens

A rank has one virtual stage, or several as model chunks. Multi-token prediction may have a stage of its own before the head's.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.schema.quantization import QuantizationFormat
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.model.contexts import PackContexts, SampleContexts
from megatrain.model.distillation import Distillation
from megatrain.model.embedding import Embedding
from megatrain.model.embedding_parts import CastToDtype, LearnedPositions, Scale, TokenTypes
from megatrain.model.experts.biases import ExpertBiases
from megatrain.model.families.cross_attention import LayerWithMemory
from megatrain.model.families.decoder_start import DecoderStart
from megatrain.model.families.image_shares import ImageShares
from megatrain.model.families.masked_lm import (
    BinaryHead,
    HeadParts,
    HeadTransform,
    LabelledTokens,
    MicrobatchMeans,
)
from megatrain.model.families.parallel_layer import ParallelLayer
from megatrain.model.families.relative_positions import RelativePositions
from megatrain.model.families.vision import freeze, tower_of, vision_segments
from megatrain.model.head import Head
from megatrain.model.implementations.bias_sums import leave_sums_and_amaxes
from megatrain.model.implementations.fake_quantized import fake_quantized_builder
from megatrain.model.implementations.local import LocalColumnLinear, LocalNorm, LocalRowLinear
from megatrain.model.implementations.local_builder import LocalBuilder
from megatrain.model.implementations.lora import freeze_base, lora_builder
from megatrain.model.implementations.module_protocols import Pointwise
from megatrain.model.implementations.transformer_engine import TransformerEngineBuilder
from megatrain.model.layer import Attention, Mlp, Sequential, TransformerLayer
from megatrain.model.layer_context import ExpertCommunication, LayerContext, LayerRanks
from megatrain.model.layouts import norm_weights, table_layout, vocab_bias_layout, vocab_layout
from megatrain.model.mtp import MtpLayer
from megatrain.model.parts import build_part
from megatrain.model.recompute import Recompute, RecomputedModule, layer_segments
from megatrain.model.user_loss import UserLoss
from megatrain.parallel.context_parallel import ContextParallel, TokenSplit
from megatrain.parallel.expert_parallel import ExpertParallel
from megatrain.parallel.fp8.scaling import Fp8Recipes
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.layout import Init, ParamLayout, ParamRegistry
from megatrain.parallel.pipeline.actions import Placement
from megatrain.parallel.rank_lists import embedding_ranks
from megatrain.parallel.tensor_overlap.copies import peer_memory
from megatrain.parallel.tensor_parallel import TensorParallel

EMBEDDING_NAME = "embedding.word_embeddings.weight"
POSITIONS_NAME = "embedding.position_embeddings.weight"
TYPES_NAME = "embedding.tokentype_embeddings.weight"
OUTPUT_NAME = "output_layer.weight"
OUTPUT_BIAS_NAME = "output_layer.bias"


@dataclass(frozen=True)
class Model:
    """This rank's part of the model. Its parameters have no memory until `FlatBuffers` allocates it."""

    spec: ModelSpec
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
    fp8: Fp8Recipes | None
    """FP8 of linear layers; None: there is none."""
    communication: ExpertCommunication
    distillation: Distillation | None = None
    """The teacher of the run; None: it has none."""


def equal_stages(num_layers: int, num_stages: int) -> list[range]:
    """Return the numbers of the layers of each virtual stage, for stages of equally many."""
    per_stage = num_layers // num_stages
    return [range(stage * per_stage, (stage + 1) * per_stage) for stage in range(num_stages)]


def build_model(
    spec: ModelSpec,
    grid: RankGrid,
    *,
    seq_length: int,
    sequence_parallel: bool,
    overlaps_tp: bool = False,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    implementation: str = "local",
    attention: str = "sdpa",
    cp_comm_types: Sequence[str] = ("p2p",),
    recompute: Recompute = Recompute(),  # noqa: B008 (frozen)
    communication: ExpertCommunication = ExpertCommunication(),  # noqa: B008 (frozen)
    placement: Placement | None = None,
    stages: Sequence[range] | None = None,
    tower_stages: Sequence[range] | None = None,
    mtp_stage: int | None = None,
    fp8: Fp8Recipes | None = None,
    qat: QuantizationFormat | None = None,
    user_loss: UserLoss | None = None,
    others: OtherModules | None = None,
    has_packs: bool = False,
) -> Model:
    """Build this rank's part of the model that `spec` describes.

    Args:
        seq_length: length of the longest sample; RoPE tables cover it.
        overlaps_tp: with sequence parallelism, products overlap the communication of their layer.
        dtype: dtype of the weights and of the computation.
        device: device of the RoPE tables and the router biases (weights have no memory yet).
        seed: seed of dropout.
        implementation: implementation of the modules, a value of --transformer-impl.
        attention: attention kernel, a value of `derived.attention_backend`.
        cp_comm_types: values of --cp-comm-type, one for all layers or one per layer.
        recompute: activations to recompute.
        communication: communication of experts.
        placement: virtual stages of the pipeline; None: one per rank.
        stages, tower_stages: numbers of each virtual stage's layers; None: equally many, the whole tower in the first.
        mtp_stage: virtual stage of multi-token prediction; None: the last one.
        fp8: builders of the FP8 tensors of linear layers.
        qat: format that linear layers are rounded to (--qat).
        user_loss: loss of the user in place of the cross-entropy (--loss).
        others: makes the head, and modules around layers, of a teacher or of a model that has one.
        has_packs: micro-batches are packs, each on a group of ranks of its own.
    """
    placement = placement or Placement(grid.pp.size)
    stages = stages or equal_stages(len(spec.layers), placement.num_stages)
    contexts = (PackContexts if has_packs else SampleContexts)(grid, seq_length, cp_comm_types, dtype, device)
    tp, cp = _tensor_parallel(grid, device, sequence_parallel, overlaps_tp), contexts.cp
    new_builder = _new_builder(implementation, qat, spec)

    def builder_of(layer: int) -> LocalBuilder:
        recipe = fp8 and functools.partial(fp8.recipe, layer)
        return new_builder(tp, cp, dtype, spec.norm, seed, attention, contexts.attention(layer), recipe)

    ranks = LayerRanks(
        split=TokenSplit(tp, cp), dp=grid.dp, parallel=ExpertParallel(grid.ep, grid.etp, grid.ep_steps),
        communication=communication, dtype=dtype, seed=seed,
    )  # fmt: skip
    split = (placement, stages, tower_stages, placement.num_stages - 1 if mtp_stage is None else mtp_stage)
    builder = _StageBuilder(spec, *split, builder_of, ranks, contexts, recompute, user_loss, others)
    segments, chunks = builder.chunks(grid.pp.rank)
    biases = _expert_biases(spec, segments, dtype, device)
    parts = (segments, chunks, placement, ParamRegistry.of(segments), tp, cp, builder.hidden_dtype)
    return Model(spec, *parts, biases, fp8, communication)


def _tensor_parallel(
    grid: RankGrid, device: torch.device, sequence_parallel: bool, overlaps: bool
) -> TensorParallel:
    has_peers = overlaps and sequence_parallel and grid.tp.size > 1
    peers = peer_memory(grid.tp, device) if has_peers else None
    return TensorParallel(grid.tp, grid.kv, sequence_parallel, peers)


def _expert_biases(
    spec: ModelSpec, segments: Sequence[nn.Module], dtype: torch.dtype, device: torch.device
) -> ExpertBiases:
    biases = ExpertBiases(spec.routers, spec.routers_by_name, dtype=accumulation_dtype(dtype), device=device)
    biases.attach_to(segments)
    return biases


def _new_builder(
    implementation: str, qat: QuantizationFormat | None, spec: ModelSpec
) -> Callable[..., LocalBuilder]:
    """Return what makes the builder of a layer's modules, given the arguments of `LocalBuilder`."""
    if qat is not None:
        return fake_quantized_builder(qat)
    if spec.lora is not None:
        return lora_builder(spec.lora)
    if implementation == "transformer_engine":
        return functools.partial(TransformerEngineBuilder, is_residual_fp32=spec.is_residual_fp32)
    return LocalBuilder


class OtherModules(Protocol):
    """Makes modules in place of a model's own."""

    def head(self, *arguments: Any) -> Head:
        """Return the last segment; the arguments are those of `Head`."""

    def layer(self, number: int, layer: nn.Module, spec: ModelSpec, ranks: LayerRanks) -> nn.Module:
        """Return a module in place of the layer of this number."""


@dataclass(frozen=True)
class _StageBuilder:
    """Builder of the segments of this rank's virtual stages."""

    spec: ModelSpec
    placement: Placement
    stages: Sequence[range]
    """Numbers of the layers of each virtual stage."""
    tower_stages: Sequence[range] | None
    """Numbers of the layers of the vision tower of each virtual stage; None: the first has them all."""
    mtp_stage: int
    """Virtual stage of multi-token prediction."""
    builder_of: Callable[[int], LocalBuilder]
    """Returns the builder of the modules of a layer, by its number."""
    ranks: LayerRanks
    contexts: SampleContexts
    recompute: Recompute
    user_loss: UserLoss | None
    others: OtherModules | None

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Dtype of the residual stream."""
        dtype = self.ranks.dtype
        return accumulation_dtype(dtype) if self.spec.is_residual_fp32 else dtype

    def chunks(self, rank: int) -> tuple[list[nn.Module], list[range]]:
        """Build the segments of a pipeline rank; returns them and the numbers of those of each model chunk."""
        segments: list[nn.Module] = []
        chunks: list[range] = []
        for chunk in range(self.placement.num_chunks):
            stage, first = self.placement.stage(rank, chunk), len(segments)
            segments += self.segments(stage, self.stages[stage], segments)
            chunks.append(range(first, len(segments)))
        for stack, table in self.relative_positions.items():
            segments[0].add_module(f"relative_positions_of_{stack}", table)
        freeze(segments, self.spec)
        if self.spec.lora is not None:
            freeze_base(segments)
        return segments, chunks

    def segments(self, stage: int, layers: range, earlier: Sequence[nn.Module]) -> list[nn.Module]:
        """Build the segments of a virtual stage; `earlier`: those of this rank's earlier stages."""
        found: list[nn.Module] = []
        if self.spec.vision is not None:
            found += self._vision(stage)
        elif stage == 0:
            found.append(self._embedding(self._embedding_output("embedding")))
        first = len(self.spec.stacks[0].layers)
        of_encoder, of_decoder = layers, range(0)
        if len(self.spec.stacks) > 1:
            of_encoder, of_decoder = (
                range(layers.start, min(layers.stop, first)),
                range(max(layers.start, first), layers.stop),
            )
        found += layer_segments([self._layer(number) for number in of_encoder], self.recompute)
        if first in of_decoder:
            found.append(self._decoder_start([*earlier, *found]))
        found += layer_segments([self._layer(number) for number in of_decoder], self.recompute)
        if stage == self.mtp_stage:
            for depths in self._depths_of_segments:
                found.append(self._mtp_layer(depths, [*earlier, *found]))
        if stage == self.placement.num_stages - 1:
            found.append(self._head([*earlier, *found]))
        return found

    def _embedding(self, output: nn.Module) -> Embedding:
        """Build the embedding with all its tables."""
        spec, tp, dtype = self.spec, self.ranks.split.tp, self.ranks.dtype
        init = Init(std=spec.init_std if spec.embedding_init_std is None else spec.embedding_init_std)
        positions = types = None
        if spec.num_positions is not None:
            shared = len(spec.stacks) > 1 and len(self._embedding_holders) > 1
            size = spec.num_positions, spec.hidden_size
            layout = table_layout(POSITIONS_NAME, *size, init, tp, is_shared=shared)
            positions = LearnedPositions(layout, tp, dtype)
        if spec.num_token_types is not None:
            layout = table_layout(TYPES_NAME, spec.num_token_types, spec.hidden_size, init, tp)
            types = TokenTypes(layout, tp, dtype)
        return Embedding(self._vocab_layout(EMBEDDING_NAME), positions, types, output, tp, dtype)

    def _decoder_start(self, earlier: Sequence[nn.Module]) -> DecoderStart:
        embedding = _embedding_in(earlier)
        return DecoderStart(
            self._final_norm(self.spec.stacks[0].name),
            embedding or self._embedding(Sequential([])),
            owns_embedding=embedding is None,
            output=self._embedding_output("decoder.embedding"),
            hidden_dtype=self.hidden_dtype,
        )

    def _vision(self, stage: int) -> list[nn.Module]:
        """Build a virtual stage's segments of the vision tower and the projector, which embed the text too."""
        assert self.spec.vision is not None
        stages = self.tower_stages or [range(len(self.spec.vision.layers))]
        last = max(number for number, layers in enumerate(stages) if layers)
        if stage > last:
            return []
        embedding = self._embedding(self._embedding_output("embedding")) if stage == last else None
        whole, tower = self.ranks.split.tp, tower_of(self.spec)
        alone = RankGroup("alone", (whole.group.ranks[whole.rank],), 0)
        shares = ImageShares(whole, self.ranks.split.cp.group, self.spec.vision.is_spread_over_tp)
        tp = dataclasses.replace(whole, sequence_parallel=False, peers=None)
        if shares.spreads_over_tp:
            tp = TensorParallel(alone, alone, sequence_parallel=False)
        cp = ContextParallel(alone)
        plain = self._plain_builder
        assert isinstance(plain, LocalBuilder)
        builder = dataclasses.replace(plain, tp=tp, cp=cp, norms=tower.norm)
        ranks = dataclasses.replace(self.ranks, split=TokenSplit(tp, cp))

        def context(number: int) -> LayerContext:
            return LayerContext(tower, number, builder, ranks, lambda _: None, self.recompute)

        segments = layer_segments([_layer(context(number)) for number in stages[stage]], self.recompute)
        parts = (self.spec, embedding, segments, context(0), builder, shares)
        return vision_segments(*parts, is_first=stage == 0, hidden_dtype=self.hidden_dtype)

    def _layer(self, number: int) -> nn.Module:
        builder = self.builder_of(number)
        relative = self.relative_positions.get(self.spec.stack_of(number).name)
        layer = _layer(
            LayerContext(self.spec, number, builder, self.ranks, self.contexts.rope, self.recompute, relative)
        )
        return layer if self.others is None else self.others.layer(number, layer, self.spec, self.ranks)

    @functools.cached_property
    def relative_positions(self) -> dict[str, RelativePositions]:
        """The tables of relative position bias by stack; all pipeline ranks hold all of them, in their first segment."""
        found: dict[str, RelativePositions] = {}
        for stack in self.spec.stacks:
            attention = next((layer.attention for layer in stack.layers if layer.attention is not None), None)
            if attention is None or attention.relative is None:
                continue
            name, init = f"{stack.name}.relative_positions.weight", Init(std=self.spec.init_std)
            found[stack.name] = RelativePositions(
                attention.relative, name, attention.num_heads, init, self.ranks.split.tp, self.ranks.dtype,
                is_shared=self.placement.num_ranks > 1,
            )  # fmt: skip
        return found

    def _embedding_output(self, name: str) -> Sequential:
        """Build the modules that are applied to embedded tokens; `name`: key of their dropout."""
        spec, dtype = self.spec, self.ranks.dtype
        modules: list[Pointwise] = []
        if spec.embedding_multiplier != 1.0:
            modules.append(Scale(torch.tensor(spec.embedding_multiplier, dtype=dtype).item()))
        if spec.width_multiplier != 1.0:
            modules.append(Scale(spec.width_multiplier))
        if self.hidden_dtype != dtype:
            modules.append(CastToDtype(self.hidden_dtype))
        if spec.hidden_dropout:
            modules.append(self.builder_of(0).dropout(spec.hidden_dropout, f"{name}.hidden"))
        return Sequential(modules)

    @property
    def _depths_of_segments(self) -> list[range]:
        """Depths of multi-token prediction in each of its segments: all in one, if they share their weights."""
        count = self.spec.num_depths
        if self.spec.mtp is not None and self.spec.mtp.is_repeated:
            return [range(count)]
        return [range(depth, depth + 1) for depth in range(count)]

    def _mtp_layer(self, depths: range, earlier: Sequence[nn.Module]) -> nn.Module:
        """Build a segment of multi-token prediction; it is recomputed like a chunk of layers."""
        spec, tp, depth = self.spec, self.ranks.split.tp, depths.start
        size, embedding = len(spec.depth_layers), _embedding_in(earlier)
        first = len(spec.layers) + depth * size
        layer = MtpLayer(
            spec,
            depths,
            model_norm=self._final_norm(spec.stacks[-1].name) if depth == 0 else None,
            embedding=embedding
            or Embedding(
                self._vocab_layout(EMBEDDING_NAME), None, None, Sequential([]), tp, self.ranks.dtype
            ),
            owns_embedding=embedding is None,
            embedding_output=self._embedding_output(f"mtp.layers.{depth}.embedding"),
            layers=[self._layer(number) for number in range(first, first + size)],
            builder=self.builder_of(first),
            tp=tp,
            hidden_dtype=self.hidden_dtype,
        )
        return RecomputedModule(layer) if self.recompute.kind == "uniform" else layer

    def _final_norm(self, stack: str) -> nn.Module:
        spec = self.spec
        weights = norm_weights(f"{stack}.final_norm", spec.hidden_size, spec.norm, self.ranks.split.tp)
        norm = self.builder_of(0).norm(weights, spec.norm)
        assert isinstance(norm, nn.Module)
        return norm

    def _head(self, earlier: Sequence[nn.Module]) -> Head:
        spec, tp, dtype, embedding = self.spec, self.ranks.split.tp, self.ranks.dtype, _embedding_in(earlier)
        norm = self._final_norm(spec.stacks[-1].name) if spec.mtp is None else None
        bias = vocab_bias_layout(OUTPUT_BIAS_NAME, spec.vocab_size, spec.padded_vocab_size, tp)
        parts = HeadParts(
            transform=HeadTransform(spec, self._plain_builder, tp) if spec.head.has_transform else None,
            binary=BinaryHead(spec, self.ranks.split, dtype) if spec.head.is_binary else None,
            means=MicrobatchMeans(self.ranks.split.cp) if spec.head.averages_microbatches else None,
            bias=bias if spec.head.has_bias else None,
            selection=None if spec.head.max_labels is None else LabelledTokens(spec.head.max_labels),
        )
        if spec.is_tied and embedding is None and len(spec.stacks) > 1:
            # All ranks with the word table have all tables that the stacks share, at the same positions.
            parts, embedding = (
                dataclasses.replace(parts, owns_embedding=True),
                self._embedding(Sequential([])),
            )
        is_tied_here = spec.is_tied and embedding is not None
        layout = None if is_tied_here else self._vocab_layout(EMBEDDING_NAME if spec.is_tied else OUTPUT_NAME)
        owner = embedding if is_tied_here else None
        arguments = (norm, parts, layout, owner, spec, self.user_loss, tp, dtype)
        return Head(*arguments) if self.others is None else self.others.head(*arguments)

    @property
    def _plain_builder(self) -> LocalBuilder:
        """The builder of modules outside of layers, which are not in FP8."""
        builder = self.builder_of(0)
        assert isinstance(builder, LocalBuilder)
        return dataclasses.replace(builder, fp8_recipe=None)

    @property
    def _embedding_holders(self) -> tuple[int, ...]:
        """Pipeline ranks with the word embedding."""
        decoder_stage = self.spec.decoder_stage([len(one) for one in self.stages])
        later = decoder_stage if self.spec.mtp is None else self.mtp_stage
        return embedding_ranks(self.placement, is_tied=self.spec.is_tied, later_stage=later)

    def _vocab_layout(self, name: str) -> ParamLayout:
        spec, is_embedding = self.spec, name == EMBEDDING_NAME
        std = spec.embedding_init_std if is_embedding else spec.head_init_std
        return vocab_layout(
            name,
            spec.vocab_size,
            spec.padded_vocab_size,
            spec.hidden_size,
            Init(std=spec.init_std if std is None else std),
            self.ranks.split.tp,
            is_shared=is_embedding and len(self._embedding_holders) > 1,
            kind="embedding" if is_embedding else "output",
        )


def _embedding_in(segments: Sequence[nn.Module]) -> Embedding | None:
    """Return the word embedding of these segments, if they have it."""
    modules = (module for segment in segments for module in segment.modules())
    return next((module for module in modules if isinstance(module, Embedding)), None)


def _layer(context: LayerContext) -> TransformerLayer:
    layer = context.model.all_layers[context.number]
    branches = [build_part(part, context) for part in layer.parts]
    leave_sums_and_amaxes(branches)
    if context.model.stack_of(context.number).memory is not None:
        return LayerWithMemory(branches, context.tp)
    if layer.is_parallel:
        return ParallelLayer(branches, context.layer_norm() if layer.has_one_norm else None)
    if context.tp.peers is not None:
        _halve_gradients(branches)
        if context.tp.size == 2:
            _leave_sums_to_residual(branches)
    return TransformerLayer(branches)


def _halve_gradients(branches: Sequence[nn.Module]) -> None:
    """Let half of the weight gradient of an MLP overlap the gather of the attention before it, whose GEMM is too small to hide it."""
    for branch, after in itertools.pairwise(branches):
        if (
            isinstance(branch, Attention)
            and isinstance(branch.proj, LocalRowLinear)
            and branch.proj.fp8 is None
        ):
            first = after.fc1 if isinstance(after, Mlp) else None
            if isinstance(first, LocalColumnLinear) and first.fp8 is None:
                first.tp = dataclasses.replace(first.tp, halves_gradients=True)


def _leave_sums_to_residual(branches: Sequence[nn.Module]) -> None:
    """Let dense branches return the terms of their output where a norm or the end of the layer reads and adds them."""
    dense = [branch for branch in branches if isinstance(branch, Attention | Mlp)]
    firsts = [branch.qkv if isinstance(branch, Attention) else branch.fc1 for branch in dense]
    if len(dense) < len(branches) or not all(
        isinstance(first, LocalColumnLinear) and isinstance(first.norm, LocalNorm) for first in firsts
    ):
        return
    for branch in dense:
        last = branch.proj if isinstance(branch, Attention) else branch.fc2
        is_plain = isinstance(branch.output, Sequential) and not branch.output.steps
        if is_plain and isinstance(last, LocalRowLinear) and last.fp8 is None and not hasattr(last, "bias"):
            last.returns_partial_sums = True
