"""`--spec`: custom layers from a function of the user, which `model/custom_layers.py` calls.

--spec module:function      --spec module function      --spec file.py:function
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.activation import ActivationFunction
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.values import UnresolvedError
from megatrain.config.user_function import UserFunction, function_of

_MEGATRON_SPECS: Final = "megatron.core.models.gpt.gpt_layer_specs"
_PLAIN_GPT_LAYERS: Final = (
    ("local",),
    (_MEGATRON_SPECS, "get_gpt_layer_local_spec"),
    (_MEGATRON_SPECS, "get_gpt_layer_with_transformer_engine_spec"),
)
_PLAIN_HYBRID_LAYERS: Final = (
    ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"),
)


_ADDRESS: Final = re.compile(" at 0x[0-9a-f]+")
"""Address of an object in its text, which differs between processes."""

Layers = Callable[[ModelConfig, tuple[LayerSpec, ...]], tuple[LayerSpec, ...]]
"""Returns the layers of a model from its settings and the layers that flags describe. Raises ConfigError."""


def called_once(function: Layers) -> Layers:
    """Return a function that calls the user's once; with other arguments later, it raises UnresolvedError."""
    calls: list[tuple[object, tuple[LayerSpec, ...] | ConfigError]] = []

    def layers(model: ModelConfig, default: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
        # The rows of the vocabulary depend on the tensor-parallel size.
        given = model.replaced({"padded_vocab_size": 0}), default
        if not calls:
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

    return layers


def plain_family(words: Sequence[str]) -> str | None:
    """Return the family whose plain layers Megatron-LM's --spec of these words names; None: it names others."""
    name = tuple(" ".join(words).strip("[]").split())
    return "gpt" if name in _PLAIN_GPT_LAYERS else "hybrid" if name in _PLAIN_HYBRID_LAYERS else None


def layer_function(words: Sequence[str]) -> UserFunction | None:
    """Return the function that --spec names; None: it names none, or one of Megatron-LM."""
    return function_of("model.spec", words)


Values = Mapping[str, str]
"""The fields of a layer by path, such as `mlp.ffn_hidden_size`, and their values in words."""


def values_of(layers: Sequence[LayerSpec]) -> list[Values]:
    """Return the fields of each layer. Equal layers of two processes have the same."""
    return [dict(_values(layer, "")) for layer in layers]


def differences(layers: Sequence[Values], others: Sequence[Values], whose: str) -> Iterator[str]:
    """Yield a line for each run of consecutive layers with the same differences; `whose`: words for the others."""
    texts = [changes(layer, other, whose) for layer, other in zip(layers, others, strict=True)]
    first = 0
    for text, run in itertools.groupby(texts):
        last = first + len(list(run)) - 1
        if text:
            yield f"{f'layer {first}' if first == last else f'layers {first} to {last}'}: {text}"
        first = last + 1


def changes(one: Values, other: Values, whose: str) -> str:
    """Return the values that differ in words; empty: none do."""
    changed = [name for name in {**one, **other} if one.get(name, "none") != other.get(name, "none")]
    replaced = [f"{name}." for name in changed if name in one or name in other]
    return ", ".join(
        f"{name} {one.get(name, 'none')}, {whose} {other.get(name, 'none')}"
        for name in changed
        if not any(name.startswith(prefix) for prefix in replaced)  # fields of parts of two kinds
    )


def _values(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, LayerSpec):
        for part in value.parts:
            yield from _values(part, part.name)
        value = replace(value, parts=())
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, ActivationFunction | type)
    if path:
        name = getattr(value, "__qualname__", None) or ("none" if value is None else str(value))
        yield path, type(value).__name__ if is_data else _ADDRESS.sub("", name)
    if is_data:
        for field in dataclasses.fields(value):
            yield from _values(getattr(value, field.name), f"{path}.{field.name}".lstrip("."))
