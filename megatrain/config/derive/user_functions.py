"""Functions of the user that are named by one setting each, and the digests of their files, which checkpoints store.

--dataset file.py:function ─> Facts.digests (`training/launch/user_files.py`) ─> data.dataset_digest
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.schema.tree import Config, flag_of
from megatrain.config.schema.values import UnresolvedError
from megatrain.config.user_function import UserFunction

USER_FUNCTIONS: Final = ("data.dataset", "training.loss", "logging.callbacks")
"""Settings that name a function. The digest of its file is in the setting of the same name with `_digest`."""


def user_function(config: Config, setting: str) -> UserFunction | None:
    """Return the function that a setting names; None: it names none."""
    text = config.get(setting)
    return None if text is None else UserFunction.parse(text, flag_of(setting))


def digest_of(setting: str) -> Callable[[Draft], DerivedValue]:
    """Return the derivation of the digest of a setting's file."""

    def derive(draft: Draft) -> DerivedValue:
        if draft.config.get(setting) is None:
            return DerivedValue(None, f"{flag_of(setting)} is not given")
        if setting not in draft.facts.digests:
            raise UnresolvedError  # `data_problems` or the rule `functions_are_named` has the reason.
        return DerivedValue(draft.facts.digests[setting], f"of {draft.config.get(setting)}")

    return derive
