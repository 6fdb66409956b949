"""Description of the values of a manifest that are not about tensors: counters, `state` and `config`.

A checkpoint with a value that cannot be right counts as damaged. The configuration describes the run that wrote the
checkpoint; nothing in it is executed, and --spec, which names code, is taken from the command line alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from megatrain.checkpoint.errors import MismatchError
from megatrain.config.derive.lr_schedule import ScheduleValues
from megatrain.config.derive.vision import is_frozen_in
from megatrain.config.facts import DatasetFacts
from megatrain.config.schema.lr_decay import LrDecay
from megatrain.config.schema.tree import section_types
from megatrain.config.schema.values import Range, is_resolved
from megatrain.optim.sharded import WEIGHT
from megatrain.optim.soap import FACTOR, FACTOR_PREFIX
from megatrain.storage.untrusted_json import (
    InvalidError,
    flag,
    integer,
    list_of,
    map_of,
    number,
    optional,
    record,
    record_of,
    text,
)

_COUNT: Final = integer(0, 1 << 50)
_PLAN: Final = list_of(optional(_COUNT), most=1000)
_PHASE: Final = record(
    {"from_iteration": integer(1, 1 << 50), "start": _COUNT, "plan": list_of(_COUNT, most=1000)}
)
_LOSS_SCALE: Final = record(
    {
        "scale": number(Range(above=0.0, at_most=1e38)),
        "finite_steps": _COUNT,
        "patience": integer(-(1 << 50), 1 << 50),  # decreases with every step that is not finite
    }
)


def _loss_scale(value: Any, name: str) -> None:
    if value != {}:  # a constant loss scale has no state
        _LOSS_SCALE(value, name)


def _amax(value: Any, name: str) -> None:
    """Check an entry of a history: steps since the last one, and the largest value of that step."""
    list_of(number(Range(at_least=0.0)))(value, name)
    if len(value) != 2:
        raise InvalidError(f"{name} has {len(value)} numbers instead of 2")
    _COUNT(value[0], f"{name}.0")


def _fields_with_defaults(kind: type[Any]) -> tuple[str, ...]:
    """Return the fields that a manifest may lack: they came later."""
    return tuple(entry.name for entry in dataclasses.fields(kind) if entry.default is not dataclasses.MISSING)


_STATE: Final = record(
    {
        "consumed_valid_samples": _COUNT,
        "scheduled_samples": _COUNT,
        "schedule": record_of(
            ScheduleValues,
            within=Range(at_least=0.0),
            may_lack=("lr_decay_digest", *(entry.name for entry in dataclasses.fields(LrDecay))),
        ),
        "loss_scale": _loss_scale,
        "expert_biases": map_of(list_of(number())),
        "has_optimizer": flag,
        "is_evaluation_left": flag,
        "tokenizer_fingerprint": optional(text(max_characters=1000)),
        "data_plans": record(
            {"train": _PLAN, "valid": _PLAN, "test": _PLAN},
            {"phases": list_of(_PHASE, most=1000), "start": _COUNT},
        ),
        "pass_size": integer(1, 1 << 50),
        "datasets": list_of(
            record_of(DatasetFacts, within=Range(at_least=0.0), may_lack=_fields_with_defaults(DatasetFacts))
        ),
    },
    {
        "amax_history": map_of(list_of(_amax)),
        "end_token_ids": list_of(_COUNT, most=1000),
        "decoder_start_id": _COUNT,
    },
)
_CONFIG: Final = record(
    {}, {name: record_of(section, is_complete=False) for name, section in section_types().items()}
)
FIELDS: Final = {
    "iteration": _COUNT,
    "consumed_train_samples": _COUNT,
    "optimizer_step_count": _COUNT,
    "state": _STATE,
    "config": _CONFIG,
}
_MAX_LAYERS_PER_TENSOR: Final = 10
"""Layers may have no tensors, but few do."""


def make_lists(content: Mapping[str, Any]) -> None:
    """Put lists in place of values of the configuration, in place: versions before had one value, or none, for some settings."""
    sections: Any = content.get("config")
    for name, kind in section_types().items() if isinstance(sections, dict) else ():
        stored: Any = sections.get(name)
        for entry in dataclasses.fields(kind) if isinstance(stored, dict) else ():
            value = stored.get(entry.name)
            if entry.name in stored and entry.default == () and not isinstance(value, list):
                stored[entry.name] = [] if value is None else [value]


def check_stored_values(content: Mapping[str, Any]) -> None:
    """Check the values of a manifest that are not about tensors; `content["tensors"]`, or its parts, must be valid.

    Raises:
        InvalidError: a value is missing, has another type or range, or contradicts another one.
    """
    for name, check in FIELDS.items():
        if name not in content:
            raise InvalidError(f"{name} is missing")
        check(content[name], name)
    for problem in _contradictions(content):
        raise InvalidError(problem)


def check_kinds(
    tensors: Mapping[str, Collection[str]], state: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Raise InvalidError if a tensor lacks a kind of state, or has one that `state` and `config` exclude."""
    expected = any(len(kinds) > 1 for kinds in tensors.values())
    for name, kinds in tensors.items():
        is_factor = name.startswith(FACTOR_PREFIX)
        has_optimizer = len(kinds) > 1 or is_factor
        if (
            (FACTOR if is_factor else WEIGHT) not in kinds
            or has_optimizer > state["has_optimizer"]
            or has_optimizer != (expected and not is_frozen_in(config, name))
        ):
            raise InvalidError(
                f"{name} has {', '.join(kinds) or 'nothing'}, and state.has_optimizer is {state['has_optimizer']}"
            )


