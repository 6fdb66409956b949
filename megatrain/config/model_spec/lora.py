"""Low-rank adapters (LoRA, arXiv:2106.09685) of named linear layers: y = W x + alpha / rank * B A x, with W frozen.

decoder.layers.0.attention.q.weight [o, h]   A  decoder.layers.0.attention.q.lora_a.weight [rank, h]
B  decoder.layers.0.attention.q.lora_b.weight [o, rank]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

LoraModule = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2",
]  # fmt: skip
"""Names of linear layers: transformers', or Megatron-LM's."""
_TENSORS: Final[dict[LoraModule, tuple[str, ...]]] = {
    "q_proj": ("attention.q",),
    "k_proj": ("attention.k",),
    "v_proj": ("attention.v",),
    "o_proj": ("attention.proj",),
    "gate_proj": ("mlp.gate",),
    "up_proj": ("mlp.up",),
    "down_proj": ("mlp.down",),
    "linear_qkv": ("attention.q", "attention.k", "attention.v"),
    "linear_proj": ("attention.proj",),
    "linear_fc1": ("mlp.gate", "mlp.up"),
    "linear_fc2": ("mlp.down",),
}
"""Ends of the canonical names of their weights, without `.weight`."""


@dataclass(frozen=True)
class LoraSpec:
    """The adapters of a model."""

    rank: int
    alpha: float
    modules: tuple[LoraModule, ...]
    dropout: float = 0.0
    """Probability with which an input of an adapter is dropped in training."""

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        return self.alpha / self.rank

    def adapts(self, weight: str) -> bool:
        """Return whether a weight, by its canonical name, has an adapter."""
        return weight.endswith(tuple(f".{name}.weight" for name in adapted_weights(self.modules)))


def adapted_weights(modules: Sequence[LoraModule]) -> frozenset[str]:
    """Return the ends of the canonical names of the weights that have an adapter, without `.weight`."""
    return frozenset(name for module in modules for name in _TENSORS[module])


def modules_with(weights: Sequence[str]) -> tuple[LoraModule, ...]:
    """Return the linear layers, by the names of transformers, that have one of these weights."""
    theirs = {module: names for module, names in _TENSORS.items() if not module.startswith("linear_")}
    return tuple(
        module
        for module, (name,) in theirs.items()
        if any(one.endswith(f".{name}.weight") for one in weights)
    )


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the canonical names of A and B of a weight."""
    base = weight.removesuffix(".weight")
    return f"{base}.lora_a.weight", f"{base}.lora_b.weight"


def is_adapter(name: str) -> bool:
    """Return whether a canonical tensor is A or B of an adapter."""
    return name.endswith((".lora_a.weight", ".lora_b.weight"))
