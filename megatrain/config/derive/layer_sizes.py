"""Sizes of each layer: the same for all, or from a JSON file.

    {"block_configs": [{"attention": {"num_query_groups": 4}, "mlp": {"ffn_hidden_size": 512}},
                       {"attention": {"no_op": true},         "mlp": {"ffn_mult": 2.625}}, ...]}

The format is that of Megatron-LM's --heterogeneous-layers-config-path, from the models of NVIDIA's Puzzle
(arXiv:2411.19146): `ffn` is an alias of `mlp`; `n_heads_in_group` is heads / groups; `ffn_mult` is a width of
2/3 * ffn_mult * hidden size, up to a multiple of 256. The flags give missing and null values.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megatrain.config.derive.patterns import PatternError, parse_expert_pattern, parse_layer_pattern
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """Sizes of the experts of a layer."""

    num_experts: int
    top_k: int
    """Experts per token."""
    ffn_hidden_size: int
    """Width of each expert."""
    shared_ffn_hidden_size: int
    """Width of the shared expert; 0: none."""
    latent_size: int = 0
    """Width of the inputs and outputs of routed experts; 0: the hidden size."""

    @property
    def active_width(self) -> int:
        """Total MLP width that a token uses."""
        return self.top_k * self.ffn_hidden_size + self.shared_ffn_hidden_size

    def active_weights(self, hidden_size: int, num_matrices: int) -> int:
        """Return the weights of experts and latent projections that process a token; an expert has `num_matrices`."""
        routed = self.top_k * self.ffn_hidden_size * (self.latent_size or hidden_size)
        shared = self.shared_ffn_hidden_size * hidden_size
        return num_matrices * (routed + shared) + 2 * hidden_size * self.latent_size


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of multi-latent attention (MLA). Channels are those of a head."""

    query_rank: int | None
    """Channels of the latent of queries; None: queries are projected from the hidden states."""
    kv_rank: int
    """Channels of the latent of keys and values."""
    plain_channels: int
    """Channels of queries and keys without RoPE."""
    rotary_channels: int
    """Channels of queries and keys with RoPE; all heads of keys share them."""
    value_channels: int

    @property
    def head_channels(self) -> int:
        """Channels of a head of queries and keys."""
        return self.plain_channels + self.rotary_channels


@dataclass(frozen=True, kw_only=True)
class LinearSizes:
    """Sizes of linear attention."""

    num_key_heads: int
    num_value_heads: int
    key_head_channels: int
    value_head_channels: int
    convolution_taps: int

    @property
    def key_channels(self) -> int:
        """Channels of all heads of keys, and of queries."""
        return self.num_key_heads * self.key_head_channels

    @property
    def value_channels(self) -> int:
        """Channels of all heads of values."""
        return self.num_value_heads * self.value_head_channels

    def active_weights(self, hidden_size: int) -> int:
        """Return the multiplications per token: projections, convolution, and four products with the state of each head."""
        k, v, heads = self.key_channels, self.value_channels, self.num_value_heads
        projections = hidden_size * (2 * k + 2 * v + 2 * heads + v)
        return projections + self.convolution_taps * (2 * k + v) + 4 * v * self.value_head_channels


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

    def active_mlp_weights(self, hidden_size: int) -> int:
        """Return the weights of the MLP or the experts that process a token."""
        num_matrices = 3 if self.is_gated else 2
        if self.experts is not None:
            return self.experts.active_weights(hidden_size, num_matrices)
        return num_matrices * hidden_size * self.ffn_hidden_size


@dataclass(frozen=True)
class LayerTable:
    """Sizes of all layers."""

    layers: tuple[LayerSizes, ...]
    num_mtp_layers: int = 0
    """Further layers for multi-token prediction, each as the last one."""

    @property
    def mtp_layers(self) -> tuple[LayerSizes, ...]:
        return self.layers[-1:] * self.num_mtp_layers

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


class LayersError(Exception):
    """An error in the JSON: its place and value."""


