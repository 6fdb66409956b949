"""The file of --te-precision-config-file: the FP8 recipe of each linear layer by patterns of names, in Megatron-LM's format.

    configs:
      bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
      fp8:  {transformer_engine_config_type: TEQuantizationParams, training_recipe: {fp8_quantization_recipe: tensorwise}}
    matchers:
      attention: {type: glob, enabled: true, pattern: "*.self_attention.*", config: bf16}

The first enabled matcher whose pattern matches a path, such as decoder.layers.0.mlp.linear_fc1, decides. Where the flags have
FP8 (--fp8-format, --first-last-layers-bf16), its config applies unless it has `override_quantized_autocast: false`, elsewhere
only with `override_nonquantized_autocast: true`. Other linear layers are as the flags say. Numbers of layers are global.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, NamedTuple

import yaml

from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.plain_yaml import load_yaml

RECIPES: Final = ("tensorwise", "blockwise", "mxfp8")
"""Recipes of single linear layers. Megatron-LM does not allow `delayed` there either."""
FORMATS: Final = ("e4m3", "hybrid")
_TYPE: Final = "transformer_engine_config_type"
_KEY_TAGS: Final = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


class PrecisionFileError(Exception):
    """An error in the file: its place and value."""


class Recipe(NamedTuple):
    """A recipe: values of --fp8-recipe and --fp8-format, or of --fp4-recipe and --fp4-format."""

    name: Literal["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"]
    format: Literal["e4m3", "hybrid", "e2m1"]


class Matcher(NamedTuple):
    """A pattern of paths, and the precision of the linear layers that it matches first."""

    name: str
    pattern: str
    recipe: Recipe | None
    """None: the dtype of the weights."""
    changes_fp8: bool
    """It applies to linear layers that the flags compute in FP8."""
    changes_others: bool
    """It applies to the other ones."""


class NamedLinear(NamedTuple):
    """A linear layer."""

    path: str
    """Megatron-LM's name of the module."""
    layer: int
    weight: str
    """Canonical name of the first tensor of the weight that its product reads; without the number of an expert."""


@dataclass(frozen=True)
class ModuleRecipes:
    """The recipe of each linear layer."""

    by_path: Mapping[str, Recipe | None]
    """By path; None: the dtype of the weights."""
    linears: tuple[NamedLinear, ...]
    deciding: Mapping[str, int] = field(default_factory=dict)
    """Linear layers that each enabled matcher decides."""
    unmatched: tuple[Matcher, ...] = ()
    """Enabled matchers whose pattern matches no path."""

    @property
    def by_weight(self) -> dict[str, Recipe | None]:
        """The recipes by canonical name of the weight."""
        return {one.weight: self.by_path[one.path] for one in self.linears}

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers with linear layers in FP8."""
        return tuple(sorted({one.layer for one in self.linears if self.by_path[one.path] is not None}))

    @property
    def disagreeing(self) -> Iterator[tuple[str, str]]:
        """Pairs of paths that are one product here, and have different recipes."""
        first: dict[str, str] = {}
        for one in self.linears:
            other = first.setdefault(one.weight, one.path)
            if self.by_path[other] != self.by_path[one.path]:
                yield other, one.path

    def __str__(self) -> str:
        counts = Counter("not FP8" if each is None else each.name for each in self.by_path.values())
        return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def recipes_of_modules(
    text: str, spec: ModelSpec, *, fp8_layers: Container[int], recipe: Recipe | None
) -> ModuleRecipes:
    """Return the recipes that a file gives to the linear layers.

    Args:
        fp8_layers: the layers in FP8 by flags, and `recipe` theirs.
    """
    matchers, linears = matchers_of(text), tuple(linear_layers(spec))
    by_path: dict[str, Recipe | None] = {}
    deciding = {matcher.name: 0 for matcher in matchers}
    for one in linears:
        is_fp8 = one.layer in fp8_layers
        found = next((matcher for matcher in matchers if fnmatchcase(one.path, matcher.pattern)), None)
        applies = found is not None and (found.changes_fp8 if is_fp8 else found.changes_others)
        by_path[one.path] = found.recipe if found and applies else recipe if is_fp8 else None
        if found is not None and applies:
            deciding[found.name] += 1
    unmatched = [m for m in matchers if not any(fnmatchcase(one.path, m.pattern) for one in linears)]
    return ModuleRecipes(by_path, linears, deciding, tuple(unmatched))


def linear_layers(spec: ModelSpec) -> Iterator[NamedLinear]:
    """Yield the linear layers that FP8 may cover. Products that are one here have several paths and one weight."""
    for number, layer in enumerate(spec.all_layers):
        depth, ours = number - len(spec.layers), spec.layer_name(number)
        theirs = ours if depth < 0 else f"{ours}.mtp_model_layer"
        for one in layer.linears(hidden_size=0):
            for module in one.modules or (one.weight,):
                yield NamedLinear(f"{theirs}.{module}", number, f"{ours}.{one.recipe or one.weight}.weight")
        if depth >= 0:
            yield NamedLinear(f"{ours}.eh_proj", number, f"{ours}.projection.weight")


class _Loader(yaml.SafeLoader):
    """Loader that refuses a key that is not text, such as yes and 1, and one that is given twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        given = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag not in _KEY_TAGS:
                text = f" {key.value}" if isinstance(key, yaml.ScalarNode) else ""
                kind = key.tag.rpartition(":")[2]
                raise PrecisionFileError(f"line {line}: the key{text} is a YAML {kind}, not text: quote it")
            if key.value in given:
                raise PrecisionFileError(f"line {line}: {key.value} is given twice")
            given.add(key.value)
        return node


