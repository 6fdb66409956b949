"""`--spec`: layers from a function of the user's own (`model/custom_layers.py` calls it).

--spec module:function      --spec module function      --spec file.py:function
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from megatrain.config.derive.layer_sizes import LayerSizes

_MEGATRONS: Final = "megatron.core.models.gpt.gpt_layer_specs"
_USUAL: Final = (
    ("local",),
    (_MEGATRONS, "get_gpt_layer_local_spec"),
    (_MEGATRONS, "get_gpt_layer_with_transformer_engine_spec"),
)


@dataclass(frozen=True)
class LayerFunction:
    """Where the function is."""

    module: str
    """A module on the Python path, or a file that ends in .py."""
    function: str

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"


LayerShare = Literal["none", "some", "all"]
"""Of the layers with attention."""


@dataclass(frozen=True, kw_only=True)
class CustomLayers:
    """What the function gave, as a plan needs it."""

    digest: str
    """Of the file that it is in."""
    layers: tuple[LayerSizes, ...]
    differences: tuple[str, ...]
    """From the layers that the flags describe."""
    has_windows: bool = False
    """Whether the attention of one sees near keys alone."""
    has_sinks: bool = False
    """Whether the softmax of one sums over more than the keys."""
    eager_attention: LayerShare = "none"
    """Those with a softcap or dropout of scores."""


def _apart(words: Sequence[str]) -> tuple[str, ...]:
    """`module function` of a YAML file is one text there."""
    return tuple(words[0].split()) if len(words) == 1 and ":" not in words[0] else tuple(words)


def is_plain_gpt_layer(words: Sequence[str]) -> bool:
    """Whether Megatron-LM's name of a plain GPT layer is given."""
    return _apart(words) in _USUAL


def layer_function(words: Sequence[str]) -> LayerFunction | None:
    """The function that --spec names; None where it names none, or a plain GPT layer."""
    words = _apart(words)
    if not words or words in _USUAL:
        return None
    module, sign, function = words[0].rpartition(":") if len(words) == 1 else (words[0], ":", words[1])
    is_named = len(words) <= 2 and module and sign and function.isidentifier()
    return LayerFunction(module, function) if is_named and not module.startswith("megatron.") else None
