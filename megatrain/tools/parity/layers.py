"""Custom layers for `megatrain parity`, as a user's function returns them (`--spec`)."""

from __future__ import annotations

import dataclasses

from megatrain.config import ModelConfig
from megatrain.config.model_spec.activation import ActivationFunction
from megatrain.config.model_spec.layer import LayerSpec

_CUBED_RELU = ActivationFunction(
    "cubed_relu", lambda x: x.clamp(min=0) ** 3, lambda x: 3 * x.clamp(min=0) ** 2
)


def mixed_layers(model: ModelConfig, layers: tuple[LayerSpec, ...]) -> list[LayerSpec]:
    """Return layers with post-norms, then with norms on both sides; a custom activation, and an MLP of half the width."""
    found = []
    for number, layer in enumerate(layers):
        assert layer.dense is not None
        mlp = dataclasses.replace(layer.dense, ffn_hidden_size=model.ffn_hidden_size // (1 + number % 2))
        if number % 2:
            mlp = dataclasses.replace(mlp, activation="squared_relu", activation_fn=_CUBED_RELU)
        found.append(
            dataclasses.replace(layer.with_part(mlp), norm_position="both" if number % 3 else "post")
        )
    return found
