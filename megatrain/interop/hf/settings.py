"""The settings of a model, from a config.json and back.

    config.json ─> parts of the family ─> settings ─> flags ─> parse, resolve ─> Plan ─> ModelSpec
    Config ─> parts of the family ─> config.json ─> the same way ─> ModelSpec, compared with the spec of Config

So an export is of a family only if its config.json describes the function of our model, option by option.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from megatrain.config import Facts, Plan, parse, resolve
from megatrain.config.cli.flag_words import words_of
from megatrain.config.derive.vision import PROJECTOR, TOWER, tokens_of_images
from megatrain.config.errors import ConfigError, InputError
from megatrain.config.model_spec.cross_attention import CrossAttentionSpec
from megatrain.config.model_spec.experts import RouterSpec
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.model_spec.vision import ProjectorSpec
from megatrain.config.schema.tree import Config, in_words, settings
from megatrain.config.schema.vision import VisionConfig
from megatrain.config.subjects.model_spec import describe_model
from megatrain.interop.hf.config_file import CONFIG_NAME, ConfigFile
from megatrain.interop.hf.families.table import FAMILIES
from megatrain.interop.hf.family import Family, Fixed
from megatrain.interop.hf.tensors import Shape
from megatrain.model.gpt import build_model
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.layout import ParamRegistry
from megatrain.parallel.rank_lists import GridShape

_RUN: Final = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer"
"""Flags that a plan needs, and that no model has."""

MTP: Final = "mtp."
"""Start of the names of tensors of multi-token prediction, which transformers leaves out."""
_NO_MODEL: Final = 1 << 30
"""Distance of a family that has no config.json for a model."""


def read_settings(family: Family, source: ConfigFile) -> dict[str, Any]:
    """Return the settings of the model that a config.json describes, by path.

    Raises:
        InputError: a value is missing, wrong, or of a model that megatrain lacks.
    """
    found: dict[str, Any] = {}
    for part in family.config:
        found |= part.read(source)
    return found


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Return the flags for these settings; those with their default values are left out."""
    words: list[str] = []
    for setting in settings():
        value = values.get(setting.path, setting.default)
        if value == setting.default:
            continue
        if isinstance(value, bool):
            words.append(setting.flag if value else setting.opposite_flag)
        elif isinstance(value, tuple):
            words += [setting.flag, *map(str, value)]
        else:
            words += words_of(setting.flag, str(value))
    return words


def plan_of(values: Mapping[str, Any], vocab_size: int, where: Path) -> Plan:
    """Return the plan of a run with these settings of the model, on one rank.

    Raises:
        InputError: the settings contradict each other. `where` has described them.
    """
    length = values["model.max_position_embeddings"]
    if values.get("model.model_family") == "vlm":  # whose samples have the tokens of an image besides
        prefix = "vision."
        own = {key.removeprefix(prefix): one for key, one in values.items() if key.startswith(prefix)}
        vision = VisionConfig(**own)
        length = max(1, length - tokens_of_images(vision))
    words = [*flags_of(values), *_RUN.split(), "--seq-length", str(length), "--vocab-size", str(vocab_size)]
    try:
        return resolve(parse(words), replace(Facts(), world_size=1, vocab_size=vocab_size, eod_id=0))
    except ConfigError as error:
        first = error.problems[0]
        raise InputError(
            f"{where}: {first.text}", fix="models of this kind are not converted; see docs/weights.md"
        ) from error


def registry_of(config: Config, vocab_size: int) -> ParamRegistry:
    """Return the registry of our model; no memory is allocated for its tensors."""
    return build_model(
        describe_model(config.model, config.experts, config.vision, vocab_size=vocab_size),
        build_grid(GridShape(), 0),
        seq_length=1,
        sequence_parallel=False,
        dtype=torch.float32,
        device=torch.device("meta"),
    ).registry


def shapes_of(family: Family | None, config: Config, vocab_size: int) -> dict[str, Shape]:
    """Return the shapes of our model's tensors that a family has, by canonical name."""
    return {
        piece.name: piece.shape
        for entry in registry_of(config, vocab_size).entries.values()
        for piece in entry.layout.pieces
        if family is None or has_tensor(family, piece.name)
    }


def has_tensor(family: Family, name: str) -> bool:
    """Return whether a family has one of our tensors: a tower alone has no projector and no language model."""
    return not family.is_tower or (name.startswith(f"{TOWER}.") and not name.startswith(f"{PROJECTOR}."))


def bias_shapes(config: Config, vocab_size: int) -> dict[str, Shape]:
    """Return the shapes of the biases that select experts, by canonical name: state of our models, tensors of theirs."""
    routers = describe_model(
        config.model, config.experts, config.vision, vocab_size=vocab_size
    ).routers_by_name
    return {
        f"{name}.expert_bias": (router.num_experts,)
        for name, router in routers.items()
        if router.has_expert_bias and not name.startswith(MTP)
    }


