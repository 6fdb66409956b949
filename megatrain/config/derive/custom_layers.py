"""`--spec`: custom layers from a function of the user, which `model/custom_layers.py` calls.

--spec module:function      --spec module function      --spec file.py:function
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from megatrain.config.model_spec.layer import LayerSizes
from megatrain.config.user_function import UserFunction

_MEGATRON_SPECS: Final = "megatron.core.models.gpt.gpt_layer_specs"
_PLAIN_GPT_LAYERS: Final = (
    ("local",),
    (_MEGATRON_SPECS, "get_gpt_layer_local_spec"),
    (_MEGATRON_SPECS, "get_gpt_layer_with_transformer_engine_spec"),
)


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


def is_plain_gpt_layer(words: Sequence[str]) -> bool:
    """Return whether --spec is one of Megatron-LM's names of a plain GPT layer."""
    return (tuple(words[0].split()) if len(words) == 1 else tuple(words)) in _PLAIN_GPT_LAYERS


def layer_function(words: Sequence[str]) -> UserFunction | None:
    """Return the function that --spec names; None: it names none, or one of Megatron-LM."""
    function = UserFunction.parse(words, "--spec") if words else None
    return None if function is None or function.module.startswith("megatron.") else function
