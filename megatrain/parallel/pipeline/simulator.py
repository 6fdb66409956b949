"""Simulates the schedules of all pipeline ranks without tensors: deadlocks, bubble, peak activations.

Sends do not wait; a receive waits for its message. A message is transferred once it has been sent and its receive has been
posted, one after the other between two ranks in one direction of the model, in the order in which they were sent: a receive
that expects another message than the next one is an error, as it is between real ranks. Each pass must find its input: a
backward pass follows its forward pass, a weight gradient its backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatrain.parallel.pipeline.actions import Action, ActionKind, Placement
from megatrain.parallel.pipeline.schedule import RECEIVED_AS

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


class ScheduleError(AssertionError):
    """A schedule that deadlocks or mixes up its messages: an internal error."""


@dataclass(frozen=True)
class StageCosts:
    """Times of the passes of each virtual stage, and of a message."""

    forward: Sequence[float]
    backward: Sequence[float]
    """Gradients of the inputs."""
    weight: Sequence[float]
    """Weight gradients; part of the backward pass unless the schedule defers them."""
    transfer: float = 0.0
    """Time in which a message is transferred to another rank; both may compute meanwhile."""
    combined: Sequence[float] = ()
    """Times of the passes of each virtual stage in a forward and a backward pass that run together, as a fraction of those
    alone; empty: 1."""

    @classmethod
    def equal(cls, num_stages: int) -> StageCosts:
        """Return costs of 1 for each pass, and free messages."""
        ones = [1.0] * num_stages
        return cls(forward=ones, backward=ones, weight=ones)

    def of(self, kind: ActionKind, stage: int, *, defers_weights: bool) -> float:
        """Return the time of a pass of a virtual stage; `defers_weights`: its weight gradients are an action of their own."""
        match kind:
            case ActionKind.FORWARD:
                return self.forward[stage]
            case ActionKind.WEIGHT:
                return self.weight[stage]
            case _:
                return self.backward[stage] + (0 if defers_weights else self.weight[stage])


@dataclass(frozen=True)
class Span:
    """A pass of a rank, or a combined forward and backward pass."""

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
        self.deferred = {(one.microbatch, one.chunk) for one in schedule if one.kind is ActionKind.WEIGHT}
        """Micro-batches and chunks whose weight gradients are actions of their own."""
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
            if action.kind in RECEIVED_AS:
                network.post(self.number, action, self.clock)
            elif action.kind in _SENT_AS:
                arrived = network.receive(self.number, action, self.clock)
                if arrived is None:
                    break
                self.clock = max(self.clock, arrived)
            elif action.kind in _STEPS:
                network.send(self.number, action, self.clock)
            else:
                self._run_passes(action)
            self.position += 1
        return self.position > first

    def _run_passes(self, action: Action) -> None:
        start = self.clock
        for one in action.passes:
            self.clock += self._cost(one, is_combined=len(action.passes) > 1)
            self.held += one.kind is ActionKind.FORWARD
            self.peak = max(self.peak, self.held)
            self.held -= one.kind is ActionKind.BACKWARD
        self.spans.append(Span(action, start, self.clock))

    def _cost(self, one: Action, *, is_combined: bool) -> float:
        is_deferred = (one.microbatch, one.chunk) in self.deferred
        stage = self.placement.stage(self.number, one.chunk)
        fraction = self.costs.combined[stage] if is_combined and self.costs.combined else 1.0
        return self.costs.of(one.kind, stage, defers_weights=is_deferred) * fraction


def _check_order(schedule: Sequence[Action]) -> None:
    """Raise ScheduleError if a pass runs twice, before the pass that it needs, or together with it."""
    done: set[Action] = set()
    needed = {ActionKind.BACKWARD: ActionKind.FORWARD, ActionKind.WEIGHT: ActionKind.BACKWARD}
    for action in schedule:
        for one in action.passes:
            before = needed.get(one.kind)
            if one in done:
                raise ScheduleError(f"{one} runs twice")
            if before is not None and Action(before, one.microbatch, one.chunk) not in done:
                raise ScheduleError(f"{one} runs before its {before.name.lower()} pass")
        done.update(action.passes)


@dataclass
class _Channel:
    """The messages from one rank to another in one direction of the model."""

    sent: deque[tuple[int, int, float]] = field(default_factory=deque)
    """Micro-batch, virtual stage of the sender, and time of each message that has not been received."""
    posted: deque[tuple[Action, float]] = field(default_factory=deque)
    """Receives that have been posted and not completed, with their times."""
    free_at: float = 0.0
    """Arrival of the message before."""


class _Network:
    """The channels between all ranks, by sender, receiver and direction."""

    def __init__(self, placement: Placement, transfer: float) -> None:
        self.placement, self.transfer = placement, transfer
        self.channels: dict[tuple[int, int, ActionKind], _Channel] = {}

    @property
    def unread(self) -> list[object]:
        """Messages that were sent and not received, and receives that were posted and not completed."""
        return [one for channel in self.channels.values() for one in (*channel.sent, *channel.posted)]

    def send(self, rank: int, action: Action, time: float) -> None:
        stage = self.placement.stage(rank, action.chunk)
        peer = self.placement.rank(stage + _STEPS[action.kind])
        self._channel(rank, peer, action.kind).sent.append((action.microbatch, stage, time))

    def post(self, rank: int, action: Action, time: float) -> None:
        """Begin a receive."""
        received = Action(RECEIVED_AS[action.kind], action.microbatch, action.chunk)
        self._source(rank, received)[1].posted.append((received, time))

    def receive(self, rank: int, action: Action, time: float) -> float | None:
        """Return the time at which the message arrives; None: it has not been sent yet. Post the receive if necessary."""
        source, channel = self._source(rank, action)
        if action not in [one for one, _ in channel.posted]:
            channel.posted.append((action, time))
        if not channel.sent:
            return None
        microbatch, stage, sent_at = channel.sent.popleft()
        posted, posted_at = channel.posted.popleft()
        if (microbatch, stage, posted) != (action.microbatch, source, action):
            raise ScheduleError(
                f"rank {rank} expects {action} from virtual stage {source} and receives micro-batch {microbatch} from"
                f" {stage} for {posted}"
            )
        channel.free_at = max(sent_at, posted_at, channel.free_at) + self.transfer
        return channel.free_at

    def _source(self, rank: int, action: Action) -> tuple[int, _Channel]:
        """Return the virtual stage that sends the message of a receive, and its channel."""
        stage = self.placement.stage(rank, action.chunk) + _STEPS[action.kind]
        return stage, self._channel(self.placement.rank(stage), rank, _SENT_AS[action.kind])

    def _channel(self, sender: int, receiver: int, direction: ActionKind) -> _Channel:
        return self.channels.setdefault((sender, receiver, direction), _Channel())
