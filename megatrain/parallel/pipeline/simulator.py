"""Simulates the schedules of all stages without tensors: deadlocks, bubble, peak activations.

Sends do not wait; a receive waits for its message. Messages between two stages arrive in the order in which they were
sent: a receive that expects another message than the next one is an error, as it is between real ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.parallel.pipeline.schedule import Action, ActionKind

_PEERS = {
    ActionKind.SEND_FORWARD: 1,
    ActionKind.SEND_BACKWARD: -1,
    ActionKind.RECV_FORWARD: -1,
    ActionKind.RECV_BACKWARD: 1,
}
_SENT_AS = {
    ActionKind.RECV_FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.RECV_BACKWARD: ActionKind.SEND_BACKWARD,
}


class ScheduleError(AssertionError):
    """A schedule that deadlocks or mixes up its messages: an internal error."""


@dataclass(frozen=True)
class Simulation:
    """The cost of a schedule."""

    bubble_fraction: float
    """Fraction of all stages' time in which they wait."""
    peak_activations: tuple[int, ...]
    """For each stage, the largest number of micro-batches between forward and backward."""


def simulate(
    schedules: Sequence[Sequence[Action]], costs: Mapping[ActionKind, float] | None = None
) -> Simulation:
    """Simulate one schedule per stage. Costs default to F 1, B 2, W 0 and free messages.

    Raises:
        ScheduleError: a stage waits for a message that is never sent, or receives another one.
    """
    costs = costs or {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0}
    clocks = [0.0] * len(schedules)
    busy = [0.0] * len(schedules)
    positions = [0] * len(schedules)
    held, peaks = [0] * len(schedules), [0] * len(schedules)
    channels: dict[tuple[int, int, ActionKind], deque[tuple[Action, float]]] = {}
    while any(position < len(schedule) for position, schedule in zip(positions, schedules, strict=True)):
        has_moved = False
        for stage, schedule in enumerate(schedules):
            while positions[stage] < len(schedule):
                action = schedule[positions[stage]]
                if action.kind in _SENT_AS:
                    arrived = _take(channels, stage, action)
                    if arrived is None:
                        break
                    clocks[stage] = max(clocks[stage], arrived)
                cost = costs.get(action.kind, 0.0)
                clocks[stage] += cost
                busy[stage] += cost if action.kind not in _PEERS else 0.0
                held[stage] += (action.kind is ActionKind.FORWARD) - (action.kind is ActionKind.BACKWARD)
                peaks[stage] = max(peaks[stage], held[stage])
                if action.kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD):
                    channel = channels.setdefault((stage, stage + _PEERS[action.kind], action.kind), deque())
                    channel.append((action, clocks[stage]))
                positions[stage] += 1
                has_moved = True
        if not has_moved:
            waiting = {s: schedules[s][p] for s, p in enumerate(positions) if p < len(schedules[s])}
            raise ScheduleError(f"deadlock: the stages wait at {waiting}")
    unread = [message for channel in channels.values() for message in channel]
    if unread:
        raise ScheduleError(f"messages that no stage receives: {unread}")
    total = max(clocks)
    return Simulation(1 - sum(busy) / (total * len(schedules)) if total else 0.0, tuple(peaks))


def _take(
    channels: dict[tuple[int, int, ActionKind], deque[tuple[Action, float]]], stage: int, action: Action
) -> float | None:
    channel = channels.get((stage + _PEERS[action.kind], stage, _SENT_AS[action.kind]))
    if not channel:
        return None
    sent, time = channel.popleft()
    if sent.microbatch != action.microbatch:
        raise ScheduleError(f"stage {stage} expects {action} and receives {sent}")
    return time
