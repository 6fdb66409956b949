"""Custom layers of --spec, as facts of the plan.

request without --spec ─> plan ─> its model and layers ─> the user's function ─> Facts.custom_layers
"""

from __future__ import annotations

import dataclasses

from megatrain.config import ConfigError, Facts, Origin, Plan, Request, resolve
from megatrain.config.derive.custom_layers import layer_function
from megatrain.config.schema.values import AUTO
from megatrain.model.custom_layers import describe_custom_layers
from megatrain.model.specs import gpt_spec


def with_custom_layers(request: Request, facts: Facts) -> Facts:
    """The facts, with what the function of --spec gives, or the problem that it has. Without --spec they are as they were."""
    function = layer_function(request.known("model.spec") or ())
    if function is None:
        return facts
    try:
        plan = _plain_plan(request, facts)
        usual = gpt_spec(plan.config.model, plan.config.experts, vocab_size=plan.derived.vocab_size).layers
        return dataclasses.replace(facts, custom_layers=describe_custom_layers(function, plan.config.model, usual))
    except ConfigError as error:
        return dataclasses.replace(facts, data_problems=(*facts.data_problems, *error.problems))


def _plain_plan(request: Request, facts: Facts) -> Plan:
    """The plan of the same run with the layers that its flags describe, on this device or, as for a dry run, another."""
    plain = dataclasses.replace(
        request,
        config=request.config.with_values({"model.spec": (), "model.spec_digest": AUTO}),
        origins={**request.origins, "model.spec": Origin("default"), "model.spec_digest": Origin("default")},
    )
    fresh = dataclasses.replace(facts, checkpoint=None, devices_per_node=None)
    try:
        return resolve(plain, fresh)
    except ConfigError:
        return resolve(plain, dataclasses.replace(fresh, device="cpu" if fresh.device == "cuda" else "cuda"))
