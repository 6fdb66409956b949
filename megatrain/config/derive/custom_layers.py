"""`--spec`: custom layers from a function of the user, which `model/custom_layers.py` calls.

--spec module:function      --spec module function      --spec file.py:function
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from megatrain.config.model_spec.layer import LayerSizes

_MEGATRON_SPECS: Final = "megatron.core.models.gpt.gpt_layer_specs"
_PLAIN_GPT_LAYERS: Final = (
    ("local",),
    (_MEGATRON_SPECS, "get_gpt_layer_local_spec"),
    (_MEGATRON_SPECS, "get_gpt_layer_with_transformer_engine_spec"),
)


@dataclass(frozen=True)
class LayerFunction:
    """Location of the function."""

    module: str
    """Module on the Python path, or a file that ends in .py."""
    function: str

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"


LayerShare = Literal["none", "some", "all"]
"""Part of the layers with attention."""


@dataclass(frozen=True, kw_only=True)
class CustomLayers:
    """The layers that the function returned, as far as a plan depends on them."""

    digest: str
    """Digest of the file with the function."""
    layers: tuple[LayerSizes, ...]
    differences: tuple[str, ...]
    """Differences from the layers that the flags describe."""
    has_windows: bool = False
    """True if a layer has a sliding window."""
    has_sinks: bool = False
    """True if the softmax of a layer has a sink."""
    softcap_or_dropout: LayerShare = "none"
    """Layers with logit softcapping or attention dropout."""


def _module_and_function(words: Sequence[str]) -> tuple[str, ...]:
    """Split `module function`, which is one string in a YAML file."""
    return tuple(words[0].split()) if len(words) == 1 and ":" not in words[0] else tuple(words)


def is_plain_gpt_layer(words: Sequence[str]) -> bool:
    """Return whether --spec is one of Megatron-LM's names of a plain GPT layer."""
    return _module_and_function(words) in _PLAIN_GPT_LAYERS


def layer_function(words: Sequence[str]) -> LayerFunction | None:
    """Return the function that --spec names; None: it names none, or a plain GPT layer."""
    words = _module_and_function(words)
    if not words or words in _PLAIN_GPT_LAYERS:
        return None
    module, sign, function = words[0].rpartition(":") if len(words) == 1 else (words[0], ":", words[1])
    is_named = len(words) <= 2 and module and sign and function.isidentifier()
    return LayerFunction(module, function) if is_named and not module.startswith("megatron.") else None
