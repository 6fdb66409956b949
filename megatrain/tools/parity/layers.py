"""Layers for `megatrain parity` as a user's own function gives them (`--spec`)."""

from __future__ import annotations

import dataclasses

from megatrain.config import ModelConfig
from megatrain.kernels.activations import Curve
from megatrain.model.specs import LayerSpec, MlpSpec

_CUBED_RELU = Curve("cubed_relu", lambda x: x.clamp(min=0) ** 3, lambda x: 3 * x.clamp(min=0) ** 2)


def mixed_layers(model: ModelConfig, layers: tuple[LayerSpec, ...]) -> list[LayerSpec]:
    """Norms behind the parts, then on both sides; a curve of its own, and an MLP of half the width."""
    found = []
    for number, layer in enumerate(layers):
        assert isinstance(layer.mlp, MlpSpec)
        mlp = dataclasses.replace(layer.mlp, ffn_hidden_size=model.ffn_hidden_size // (1 + number % 2))
        if number % 2:
            mlp = dataclasses.replace(mlp, activation="squared_relu", curve=_CUBED_RELU)
        found.append(dataclasses.replace(layer, mlp=mlp, norm_position="both" if number % 3 else "post"))
    return found
