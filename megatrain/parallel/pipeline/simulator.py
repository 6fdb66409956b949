"""Simulates the schedules of all pipeline ranks without tensors: deadlocks, bubble, peak activations.

Sends do not wait; a receive waits for its message. Messages between two ranks in one direction of the model arrive in the
order in which they were sent: a receive that expects another message than the next one is an error, as it is between real
ranks. Each pass must find its input: a backward pass follows its forward pass, a weight gradient its backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.parallel.pipeline.actions import Action, ActionKind, Placement

_STEPS = {
    ActionKind.SEND_FORWARD: 1,
    ActionKind.SEND_BACKWARD: -1,
    ActionKind.RECV_FORWARD: -1,
    ActionKind.RECV_BACKWARD: 1,
}
"""Distance to the virtual stage at the other end of a message."""
_SENT_AS = {
    ActionKind.RECV_FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.RECV_BACKWARD: ActionKind.SEND_BACKWARD,
}
_PASSES = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT)


class ScheduleError(AssertionError):
    """A schedule that deadlocks or mixes up its messages: an internal error."""


@dataclass(frozen=True)
class StageCosts:
    """Times of the passes of each virtual stage, and of a message."""

    forward: Sequence[float]
    backward: Sequence[float]
    """Gradients of the inputs."""
    weight: Sequence[float]
    """Weight gradients; part of the backward pass in schedules that do not defer them."""
    transfer: float = 0.0
    """Time from the end of a pass to the arrival of its result at another rank, which may compute meanwhile."""

    @classmethod
    def equal(cls, num_stages: int) -> StageCosts:
        """Return costs of 1 for each pass, and free messages."""
        ones = [1.0] * num_stages
        return cls(forward=ones, backward=ones, weight=ones)


@dataclass(frozen=True)
class Span:
    """A pass of a rank."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The cost of a schedule."""

    bubble_fraction: float
    """Fraction of all stages' time in which they wait."""
    peak_activations: tuple[int, ...]
    """For each rank, the largest number of passes (micro-batches of a chunk) between forward and backward."""
    duration: float
    """Time until the last rank has ended, in units of the costs: the optimizer waits for all ranks."""
    spans: tuple[tuple[Span, ...], ...]
    """The passes of each rank."""


def simulate(
    schedules: Sequence[Sequence[Action]],
    costs: StageCosts | None = None,
    placement: Placement | None = None,
) -> Simulation:
    """Simulate one schedule per rank.

    Args:
        costs: times of passes and messages; default: F, B and W 1 each, and free messages.
        placement: of the virtual stages; default: one per rank.

    Raises:
        ScheduleError: a rank waits for a message that is never sent, receives another one, or lacks the input of a pass.
    """
    placement = placement or Placement(len(schedules))
    costs = costs or StageCosts.equal(placement.num_stages)
    for schedule in schedules:
        _check_order(schedule)
    ranks = [_Rank(rank, schedule, costs, placement) for rank, schedule in enumerate(schedules)]
    _run_to_the_end(ranks, _Network(placement, costs.transfer))
    total = max(rank.clock for rank in ranks)
    busy = sum(span.end - span.start for rank in ranks for span in rank.spans)
    bubble = 1 - busy / (total * len(ranks)) if total else 0.0
    spans = tuple(tuple(rank.spans) for rank in ranks)
    return Simulation(bubble, tuple(rank.peak for rank in ranks), total, spans)


def _run_to_the_end(ranks: Sequence[_Rank], network: _Network) -> None:
    """Run all ranks; raise ScheduleError if they wait for one another, or if a message is left."""
    while any(rank.has_actions for rank in ranks):
        has_run = [rank.run(network) for rank in ranks]
        if not any(has_run):
            waiting = {rank.number: rank.schedule[rank.position] for rank in ranks if rank.has_actions}
            raise ScheduleError(f"deadlock: the ranks wait at {waiting}")
    if network.unread:
        raise ScheduleError(f"messages that no rank receives: {network.unread}")


class _Rank:
    """A rank that runs its schedule."""

    def __init__(
        self, number: int, schedule: Sequence[Action], costs: StageCosts, placement: Placement
    ) -> None:
        self.number, self.schedule, self.costs, self.placement = number, schedule, costs, placement
        self.defers_weights = any(action.kind is ActionKind.WEIGHT for action in schedule)
        self.position = self.held = self.peak = 0
        self.clock = 0.0
        self.spans: list[Span] = []

    @property
    def has_actions(self) -> bool:
        return self.position < len(self.schedule)

    def run(self, network: _Network) -> bool:
        """Run until a message is missing; return whether an action has run."""
        first = self.position
        while self.has_actions:
            action = self.schedule[self.position]
            if action.kind in _SENT_AS:
                arrived = network.receive(self.number, action)
                if arrived is None:
                    break
                self.clock = max(self.clock, arrived)
            if action.kind in _PASSES:
                start, self.clock = self.clock, self.clock + self._cost(action)
                self.spans.append(Span(action, start, self.clock))
            self.held += (action.kind is ActionKind.FORWARD) - (action.kind is ActionKind.BACKWARD)
            self.peak = max(self.peak, self.held)
            if action.kind in _SENT_AS.values():
                network.send(self.number, action, self.clock)
            self.position += 1
        return self.position > first

    def _cost(self, action: Action) -> float:
        stage = self.placement.stage(self.number, action.chunk)
        match action.kind:
            case ActionKind.FORWARD:
                return self.costs.forward[stage]
            case ActionKind.WEIGHT:
                return self.costs.weight[stage]
            case _:
                return self.costs.backward[stage] + (0 if self.defers_weights else self.costs.weight[stage])


def _check_order(schedule: Sequence[Action]) -> None:
    """Raise ScheduleError if a pass runs twice or before the pass that it needs."""
    done: set[Action] = set()
    needed = {ActionKind.BACKWARD: ActionKind.FORWARD, ActionKind.WEIGHT: ActionKind.BACKWARD}
    for action in schedule:
        before = needed.get(action.kind)
        if action in done:
            raise ScheduleError(f"{action} runs twice")
        if before is not None and Action(before, action.microbatch, action.chunk) not in done:
            raise ScheduleError(f"{action} runs before its {before.name.lower()} pass")
        done.add(action)


class _Network:
    """The messages that were sent and not received, in order, by sender, receiver and direction."""

    def __init__(self, placement: Placement, transfer: float) -> None:
        self.placement, self.transfer = placement, transfer
        self.channels: dict[tuple[int, int, ActionKind], deque[tuple[int, int, float]]] = {}

    @property
    def unread(self) -> list[tuple[int, int, float]]:
        """Micro-batch, virtual stage of the sender, and arrival of each message."""
        return [message for channel in self.channels.values() for message in channel]

    def send(self, rank: int, action: Action, time: float) -> None:
        stage = self.placement.stage(rank, action.chunk)
        peer = self.placement.rank(stage + _STEPS[action.kind])
        self.channels.setdefault((rank, peer, action.kind), deque()).append(
            (action.microbatch, stage, time + self.transfer)
        )

    def receive(self, rank: int, action: Action) -> float | None:
        """Return the time at which the message arrives; None: it has not been sent yet."""
        source = self.placement.stage(rank, action.chunk) + _STEPS[action.kind]
        channel = self.channels.get((self.placement.rank(source), rank, _SENT_AS[action.kind]))
        if not channel:
            return None
        microbatch, stage, time = channel.popleft()
        if (microbatch, stage) != (action.microbatch, source):
            raise ScheduleError(
                f"rank {rank} expects {action} from virtual stage {source} and receives micro-batch {microbatch} from {stage}"
            )
        return time
