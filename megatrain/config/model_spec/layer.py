"""A layer as data: attention or what replaces it, and an MLP or experts; `LayerTable` has all layers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.config.model_spec.delta_rule import LinearSizes
from megatrain.config.model_spec.experts import ExpertSizes
from megatrain.config.model_spec.latent_attention import LatentSizes
from megatrain.config.model_spec.linear import Linear, Piece, active_weights
from megatrain.config.model_spec.mlp import mlp_linears

_HEADS = "--num-attention-heads, --kv-channels, --num-query-groups, --tensor-model-parallel-size"


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of a layer. 0 heads: no attention, or a linear one; a width of 0 and no experts: no MLP."""

    num_heads: int = 0
    num_query_groups: int = 0
    head_channels: int = 0
    """Channels of a head of queries and keys."""
    latent: LatentSizes | None = None
    """Multi-latent attention; None: one projection to queries, keys and values."""
    has_output_gate: bool = False
    """A projection of the width of the queries gates the output of attention."""
    linear: LinearSizes | None = None
    """Linear attention in place of attention; None: none."""
    ffn_hidden_size: int = 0
    """Width of a dense MLP."""
    is_gated: bool = False
    experts: ExpertSizes | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerSizes:
        """Build from the values of a JSON object."""
        latent, linear, experts = values["latent"], values["linear"], values["experts"]
        return cls(
            **{
                **values,
                "latent": None if latent is None else LatentSizes(**latent),
                "linear": None if linear is None else LinearSizes(**linear),
                "experts": None if experts is None else ExpertSizes(**experts),
            }
        )

    @property
    def value_channels(self) -> int:
        """Channels of a head of values."""
        return self.head_channels if self.latent is None else self.latent.value_channels

    @property
    def has_mixer(self) -> bool:
        """True if the layer has attention, or a linear one."""
        return bool(self.num_heads) or self.linear is not None

    @property
    def has_mlp(self) -> bool:
        """True if the layer has a dense MLP or experts."""
        return bool(self.ffn_hidden_size) or self.experts is not None

    @property
    def active_width(self) -> int:
        """Total MLP width that a token uses."""
        return self.ffn_hidden_size if self.experts is None else self.experts.active_width

    @property
    def pair_channels(self) -> int:
        """Channels of all heads in the two products of a pair of tokens: scores, and their use."""
        return self.num_heads * (self.head_channels + self.value_channels)

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Return the GEMMs of the layer."""
        return (*self.mixer_linears(hidden_size), *self.mlp_linears(hidden_size))

    def mixer_linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Return the GEMMs of attention, or of what replaces it."""
        if self.linear is not None:
            return tuple(self.linear.linears(hidden_size))
        if not self.num_heads:
            return ()
        if self.latent is not None:
            return tuple(self.latent.linears(hidden_size, self.num_heads))
        return tuple(self._attention_linears(hidden_size))

    def mlp_linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Return the GEMMs of the MLP or the experts."""
        if self.experts is not None:
            return tuple(self.experts.linears(hidden_size, is_gated=self.is_gated))
        if not self.ffn_hidden_size:
            return ()
        return tuple(mlp_linears(hidden_size, self.ffn_hidden_size, is_gated=self.is_gated))

    def active_weights(self, hidden_size: int) -> int:
        """Return the multiplications per token of the layer's matrices, and of what Megatron-LM counts with them."""
        latent = 0 if self.latent is None else self.latent.norm_weights
        linear = 0 if self.linear is None else self.linear.state_weights
        return active_weights(self.linears(hidden_size)) + latent + linear

    def _attention_linears(self, hidden_size: int) -> Iterator[Linear]:
        heads, groups, d = self.num_heads, self.num_query_groups, self.head_channels
        gate = (Piece("gate", heads * d, heads, "the output gate"),) if self.has_output_gate else ()
        pieces = (
            Piece("q", heads * d, heads, "queries"),
            *gate,
            Piece("k", groups * d, groups, "keys"),
            Piece("v", groups * d, groups, "values"),
        )
        yield Linear(
            part="attention", pieces=pieces, inputs=hidden_size, split="outputs", reads="hidden states",
            writes="queries, keys and values", flags=_HEADS, modules=("self_attention.linear_qkv",),
        )  # fmt: skip
        yield Linear(
            part="attention", pieces=(Piece("proj", hidden_size),), inputs=heads * d, split="inputs", reads="the heads",
            writes="hidden states", flags=_HEADS, modules=("self_attention.linear_proj",),
        )  # fmt: skip


@dataclass(frozen=True)
class LayerTable:
    """Sizes of all layers."""

    layers: tuple[LayerSizes, ...]
    num_mtp_layers: int = 0
    """Further layers for multi-token prediction, each as the last one."""

    @property
    def mtp_layers(self) -> tuple[LayerSizes, ...]:
        return self.layers[-1:] * self.num_mtp_layers

    @property
    def all_layers(self) -> tuple[LayerSizes, ...]:
        """Layers by number, with those of multi-token prediction."""
        return self.layers + self.mtp_layers

    def __str__(self) -> str:
        attention = [layer.num_query_groups for layer in self.layers if layer.num_query_groups]
        linear = sum(layer.linear is not None for layer in self.layers)
        mlp = [layer.ffn_hidden_size for layer in self.layers if layer.ffn_hidden_size]
        experts = [layer.experts for layer in self.layers if layer.experts is not None]
        parts = [
            f"{len(self.layers)} layers",
            f"query groups {_span(attention)}" if attention else "",
            f"ffn {_span(mlp)}" if mlp else "",
            _describe_experts(experts, len(self.layers)),
            f"{linear} with linear attention" if linear else "",
            _missing(len(self.layers) - len(attention) - linear, "attention"),
            _missing(len(self.layers) - len(mlp) - len(experts), "MLP"),
            f"{self.num_mtp_layers} more for multi-token prediction" if self.num_mtp_layers else "",
        ]
        return ", ".join(part for part in parts if part)


def _describe_experts(experts: Sequence[ExpertSizes], num_layers: int) -> str:
    if not experts:
        return ""
    one = experts[0]
    shared = f" and {one.shared_ffn_hidden_size} shared" if one.shared_ffn_hidden_size else ""
    latent = f" on {one.latent_size} latent channels" if one.latent_size else ""
    where = "" if len(experts) == num_layers else f" in {len(experts)} layers"
    return f"{one.num_experts} experts of {one.ffn_hidden_size}{latent}{shared}, {one.top_k} a token{where}"


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _missing(count: int, name: str) -> str:
    return f"{count} without {name}" if count else ""
