"""A family of models as data: the parts of its config.json, and the modules that hold our tensors.

    Value("hidden_size", "model.hidden_size")        a key of theirs is a setting of ours
    Choice("hidden_act", {"silu": {}})               only these values, each with settings of ours
    "self_attn.q_proj": "attention.q"                a module of theirs holds one of ours
    "self_attn.qkv_proj": Fused(("attention.q", "attention.k", "attention.v"))   or several, stacked by rows

Each part is read (config.json to settings) and written (settings to config.json).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from megatrain.config.schema.tree import Config
from megatrain.config.schema.values import Range
from megatrain.interop.hf.config_file import ConfigFile
from megatrain.storage.untrusted_json import Check, integer, number

COUNT: Final = integer(1, 1 << 31)
POSITIVE: Final = number(Range(above=0))
PROBABILITY: Final = number(Range(at_least=0, below=1))


class ConfigPart(Protocol):
    """A part of a family's config.json. By default it has no settings and no keys."""

    def read(self, source: ConfigFile) -> dict[str, Any]:  # noqa: ARG002 (the signature of a part)
        """Return settings, by path."""
        return {}

    def write(self, config: Config) -> dict[str, Any]:  # noqa: ARG002
        """Return keys of config.json."""
        return {}


@dataclass(frozen=True)
class Value:
    """A number that is a setting. An absent key means `default`; without a value the setting is left open."""

    theirs: str
    ours: str
    check: Check = COUNT
    default: Any = None
    is_optional: bool = False
    also: tuple[str, ...] = ()
    """Other names of the key."""
    unset: Any = None
    """Value that is written for a setting without one."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        value = source.checked(
            self.theirs, *self.also, check=self.check, default=self.default, is_optional=self.is_optional
        )
        return {} if value is None else {self.ours: value if self.check is COUNT else float(value)}

    def write(self, config: Config) -> dict[str, Any]:
        value = config.get(self.ours)
        return {self.theirs: self.unset if value is None else value}


@dataclass(frozen=True)
class Not:
    """A switch that is the opposite of a setting."""

    theirs: str
    ours: str
    default: bool

    def read(self, source: ConfigFile) -> dict[str, Any]:
        value = source.get(self.theirs, default=self.default)
        if not isinstance(value, bool):
            raise source.refusal(self.theirs, value)
        return {self.ours: not value}

    def write(self, config: Config) -> dict[str, Any]:
        return {self.theirs: not config.get(self.ours)}


@dataclass(frozen=True)
class Choice:
    """A key with some supported values; each means settings of ours. An absent key means the first, or `default`."""

    theirs: str
    values: Mapping[Any, Mapping[str, Any]]
    default: Any = None
    reason: str = ""
    """Part of other models that megatrain lacks."""
    also: tuple[str, ...] = ()

    def read(self, source: ConfigFile) -> dict[str, Any]:
        default = next(iter(self.values)) if self.default is None else self.default
        value = source.get(self.theirs, *self.also, default=default)
        for supported, settings in self.values.items():
            if value == supported:
                return dict(settings)
        raise source.refusal(self.theirs, value, self.reason)

    def write(self, config: Config) -> dict[str, Any]:
        fitting = [
            (len(settings), value)
            for value, settings in self.values.items()
            if all(config.get(path) == wanted for path, wanted in settings.items())
        ]
        most = max((size for size, _ in fitting), default=None)
        return {self.theirs: next((value for size, value in fitting if size == most), None)}


@dataclass(frozen=True)
class Implied(ConfigPart):
    """Keys whose values follow from others."""

    keys: tuple[str, ...]

    def read(self, source: ConfigFile) -> dict[str, Any]:
        source.get(*self.keys)
        return {}


@dataclass(frozen=True)
class Fixed(ConfigPart):
    """Settings that all models of the family have."""

    settings: Mapping[str, Any]

    def read(self, source: ConfigFile) -> dict[str, Any]:  # noqa: ARG002 (the signature of a part)
        return dict(self.settings)


@dataclass(frozen=True)
class Fused:
    """Modules of ours that one of theirs holds, stacked by rows."""

    names: tuple[str, ...]
    heads: str = ""
    """Setting of the model with the number of heads: rows of each module for the first head, then for the second ..."""
    is_transposed: bool = False
    """Their weight is [inputs, outputs]."""
    in_turns: bool = False
    """Rows are the first of each module, then the second of each ..."""
    is_stacked: bool = False
    """One tensor holds all experts, [experts, ...]; its name has no `.weight`, and `_bias` in place of `.bias`."""
    is_one_of: bool = False
    """A layer has one of them."""
    is_filter: bool = False
    """A filter per channel: theirs is [channels, 1, kernel size]."""
    is_flat: bool = False
    """Theirs is a vector."""
    has_one_row: bool = False
    """Theirs has one dimension more, of size 1, before the others."""
    scale: str = ""
    """Tensor of theirs with a factor of each row: ours hold the products, and 1 is written."""
    offset: float = 0.0
    """Their values minus ours."""


Modules = Mapping[str, str | Fused]
"""Modules of theirs, or whole names of tensors, each with ours; `{}` is the number of a layer or an expert."""


@dataclass(frozen=True)
class Nested:
    """The config.json of a part of the model, under a key."""

    theirs: str
    model_type: str
    parts: tuple[ConfigPart, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of transformers for absent keys, where the parts have none."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        inner = source.nested(self.theirs, self.defaults)
        found: dict[str, Any] = {}
        for part in self.parts:
            found |= part.read(inner)
        return found

    def write(self, config: Config) -> dict[str, Any]:
        keys: dict[str, Any] = {"model_type": self.model_type}
        for part in self.parts:
            keys |= part.write(config)
        return {self.theirs: keys}


@dataclass(frozen=True)
class LeftOut:
    """Layers in files that the model does not compute."""

    layers: str
    """Prefix of their names."""
    words: str
    """Name of the layers in messages."""
    numbers: Callable[[ConfigFile, Config], range]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A class of models in transformers."""

    architecture: str
    model_type: str
    config: tuple[ConfigPart, ...]
    modules: Modules
    optional_prefix: str = ""
    """Prefix of names that files of the model without head leave out."""
    buffers: tuple[str, ...] = field(default=())
    """Patterns of tensors that are not weights: old versions stored them."""
    zeros: Mapping[str, int] = field(default_factory=dict)
    """Tables of theirs that models here lack, with their rows: zeros are written, and other values refused."""
    has_mxfp4: bool = False
    """Files may store experts in MXFP4."""
    auto_class: str = "AutoModelForCausalLM"
    """Class of transformers that loads a folder."""
    fits: Callable[[Config], bool] = lambda _: True
    """An export tries the family for a model of ours: its layers are of the right kinds."""
    layers_per_block: int = 1
    """Layers of ours that one of theirs holds."""
    more_layers: LeftOut | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of names in files of other versions of transformers, and those here."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that files may leave out, and the one that each equals then. Here they are trained apart."""
    unused: Mapping[str, float] = field(default_factory=dict)
    """Tensors of the width of the vision tower without effect, with the value that is written."""
    of_text: str = ""
    """Key with the config.json of the language model; empty: the file is the language model's."""
    is_tower: bool = False
    """A vision tower alone, without a language model."""
    variants: tuple[Family, ...] = ()
    """Families of the same class; `is_of` finds one."""
    is_of: Callable[[ConfigFile], bool] = lambda _: True
    factors: Callable[[ConfigFile], Mapping[str, float]] = lambda _: {}
    """Factors of config.json by module of ours, whose weights hold the products; an export has none."""

    @property
    def kinds(self) -> tuple[Family, ...]:
        """Return all families of the class."""
        return (self, *self.variants)

    def text_config(self, source: ConfigFile) -> ConfigFile:
        """Return the config.json of the language model."""
        return source.nested(self.of_text) if self.of_text else source


def in_layers(layers: str, modules: Modules, stack: str = "decoder") -> dict[str, str | Fused]:
    """Return modules of a layer with their full names. `layers`: prefix of theirs, such as model.layers; `stack`: ours."""
    prefix = f"{stack}.layers.{{}}."
    return {
        f"{layers}.{{}}.{theirs}": prefix + ours
        if isinstance(ours, str)
        else replace(ours, names=tuple(prefix + name for name in ours.names))
        for theirs, ours in modules.items()
    }
