"""Parts of config.json that take more than one key: query groups, RoPE, windows, layers with experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from megatrain.checkpoint.untrusted_json import flag, integer, list_of, text
from megatrain.config.derive.patterns import parse_expert_pattern, parse_layer_pattern, parse_window
from megatrain.config.schema.tree import Config
from megatrain.interop.hf.config_file import ConfigFile
from megatrain.interop.hf.family import COUNT, POSITIVE

_LAYERS: Final = "num_hidden_layers"
_ATTENTION: Final = ("full_attention", "sliding_attention")
_MAX_LAYERS: Final = 1 << 16


class QueryGroups:
    """Key and value heads; null: one per query head."""

    def __init__(self, default: int | None = None) -> None:
        self.default = default

    def read(self, source: ConfigFile) -> dict[str, Any]:
        groups = source.checked("num_key_value_heads", check=COUNT, default=self.default, is_optional=True)
        if groups is None or groups == source.get("num_attention_heads"):
            return {}
        return {"model.group_query_attention": True, "model.num_query_groups": groups}

    def write(self, config: Config) -> dict[str, Any]:
        return {"num_key_value_heads": config.model.num_query_groups}


@dataclass(frozen=True)
class Rope:
    """RoPE: base, fraction of the channels, scaling; as `rope_parameters`, or as the older `rope_theta` and `rope_scaling`."""

    base: float = 10000.0
    theta: str = "rope_theta"
    """Older key of the base."""
    partial: str | None = None
    """Older key of the fraction of rotated channels; None: all are rotated."""
    percent: float = 1.0
    types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")

    def read(self, source: ConfigFile) -> dict[str, Any]:
        given = source.get("rope_parameters")
        if given is None:
            given = source.get("rope_scaling")
        if not isinstance(given, dict | None) or any(
            isinstance(value, dict) for value in (given or {}).values()
        ):
            raise source.refusal("rope_parameters", given, "one RoPE for all layers is needed")
        keys = dict(given or {})
        keys.setdefault("rope_theta", source.get(self.theta, default=self.base))
        old = self.partial or "partial_rotary_factor"
        keys.setdefault("partial_rotary_factor", source.get(old, default=self.percent))
        rope = ConfigFile(source.path, keys)
        kind = rope.get("rope_type", "type", default="default")
        if kind not in self.types:
            raise source.refusal("rope_type", kind)
        percent = float(rope.checked("partial_rotary_factor", check=POSITIVE))
        if percent > 1 or (self.partial is None and percent != 1):
            raise source.refusal("partial_rotary_factor", percent)
        settings = {
            "model.position_embedding_type": "rope",
            "model.rotary_base": float(rope.checked("rope_theta", check=POSITIVE)),
            "model.rotary_percent": percent,
            **_SCALINGS[kind](rope),
        }
        if rope.unread:
            raise source.refusal(f"rope_parameters.{rope.unread[0]}", keys[rope.unread[0]])
        return settings

    def write(self, config: Config) -> dict[str, Any]:
        model = config.model
        scaling: dict[str, Any] = {}
        if model.position_embedding_type == "yarn":
            scaling = {theirs: config.get(ours) for theirs, ours in _YARN.items()} | {"rope_type": "yarn"}
        elif model.use_rope_scaling:
            scaling = {**_LLAMA3, "rope_type": "llama3", "factor": model.rope_scaling_factor}
        elif model.rotary_seq_len_interpolation_factor not in (None, 1):
            scaling = {"rope_type": "linear", "factor": float(model.rotary_seq_len_interpolation_factor or 1)}
        parameters = {"rope_type": "default", **scaling, "rope_theta": model.rotary_base}
        # Both forms: versions of transformers before 5 read the older keys.
        older: dict[str, Any] = {self.theta: model.rotary_base}
        if self.partial is not None:
            parameters["partial_rotary_factor"] = older[self.partial] = model.rotary_percent
        if scaling:
            older["rope_scaling"] = parameters
        return {"rope_parameters": parameters, **older}


_LLAMA3: Final = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Values of Llama 3.1, which are fixed in megatrain."""
_YARN: Final = {
    "factor": "model.rotary_scaling_factor",
    "original_max_position_embeddings": "model.yarn_original_max_position_embeddings",
    "beta_fast": "model.yarn_beta_fast",
    "beta_slow": "model.yarn_beta_slow",
    "truncate": "model.yarn_correction_range_round_to_int",
}


def _llama3(rope: ConfigFile) -> dict[str, Any]:
    for name, value in _LLAMA3.items():
        if rope.get(name) != value:
            raise rope.refusal(f"{name} of RoPE", rope.get(name), f"it has {value:g}")
    return {
        "model.use_rope_scaling": True,
        "model.rope_scaling_factor": float(rope.checked("factor", check=POSITIVE)),
    }


def _linear(rope: ConfigFile) -> dict[str, Any]:
    factor = rope.checked("factor", check=POSITIVE)
    if factor != int(factor):
        raise rope.refusal("factor of RoPE", factor, "only whole factors")
    return {"model.rotary_seq_len_interpolation_factor": int(factor)}


