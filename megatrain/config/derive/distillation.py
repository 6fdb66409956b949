"""The files of distillation: --export-kd-cfg and --export-kd-teacher-model-config, and the pairs of layers that both spellings name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.distillation import LayerPair
from megatrain.config.plain_yaml import load_yaml
from megatrain.config.schema.model import ModelConfig

_FINAL: Final = "final"
_LOSSES: Final = {"cosine": "cosine", "hidden_cosine": "cosine", "mse": "mse"}
_LAYER: Final = re.compile(r"decoder\.layers\.(\d+)")
_OUTPUT: Final = ["output_layer", "output_layer"]
_NEMO_NAMES: Final = {
    "encoder_seq_length": None,
    "activation": None,
    "layernorm_epsilon": "norm_epsilon",
    "rotary_percentage": "rotary_percent",
    "share_embeddings_and_output_weights": None,
}
"""Names in NeMo's model_config.yaml that differ from Megatron-LM's; None: not compared."""


def parse_pair(word: str) -> LayerPair | None:
    """Return the pair that a word of --kd-layer-pairs names, such as 3:7:cosine or final:final; None: it names none."""
    student, _, rest = word.partition(":")
    teacher, _, loss = rest.partition(":")
    names = (student, teacher)
    if not all(name == _FINAL or name.isdecimal() for name in names) or (loss or "cosine") not in _LOSSES:
        return None
    first, second = (None if name == _FINAL else int(name) for name in names)
    return LayerPair(first, second, "mse" if loss == "mse" else "cosine")


def settings_of_file(file: str) -> dict[str, Any]:
    """Return the settings that a file of --export-kd-cfg gives, by path. Raises ConfigError."""
    found: dict[str, Any] = {}
    for key, value in _mapping(file, "--export-kd-cfg").items():
        where = f"--export-kd-cfg {file}: {key}"
        if key not in _KEYS:
            raise ConfigError(f"{where} is not a key", fix=f"use {', '.join(_KEYS)}, or remove the line")
        try:
            found |= _KEYS[key](value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where} is {str(value)[:200]}", fix=f"give {error}") from error
    return found


def teacher_settings(file: str) -> dict[str, Any]:
    """Return the settings of a model that a file of --export-kd-teacher-model-config gives, by name. Raises ConfigError."""
    content = _mapping(file, "--export-kd-teacher-model-config")
    names = vars(ModelConfig()).keys()
    renamed = {_NEMO_NAMES.get(str(key), str(key)): value for key, value in content.items()}
    return {name: value for name, value in renamed.items() if name in names and value is not None}


def _mapping(file: str, flag: str) -> Mapping[Any, Any]:
    try:
        content = load_yaml(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"{flag} {file}: {reason}", fix="name a readable YAML file") from error
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{flag} {file} has no keys", fix="write a line such as `name: value` for each setting"
        )
    return content


def _flag(name: str) -> Callable[[Any], dict[str, Any]]:
    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, bool):
            raise TypeError("true or false")
        return {f"distillation.{name}": value}

    return read


def _number(name: str) -> Callable[[Any], dict[str, Any]]:
    def read(value: Any) -> dict[str, Any]:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError("a number")
        return {f"distillation.{name}": float(value)}

    return read


def _logit_layers(value: Any) -> dict[str, Any]:
    if value != _OUTPUT:
        raise ValueError(str(_OUTPUT))
    return {}


def _reverse(value: Any) -> dict[str, Any]:
    (is_reversed,) = _flag("kd_loss")(value).values()
    return {"distillation.kd_loss": "reverse_kl" if is_reversed else "forward_kl"}


def _pairs(value: Any) -> dict[str, Any]:
    if not isinstance(value, list):
        raise TypeError("a list of pairs")
    return {"distillation.kd_layer_pairs": [_pair(entry) for entry in value]}


def _pair(entry: Any) -> str:
    names = entry if isinstance(entry, list) else []
    loss = "hidden_cosine" if len(names) == 2 else str(names[-1]) if len(names) == 3 else ""
    if loss not in _LOSSES:
        raise ValueError(
            'pairs such as ["decoder.layers.3", "decoder.layers.7", "mse"], with mse, hidden_cosine or neither'
        )
    return ":".join([*map(_place, names[:2]), _LOSSES[loss]])


def _place(name: Any) -> str:
    if name == "decoder.final_layernorm":
        return _FINAL
    found = _LAYER.fullmatch(str(name))
    if found is None:
        places = "decoder.layers.N (the output of layer N) or decoder.final_layernorm"
        raise ValueError(f"{places} in place of {str(name)[:100]}")
    return found[1]


_KEYS: Final[Mapping[str, Callable[[Any], dict[str, Any]]]] = {
    "logit_layers": _logit_layers,
    "intermediate_layer_pairs": _pairs,
    "skip_lm_loss": _flag("kd_skip_lm_loss"),
    "kd_loss_scale": _number("kd_loss_scale"),
    "logit_kl_temperature": _number("kd_temperature"),
    "logit_kl_reverse": _reverse,
    "balance_losses": _flag("kd_balance_losses"),
    "layer_loss_scale": _number("kd_layer_loss_scale"),
}