def matchers_of(text: str) -> tuple[Matcher, ...]:
    """Return the enabled matchers of a file's text, in order. Raises PrecisionFileError with the place in the file."""
    try:
        content = load_yaml(text, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise PrecisionFileError(
            " ".join(str(error).split()) or "its brackets are nested too deeply"
        ) from error
    root = _mapping(content, "the file", required=("configs", "matchers"))
    configs = {
        name: _config(config, f"configs.{name}")
        for name, config in _mapping(root["configs"], "configs").items()
    }
    found = []
    for name, value in _mapping(root["matchers"], "matchers").items():
        place = f"matchers.{name}"
        one = _mapping(value, place, required=("type", "pattern", "config"), known=("enabled",))
        if one["type"] != "glob":
            raise PrecisionFileError(f"{place}.type is {one['type']!r}, not glob")
        if not isinstance(one["config"], str) or one["config"] not in configs:
            raise PrecisionFileError(
                f"{place}.config {one['config']!r} is not one of configs: {', '.join(configs)}"
            )
        if not isinstance(one["pattern"], str):
            raise PrecisionFileError(f"{place}.pattern {one['pattern']!r} is not text")
        if _switch(one, "enabled", place, default=False):
            found.append(Matcher(name, one["pattern"], *configs[one["config"]]))
    return tuple(found)


def _config(value: Any, place: str) -> tuple[Recipe | None, bool, bool]:
    """Return the fields of `Matcher` that a config decides."""
    config = _mapping(value, place, required=(_TYPE, "training_recipe"), known=("evaluation_recipe",))
    if config[_TYPE] != "TEQuantizationParams":
        raise PrecisionFileError(f"{place}.{_TYPE} is {config[_TYPE]!r}, not TEQuantizationParams")
    of_evaluation, place = f"{place}.evaluation_recipe", f"{place}.training_recipe"
    recipe = _mapping(
        config["training_recipe"],
        place,
        known=(
            "fp8_quantization_recipe",
            "fp8_format",
            "override_quantized_autocast",
            "override_nonquantized_autocast",
            "tp_only_amax_red",
        ),
    )
    if _switch(recipe, "tp_only_amax_red", place, default=False):
        raise PrecisionFileError(
            f"{place}.tp_only_amax_red: a scale is that of a tensor on all ranks that hold parts of it"
        )
    name, number_format = recipe.get("fp8_quantization_recipe"), recipe.get("fp8_format", "e4m3")
    if name is not None and name not in RECIPES:
        raise PrecisionFileError(
            f"{place}.fp8_quantization_recipe is {name!r}, not one of {', '.join(RECIPES)}"
        )
    if number_format not in FORMATS:
        raise PrecisionFileError(f"{place}.fp8_format is {number_format!r}, not one of {', '.join(FORMATS)}")
    found = (
        None if name is None else Recipe(name, number_format),
        _switch(recipe, "override_quantized_autocast", place, default=True),
        _switch(recipe, "override_nonquantized_autocast", place, default=False),
    )
    if config.get("evaluation_recipe", recipe) != recipe:
        raise PrecisionFileError(
            f"{of_evaluation} differs from training_recipe, and evaluations compute as training does"
        )
    return found


def _mapping(
    value: Any, place: str, *, required: tuple[str, ...] = (), known: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a mapping. Raises PrecisionFileError unless it has the required keys, and no others than these and the known ones."""
    if not isinstance(value, dict):
        raise PrecisionFileError(f"{place} is not a mapping")
    for key in required:
        if key not in value:
            raise PrecisionFileError(f"{place} has no {key}")
    for key in value:
        if (required or known) and key not in (*required, *known):
            raise PrecisionFileError(
                f"{place}.{key} is not known; known are {', '.join((*required, *known))}"
            )
    return {str(key): one for key, one in value.items()}


def _switch(values: Mapping[str, Any], key: str, place: str, *, default: bool) -> bool:
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise PrecisionFileError(f"{place}.{key} is {value!r}, not true or false")
    return value


def digest_of(text: str) -> str:
    """Return the digest of a file's text, which a resumed run compares."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
