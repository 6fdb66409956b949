"""Schedules: the list of a pipeline rank's actions in a step.

    1F1B, 2 stages, 3 micro-batches        stage 0   F0 >   F1 >   < B0 F2 >   < B1     < B2
    (> sends, < receives)                  stage 1     < F0 B0 >  < F1 B1 >  < F2 B2 >

Pure functions of the stage and the numbers of stages and micro-batches; `simulator.py` checks them.

Source: Narayanan et al., arXiv:2104.04473, section 2.2 (1F1B, there PipeDream-Flush).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """The kind of an action; sends and receives name the direction of the data."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    SEND_FORWARD = "sf"
    RECV_FORWARD = "rf"
    SEND_BACKWARD = "sb"
    RECV_BACKWARD = "rb"


@dataclass(frozen=True)
class Action:
    """One action of a rank for one micro-batch of one model chunk."""

    kind: ActionKind
    microbatch: int
    chunk: int = 0


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Return 1F1B: a stage runs ahead by one forward pass per later stage. One stage: F B F B ..."""
    ahead = min(num_stages - stage - 1, num_microbatches)
    actions: list[Action] = []
    for microbatch in range(ahead):
        actions += _forward(stage, num_stages, microbatch)
    for microbatch in range(num_microbatches - ahead):
        actions += _forward(stage, num_stages, microbatch + ahead)
        actions += _backward(stage, num_stages, microbatch)
    for microbatch in range(num_microbatches - ahead, num_microbatches):
        actions += _backward(stage, num_stages, microbatch)
    return actions


def forward_only(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Return the schedule of evaluation: every micro-batch forward, in order."""
    return [action for i in range(num_microbatches) for action in _forward(stage, num_stages, i)]


def with_split_backward(actions: list[Action]) -> list[Action]:
    """Return the schedule with weight gradients as separate actions after each backward pass."""
    split: list[Action] = []
    for action in actions:
        split.append(action)
        if action.kind is ActionKind.BACKWARD:
            split.append(Action(ActionKind.WEIGHT, action.microbatch, action.chunk))
    return split


def _forward(stage: int, num_stages: int, microbatch: int) -> Iterator[Action]:
    if stage > 0:
        yield Action(ActionKind.RECV_FORWARD, microbatch)
    yield Action(ActionKind.FORWARD, microbatch)
    if stage < num_stages - 1:
        yield Action(ActionKind.SEND_FORWARD, microbatch)


def _backward(stage: int, num_stages: int, microbatch: int) -> Iterator[Action]:
    if stage < num_stages - 1:
        yield Action(ActionKind.RECV_BACKWARD, microbatch)
    yield Action(ActionKind.BACKWARD, microbatch)
    if stage > 0:
        yield Action(ActionKind.SEND_BACKWARD, microbatch)