def stored_section(path: Path, config: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """Build a section from the configuration of the checkpoint at `path`, whose values are checked already.

    Raises:
        MismatchError: another version of the program, with other settings, wrote it.
    """
    stored: Mapping[str, Any] = _later(name, config.get(name, {})) | config.get(name, {})
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    unknown = sorted(set(stored) - set(defaults))
    missing = sorted(key for key in set(defaults) - set(stored) if not is_resolved(defaults[key]))
    if unknown or missing:
        raise MismatchError(
            f"{path}: its configuration {'has' if unknown else 'lacks'} {name}.{(unknown or missing)[0]}",
            fix="use the version of the program that wrote it",
        )
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()})


def _later(name: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that came later, and whose default depends on others, with the values that earlier versions used."""
    is_siglip = stored.get("vision_model_type") == "siglip"
    later: dict[str, dict[str, Any]] = {
        "vision": {"image_processor": "siglip" if is_siglip else "clip"},
        "experts": {"moe_alltoall_ranks_per_host": 1},
    }
    return later.get(name, {})


def _planned_samples(plans: Mapping[str, Any]) -> int:
    """Return the training samples of all phases."""
    ends: list[int] = [phase["start"] + sum(phase["plan"]) for phase in plans.get("phases", ())]
    planned: int = plans.get("start", 0) + sum(count or 0 for count in plans["train"])
    return max([planned, *ends])


def _contradictions(content: Mapping[str, Any]) -> Iterator[str]:
    yield from _contradicting_counters(content)
    state, config, tensors = content["state"], content["config"], content.get("tensors", {})
    check_kinds({name: tensor["kinds"] for name, tensor in tensors.items()}, state, config)
    parts = content.get("parts", {}).values()
    num_tensors = len(tensors) + sum(len(part["name_keys"]) // 8 for part in parts)
    precision = config.get("precision", {})
    has_delayed_scales = precision.get("fp8_format") is not None and precision.get("fp8_recipe") == "delayed"
    if has_delayed_scales and "amax_history" not in state:
        yield "state.amax_history is missing, from which delayed FP8 scales follow"
    num_layers = config.get("model", {}).get("num_layers", 0)
    num_experts = config.get("experts", {}).get("num_experts") or 0
    if num_layers > _MAX_LAYERS_PER_TENSOR * num_tensors or num_experts > num_tensors:
        yield f"config has {num_layers} layers and {num_experts} experts, for {num_tensors} tensors"


def _contradicting_counters(content: Mapping[str, Any]) -> Iterator[str]:
    state, iteration, consumed = content["state"], content["iteration"], content["consumed_train_samples"]
    planned = _planned_samples(state["data_plans"])
    is_repeated = content["config"].get("data", {}).get("dataloader_type") == "cyclic"
    if consumed < iteration or (consumed > planned and not is_repeated):
        yield f"consumed_train_samples {consumed} at iteration {iteration}, with data for {planned} samples"
    if state["scheduled_samples"] > consumed:
        yield f"state.scheduled_samples {state['scheduled_samples']} of {consumed} consumed samples"
    if content["optimizer_step_count"] > consumed:
        yield f"optimizer_step_count {content['optimizer_step_count']} after {consumed} consumed samples"
