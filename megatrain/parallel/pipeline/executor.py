"""Runs a schedule over a model chunk: a list of segments with the autograd graph cut between them.

    batch -> [embedding] | [layer] | [layer] | [head] -> loss          | marks a cut of the graph

The executor knows segments only as callables. Since the graph is cut, it knows when a segment runs and when its
gradients are complete, and reports both to its `hooks`, which gather weights and reduce gradients meanwhile; there are
no autograd hooks. The same code runs one stage and many, in training and in evaluation.
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
from megatrain.parallel.collectives import Transfer, begin_send, receive
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.pipeline.schedule import Action, ActionKind


class Segment(Protocol):
    """A part of the model. The first one ignores `hidden`; the last one returns the scaled loss of the micro-batch."""

    def __call__(self, hidden: Tensor | None, batch: Batch, info: PassInfo) -> Tensor: ...


@dataclass(frozen=True)
class SegmentPass:
    """A pass of a micro-batch through a segment: forward, backward or weight gradients."""

    kind: ActionKind
    segment: int


class SegmentHooks(Protocol):
    """Callbacks around the passes of segments, for communication of weights and gradients."""

    def on_schedule(self, passes: Sequence[SegmentPass]) -> None:
        """A run of these passes begins, in this order."""

    def before(self, segment_pass: SegmentPass) -> None:
        """The next pass begins."""

    def after(self, segment_pass: SegmentPass) -> None:
        """The pass has ended."""

    def on_gradients(self, segment: int, *, is_last: bool) -> None:
        """All gradients of a micro-batch have been added to a segment's; `is_last`: of the step's last micro-batch."""


@dataclass
class _InFlight:
    """A micro-batch between its forward and its last backward action."""

    info: PassInfo
    inputs: list[Tensor | None] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    received: Tensor | None = None
    gradient: Tensor | None = None
    deferred: list[list[Callable[[], None]]] = field(default_factory=list)
    """Weight gradients to compute, per segment, last segment first."""


class Executor:
    """Runs schedules over this rank's segments.

    Args:
        segments: those of this pipeline stage, first to last.
        grid: hidden states are sent over `pp`, their gradients over `pp_backward`.
        hidden_shape: shape of the hidden states between stages, [s/tp, b, h] with sequence parallelism.
        dtype, device: those of the hidden states.
        hooks: called around each pass.
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
        """Run a schedule; sums for the log remain in `infos`."""
        microbatches = [_InFlight(info) for info in infos]
        num_done = [0] * len(self.segments)
        forward_sends = _Sends(self.grid.pp, 1)
        backward_sends = _Sends(self.grid.pp_backward, -1)
        splits_backward = any(action.kind is ActionKind.WEIGHT for action in actions)
        for info in infos:
            info.splits_backward = splits_backward
        self.hooks.on_schedule(segment_passes(actions, len(self.segments)))
        for action in actions:
            state = microbatches[action.microbatch]
            match action.kind:
                case ActionKind.RECV_FORWARD:
                    state.received = self._receive(self.grid.pp, -1)
                case ActionKind.FORWARD:
                    self._forward(state, batches[action.microbatch])
                case ActionKind.SEND_FORWARD:
                    forward_sends.add(state.outputs[-1])
                    if not state.info.is_training:
                        state.outputs = []
                case ActionKind.RECV_BACKWARD:
                    state.gradient = self._receive(self.grid.pp_backward, 1)
                case ActionKind.BACKWARD:
                    self._backward(state, num_done, len(batches))
                case ActionKind.SEND_BACKWARD:
                    assert state.gradient is not None
                    backward_sends.add(state.gradient)
                    state.gradient = None
                case ActionKind.WEIGHT:
                    self._weight_gradients(state, num_done, len(batches))
        forward_sends.finish()
        backward_sends.finish()

    @record_function("forward")
    def _forward(self, state: _InFlight, batch: Batch) -> None:
        hidden = state.received
        state.received = None
        with torch.set_grad_enabled(state.info.is_training):
            for number, segment in enumerate(self.segments):
                if hidden is not None and state.info.is_training:
                    hidden = hidden.detach().requires_grad_()
                with self._pass(ActionKind.FORWARD, number):
                    output = segment(hidden, batch, state.info)
                if state.info.is_training:
                    state.inputs.append(hidden)
                    state.outputs.append(output)
                hidden = output
        if not state.info.is_training:
            state.outputs = [output]  # for the next stage

    @record_function("backward")
    def _backward(self, state: _InFlight, num_done: list[int], num_microbatches: int) -> None:
        gradient = state.gradient
        for number in reversed(range(len(self.segments))):
            state.info.deferred = [] if state.info.splits_backward else None
            with self._pass(ActionKind.BACKWARD, number):
                run_backward(state.outputs.pop(), gradient)
            hidden = state.inputs.pop()
            gradient = hidden.grad if hidden is not None else None
            if state.info.deferred is not None:
                state.deferred.append(state.info.deferred)
            else:
                self._count(number, num_done, num_microbatches)
        state.info.deferred = None
        state.gradient = gradient

    @record_function("weight gradients")
    def _weight_gradients(self, state: _InFlight, num_done: list[int], num_microbatches: int) -> None:
        for number, deferred in zip(reversed(range(len(self.segments))), state.deferred, strict=True):
            with torch.no_grad(), self._pass(ActionKind.WEIGHT, number):
                for compute in deferred:
                    compute()
            self._count(number, num_done, num_microbatches)
        state.deferred = []

    def _count(self, number: int, num_done: list[int], num_microbatches: int) -> None:
        num_done[number] += 1
        self.hooks.on_gradients(number, is_last=num_done[number] == num_microbatches)

    @contextmanager
    def _pass(self, kind: ActionKind, segment: int) -> Iterator[None]:
        segment_pass = SegmentPass(kind, segment)
        self.hooks.before(segment_pass)
        yield
        self.hooks.after(segment_pass)

    def _receive(self, group: RankGroup, step: int) -> Tensor:
        return receive(torch.empty(self.hidden_shape, dtype=self.dtype, device=self.device), group, step)


def segment_passes(actions: Sequence[Action], num_segments: int) -> list[SegmentPass]:
    """Return the passes of a schedule through a stage's segments: up in forward passes, down in the others."""
    passes: list[SegmentPass] = []
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            passes += [SegmentPass(action.kind, number) for number in range(num_segments)]
        elif action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT):
            passes += [SegmentPass(action.kind, number) for number in reversed(range(num_segments))]
    return passes


class _Sends:
    """The sends in flight in one direction, at most as many as stages: no schedule runs further ahead."""

    def __init__(self, group: RankGroup, step: int) -> None:
        self.group = group
        self.step = step
        self.in_flight: deque[Transfer] = deque()

    def add(self, x: Tensor) -> None:
        self.in_flight.append(begin_send(x.detach().contiguous(), self.group, self.step))
        if len(self.in_flight) > self.group.size:
            self.in_flight.popleft().wait()

    def finish(self) -> None:
        for transfer in self.in_flight:
            transfer.wait()


def run_backward(output: Tensor, gradient: Tensor | None) -> None:
    """Run the backward pass of a segment from the gradient of its output; None: the output is the loss."""
    torch.autograd.backward(output if gradient is None else _Seed.apply(output, gradient))


class _Seed(Function):
    """A scalar whose backward pass returns `gradient` for `output`.

    torch.autograd.backward imports sympy if it is given gradients, to compare symbolic sizes: 2 s.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        assert gradient.shape == output.shape
        ctx.gradient = gradient
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 (autograd's signature)
        return ctx.gradient, None
