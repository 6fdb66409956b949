"""The user's own files: their digests and the function of --spec, as facts of the plan.

rank 0        digest of the file as expected? ─> its function is loaded ─> Facts.digests, Facts.custom_layers
other ranks   digest as on rank 0? ─> the function of their own file

A run that resumes expects the digest in its checkpoint, unless the setting of the digest gives another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from megatrain.config import ConfigError, Facts, Plan, Problem, Request, StoredRun
from megatrain.config.derive.custom_layers import Values, differences, values_of
from megatrain.config.schema.tree import flag_of
from megatrain.config.user_function import (
    LR_FUNCTION,
    USER_FUNCTIONS,
    UserFunction,
    function_of,
    user_function,
)
from megatrain.model.custom_layers import layers_of
from megatrain.optim.lr_schedule import LrSchedule

_OWN_SCHEDULE: Final = (
    "schedule.override_opt_param_scheduler",
    "checkpoint.no_load_optim",
    "training.skip_train",
    "training.eval_only",
)
"""Settings of runs that do not continue the schedule of the checkpoint."""


def add_user_files(request: Request, facts: Facts) -> Facts:
    """Add the digests of the user's files and the function of --spec to the facts, and the problems of files."""
    problems: list[Problem] = []
    digests: dict[str, str] = {}
    for setting, function in _functions(request).items():
        try:
            digests[setting] = _digest(function, setting, request, facts.checkpoint)
            facts = _loaded(facts, setting, function, digests[setting])
        except ConfigError as error:
            problems += error.problems
    return dataclasses.replace(facts, digests=digests, data_problems=(*facts.data_problems, *problems))


def with_own_files(request: Request, facts: Facts) -> Facts:
    """Run this rank's files; return the facts of rank 0 with the function of --spec. Raises ConfigError if a file differs."""
    for setting, function in _functions(request).items():
        if setting in facts.digests:  # `data_problems` has the problem of another one
            facts = _loaded(facts, setting, function, facts.digests[setting])
    return facts


def results_of(plan: Plan) -> dict[str, list[Values]]:
    """Return what functions of the user gave by setting, which must be equal on all ranks: layers, and some learning rates."""
    found: dict[str, list[Values]] = {}
    if user_function(plan.config, "model.spec") is not None:
        found["model.spec"] = values_of(plan.derived.model_spec.layers)
    if plan.derived.schedule.function is not None:
        rates = LrSchedule.of(plan.derived.schedule).trial()
        found[LR_FUNCTION] = [{f"after {samples} samples": str(rate) for samples, rate in rates.items()}]
    return found


def require_results(plan: Plan, of_rank_0: Mapping[str, list[Values]]) -> None:
    """Raise a ConfigError if this rank's functions gave other values."""
    for setting, found in results_of(plan).items():
        lines = differences(found, of_rank_0[setting], "on rank 0")
        differing = "; ".join(lines).removeprefix("" if setting == "model.spec" else "layer 0: ")
        if differing:
            raise ConfigError(
                f"{flag_of(setting)} {user_function(plan.config, setting)} gives other values on this rank: {differing}",
                fix="compute them from the arguments of the function alone, not from the rank, the host or the time",
            )


def _functions(request: Request) -> dict[str, UserFunction]:
    found = {name: function_of(name, request.known(name)) for name in (*USER_FUNCTIONS, LR_FUNCTION)}
    return {setting: function for setting, function in found.items() if function is not None}


def _loaded(facts: Facts, setting: str, function: UserFunction, digest: str) -> Facts:
    found = function.load(digest)
    if setting != "model.spec":
        return facts
    return dataclasses.replace(facts, custom_layers=layers_of(function, found))


def _digest(function: UserFunction, setting: str, request: Request, stored: StoredRun | None) -> str:
    if setting == LR_FUNCTION:
        schedule = (
            stored.schedule if stored is not None and not any(map(request.known, _OWN_SCHEDULE)) else None
        )
        return function.digest(stored=(schedule or {}).get("lr_decay_digest"), flag=flag_of(_OWN_SCHEDULE[0]))
    # A change of callbacks does not change what is trained: it is a note.
    is_compared = stored is not None and not stored.is_start and setting != "logging.callbacks"
    section, name = setting.split(".")
    values = stored.config.get(section, {}) if stored is not None and is_compared else {}
    return function.digest(
        given=request.known(f"{setting}_digest"),
        stored=values.get(f"{name}_digest"),
        before=function_of(setting, values.get(name)),
        flag=f"{flag_of(setting)}-digest {{digest}}",
    )
