"""Custom layers from a function of the user: `--spec`.

    def my_spec(model: ModelConfig, layers: tuple[LayerSpec, ...]) -> Sequence[LayerSpec]: ...

The function receives the resolved settings of the model and the layers that they describe, and returns as many layers. Every
rank calls it; rank 0's digest of the file is in the plan, and a different digest on any rank is an error. A digest is always
compared before the file is run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatrain.config.derive.custom_layers import CustomLayers, layer_function
from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.experts import ExpertSizes
from megatrain.config.model_spec.layer import LayerSizes
from megatrain.config.schema.model import ModelConfig
from megatrain.config.user_function import UserFunction
from megatrain.kernels.activations import ActivationFunction
from megatrain.model.specs import (
    AttentionSpec,
    ExpertsSpec,
    GptSpec,
    LayerSpec,
    LinearAttentionSpec,
    MlpSpec,
)


def apply_custom_layers(spec: GptSpec, model: ModelConfig) -> GptSpec:
    """Replace the layers of a model by those of --spec, if it is given.

    Raises:
        ConfigError: the function cannot be loaded, or its file differs from the plan's.
    """
    function = layer_function(model.spec)
    if function is None:
        return spec
    function.require_digest(model.spec_digest)
    return dataclasses.replace(spec, layers=load_layers(function, model, spec.layers))


def describe_custom_layers(
    function: UserFunction, model: ModelConfig, default: tuple[LayerSpec, ...]
) -> CustomLayers:
    """Describe the custom layers for a plan. Raises ConfigError."""
    digest, layers = function.digest(), load_layers(function, model, default)
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec)]
    has_either = [mixer.softcap is not None or bool(mixer.dropout) for mixer in mixers]
    return CustomLayers(
        digest=digest,
        layers=tuple(map(_sizes, layers)),
        differences=tuple(_differences(layers, default)),
        has_windows=any(mixer.window is not None for mixer in mixers),
        has_sinks=any(mixer.sink != "none" for mixer in mixers),
        softcap_or_dropout="none" if not any(has_either) else "all" if all(has_either) else "some",
    )


def load_layers(
    function: UserFunction, model: ModelConfig, default: tuple[LayerSpec, ...]
) -> tuple[LayerSpec, ...]:
    """Load and call the function, and check its result. Raises ConfigError."""
    found = function.load()
    try:
        layers = found(model, default)
    except Exception as error:
        raise function.failure(error) from error
    _check(function, layers, len(default))
    return tuple(layers)


def _check(function: UserFunction, layers: Any, count: int) -> None:
    is_sequence = isinstance(layers, Sequence) and all(isinstance(layer, LayerSpec) for layer in layers)
    if not is_sequence or len(layers) != count:
        returned = (
            f"{len(layers)} layers"
            if is_sequence
            else f"{type(layers).__name__}, not a sequence of LayerSpec"
        )
        raise ConfigError(
            f"--spec {function} returned {returned}, and --num-layers is {count}",
            fix="return one LayerSpec per layer, such as dataclasses.replace(layer, ...) of each argument layer",
        )
    for activation_fn in {
        mlp.activation_fn for layer in layers for mlp in _mlps(layer) if mlp.activation_fn is not None
    }:
        x = torch.linspace(-3.05, 3.05, 20, dtype=torch.float64)
        derivative = (activation_fn.value(x + 1e-6) - activation_fn.value(x - 1e-6)) / 2e-6
        if not torch.allclose(derivative, activation_fn.derivative(x), rtol=1e-4, atol=1e-6):
            raise ConfigError(
                f"--spec {function}: the derivative of activation function {activation_fn.name} does not match its value",
                fix="correct value or derivative",
            )


def _mlps(layer: LayerSpec) -> list[MlpSpec]:
    """Return the MLPs of a layer: its own, or those of its experts."""
    if not isinstance(layer.mlp, ExpertsSpec):
        return [] if layer.mlp is None else [layer.mlp]
    return [layer.mlp.expert, *([] if layer.mlp.shared is None else [layer.mlp.shared])]


def _sizes(layer: LayerSpec) -> LayerSizes:
    mlp = layer.mlp
    mixer = layer.mixer if isinstance(layer.mixer, AttentionSpec) else None
    linear = layer.mixer if isinstance(layer.mixer, LinearAttentionSpec) else None
    return LayerSizes(
        num_heads=mixer.num_heads if mixer else 0,
        num_query_groups=mixer.num_query_groups if mixer else 0,
        head_channels=mixer.head_channels if mixer else 0,
        latent=mixer.latent if mixer else None,
        has_output_gate=mixer is not None and mixer.has_output_gate,
        linear=None if linear is None else linear.sizes,
        ffn_hidden_size=mlp.ffn_hidden_size if isinstance(mlp, MlpSpec) else 0,
        is_gated=any(one.is_gated for one in _mlps(layer)),
        experts=_expert_sizes(mlp) if isinstance(mlp, ExpertsSpec) else None,
    )


def _expert_sizes(experts: ExpertsSpec) -> ExpertSizes:
    return ExpertSizes(
        num_experts=experts.router.num_experts,
        top_k=experts.router.top_k,
        ffn_hidden_size=experts.expert.ffn_hidden_size,
        shared_ffn_hidden_size=0 if experts.shared is None else experts.shared.ffn_hidden_size,
        latent_size=experts.latent_size or 0,
    )


def _differences(layers: Sequence[LayerSpec], default: Sequence[LayerSpec]) -> Iterator[str]:
    """Yield a line for each run of consecutive layers with the same differences."""
    texts = [", ".join(_changes(layer, other, "")) for layer, other in zip(layers, default, strict=True)]
    first = 0
    for text, run in itertools.groupby(texts):
        last = first + len(list(run)) - 1
        if text:
            yield f"{f'layer {first}' if first == last else f'layers {first} to {last}'}: {text}"
        first = last + 1


def _changes(one: Any, other: Any, path: str) -> Iterator[str]:
    is_part = dataclasses.is_dataclass(one) and not isinstance(one, ActivationFunction)
    if is_part and type(one) is type(other):
        for field in dataclasses.fields(one):
            yield from _changes(
                getattr(one, field.name), getattr(other, field.name), f"{path}.{field.name}".lstrip(".")
            )
    elif one != other:
        yield f"{path} {_shown(one)}, by the flags {_shown(other)}"


def _shown(value: Any) -> str:
    if isinstance(value, ActivationFunction):
        return f"{value.name} (without a fused kernel)"
    if dataclasses.is_dataclass(value):
        return type(value).__name__
    return "none" if value is None else str(value)
