"""Schedules whose weight gradients are actions of their own."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.parallel.pipeline.actions import Action, ActionKind


def with_split_backward(actions: Sequence[Action]) -> list[Action]:
    """Return the schedule with weight gradients as separate actions after each backward pass."""
    split: list[Action] = []
    for action in actions:
        split.append(action)
        if action.kind is ActionKind.BACKWARD:
            split.append(Action(ActionKind.WEIGHT, action.microbatch, action.chunk))
    return split
