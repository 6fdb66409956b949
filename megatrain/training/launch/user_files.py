"""Digests of the user's files, compared before a file is run.

A run that resumes expects the digest in its checkpoint, unless the setting of the digest gives another one.
"""

from __future__ import annotations

from megatrain.config import ConfigError, Request, StoredRun
from megatrain.config.schema.tree import flag_of
from megatrain.config.user_function import UserFunction


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
    of_checkpoint = stored.config.get(section, {}).get(name) if stored and is_resumed else None
    if given is None and of_checkpoint not in (None, digest):
        raise ConfigError(
            f"{function.flag} {function}: the file has changed, its digest is {digest}, and that of the checkpoint is"
            f" {of_checkpoint}",
            fix=f"use the file of that run, or add {flag} {digest} to run the changed file",
        )