_PARTS: Final = {"attention": ("attention",), "mlp": ("mlp", "ffn")}
_KEYS: Final = {
    "attention": ("no_op", "replace_with_linear", "num_query_groups", "n_heads_in_group"),
    "mlp": ("no_op", "replace_with_linear", "ffn_hidden_size", "ffn_mult"),
}


def layer_table(model: ModelConfig, experts: ExpertsConfig) -> LayerTable:
    """Return the layer sizes of a resolved model. Raises LayersError."""
    dense = _dense_layers(model)
    if experts.num_experts is None:
        return LayerTable(dense, model.mtp_num_layers or 0)
    if experts.moe_ffn_hidden_size is None:
        raise LayersError("--moe-ffn-hidden-size is none")
    sizes = ExpertSizes(
        num_experts=experts.num_experts,
        top_k=experts.moe_router_topk,
        ffn_hidden_size=experts.moe_ffn_hidden_size,
        shared_ffn_hidden_size=experts.moe_shared_expert_intermediate_size or 0,
        latent_size=experts.moe_latent_size or 0,
    )
    try:
        has_experts = parse_expert_pattern(experts.moe_layer_freq, model.num_layers)
    except PatternError as error:
        raise LayersError(f"--moe-layer-freq {error}") from error
    return LayerTable(
        tuple(
            dataclasses.replace(layer, ffn_hidden_size=0, experts=sizes) if has and layer.has_mlp else layer
            for layer, has in zip(dense, has_experts, strict=True)
        ),
        model.mtp_num_layers or 0,
    )


def latent_sizes(model: ModelConfig) -> LatentSizes | None:
    """Return the sizes of multi-latent attention; None: the model does not have it."""
    if not model.multi_latent_attention:
        return None
    return LatentSizes(
        query_rank=model.q_lora_rank,
        kv_rank=model.kv_lora_rank,
        plain_channels=model.qk_head_dim,
        rotary_channels=model.qk_pos_emb_head_dim,
        value_channels=model.v_head_dim,
    )


def linear_sizes(model: ModelConfig) -> LinearSizes:
    """Return the sizes of the layers with linear attention."""
    return LinearSizes(
        num_key_heads=model.linear_num_key_heads,
        num_value_heads=model.linear_num_value_heads,
        key_head_channels=model.linear_key_head_dim,
        value_head_channels=model.linear_value_head_dim,
        convolution_taps=model.linear_conv_kernel_dim,
    )


def _dense_layers(model: ModelConfig) -> tuple[LayerSizes, ...]:
    """Return the layers before experts replace their MLPs."""
    layers = _softmax_layers(model)
    if model.experimental_attention_variant is None:
        return layers
    try:
        is_linear = parse_layer_pattern(model.linear_attention_freq, model.num_layers, one_means=True)
    except PatternError as error:
        raise LayersError(f"--linear-attention-freq {error}") from error
    linear = linear_sizes(model)
    return tuple(
        LayerSizes(linear=linear, ffn_hidden_size=layer.ffn_hidden_size, is_gated=layer.is_gated)
        if is_own and layer.num_heads
        else layer
        for layer, is_own in zip(layers, is_linear, strict=True)
    )


def _softmax_layers(model: ModelConfig) -> tuple[LayerSizes, ...]:
    """Return the layers with attention by softmax in all of them, as sizes of a JSON file or flags have it."""
    text, latent = model.heterogeneous_layers_config_encoded_json, latent_sizes(model)
    default = LayerSizes(
        num_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        head_channels=model.kv_channels if latent is None else latent.head_channels,
        latent=latent,
        has_output_gate=model.attention_output_gate,
        ffn_hidden_size=model.ffn_hidden_size,
        is_gated=model.swiglu or model.geglu or model.quick_geglu,
    )
    if text is None:
        return (default,) * model.num_layers
    blocks = _blocks(text)
    if len(blocks) != model.num_layers:
        raise LayersError(f"block_configs has {len(blocks)} layers, and --num-layers is {model.num_layers}")
    return tuple(_layer(block, f"block_configs[{n}]", default, model) for n, block in enumerate(blocks))