def _yarn(rope: ConfigFile) -> dict[str, Any]:
    factor = float(rope.checked("factor", check=POSITIVE))
    usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    attention = rope.checked("attention_factor", check=POSITIVE, default=usual, is_optional=True)
    if attention is not None and not math.isclose(attention, usual, rel_tol=1e-9):
        raise rope.refusal("attention_factor of RoPE", attention, f"it has {usual:g}")
    truncate = rope.get("truncate", default=True)
    flag(truncate, "truncate")
    return {
        "model.position_embedding_type": "yarn",
        "model.rotary_scaling_factor": factor,
        "model.yarn_original_max_position_embeddings": rope.checked(
            "original_max_position_embeddings", check=COUNT
        ),
        "model.yarn_beta_fast": float(rope.checked("beta_fast", check=POSITIVE, default=32.0)),
        "model.yarn_beta_slow": float(rope.checked("beta_slow", check=POSITIVE, default=1.0)),
        "model.yarn_correction_range_round_to_int": truncate,
    }


_SCALINGS: Final[Mapping[str, Callable[[ConfigFile], dict[str, Any]]]] = {
    "default": lambda _: {},
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def every_second(source: ConfigFile, num_layers: int) -> list[bool]:
    """Return the layers with a window in Gemma 2: the first, the third ..."""
    del source
    return [number % 2 == 0 for number in range(num_layers)]


def last_layers(source: ConfigFile, num_layers: int) -> list[bool]:
    """Return the layers with a window in Qwen 2: those from `max_window_layers` on."""
    first = source.checked("max_window_layers", check=integer(0, 1 << 31), default=28)
    return [number >= first for number in range(num_layers)]


@dataclass(frozen=True)
class Windows:
    """Sliding windows. Theirs count the query, ours the tokens before it."""

    default: int | None = None
    """Window of a config.json without the key."""
    layers: Callable[[ConfigFile, int], list[bool]] | None = None
    """Layers with a window where `layer_types` does not list them; None: all layers."""
    switch: str | None = None
    """Key that must be true for any window."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        size = source.checked(
            "sliding_window", check=integer(0, 1 << 31), default=self.default, is_optional=True
        )
        is_on = self.switch is None or source.get(self.switch, default=False) is True
        if size is None or not is_on:
            return {}
        num_layers = source.checked(_LAYERS, check=integer(1, _MAX_LAYERS))
        has_window = [True] * num_layers
        if self.layers is not None:
            types = source.checked(
                "layer_types", check=list_of(text(_ATTENTION), most=_MAX_LAYERS), is_optional=True
            )
            has_window = (
                self.layers(source, num_layers)
                if types is None
                else [kind == "sliding_attention" for kind in types]
            )
        if size < 1 or len(has_window) != num_layers:
            raise source.refusal("sliding_window", size, f"with {len(has_window)} layer_types")
        if not any(has_window):
            return {}
        pattern = {} if all(has_window) else {"model.window_attn_skip_freq": _list(has_window)}
        return {"model.window_size": f"{size - 1},0", **pattern}

    def write(self, config: Config) -> dict[str, Any]:
        model = config.model
        keys: dict[str, Any] = {}
        left = parse_window(model.window_size)
        has_window = parse_layer_pattern(model.window_attn_skip_freq, model.num_layers, one_means=True)
        if self.layers is not None:
            keys["layer_types"] = [_ATTENTION[left is not None and one] for one in has_window]
        if self.switch is not None:
            keys[self.switch] = left is not None
        return {**keys, "sliding_window": None if left is None else left + 1}


class ExpertLayers:
    """Layers with experts, of Qwen: every `decoder_sparse_step`th, without `mlp_only_layers`."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        num_layers = source.checked(_LAYERS, check=integer(1, _MAX_LAYERS))
        step = source.checked("decoder_sparse_step", check=COUNT, default=1)
        dense = source.checked(
            "mlp_only_layers", check=list_of(integer(0, _MAX_LAYERS)), default=[], is_optional=True
        )
        dense = frozenset(dense or ())
        has_experts = [number not in dense and (number + 1) % step == 0 for number in range(num_layers)]
        return {} if all(has_experts) else {"experts.moe_layer_freq": _list(has_experts)}

    def write(self, config: Config) -> dict[str, Any]:
        has_experts = parse_expert_pattern(config.experts.moe_layer_freq, config.model.num_layers)
        return {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [number for number, one in enumerate(has_experts) if not one],
        }


class GemmaScales:
    """Gemma's factors of the embedding, by the hidden size, and of the attention scores."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        scalar = source.checked("query_pre_attn_scalar", check=POSITIVE, default=256)
        hidden_size = source.checked("hidden_size", check=COUNT)
        return {
            "model.embedding_multiplier": math.sqrt(hidden_size),
            "model.softmax_scale": 1 / math.sqrt(scalar),
        }

    def write(self, config: Config) -> dict[str, Any]:
        scale = config.model.softmax_scale
        scalar = config.model.kv_channels if scale is None else 1 / scale**2
        is_whole = math.isclose(scalar, round(scalar), rel_tol=1e-6)
        return {"query_pre_attn_scalar": round(scalar) if is_whole else scalar}


def _list(values: list[bool]) -> str:
    return f"[{','.join(str(int(value)) for value in values)}]"
