"""The module of each part of a layer: the table `class of the part -> builder of its module`.

A module is the branch of its part in the residual stream. `forward(residual, delta, info)`, with `delta` the output of the branch
before that is not yet added, or None, returns the stream with it, and the output of this branch, all [s/tp, b, h]. That of
cross-attention takes the memory too.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from megatrain.config.errors import ConfigError, MegatrainError
from megatrain.config.model_spec.attention import AttentionSpec, SparseAttentionSpec
from megatrain.config.model_spec.cross_attention import CrossAttentionSpec
from megatrain.config.model_spec.delta_rule import LinearAttentionSpec
from megatrain.config.model_spec.experts import ExpertsSpec
from megatrain.config.model_spec.mamba import MambaSpec
from megatrain.config.model_spec.mlp import (
    AttentionReplacementSpec,
    MlpReplacementSpec,
    MlpSpec,
    ReplacementSpec,
)
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.model_spec.part import Part
from megatrain.config.user_function import describe_line
from megatrain.model.experts.build import expert_branch
from megatrain.model.families.cross_attention import CrossAttention
from megatrain.model.families.sparse_attention import SparseAttention
from megatrain.model.implementations.mlp_chunks import ChunkedMlp
from megatrain.model.latent_attention import LatentAttention
from megatrain.model.layer import Attention, Mlp, branch_output
from megatrain.model.layer_context import LayerContext
from megatrain.model.linear_attention import LinearAttention
from megatrain.model.mamba import Mamba
from megatrain.model.recompute import RecomputedModule
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.layout import ShardedModule


class Replacement(nn.Module):
    """Every tensor rank computes its rows: there is no communication."""

    def __init__(self, spec: ReplacementSpec, context: LayerContext) -> None:
        super().__init__()
        (linear,) = spec.linears(context.model.hidden_size)
        self.linear = context.replicated_linear(linear, context.branch_norm(spec), has_bias=spec.has_bias)
        self.output = branch_output(spec, context)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor | None]:
        residual, x = self.linear(residual, delta, info)
        return self.output.add_to(residual, x, info)


def build_part(part: Part, context: LayerContext) -> nn.Module:
    """Build the module of a part: its own, or that of the table."""
    build = type(part).module or MODULES[type(part)]
    try:
        module: nn.Module = build(part, context)
    except MegatrainError:
        raise
    except Exception as error:
        if type(part).module is None:
            raise
        raise failure_of(part, error) from error
    if type(part).module is not None:
        _require_layouts(part, module)
    return module


def _require_layouts(part: Part, module: nn.Module) -> None:
    """Require a layout of each parameter of a part of the user's own."""
    for path, one in module.named_modules():
        for attribute, _ in one.named_parameters(recurse=False):
            if not isinstance(one, ShardedModule) or attribute not in one.layouts:
                name = f"{path}.{attribute}" if path else attribute
                raise ConfigError(
                    f"--spec: {type(part).__name__}: the parameter {name} of {type(module).__name__} has no layout, which says"
                    " how ranks split it",
                    fix="declare it with add_weight and a layout of megatrain/model/layouts.py, or use column_linear and"
                    " row_linear of the context (docs/extending.md)",
                )


@contextmanager
def failures_of_parts(spec: ModelSpec) -> Iterator[None]:
    """Raise an exception in a part of the user's own as the ConfigError that names its line."""
    try:
        yield
    except MegatrainError:
        raise
    except Exception as error:
        files = {Path(frame.filename).resolve() for frame in traceback.extract_tb(error.__traceback__)}
        for part in (one for layer in spec.all_layers for one in layer.parts):
            module = type(part).module
            if module is not None and Path(inspect.getfile(module)).resolve() in files:
                raise failure_of(part, error) from error
        raise


def failure_of(part: Part, error: Exception) -> ConfigError:
    """Return the error that a part of the user's own raised, with the line of its module."""
    kind = type(part)
    return ConfigError(
        f"--spec: {kind.__name__}: {describe_line(error, inspect.getfile(kind.module))}",
        fix="correct the module at that line: forward(residual, delta, info) gets the residual stream [s/tp, b, h] and"
        " delta, of its shape or None (docs/extending.md)",
    )


def _attention(spec: AttentionSpec, context: LayerContext) -> nn.Module:
    return Attention(spec, context) if spec.latent is None else LatentAttention(spec, context)


def _mlp(spec: MlpSpec, context: LayerContext) -> nn.Module:
    mlp = Mlp(spec, context)
    if context.recompute.mlp_rows is not None:
        return ChunkedMlp(mlp, context.recompute.mlp_rows)
    return RecomputedModule(mlp) if context.recompute.has_part("mlp") else mlp


MODULES: Final[Mapping[type[Part], Callable[[Any, LayerContext], nn.Module]]] = {
    AttentionSpec: _attention,
    SparseAttentionSpec: SparseAttention,
    LinearAttentionSpec: LinearAttention,
    MambaSpec: Mamba,
    MlpSpec: _mlp,
    ExpertsSpec: expert_branch,
    CrossAttentionSpec: CrossAttention,
    AttentionReplacementSpec: Replacement,
    MlpReplacementSpec: Replacement,
}
