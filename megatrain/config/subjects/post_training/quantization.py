"""Training aware of quantization (--qat): the layers that it covers, and the sizes of groups."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.linear import Linear
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import Problems, derives, rule
from megatrain.config.schema.optimizer import PrecisionConfig
from megatrain.config.schema.quantization import QUANTIZATION_FORMATS, QuantizationFormat

_USUAL_GROUP: Final = 128
"""Inputs of a group that kernels support, as they do its halves."""


@derives("derived.qat")
def qat(draft: Draft) -> DerivedValue:
    """Derive the format that linear layers are rounded to."""
    found = format_of_training(draft.config.precision)
    return DerivedValue(
        found, "--qat is not given" if found is None else f"--qat {draft.config.precision.qat}"
    )


def format_of_training(precision: PrecisionConfig) -> QuantizationFormat | None:
    """Return the format of --qat."""
    if precision.qat is None:
        return None
    found = QUANTIZATION_FORMATS[precision.qat]
    if found.weights.strategy != "group":
        return found
    return dataclasses.replace(
        found, weights=dataclasses.replace(found.weights, group_size=precision.qat_group_size)
    )


def split_group(spec: ModelSpec, size: int, tp: int) -> Linear | None:
    """Return a linear layer whose inputs on one of `tp` tensor ranks are no whole groups; None: there is none."""
    linears = (linear for layer in spec.layers for linear in layer.linears(spec.hidden_size))
    return next((linear for linear in linears if linear.local_inputs(tp) % size), None)


def uncovered_part(draft: Draft) -> str:
    """Return what the model has besides attention and dense MLPs of a GPT; empty: nothing."""
    parts = [part for layer in draft.derived.model_spec.all_layers for part in layer.parts]
    wrong = next((part for part in parts if not isinstance(part, AttentionSpec | MlpSpec)), None)
    if wrong is not None:
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(wrong).__name__.removesuffix("Spec")).lower()
    if any(isinstance(part, AttentionSpec) and part.latent is not None for part in parts):
        return "latent attention"
    return "" if draft.config.model.model_family == "gpt" else draft.config.model.model_family


@rule
def qat_covers_the_layers(draft: Draft) -> Problems:
    """Only dense layers of attention and MLPs have an export that is quantized."""
    what = uncovered_part(draft)
    if draft.config.precision.qat is not None and what:
        yield Problem(
            f"--qat {draft.config.precision.qat} rounds attention and dense MLPs of GPTs alone, and the model has"
            f" {what}",
            "remove --qat, and quantize the trained model: megatrain quantize",
        )


@rule
def groups_divide_inputs(draft: Draft) -> Problems:
    """Each tensor rank has whole groups."""
    precision, tp = draft.config.precision, draft.config.parallel.tensor_model_parallel_size
    if precision.qat is None or QUANTIZATION_FORMATS[precision.qat].weights.strategy != "group":
        return
    spec, size = draft.derived.model_spec, precision.qat_group_size
    wrong = split_group(spec, size, tp)
    if wrong is not None:
        linears = [linear for layer in spec.layers for linear in layer.linears(spec.hidden_size)]
        fitting = math.gcd(_USUAL_GROUP, *(int(linear.local_inputs(tp)) for linear in linears))
        yield Problem(
            f"--qat-group-size {size} does not divide the {wrong.local_inputs(tp):g} inputs of {wrong.weight} on a tensor rank",
            f"use --qat-group-size {fitting}",
        )
