"""Biases of routers, which a checkpoint keeps in the state of its manifest: few numbers, which every rank needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.checkpoint.errors import MismatchError
from megatrain.model.gpt import Model


def restore_biases(model: Model, state: Mapping[str, Any], path: Path) -> None:
    """Give a model the biases of the checkpoint in folder `path`, whose state this is.

    Raises:
        MismatchError: its routers have others, or none.
    """
    try:
        model.expert_biases.restore(state.get("expert_biases", {}))  # checkpoints from before there were any
    except ValueError as error:
        raise MismatchError(
            f"{path}: {error}", fix="load it into the model that it was saved from"
        ) from error
