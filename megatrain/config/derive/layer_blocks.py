"""Layers with individual sizes, from a JSON file.

    {"block_configs": [{"attention": {"num_query_groups": 4}, "mlp": {"ffn_hidden_size": 512}},
                       {"attention": {"no_op": true},         "mlp": {"replace_with_linear": true}}, ...]}

The format is that of Megatron-LM's --heterogeneous-layers-config-path, from the models of NVIDIA's Puzzle
(arXiv:2411.19146): `ffn` is an alias of `mlp`; `n_heads_in_group` is heads / groups; `ffn_mult` is a width of
2/3 * ffn_mult * hidden size, up to a multiple of 256. The flags give missing and null values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.values import UnresolvedError


class LayersError(UnresolvedError):
    """An error in the JSON, its place and value, which a rule reports."""


_PARTS: Final = {"attention": ("attention",), "mlp": ("mlp", "ffn")}
_KEYS: Final = {
    "attention": ("no_op", "replace_with_linear", "num_query_groups", "n_heads_in_group"),
    "mlp": ("no_op", "replace_with_linear", "ffn_hidden_size", "ffn_mult"),
}


LINEAR: Final = -1
"""In place of a size: the part is a linear layer."""


class LayerBlock(NamedTuple):
    """Sizes of a layer."""

    num_query_groups: int
    """0: no attention."""
    ffn_hidden_size: int
    """0: no MLP."""


def layer_blocks(model: ModelConfig) -> tuple[LayerBlock, ...]:
    """Return the sizes of all layers: those of the JSON, or of the flags. Raises LayersError."""
    default = LayerBlock(model.num_query_groups, model.ffn_hidden_size)
    text = model.heterogeneous_layers_config_encoded_json
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


def _layer(block: Any, place: str, default: LayerBlock, model: ModelConfig) -> LayerBlock:
    if not isinstance(block, dict):
        raise LayersError(f"{place} is not an object")
    _refuse_others(block, [name for names in _PARTS.values() for name in names], place)
    return LayerBlock(
        _query_groups(block, place, default, model.num_attention_heads),
        _mlp_width(block, place, default, model.hidden_size),
    )


def _query_groups(block: Mapping[str, Any], place: str, default: LayerBlock, num_heads: int) -> int:
    """Return the query groups of the attention part of a block; 0: no attention."""
    attention, where = _part(block, "attention", place)
    groups = _whole(attention, "num_query_groups", where)
    heads_in_group = _whole(attention, "n_heads_in_group", where)
    if groups is None and heads_in_group is not None:
        if num_heads % heads_in_group:
            raise LayersError(
                f"{where}.n_heads_in_group {heads_in_group} does not divide --num-attention-heads {num_heads}"
            )
        groups = num_heads // heads_in_group
    return _size(attention, where, groups, default.num_query_groups)


def _mlp_width(block: Mapping[str, Any], place: str, default: LayerBlock, hidden_size: int) -> int:
    """Return the width of the MLP part of a block; 0: no MLP."""
    mlp, where = _part(block, "mlp", place)
    width, times = _whole(mlp, "ffn_hidden_size", where), mlp.get("ffn_mult")
    if width is None and times is not None:
        if isinstance(times, bool) or not isinstance(times, int | float) or not 0 < times < 1e6:
            raise LayersError(f"{where}.ffn_mult {json.dumps(times)} is not a number above 0 and below 1e6")
        width = -(-int(2 * times * hidden_size / 3) // 256) * 256
    return _size(mlp, where, width, default.ffn_hidden_size)


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
    return part, where


def _size(part: Mapping[str, Any], where: str, size: int | None, default: int) -> int:
    """Return the size of a part; 0: it is not there, LINEAR: it is a linear layer."""
    chosen = [key for key in ("no_op", "replace_with_linear") if _is_true(part, key, where)]
    if len(chosen) + (size is not None) > 1:
        raise LayersError(f"{where} has {' and '.join([*chosen, 'a size'][:2])}")
    if chosen:
        return 0 if chosen == ["no_op"] else LINEAR
    return size or default


def _is_true(part: Mapping[str, Any], key: str, where: str) -> bool:
    value = False if part.get(key) is None else part[key]
    if not isinstance(value, bool):
        raise LayersError(f"{where}.{key} {json.dumps(value)} is not true or false")
    return value


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