def condensed(text: str) -> str:
    """Return the layers as one line of JSON, without other values of the file. Invalid text is returned unchanged."""
    try:
        return json.dumps({"block_configs": _blocks(text)}, separators=(",", ":"))
    except LayersError:
        return text


def _blocks(text: str) -> list[Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise LayersError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise LayersError(f"{error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("block_configs"), list):
        raise LayersError("there is no list `block_configs`")
    return list(found["block_configs"])


def _layer(block: Any, place: str, default: LayerSizes, model: ModelConfig) -> LayerSizes:
    if not isinstance(block, dict):
        raise LayersError(f"{place} is not an object")
    _refuse_others(block, [name for names in _PARTS.values() for name in names], place)
    groups = _query_groups(block, place, default)
    width = _mlp_width(block, place, model.hidden_size, default)
    return LayerSizes(
        num_heads=default.num_heads if groups else 0,
        num_query_groups=groups,
        head_channels=default.head_channels if groups else 0,
        has_output_gate=default.has_output_gate and groups > 0,
        ffn_hidden_size=width,
        is_gated=default.is_gated and width > 0,
    )


def _query_groups(block: Mapping[str, Any], place: str, default: LayerSizes) -> int:
    """Return the query groups of the attention part of a block; 0: no attention."""
    attention, where = _part(block, "attention", place)
    groups = _whole(attention, "num_query_groups", where)
    heads_in_group = _whole(attention, "n_heads_in_group", where)
    if groups is None and heads_in_group is not None:
        if default.num_heads % heads_in_group:
            raise LayersError(
                f"{where}.n_heads_in_group {heads_in_group} does not divide --num-attention-heads {default.num_heads}"
            )
        groups = default.num_heads // heads_in_group
    return (groups or default.num_query_groups) if _is_there(attention, where, groups) else 0


def _mlp_width(block: Mapping[str, Any], place: str, hidden_size: int, default: LayerSizes) -> int:
    """Return the width of the MLP part of a block; 0: no MLP."""
    mlp, where = _part(block, "mlp", place)
    width, times = _whole(mlp, "ffn_hidden_size", where), mlp.get("ffn_mult")
    if width is None and times is not None:
        if isinstance(times, bool) or not isinstance(times, int | float) or times <= 0:
            raise LayersError(f"{where}.ffn_mult {json.dumps(times)} is not a number above 0")
        width = -(-int(2 * times * hidden_size / 3) // 256) * 256
    return (width or default.ffn_hidden_size) if _is_there(mlp, where, width) else 0


def _part(block: Mapping[str, Any], name: str, place: str) -> tuple[Mapping[str, Any], str]:
    """Return the attention or MLP part of a block, and its place."""
    given = [key for key in _PARTS[name] if key in block]
    if len(given) != 1 or not isinstance(block[given[0]], dict):
        found = (
            f"{' and '.join(given)} together"
            if len(given) > 1
            else f"no object `{'` or `'.join(_PARTS[name])}`"
        )
        raise LayersError(f"{place} has {found}")
    where = f"{place}.{given[0]}"
    part: Mapping[str, Any] = block[given[0]]
    _refuse_others(part, _KEYS[name], where)
    if part.get("replace_with_linear"):
        raise LayersError(f"{where}.replace_with_linear is not supported")
    return part, where


def _is_there(part: Mapping[str, Any], where: str, size: int | None) -> bool:
    no_op = part.get("no_op", False)
    if not isinstance(no_op, bool):
        raise LayersError(f"{where}.no_op {json.dumps(no_op)} is not true or false")
    if no_op and size is not None:
        raise LayersError(f"{where} has no_op and a size")
    return not no_op


def _whole(part: Mapping[str, Any], key: str, where: str) -> int | None:
    value = part.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise LayersError(f"{where}.{key} {json.dumps(value)} is not a whole number above 0")
    return value


def _refuse_others(values: Mapping[str, Any], known: Any, where: str) -> None:
    """Raise LayersError for an unknown key, unless its value is null, false or empty."""
    for key, value in values.items():
        if key not in known and value:
            raise LayersError(f"{where}.{key} {json.dumps(value)} is not supported")


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
