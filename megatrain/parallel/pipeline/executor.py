"""Runs a schedule over a model chunk: a list of segments with the autograd graph cut between them.

    batch -> [embedding] | [layer] | [layer] | [head] -> loss          | is where the graph is cut

The executor knows segments only as callables. Because the graph is cut, it knows when a segment is needed and when its
gradients are complete, and says so to its `hooks`, which bring weights and reduce gradients meanwhile; no autograd
hooks. The same code runs with one stage and many, in training and evaluation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.profiler import record_function

from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.collectives import receive, send
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.pipeline.schedule import Action, ActionKind


class Segment(Protocol):
    """A part of the model. The first one ignores `hidden`; the last one returns the scaled loss of the micro-batch."""

    def __call__(self, hidden: Tensor | None, batch: Batch, info: PassInfo) -> Tensor: ...


@dataclass(frozen=True)
class SegmentPass:
    """A pass of a micro-batch through a segment: its forward, its backward or its weight gradients."""

    kind: ActionKind
    segment: int


class SegmentHooks(Protocol):
    """What happens around the work of segments, such as communication of their weights and gradients."""

    def on_schedule(self, passes: Sequence[SegmentPass]) -> None:
        """A run begins that will make these passes, in this order."""

    def before(self, segment_pass: SegmentPass) -> None:
        """The next segment_pass begins."""

    def after(self, segment_pass: SegmentPass) -> None:
        """It has ended."""

    def on_gradients(self, segment: int, *, is_last: bool) -> None:
        """All gradients of a micro-batch have been added to a segment's; `is_last`: and with them those of the step."""


@dataclass
class _Flight:
    """A micro-batch between its forward and its last backward action."""

    info: PassInfo
    inputs: list[Tensor | None] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    arrived: Tensor | None = None
    gradient: Tensor | None = None
    weight_work: list[list[Callable[[], None]]] = field(default_factory=list)


