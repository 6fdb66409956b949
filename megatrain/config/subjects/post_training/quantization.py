"""Training aware of quantization (--qat): the layers that it covers, and the sizes of groups."""

from __future__ import annotations

import dataclasses
import math

from megatrain.config.errors import Problem
from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import Problems, derives, rule
from megatrain.config.schema.quantization import QUANTIZATION_FORMATS


@derives("derived.qat")
def qat(draft: Draft) -> DerivedValue:
    """Derive the format that linear layers are rounded to."""
    precision = draft.config.precision
    if precision.qat is None:
        return DerivedValue(None, "--qat is not given")
    found = QUANTIZATION_FORMATS[precision.qat]
    if found.weights.strategy == "group":
        weights = dataclasses.replace(found.weights, group_size=precision.qat_group_size)
        found = dataclasses.replace(found, weights=weights)
    return DerivedValue(found, f"--qat {precision.qat}")


@rule
def qat_covers_the_layers(draft: Draft) -> Problems:
    """Only dense layers of attention and MLPs have an export that is quantized."""
    if draft.config.precision.qat is None:
        return
    spec = draft.derived.model_spec
    parts = [part for layer in spec.all_layers for part in layer.parts]
    wrong = next((part for part in parts if not isinstance(part, AttentionSpec | MlpSpec)), None)
    has_latents = any(isinstance(part, AttentionSpec) and part.latent is not None for part in parts)
    if wrong is not None or has_latents or draft.config.model.model_family != "gpt":
        what = "latent attention" if wrong is None and has_latents else wrong and type(wrong).__name__
        yield Problem(
            f"--qat {draft.config.precision.qat}: rounds attention and dense MLPs of GPTs alone, and the model has"
            f" {what or draft.config.model.model_family}",
            "remove --qat, and quantize the trained model: megatrain quantize",
        )


@rule
def groups_divide_inputs(draft: Draft) -> Problems:
    """Each tensor rank has whole groups."""
    precision, tp = draft.config.precision, draft.config.parallel.tensor_model_parallel_size
    if precision.qat is None or QUANTIZATION_FORMATS[precision.qat].weights.strategy != "group":
        return
    spec, size = draft.derived.model_spec, precision.qat_group_size
    linears = [linear for layer in spec.layers for linear in layer.linears(spec.hidden_size)]
    wrong = next((linear for linear in linears if linear.local_inputs(tp) % size), None)
    if wrong is not None:
        fitting = math.gcd(size, *(int(linear.local_inputs(tp)) for linear in linears))
        yield Problem(
            f"--qat-group-size {size} does not divide the {wrong.local_inputs(tp):g} inputs of {wrong.weight} on a tensor rank",
            f"use --qat-group-size {fitting}",
        )
