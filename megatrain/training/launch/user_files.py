"""Digests of the user's files, compared before a file is run.

A run that resumes expects the digest in its checkpoint, unless the setting of the digest gives another one.
"""

from __future__ import annotations

import dataclasses

from megatrain.config import ConfigError, Facts, Problem, Request, StoredRun
from megatrain.config.schema.tree import flag_of
from megatrain.config.user_function import USER_FUNCTIONS, UserFunction


def add_user_functions(request: Request, facts: Facts) -> Facts:
    """Add the digests of the user's files to the facts, and the problems of files that cannot be run."""
    digests: dict[str, str] = {}
    problems: list[Problem] = []
    for setting in USER_FUNCTIONS:
        function = UserFunction.parse(request.known(setting) or "", flag_of(setting))
        if function is None:
            continue
        try:
            # A change of callbacks does not change what is trained: it is a note.
            stored = None if setting == "logging.callbacks" else facts.checkpoint
            compare_digest(function, f"{setting}_digest", request, stored)
            function.load()
        except ConfigError as error:
            problems += error.problems
        else:
            digests[setting] = function.digest()
    return dataclasses.replace(facts, digests=digests, data_problems=(*facts.data_problems, *problems))


def compare_digest(function: UserFunction, setting: str, request: Request, stored: StoredRun | None) -> None:
    """Compare the digest of a file with the given one or, on a resume, with that of the checkpoint. Raises ConfigError.

    Args:
        function: names the file.
        setting: path of the setting that holds the digest, such as `model.spec_digest`.
    """
    given, digest, flag = request.known(setting), function.digest(), flag_of(setting)
    if given is not None and given != digest:
        raise ConfigError(
            f"{function.flag} {function}: the file has changed, its digest is {digest} and {flag} (from the saved"
            f" configuration) is {given}",
            fix=f"use the file of that run, or remove {flag}",
        )
    is_resumed = stored is not None and not stored.is_start
    section, name = setting.split(".")
    values = stored.config.get(section, {}) if stored and is_resumed else {}
    of_checkpoint = values.get(name)
    before = UserFunction.parse(values.get(name.removesuffix("_digest")) or "", function.flag)
    if given is None and before is not None and before.name != function.name:
        raise ConfigError(
            f"{function.flag} {function}: the checkpoint is of another function, {before}",
            fix=f"use that function, or add {flag} {digest} to run this one",
        )
    if given is None and of_checkpoint not in (None, digest):
        raise ConfigError(
            f"{function.flag} {function}: the file has changed, its digest is {digest}, and that of the checkpoint is"
            f" {of_checkpoint}",
            fix=f"use the file of that run, or add {flag} {digest} to run the changed file",
        )
