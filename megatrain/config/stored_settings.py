"""Settings that --use-checkpoint-args takes from a checkpoint, where neither the command line nor a YAML file gives them.

    model, experts     all settings on which the weights, the function or the loss of the model depend, and dropout
    data, tokenizer    the lengths of sequences; the tokenizer, unless a flag names one
    parallel           the layout, with --use-mp-args-from-checkpoint-args

With --eval-only also the data, unless a flag names some, and what training computed with: batch sizes, precision, optimizer.

Code is never taken: a model of --spec and data of --dataset need the flag again. Settings with their default values are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatrain.config.facts import StoredRun
from megatrain.config.request import Request
from megatrain.config.schema.data import SOURCES
from megatrain.config.schema.resume_class import FUNCTION, SHAPE
from megatrain.config.schema.setting import ARGS, EVALUATION, LAYOUT
from megatrain.config.schema.tree import Origin, settings


def stored_settings(
    stored: Mapping[str, Mapping[str, Any]],
    request: Request,
    *,
    with_layout: bool,
    with_training: bool = False,
) -> dict[str, Any]:
    """Return the settings to take from the configuration of a checkpoint, by path. Reading the checkpoint has checked them."""
    flags = {ARGS, *([LAYOUT] if with_layout else []), *([EVALUATION] if with_training else [])}
    names_tokenizer = any(
        path.startswith("tokenizer.") and origin.kind in ("flag", "yaml", "folder")
        for path, origin in request.origins.items()
    )
    names_data = any(request.origins[path].is_given for path in (*SOURCES, "data.split"))
    taken: dict[str, Any] = {}
    for setting in settings():
        replaced = {
            "tokenizer": names_tokenizer,
            "data": names_data and setting.path in (*SOURCES, "data.split"),
        }
        is_wanted = setting.taken_by in flags or setting.on_resume in (SHAPE, FUNCTION)
        is_stored = setting.name in stored.get(setting.section, {})
        if (
            not is_wanted
            or not is_stored
            or replaced.get(setting.section)
            or request.origins[setting.path].is_given
        ):
            continue
        value = stored[setting.section][setting.name]
        if setting.accepts_function and value not in setting.choices:
            continue
        if _as_setting(value) != setting.default:
            taken[setting.path] = value
    return taken


def with_stored_settings(request: Request, stored: StoredRun | None) -> Request:
    """Return the request with the settings of the checkpoint, which are empty without --use-checkpoint-args."""
    if stored is None:
        return request
    return with_settings(request, stored.settings, Origin("checkpoint", stored.path))


def with_settings(request: Request, taken: Mapping[str, Any], origin: Origin) -> Request:
    """Return the request with settings that are taken from elsewhere, by path."""
    values = {path: _as_setting(value) for path, value in taken.items()}
    origins = dict.fromkeys(values, origin)
    return replace(request, config=request.config.with_values(values), origins={**request.origins, **origins})


def _as_setting(value: Any) -> Any:
    """Return a JSON value as a setting has it."""
    return tuple(value) if isinstance(value, list) else value