def fitting_family(
    config: Config, vocab_size: int, where: Path, wanted: str | None = None
) -> tuple[Family, dict[str, Any]]:
    """Return the family of a model of ours, with its config.json.

    Args:
        wanted: architecture to use; None: the first that fits.

    Raises:
        InputError: there is none.
    """
    if wanted is not None and wanted not in FAMILIES:
        raise InputError(f"--architecture {wanted}: unknown", fix=f"use one of {', '.join(FAMILIES)}")
    described = function_of(config, vocab_size)
    closest: tuple[int, Family, Mapping[str, Any] | str] | None = None
    kind = config.model.model_family
    classes = [FAMILIES[wanted]] if wanted else FAMILIES.values()
    kinds = [family for one in classes for family in one.kinds]
    alike = [one for one in kinds if _model_family(one) == kind and not one.is_tower and one.fits(config)]
    for family in kinds if wanted else alike:
        keys = _keys(family, config, vocab_size)
        source = ConfigFile(Path(CONFIG_NAME), keys)
        values: Mapping[str, Any] | str
        try:
            values = read_settings(family, source)
            plan = plan_of(values, vocab_size, source.path)
        except InputError as error:
            values, distance = error.problems[0].text, _NO_MODEL
        else:
            both = (_compared(family, one) for one in (described, function_of(plan.config, vocab_size)))
            distance = _distance(*both)
        if not distance:
            return family, {"architectures": [family.architecture], "model_type": family.model_type, **keys}
        if closest is None or distance < closest[0]:
            closest = distance, family, values
    assert closest is not None
    _, family, values = closest
    found = [values] if isinstance(values, str) else _differences(config, vocab_size, values, family)
    raise InputError(
        f"{where}: no family of transformers computes this model; {family.architecture}, the closest, differs: {'; '.join(found)}",
        fix=f"name another architecture with --architecture, or export the weights alone: megatrain checkpoint export-weights {where} TARGET",
    )


def _differences(config: Config, vocab_size: int, values: Mapping[str, Any], family: Family) -> list[str]:
    """Return the flags of the model whose values alone make it differ from the one of a family.

    Args:
        values: settings that the family's config.json would give, by path.
    """

    def changed_by(changes: Mapping[str, Any]) -> Config:
        return plan_of({**values, **changes}, vocab_size, Path(CONFIG_NAME)).config

    def matters(path: str) -> bool:
        try:
            found = changed_by({path: config.get(path)})
        except InputError:  # it needs another flag, which is named
            return False
        both = (_compared(family, function_of(one, vocab_size)) for one in (found, there))
        return _distance(*both) > 0

    there = changed_by({})
    changed = [
        one
        for one in settings()
        if one.section in ("model", "experts", "vision") and config.get(one.path) != there.get(one.path)
    ]
    named = [one for one in changed if matters(one.path)] or changed
    return [
        f"{one.flag} is {in_words(config.get(one.path))} here, {in_words(there.get(one.path))} there"
        for one in named
    ]


def _keys(family: Family, config: Config, vocab_size: int) -> dict[str, Any]:
    """Return the config.json of a model of ours, without its class."""
    keys: dict[str, Any] = {} if family.is_tower or family.of_text else {"vocab_size": vocab_size}
    for part in family.config:
        keys |= part.write(config)
    if family.of_text:
        keys[family.of_text]["vocab_size"] = vocab_size
    return keys


def _compared(family: Family, spec: ModelSpec) -> Any:
    """Return what a family computes of a model."""
    if not family.is_tower:
        return spec
    vision = spec.vision
    return (
        None
        if vision is None
        else replace(
            vision, projector=ProjectorSpec(inputs=vision.hidden_size, mlp=None), keeps_class_token=True
        )
    )


def _model_family(family: Family) -> str:
    """Return the value of --model-family of all its models."""
    fixed = (part.settings for part in family.config if isinstance(part, Fixed))
    return next((one["model.model_family"] for one in fixed if "model.model_family" in one), "gpt")


def function_of(config: Config, vocab_size: int) -> ModelSpec:
    """Return the spec of a model without what changes only training or rounding: multi-token prediction too."""
    spec = describe_model(config.model, config.experts, config.vision, vocab_size=vocab_size)
    vision = spec.vision
    if vision is not None:
        vision = replace(
            vision,
            is_tower_frozen=False,
            is_language_frozen=False,
            images_per_sample=1,
            is_spread_over_tp=False,
        )
    return replace(
        spec,
        vision=vision,
        padded_vocab_size=0,
        init_std=0.0,
        output_init_std=0.0,
        embedding_init_std=None,
        head_init_std=None,
        hidden_dropout=0.0,
        is_residual_fp32=False,
        z_loss_coeff=0.0,
        mtp=None,
        stacks=tuple(
            replace(stack, layers=tuple(map(_layer, stack.layers)), seq_length=None) for stack in spec.stacks
        ),
    )


def _layer(layer: LayerSpec) -> LayerSpec:
    if layer.attention is not None:
        layer = layer.replaced(layer.attention, replace(layer.attention, dropout=0.0, qk_norm_decays=False))
    for part in layer.parts:
        if isinstance(part, CrossAttentionSpec):
            layer = layer.replaced(part, replace(part, dropout=0.0))
    if layer.experts is not None:
        layer = layer.replaced(layer.experts, replace(layer.experts, router=_router(layer.experts.router)))
    return layer


def _router(router: RouterSpec) -> RouterSpec:
    factor = router.scaling_factor
    return replace(
        router,
        dtype=None,
        losses=(),
        z_loss_coeff=0.0,
        bias_update_rate=0.0,
        jitter=0.0,
        scaling_factor=factor,
    )


def _distance(ours: Any, theirs: Any) -> int:
    """Return the number of differences between two specs."""
    if dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
        names = [field.name for field in dataclasses.fields(ours)]
        return sum(_distance(getattr(ours, name), getattr(theirs, name)) for name in names)
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        return sum(map(_distance, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return int(not math.isclose(ours, theirs, rel_tol=1e-9))
    return int(ours != theirs)
