"""The function of --spec, as a fact of the plan.

rank 0        digest of the file as expected? ─> its function is loaded ─> Facts.custom_layers
other ranks   digest as on rank 0? ─> the function of their own file

`resolve` calls the function. A run that resumes expects the digest in its checkpoint, unless --spec-digest gives another one.
"""

from __future__ import annotations

import dataclasses

from megatrain.config import ConfigError, Facts, Request
from megatrain.config.derive.custom_layers import CustomLayers, layer_function
from megatrain.model.custom_layers import load_layers
from megatrain.training.launch.user_files import compare_digest


def add_custom_layers(request: Request, facts: Facts) -> Facts:
    """Add the function of --spec to the facts, or its problem; without --spec, change nothing.

    The file is run only if it has the expected digest.
    """
    function = layer_function(request.known("model.spec") or ())
    if function is None:
        return facts
    try:
        compare_digest(function, "model.spec_digest", request, facts.checkpoint)
        return dataclasses.replace(
            facts, custom_layers=CustomLayers(function.digest(), load_layers(function))
        )
    except ConfigError as error:
        return dataclasses.replace(facts, data_problems=(*facts.data_problems, *error.problems))


def with_own_layers(request: Request, facts: Facts) -> Facts:
    """Return the facts of rank 0 with the function of this rank's file. Raises ConfigError if the file is another one."""
    function = layer_function(request.known("model.spec") or ())
    if function is None or facts.custom_layers is None:
        return facts
    function.require_digest(facts.custom_layers.digest)
    return dataclasses.replace(
        facts, custom_layers=CustomLayers(facts.custom_layers.digest, load_layers(function))
    )
