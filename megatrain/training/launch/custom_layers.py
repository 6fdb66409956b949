"""Custom layers of --spec, as facts of the plan.

digest of the file as expected? ─> request without --spec ─> plan ─> its model and layers ─> the user's function ─> Facts.custom_layers

A run that resumes expects the digest in its checkpoint, unless --spec-digest gives another one.
"""

from __future__ import annotations

import dataclasses

from megatrain.config import ConfigError, Facts, Origin, Plan, Problem, Request, resolve
from megatrain.config.derive.custom_layers import layer_function
from megatrain.config.schema.values import AUTO
from megatrain.model.custom_layers import describe_custom_layers
from megatrain.model.specs import gpt_spec
from megatrain.training.launch.user_files import compare_digest


def add_custom_layers(request: Request, facts: Facts) -> Facts:
    """Add the layers that the function of --spec returns to the facts, or its problem; without --spec, change nothing.

    The function is run only if its file has the expected digest.
    """
    function = layer_function(request.known("model.spec") or ())
    if function is None:
        return facts
    try:
        compare_digest(function, "model.spec_digest", request, facts.checkpoint)
        plan = _plain_plan(request, facts)
        default_layers = gpt_spec(
            plan.config.model, plan.config.experts, vocab_size=plan.derived.vocab_size
        ).layers
        return dataclasses.replace(
            facts, custom_layers=describe_custom_layers(function, plan.config.model, default_layers)
        )
    except ConfigError as error:
        return dataclasses.replace(facts, data_problems=(*facts.data_problems, *error.problems))


def _plain_plan(request: Request, facts: Facts) -> Plan:
    """Return the plan of the run without --spec, on this device or, if that is impossible, on the other kind.

    Raises:
        ConfigError: both are impossible, for the reasons that both have: others may be of a device that the run does not use.
    """
    plain = dataclasses.replace(
        request,
        config=request.config.with_values({"model.spec": (), "model.spec_digest": AUTO}),
        origins={**request.origins, "model.spec": Origin("default"), "model.spec_digest": Origin("default")},
    )
    fresh = dataclasses.replace(facts, checkpoint=None, devices_per_node=None)
    other = dataclasses.replace(fresh, device="cpu" if fresh.device == "cuda" else "cuda", has_triton=True)
    found: list[tuple[Problem, ...]] = []
    for assumed in (fresh, other):
        try:
            return resolve(plain, assumed)
        except ConfigError as error:
            found.append(error.problems)
    here, there = found
    raise ConfigError.of([problem for problem in here if problem in there] or here)
