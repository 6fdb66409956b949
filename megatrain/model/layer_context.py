"""Arguments of the module of a part: the model and the layer as data, this rank's parallelism, the builder.

    Linear (config/model_spec) ──> names, boxes and initial values of its weights ──> a leaf: norm + column-parallel, row-parallel

A part of the user's own gets the same object, and declares its GEMMs with `column_linear` and `row_linear`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.linear import Linear, Split
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.model_spec.norm import NormPosition
from megatrain.config.model_spec.part import Part
from megatrain.kernels.side_stream import SideStream
from megatrain.model.implementations.local_builder import LocalBuilder
from megatrain.model.implementations.module_protocols import ColumnLinear, Pointwise, RowLinear
from megatrain.model.layouts import (
    Columns,
    LinearLayout,
    columns_bias_layout,
    columns_layout,
    norm_weights,
    replicated_layout,
    rows_layout,
    stream_layout,
)
from megatrain.model.recompute import Recompute
from megatrain.parallel.context_parallel import TokenSplit
from megatrain.parallel.expert_parallel import ExpertParallel
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import Init
from megatrain.parallel.pipeline.interleave import Turns
from megatrain.parallel.rank_capacity import RankCapacities
from megatrain.parallel.tensor_parallel import TensorParallel

DispatcherType = Literal["allgather", "alltoall"]


@dataclass(frozen=True, kw_only=True)
class ExpertCommunication:
    """The way in which ranks exchange tokens, and what overlaps it."""

    dispatcher: DispatcherType = "allgather"
    capacities: RankCapacities | None = None
    """Memory of assignments after an all-gather; None: it holds every possible one."""
    side: SideStream | None = None
    """Stream of the shared expert on a GPU; None: that of the other experts."""
    turns: Turns | None = None
    """Turns of a forward and a backward pass, which a pass gives up before it waits; None: passes run one after the other."""


@dataclass(frozen=True, kw_only=True)
class LayerRanks:
    """Distribution of the tokens and the weights of a layer over ranks."""

    split: TokenSplit
    dp: RankGroup
    """Data-parallel ranks."""
    parallel: ExpertParallel
    communication: ExpertCommunication = ExpertCommunication()
    dtype: torch.dtype
    """Dtype of the weights."""
    seed: int
    """Seed of dropout and of the router's jitter."""


