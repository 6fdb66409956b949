"""Schedules of one rank for tests: 1F1B, also with weight gradients as actions of their own."""

from collections.abc import Sequence

from megatrain.config.schema.pipeline_schedules import ONE_CHUNK
from megatrain.parallel.pipeline.actions import Action, ActionKind, Placement
from megatrain.parallel.pipeline.schedule import PipelineSchedule


def one_rank(num_microbatches: int) -> list[Action]:
    """Return F B F B ..."""
    return PipelineSchedule(ONE_CHUNK, Placement(1)).training(0, num_microbatches)


def with_split_backward(actions: Sequence[Action]) -> list[Action]:
    """Return the schedule with weight gradients as separate actions after each backward pass."""
    split: list[Action] = []
    for action in actions:
        split.append(action)
        if action.kind is ActionKind.BACKWARD:
            split.append(Action(ActionKind.WEIGHT, action.microbatch, action.chunk))
    return split
