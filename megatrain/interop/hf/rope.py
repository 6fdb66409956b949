"""RoPE in config.json: base, share of the channels, scaling; as `rope_parameters`, or as the older `rope_theta` and `rope_scaling`.

Rope          one for all layers
LatentRope    for multi-latent attention: YaRN has factors of the attention temperature
RopeByLayer   one for layers with a window, one for the others
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from megatrain.config.schema.tree import Config
from megatrain.interop.hf.config_file import ConfigFile
from megatrain.interop.hf.config_parts import ATTENTION_KINDS
from megatrain.interop.hf.family import COUNT, POSITIVE
from megatrain.storage.untrusted_json import flag


@dataclass(frozen=True)
class Rope:
    """RoPE of all layers."""

    base: float = 10000.0
    theta: str = "rope_theta"
    """Older key of the base."""
    partial: str | None = None
    """Older key of the fraction of rotated channels; None: all are rotated."""
    percent: float = 1.0
    types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    absent: Mapping[str, Any] | None = None
    """Parameters of a config.json without them."""
    of_images: tuple[str, ...] = ()
    """Parameters without effect on text."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        keys = _given(source)
        keys = dict((self.absent if keys is None else keys) or {})
        if any(isinstance(value, dict) for value in keys.values()):
            raise source.refusal("rope_parameters", keys, "one RoPE for all layers is needed")
        keys = {name: value for name, value in keys.items() if name not in self.of_images}
        keys.setdefault("rope_theta", source.get(self.theta, default=self.base))
        old = self.partial or "partial_rotary_factor"
        keys.setdefault("partial_rotary_factor", source.get(old, default=self.percent))
        return _settings(source, keys, self.types, is_partial=self.partial is not None)

    def write(self, config: Config) -> dict[str, Any]:
        model = config.model
        parameters = {**_parameters(config), "rope_theta": model.rotary_base}
        older: dict[str, Any] = {self.theta: model.rotary_base}
        if self.partial is not None:
            parameters["partial_rotary_factor"] = older[self.partial] = model.rotary_percent
        return _both_forms(parameters) | older


class LatentRope:
    """RoPE of multi-latent attention."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        keys = {"rope_theta": source.get("rope_theta", default=10000.0), **(_given(source) or {})}
        mscales = {name: keys.pop(name, None) for name in ("mscale", "mscale_all_dim")}
        found = _settings(source, {"partial_rotary_factor": 1.0, **keys}, ("default", "yarn"))
        if found["model.position_embedding_type"] != "yarn":
            return {**found, "model.rope_type": "rope"}
        for name, value in mscales.items():
            if value is not None and (not isinstance(value, int | float) or not 0 <= value < 1e6):
                raise source.refusal(f"{name} of RoPE", value)
        if mscales["mscale_all_dim"] and not mscales["mscale"]:
            raise source.refusal("mscale of RoPE", mscales["mscale"], "with mscale_all_dim it has one")
        # transformers uses both or neither.
        one, all_dims = mscales.values() if all(mscales.values()) else (1.0, 0.0)
        temperatures = {"model.mscale": float(one), "model.mscale_all_dim": float(all_dims)}
        return {**found, **temperatures, "model.position_embedding_type": "rope", "model.rope_type": "yarn"}

    def write(self, config: Config) -> dict[str, Any]:
        model = config.model
        parameters: dict[str, Any] = {"rope_type": "default"}
        if model.rope_type == "yarn":
            mscales = {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
            parameters = _yarn_parameters(config) | (mscales if model.mscale_all_dim else {})
        base = {"rope_theta": model.rotary_base}
        return _both_forms({**parameters, **base}) | base


class RopeByLayer:
    """RoPE of Gemma 3: layers with a window have a base of their own, and no scaling."""

    base, base_of_windows = 1000000.0, 10000.0

    def read(self, source: ConfigFile) -> dict[str, Any]:
        given, scaling = source.get("rope_parameters"), source.get("rope_scaling")
        kinds: dict[str, Any] = given if isinstance(given, dict) else {}
        both = [kinds.get(kind) for kind in ATTENTION_KINDS]
        are_known = isinstance(given, dict | None) and set(kinds) <= set(ATTENTION_KINDS)
        if not are_known or not all(isinstance(keys, dict | None) for keys in (*both, scaling)):
            raise source.refusal(
                "rope_parameters", given or scaling, "it has parameters of two kinds of layers"
            )
        older = (
            source.get("rope_theta", default=self.base),
            source.get("rope_local_base_freq", default=self.base_of_windows),
        )
        found = [
            _settings(
                source,
                {"rope_theta": base, "partial_rotary_factor": 1.0, **(keys or {}), **(more or {})},
                types,
            )
            for base, keys, more, types in zip(
                older, both, (scaling, None), (("default", "linear"), ("default",)), strict=True
            )
        ]
        return {**found[0], "model.window_rotary_base": found[1]["model.rotary_base"]}

    def write(self, config: Config) -> dict[str, Any]:
        model = config.model
        bases = (model.rotary_base, model.window_rotary_base or model.rotary_base)
        full = {**_parameters(config), "rope_theta": bases[0]}
        windows = {"rope_type": "default", "rope_theta": bases[1]}
        older = dict(zip(("rope_theta", "rope_local_base_freq"), bases, strict=True))
        parameters = dict(zip(ATTENTION_KINDS, (full, windows), strict=True))
        return {**_both_forms(full), "rope_parameters": parameters, **older}


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


def _given(source: ConfigFile) -> dict[str, Any] | None:
    """Return the parameters by either key; None: there are none."""
    given = source.get("rope_parameters")
    if given is None:
        given = source.get("rope_scaling")
    if not isinstance(given, dict | None):
        raise source.refusal("rope_parameters", given)
    return given


def _settings(
    source: ConfigFile, keys: Mapping[str, Any], types: tuple[str, ...], *, is_partial: bool = False
) -> dict[str, Any]:
    """Return the settings of one RoPE.

    Args:
        types: supported kinds of scaling.
        is_partial: it may leave channels unchanged.
    """
    rope = ConfigFile(source.path, keys)
    kind = rope.get("rope_type", "type", default="default")
    if kind not in types:
        raise source.refusal("rope_type", kind)
    percent = float(rope.checked("partial_rotary_factor", check=POSITIVE))
    if percent > 1 or (not is_partial and percent != 1):
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


def _parameters(config: Config) -> dict[str, Any]:
    """Return type and scaling of RoPE."""
    model = config.model
    if model.position_embedding_type == "yarn":
        return _yarn_parameters(config)
    if model.use_rope_scaling:
        return {"rope_type": "llama3", **_LLAMA3, "factor": model.rope_scaling_factor}
    if model.rotary_seq_len_interpolation_factor not in (None, 1):
        return {"rope_type": "linear", "factor": float(model.rotary_seq_len_interpolation_factor or 1)}
    return {"rope_type": "default"}


def _yarn_parameters(config: Config) -> dict[str, Any]:
    return {"rope_type": "yarn"} | {theirs: config.get(ours) for theirs, ours in _YARN.items()}


def _both_forms(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of today and the keys of versions of transformers before 5."""
    older = {} if parameters["rope_type"] == "default" else {"rope_scaling": parameters}
    return {"rope_parameters": parameters, **older}


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
