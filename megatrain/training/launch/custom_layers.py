"""The function of --spec, as a fact of the plan.

rank 0        digest of the file as expected? ─> its function is loaded ─> Facts.custom_layers
other ranks   digest as on rank 0? ─> the function of their own file

`resolve` calls the function. A run that resumes expects the digest in its checkpoint, unless --spec-digest gives another one.
"""

from __future__ import annotations

import dataclasses

from megatrain.config import ConfigError, Facts, Request, StoredRun
from megatrain.config.derive.custom_layers import CustomLayers, LayerFunction, layer_function
from megatrain.model.custom_layers import digest_of, load_layers


def add_custom_layers(request: Request, facts: Facts) -> Facts:
    """Add the function of --spec to the facts, or its problem; without --spec, change nothing.

    The file is run only if it has the expected digest.
    """
    function = layer_function(request.known("model.spec") or ())
    if function is None:
        return facts
    try:
        digest = _compared_digest(function, request, facts.checkpoint)
        return dataclasses.replace(facts, custom_layers=CustomLayers(digest, load_layers(function)))
    except ConfigError as error:
        return dataclasses.replace(facts, data_problems=(*facts.data_problems, *error.problems))


def with_own_layers(request: Request, facts: Facts) -> Facts:
    """Return the facts of rank 0 with the function of this rank's file. Raises ConfigError if the file is another one."""
    function = layer_function(request.known("model.spec") or ())
    if function is None or facts.custom_layers is None:
        return facts
    digest = digest_of(function)
    if digest != facts.custom_layers.digest:
        raise ConfigError(
            f"--spec {function}: this rank's file has digest {digest}, that of rank 0 has {facts.custom_layers.digest}",
            fix="let all ranks read the same file, and do not change it during the start",
        )
    return dataclasses.replace(facts, custom_layers=CustomLayers(digest, load_layers(function)))


def _compared_digest(function: LayerFunction, request: Request, stored: StoredRun | None) -> str:
    """Return the digest of the file after a comparison with --spec-digest or, on a resume, with that of the checkpoint. Raises ConfigError."""
    given, digest = request.known("model.spec_digest"), digest_of(function)
    if given is not None and given != digest:
        raise ConfigError(
            f"--spec {function}: the file has changed, its digest is {digest} and --spec-digest (from the saved"
            f" configuration) is {given}",
            fix="use the file of that run, or remove --spec-digest",
        )
    is_resumed = stored is not None and not stored.is_start
    of_checkpoint = stored.config.get("model", {}).get("spec_digest") if stored and is_resumed else None
    if given is None and of_checkpoint not in (None, digest):
        raise ConfigError(
            f"--spec {function}: the file has changed, its digest is {digest}, and that of the checkpoint is {of_checkpoint}",
            fix=f"use the file of that run, or add --spec-digest {digest} to run the changed file",
        )
    return digest
