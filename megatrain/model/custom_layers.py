"""Custom layers from a function of the user: `--spec`.

    def my_spec(model: ModelConfig, layers: tuple[LayerSpec, ...]) -> Sequence[LayerSpec]: ...

The function receives the resolved settings of the model and the layers that they describe, and returns as many layers. Every
rank calls it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import torch

from megatrain.config.derive.custom_layers import Layers, layer_function
from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.linear import Linear, Split
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.model_spec.norm import NormPosition
from megatrain.config.model_spec.part import Part, Role
from megatrain.config.schema.model import ModelConfig
from megatrain.config.user_function import UserFunction
from megatrain.model.parts import MODULES


def apply_custom_layers(spec: ModelSpec, model: ModelConfig) -> ModelSpec:
    """Replace the layers of a stored model by those of --spec, if it is given. Raises ConfigError."""
    function = layer_function(model.spec)
    if function is None:
        return spec
    call = layers_of(function, function.load(model.spec_digest))
    return spec.with_layers(call(model, spec.layers))


def layers_of(function: UserFunction, found: Callable[..., Any]) -> Layers:
    """Return what calls the loaded function, and checks its result. It raises ConfigError."""

    def layers(model: ModelConfig, default: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
        try:
            made = found(model, default)
            _check(function, made, len(default), model.hidden_size)
        except ConfigError:
            raise
        except Exception as error:
            raise function.failure(error) from error
        return tuple(made)

    return layers


def _check(function: UserFunction, layers: Any, count: int, hidden_size: int) -> None:
    is_sequence = isinstance(layers, Sequence) and all(isinstance(layer, LayerSpec) for layer in layers)
    if not is_sequence or len(layers) != count:
        returned = (
            f"{len(layers)} layers"
            if is_sequence
            else f"{type(layers).__name__}, not a sequence of LayerSpec"
        )
        raise ConfigError(
            f"--spec {function} returned {returned}, and --num-layers is {count}",
            fix="return one LayerSpec per layer, such as layer.with_part(...) of each argument layer",
        )
    for number, layer in enumerate(layers):
        for problem in _problems(function, layer, hidden_size):
            raise ConfigError(
                f"--spec {function}: layer {number} (from 0): {problem}",
                fix="docs/extending.md says what a part is",
            )
    for activation_fn in {
        mlp.activation_fn for layer in layers for mlp in layer.mlps if mlp.activation_fn is not None
    }:
        x = torch.linspace(-3.05, 3.05, 20, dtype=torch.float64)
        derivative = (activation_fn.value(x + 1e-6) - activation_fn.value(x - 1e-6)) / 2e-6
        if not torch.allclose(derivative, activation_fn.derivative(x), rtol=1e-4, atol=1e-6):
            raise ConfigError(
                f"--spec {function}: the derivative of activation function {activation_fn.name} does not match its value",
                fix="correct value or derivative",
            )


def _problems(function: UserFunction, layer: LayerSpec, hidden_size: int) -> Iterator[str]:
    """Yield what is wrong with the parts of a layer."""
    if layer.norm_position not in get_args(NormPosition):
        yield f"norm_position is {layer.norm_position!r}, not one of {get_args(NormPosition)}"
    names = [getattr(part, "name", None) for part in layer.parts]
    for part, name in zip(layer.parts, names, strict=True):
        kind = type(part).__name__
        if isinstance(part, type):
            yield f"{part.__name__} is a class: create a part, {part.__name__}(...)"
        elif not isinstance(part, Part):
            yield f"{kind} is no part of a layer: derive it from megatrain.config.model_spec.part.Part"
        elif not _is_frozen(part) or getattr(part, "role", None) not in get_args(Role) or not name:
            yield f"{kind} must be a frozen dataclass with a class attribute `name`, and `role` of {get_args(Role)}"
        elif names.count(name) > 1:
            yield f"two parts have the name {name}"
        elif type(part).module is None and type(part) not in MODULES:
            yield f"{kind} has no class attribute `module`, the class of its torch module"
        else:
            yield from _problems_of_linears(function, part, hidden_size)


def _is_frozen(part: Part) -> bool:
    """Return whether this is a frozen dataclass, which is hashable."""
    return dataclasses.is_dataclass(part) and bool(type(part).__dataclass_params__.frozen)


def _problems_of_linears(function: UserFunction, part: Part, hidden_size: int) -> Iterator[str]:
    kind = type(part).__name__
    try:
        linears = list(part.linears(hidden_size))
        hash(part)
        _ = part.other_weights(hidden_size) + part.pair_channels
    except Exception as error:  # noqa: BLE001 (code of the user)
        yield f"{kind}: {function.where(error)}"
        return
    for one in linears:
        if not isinstance(one, Linear):
            yield f"{kind}.linears() yields {type(one).__name__}, not Linear"
        elif one.split not in get_args(Split):
            yield f"{kind}.linears() yields a Linear with the split {one.split!r}, not one of {get_args(Split)}"
        elif not one.pieces:
            yield f"{kind}.linears() yields a Linear without pieces"
        elif [other.weight for other in linears].count(one.weight) > 1:
            yield f"{kind}.linears() yields two of the name {one.weight}"
        elif one.part.split(".")[0] != part.name:
            yield f"{kind}.linears() yields a Linear of part {one.part}, not {part.name}"
