"""Parts of config.json that take more than one key: query groups, windows, layers with experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from megatrain.config.derive.patterns import (
    MAX_LAYERS,
    parse_expert_pattern,
    parse_layer_pattern,
    parse_window,
)
from megatrain.config.schema.tree import Config
from megatrain.interop.hf.config_file import ConfigFile
from megatrain.interop.hf.family import COUNT, POSITIVE
from megatrain.storage.untrusted_json import integer, list_of, text

ATTENTION_KINDS: Final = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class QueryGroups:
    """Key and value heads; null: one per query head."""

    default: int | None = None

    def read(self, source: ConfigFile) -> dict[str, Any]:
        groups = source.checked("num_key_value_heads", check=COUNT, default=self.default, is_optional=True)
        if groups is None or groups == source.get("num_attention_heads"):
            return {}
        return {"model.group_query_attention": True, "model.num_query_groups": groups}

    def write(self, config: Config) -> dict[str, Any]:
        return {"num_key_value_heads": config.model.num_query_groups}


def every_second(_: ConfigFile, num_layers: int) -> list[bool]:
    """Return the layers with a window in Gemma 2: the first, the third ..."""
    return [number % 2 == 0 for number in range(num_layers)]


def all_but_every_sixth(source: ConfigFile, num_layers: int) -> list[bool]:
    """Return the layers with a window in Gemma 3: all but every `sliding_window_pattern`th."""
    every = source.checked("sliding_window_pattern", check=COUNT, default=6)
    return [(number + 1) % every != 0 for number in range(num_layers)]


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
        num_layers = num_layers_of(source)
        has_window = [True] * num_layers
        if self.layers is not None:
            types = source.checked(
                "layer_types", check=list_of(text(ATTENTION_KINDS), most=MAX_LAYERS), is_optional=True
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
        pattern = {} if all(has_window) else {"model.window_attn_skip_freq": layer_list(has_window)}
        return {"model.window_size": f"{size - 1},0", **pattern}

    def write(self, config: Config) -> dict[str, Any]:
        model = config.model
        keys: dict[str, Any] = {}
        left = parse_window(model.window_size)
        has_window = parse_layer_pattern(model.window_attn_skip_freq, model.num_layers, one_means=True)
        if self.layers is not None:
            keys["layer_types"] = [ATTENTION_KINDS[left is not None and one] for one in has_window]
        if self.switch is not None:
            keys[self.switch] = left is not None
        return {**keys, "sliding_window": None if left is None else left + 1}


class ExpertLayers:
    """Layers with experts, of Qwen: every `decoder_sparse_step`th, without `mlp_only_layers`."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        num_layers = num_layers_of(source)
        step = source.checked("decoder_sparse_step", check=COUNT, default=1)
        dense = source.checked(
            "mlp_only_layers", check=list_of(integer(0, MAX_LAYERS)), default=[], is_optional=True
        )
        dense = frozenset(dense or ())
        has_experts = [number not in dense and (number + 1) % step == 0 for number in range(num_layers)]
        return {} if all(has_experts) else {"experts.moe_layer_freq": layer_list(has_experts)}

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


def num_layers_of(source: ConfigFile) -> int:
    """Return the number of layers; lists of layers have as many entries."""
    found: int = source.checked("num_hidden_layers", check=integer(1, MAX_LAYERS))
    return found


def layer_list(values: list[bool]) -> str:
    """Return a list of layers as a flag has it."""
    return f"[{','.join(str(int(value)) for value in values)}]"