@dataclass(frozen=True)
class LayerContext:
    """Arguments of the modules of layer `number`."""

    model: ModelSpec
    number: int
    builder: LocalBuilder
    ranks: LayerRanks
    rope_of: Callable[[AttentionSpec], Any]
    """Returns the `RotaryEmbedding` of an attention, which layers share, or None."""
    recompute: Recompute
    relative_positions: Any = None
    """The `RelativePositions` of the layer's stack, which its layers share, or None."""
    is_inside: bool = False
    """The branch is inside a part of the user's own, which norms its input and adds its output."""

    def inside(self) -> LayerContext:
        """Return the context of a branch that begins without a norm, and does not add its output to the stream."""
        return dataclasses.replace(self, is_inside=True)

    @property
    def tp(self) -> TensorParallel:
        return self.ranks.split.tp

    @property
    def norm_position(self) -> NormPosition:
        return self.model.all_layers[self.number].norm_position

    @property
    def adds_outputs(self) -> bool:
        """Branches add their output to the residual stream, in the kernel of its dropout."""
        is_apart = self.is_inside or self.model.all_layers[self.number].is_parallel
        return bool(self.model.hidden_dropout) and not is_apart

    @functools.cached_property
    def output_init(self) -> Init:
        """Initial values of weights whose output is added to the residual stream."""
        return Init(std=self.model.output_init_std)

    def name(self, part: Part) -> str:
        """Return the prefix of the canonical names of a part."""
        return f"{self.model.layer_name(self.number)}.{part.name}"

    def linears(self, part: Part) -> dict[str, Linear]:
        """Return the GEMMs of a part by the names of their first pieces."""
        return {one.pieces[0].name: one for one in part.linears(self.model.hidden_size)}

    def branch_norm(self, part: Part) -> LinearLayout | None:
        """Return the layouts of the norm that begins the branch of a part, if it has one."""
        if self.is_inside or self.norm_position == "post" or self.model.all_layers[self.number].has_one_norm:
            return None
        return norm_weights(f"{self.name(part)}.norm", self.model.hidden_size, self.model.norm, self.tp)

    def layer_norm(self) -> Pointwise:
        """Build the norm that all branches of the layer read."""
        name, model = f"{self.model.layer_name(self.number)}.norm", self.model
        return self.builder.norm(norm_weights(name, model.hidden_size, model.norm, self.tp), model.norm)

    def columns(self, linear: Linear, kind: str) -> list[Columns]:
        """Return the outputs of a GEMM by canonical tensor; `kind`: `weight` or `bias`."""
        prefix, tp = f"{self.model.layer_name(self.number)}.{linear.part}", self.tp
        return [
            Columns(
                f"{prefix}.{piece.name}.{kind}",
                piece.size,
                copies=tp.kv if piece.is_copied and piece.heads < tp.size else None,
            )
            for piece in linear.pieces
        ]

    def column_linear(
        self,
        linear: Linear,
        norm: LinearLayout | None,
        *,
        has_bias: bool = False,
        is_qkv: bool = False,
        keeps_norm: bool = False,
    ) -> ColumnLinear:
        """Build the addition to the residual stream, its norm if there is one, and a column-parallel GEMM.

        Args:
            keeps_norm: the output of the norm is kept even with --recompute-modules layernorm.
        """
        _require_split(linear, "outputs")
        init = Init(std=self.model.init_std)
        layout = columns_layout(self.columns(linear, "weight"), linear.inputs, init, self.tp, is_qkv=is_qkv)
        bias = columns_bias_layout(self.columns(linear, "bias"), self.tp) if has_bias else None
        recompute_norm = self.recompute.has_part("layernorm") and not keeps_norm
        return self.builder.column_linear(norm, LinearLayout(layout, bias), recompute_norm=recompute_norm)

    def replicated_linear(
        self, linear: Linear, norm: LinearLayout | None, *, init: Init | None = None, has_bias: bool = False
    ) -> ColumnLinear:
        """Build the same with a GEMM whose weight every tensor rank holds whole."""
        _require_split(linear, "none")
        tensors = [(columns.name, columns.num_outputs) for columns in self.columns(linear, "weight")]
        layout = replicated_layout(tensors, linear.inputs, init or Init(std=self.model.init_std), self.tp)
        bias = None
        if has_bias:
            (one,) = self.columns(linear, "bias")
            bias = stream_layout(one.name, one.num_outputs, Init(), self.tp)
        recompute_norm = self.recompute.has_part("layernorm") and norm is not None
        return self.builder.replicated_linear(norm, LinearLayout(layout, bias), recompute_norm=recompute_norm)

    def row_linear(self, linear: Linear, *, has_bias: bool = False) -> RowLinear:
        """Build a row-parallel GEMM, whose output is added to the residual stream."""
        return self.builder.row_linear(self.row_weights(linear, has_bias=has_bias))

    def row_weights(self, linear: Linear, *, has_bias: bool) -> LinearLayout:
        """Return the layouts of a row-parallel GEMM."""
        _require_split(linear, "inputs")
        ((weight,), (bias,)) = self.columns(linear, "weight"), self.columns(linear, "bias")
        return LinearLayout(
            rows_layout(weight.name, linear.outputs, linear.inputs, self.output_init, self.tp),
            stream_layout(bias.name, linear.outputs, Init(), self.tp) if has_bias else None,
        )


def _require_split(linear: Linear, split: Split) -> None:
    """Raise ConfigError if the module splits a GEMM in another way than its data."""
    if linear.split != split:
        raise ConfigError(
            f"{linear.weight}: its module splits it over tensor ranks by {split}, and linears() by {linear.split}",
            fix="build it with column_linear (outputs), row_linear (inputs) or replicated_linear (none)",
        )
