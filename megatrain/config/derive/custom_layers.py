"""`--spec`: custom layers from a function of the user, which `model/custom_layers.py` calls.

--spec module:function      --spec module function      --spec file.py:function
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.activation import ActivationFunction
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.part import Part
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.values import UnresolvedError
from megatrain.config.user_function import UserFunction

_MEGATRON_SPECS: Final = "megatron.core.models.gpt.gpt_layer_specs"
_PLAIN_GPT_LAYERS: Final = (
    ("local",),
    (_MEGATRON_SPECS, "get_gpt_layer_local_spec"),
    (_MEGATRON_SPECS, "get_gpt_layer_with_transformer_engine_spec"),
)


Layers = Callable[[ModelConfig, tuple[LayerSpec, ...]], tuple[LayerSpec, ...]]
"""Returns the layers of a model from its settings and the layers that flags describe. Raises ConfigError."""


@dataclass(frozen=True)
class CustomLayers:
    """The function of --spec. Every rank loads it from its own file, whose digest is that of rank 0."""

    digest: str
    """Digest of the file with the function."""
    function: Layers | None = field(compare=False)
    """None: those of another rank, as JSON has them."""


def called_once(custom: CustomLayers) -> CustomLayers:
    """Return the layers with a function that calls the user's once; with other arguments later, it raises UnresolvedError."""
    function = custom.function
    calls: list[tuple[object, tuple[LayerSpec, ...] | ConfigError]] = []

    def layers(model: ModelConfig, default: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
        given = (
            model.replaced({"padded_vocab_size": 0}),
            default,
        )  # its rows depend on the tensor-parallel size
        if not calls:
            assert function is not None
            try:
                calls.append((given, function(model, default)))
            except ConfigError as error:
                calls.append((given, error))
        known, result = calls[0]
        if known != given:
            raise UnresolvedError
        if isinstance(result, ConfigError):
            raise result
        return result

    return replace(custom, function=layers if function else None)


def is_plain_gpt_layer(words: Sequence[str]) -> bool:
    """Return whether --spec is one of Megatron-LM's names of a plain GPT layer."""
    return (tuple(words[0].split()) if len(words) == 1 else tuple(words)) in _PLAIN_GPT_LAYERS


def layer_function(words: Sequence[str]) -> UserFunction | None:
    """Return the function that --spec names; None: it names none, or one of Megatron-LM."""
    function = UserFunction.parse(words, "--spec") if words else None
    return None if function is None or function.module.startswith("megatron.") else function


def differences(layers: Sequence[LayerSpec], default: Sequence[LayerSpec]) -> Iterator[str]:
    """Yield a line for each run of consecutive layers with the same differences."""
    texts = [", ".join(_changes(layer, other, "")) for layer, other in zip(layers, default, strict=True)]
    first = 0
    for text, run in itertools.groupby(texts):
        last = first + len(list(run)) - 1
        if text:
            yield f"{f'layer {first}' if first == last else f'layers {first} to {last}'}: {text}"
        first = last + 1


def _changes(one: Any, other: Any, path: str) -> Iterator[str]:
    if isinstance(one, LayerSpec):
        for name in dict.fromkeys(part.name for part in (*one.parts, *other.parts)):
            yield from _changes(_named(one, name), _named(other, name), name)
        one, other = replace(one, parts=()), replace(other, parts=())
    is_part = dataclasses.is_dataclass(one) and not isinstance(one, ActivationFunction)
    if is_part and type(one) is type(other):
        for field in dataclasses.fields(one):
            yield from _changes(
                getattr(one, field.name), getattr(other, field.name), f"{path}.{field.name}".lstrip(".")
            )
    elif one != other:
        yield f"{path} {_shown(one)}, by the flags {_shown(other)}"


def _named(layer: LayerSpec, name: str) -> Part | None:
    return next((part for part in layer.parts if part.name == name), None)


def _shown(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, ActivationFunction):
        return type(value).__name__
    return "none" if value is None else str(value)