class Executor:
    """Runs schedules over this rank's segments.

    Args:
        segments: of this pipeline stage, first to last.
        grid: its `pp` group carries hidden states, `pp_backward` their gradients.
        hidden_shape: of what passes between stages, [s/tp, b, h] with sequence parallelism.
        dtype, device: of the hidden states.
        hooks: are told what happens.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        grid: RankGrid,
        *,
        hidden_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        hooks: SegmentHooks,
    ) -> None:
        self.segments = segments
        self.grid = grid
        self.hidden_shape = hidden_shape
        self.dtype = dtype
        self.device = device
        self.hooks = hooks

    def run(self, actions: Sequence[Action], batches: Sequence[Batch], infos: Sequence[PassInfo]) -> None:
        """Run a schedule; sums for the log stay in the infos."""
        flights = [_Flight(info) for info in infos]
        formed = [0] * len(self.segments)
        forward_sends = PendingSends(self.grid.pp, 1)
        backward_sends = PendingSends(self.grid.pp_backward, -1)
        splits_backward = any(action.kind is ActionKind.WEIGHT for action in actions)
        for info in infos:
            info.splits_backward = splits_backward
        self.hooks.on_schedule(segment_passes(actions, len(self.segments)))
        for action in actions:
            flight = flights[action.microbatch]
            match action.kind:
                case ActionKind.RECV_FORWARD:
                    flight.arrived = self._receive(self.grid.pp, -1)
                case ActionKind.FORWARD:
                    self._forward(flight, batches[action.microbatch])
                case ActionKind.SEND_FORWARD:
                    forward_sends.add(flight.outputs[-1])
                    if not flight.info.is_training:
                        flight.outputs = []
                case ActionKind.RECV_BACKWARD:
                    flight.gradient = self._receive(self.grid.pp_backward, 1)
                case ActionKind.BACKWARD:
                    self._backward(flight, formed, len(batches))
                case ActionKind.SEND_BACKWARD:
                    assert flight.gradient is not None
                    backward_sends.add(flight.gradient)
                    flight.gradient = None
                case ActionKind.WEIGHT:
                    self._form_weights(flight, formed, len(batches))
        forward_sends.finish()
        backward_sends.finish()

    @record_function("forward")
    def _forward(self, flight: _Flight, batch: Batch) -> None:
        hidden = flight.arrived
        flight.arrived = None
        with torch.set_grad_enabled(flight.info.is_training):
            for number, segment in enumerate(self.segments):
                if hidden is not None and flight.info.is_training:
                    hidden = hidden.detach().requires_grad_()
                with self._use(ActionKind.FORWARD, number):
                    output = segment(hidden, batch, flight.info)
                if flight.info.is_training:
                    flight.inputs.append(hidden)
                    flight.outputs.append(output)
                hidden = output
        if not flight.info.is_training:
            flight.outputs = [output]  # for the next stage

    @record_function("backward")
    def _backward(self, flight: _Flight, formed: list[int], num_microbatches: int) -> None:
        gradient = flight.gradient
        for number in reversed(range(len(self.segments))):
            flight.info.deferred = [] if flight.info.splits_backward else None
            with self._use(ActionKind.BACKWARD, number):
                run_backward(flight.outputs.pop(), gradient)
            hidden = flight.inputs.pop()
            gradient = hidden.grad if hidden is not None else None
            if flight.info.deferred is not None:
                flight.weight_work.append(flight.info.deferred)
            else:
                self._count(number, formed, num_microbatches)
        flight.info.deferred = None
        flight.gradient = gradient

    @record_function("weight gradients")
    def _form_weights(self, flight: _Flight, formed: list[int], num_microbatches: int) -> None:
        for number, work in zip(reversed(range(len(self.segments))), flight.weight_work, strict=True):
            with torch.no_grad(), self._use(ActionKind.WEIGHT, number):
                for form in work:
                    form()
            self._count(number, formed, num_microbatches)
        flight.weight_work = []

    def _count(self, number: int, formed: list[int], num_microbatches: int) -> None:
        formed[number] += 1
        self.hooks.on_gradients(number, is_last=formed[number] == num_microbatches)

    @contextmanager
    def _use(self, kind: ActionKind, segment: int) -> Iterator[None]:
        segment_pass = SegmentPass(kind, segment)
        self.hooks.before(segment_pass)
        yield
        self.hooks.after(segment_pass)

    def _receive(self, group: RankGroup, step: int) -> Tensor:
        return receive(torch.empty(self.hidden_shape, dtype=self.dtype, device=self.device), group, step)


def segment_passes(actions: Sequence[Action], num_segments: int) -> list[SegmentPass]:
    """The passes that a schedule makes of a stage's segments: up in forward passes, down in the others."""
    passes: list[SegmentPass] = []
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            passes += [SegmentPass(action.kind, number) for number in range(num_segments)]
        elif action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT):
            passes += [SegmentPass(action.kind, number) for number in reversed(range(num_segments))]
    return passes


class PendingSends:
    """What is on its way in one direction: no more messages than there are stages, as no schedule runs further ahead."""

    def __init__(self, group: RankGroup, step: int) -> None:
        self.group = group
        self.step = step
        self.pending: deque[tuple[Any, Tensor]] = deque()

    def add(self, x: Tensor) -> None:
        x = x.detach().contiguous()  # kept beside the handle: its memory must live until it is sent
        self.pending.append((send(x, self.group, self.step), x))
        if len(self.pending) > self.group.size:
            self.pending.popleft()[0].wait()

    def finish(self) -> None:
        for handle, _ in self.pending:
            handle.wait()


def run_backward(output: Tensor, gradient: Tensor | None) -> None:
    """Add up the gradients of all that `output` was made of; None: it is the loss."""
    torch.autograd.backward(output if gradient is None else _Seed.apply(output, gradient))


class _Seed(Function):
    """A number whose gradient makes `gradient` that of `output`.

    torch.autograd.backward imports sympy where it is given gradients, to compare sizes that are symbols: 2 s.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        assert gradient.shape == output.shape
        ctx.gradient = gradient
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 (autograd's signature)
        return ctx.gradient, None
