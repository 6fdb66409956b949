"""Runs a schedule over the model chunks of a rank: lists of segments with the autograd graph cut between them.

    batch -> [embedding] | [layer] | [layer] | [head] -> loss          | marks a cut of the graph

The executor knows segments only as callables. Since the graph is cut, it knows when a segment runs and when its
gradients are complete, and reports both to its `hooks`, which gather weights and reduce gradients meanwhile; there are
no autograd hooks. The same code runs one stage and many, in training and in evaluation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from megatrain.parallel.pipeline.actions import Action, ActionKind, Placement


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
    """A micro-batch of one chunk, between its forward and its last backward action."""

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
        segments: those of this rank's chunks, first to last.
        grid: hidden states are sent over `pp` and `pp_down`, their gradients over `pp_backward` and `pp_down_backward`.
        hidden_shape: shape of the hidden states between chunks, [s/tp, b, h] with sequence parallelism.
        dtype, device: those of the hidden states.
        hooks: called around each pass.
        chunks: numbers of the segments of each chunk; None: all segments are one chunk.
        placement: virtual stages of the chunks; None: one chunk per rank.
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
        chunks: Sequence[range] | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.segments = segments
        self.grid = grid
        self.chunks = chunks or [range(len(segments))]
        self.placement = placement or Placement(grid.pp.size)
        self.hidden_shape = hidden_shape
        self.dtype = dtype
        self.device = device
        self.hooks = hooks

    def run(self, actions: Sequence[Action], batches: Sequence[Batch], infos: Sequence[PassInfo]) -> None:
        """Run a schedule; sums for the log remain in `infos`."""
        states = {
            (n, chunk): _InFlight(info) for n, info in enumerate(infos) for chunk in range(len(self.chunks))
        }
        num_done = [0] * len(self.segments)
        messages = _Messages(self.grid, self.placement)
        splits_backward = any(action.kind is ActionKind.WEIGHT for action in actions)
        for info in infos:
            info.splits_backward = splits_backward
        self.hooks.on_schedule(segment_passes(actions, self.chunks))
        for action in actions:
            state, chunk = states[action.microbatch, action.chunk], self.chunks[action.chunk]
            match action.kind:
                case ActionKind.RECV_FORWARD:
                    state.received = messages.receive(action, self._empty())
                case ActionKind.FORWARD:
                    self._forward(state, batches[action.microbatch], chunk)
                    self._hand_over(states, action, state.outputs[-1])
                case ActionKind.SEND_FORWARD:
                    messages.send(action, state.outputs[-1])
                    if not state.info.is_training:
                        state.outputs = []
                case ActionKind.RECV_BACKWARD:
                    state.gradient = messages.receive(action, self._empty())
                case ActionKind.BACKWARD:
                    self._backward(state, chunk, num_done, len(batches))
                    self._hand_over(states, action, state.gradient)
                case ActionKind.SEND_BACKWARD:
                    assert state.gradient is not None
                    messages.send(action, state.gradient)
                    state.gradient = None
                case ActionKind.WEIGHT:
                    self._weight_gradients(state, chunk, num_done, len(batches))
        messages.finish()

    def _empty(self) -> Tensor:
        return torch.empty(self.hidden_shape, dtype=self.dtype, device=self.device)

    def _hand_over(
        self, states: Mapping[tuple[int, int], _InFlight], action: Action, x: Tensor | None
    ) -> None:
        """Give the result of a pass to the next virtual stage, if it is a chunk of this rank."""
        rank, is_forward = self.grid.pp.rank, action.kind is ActionKind.FORWARD
        chunk = action.chunk + (1 if is_forward else -1)
        if not 0 <= chunk < len(self.chunks):
            return  # as always with one chunk
        distance = self.placement.stage(rank, chunk) - self.placement.stage(rank, action.chunk)
        if abs(distance) != 1:
            return
        assert x is not None
        if is_forward:
            states[action.microbatch, chunk].received = x.detach()
        else:
            states[action.microbatch, chunk].gradient = x

    @record_function("forward")
    def _forward(self, state: _InFlight, batch: Batch, chunk: range) -> None:
        hidden = state.received
        state.received = None
        with torch.set_grad_enabled(state.info.is_training):
            for number in chunk:
                segment = self.segments[number]
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
    def _backward(self, state: _InFlight, chunk: range, num_done: list[int], num_microbatches: int) -> None:
        gradient = state.gradient
        for number in reversed(chunk):
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
    def _weight_gradients(
        self, state: _InFlight, chunk: range, num_done: list[int], num_microbatches: int
    ) -> None:
        for number, deferred in zip(reversed(chunk), state.deferred, strict=True):
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


def segment_passes(actions: Sequence[Action], chunks: Sequence[range]) -> list[SegmentPass]:
    """Return the passes of a schedule through a rank's segments: up in forward passes, down in the others."""
    passes: list[SegmentPass] = []
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            passes += [SegmentPass(action.kind, number) for number in chunks[action.chunk]]
        elif action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT):
            passes += [SegmentPass(action.kind, number) for number in reversed(chunks[action.chunk])]
    return passes


class _Messages:
    """Messages between the chunks of different ranks.

    Each direction between two ranks has a communicator of its own, so that no message waits for one of another direction.
    At most as many sends are in flight per direction as there are virtual stages: no schedule runs further ahead.
    """

    def __init__(self, grid: RankGrid, placement: Placement) -> None:
        self.grid = grid
        self.placement = placement
        self.in_flight: dict[str, deque[Transfer]] = {}

    def send(self, action: Action, x: Tensor) -> None:
        """Begin to send to the next virtual stage in the direction of the action."""
        group, peer = self._channel(action)
        sends = self.in_flight.setdefault(group.name, deque())
        sends.append(begin_send(x.detach().contiguous(), group, peer - group.rank))
        if len(sends) > self.placement.num_stages:
            sends.popleft().wait()

    def receive(self, action: Action, x: Tensor) -> Tensor:
        """Fill `x` from the virtual stage before, in the direction of the action."""
        group, peer = self._channel(action)
        return receive(x, group, peer - group.rank)

    def finish(self) -> None:
        """Wait for all sends."""
        for sends in self.in_flight.values():
            for transfer in sends:
                transfer.wait()

    def _channel(self, action: Action) -> tuple[RankGroup, int]:
        """Return the group and the rank in it at the other end."""
        own = self.grid.pp.rank
        stage = self.placement.stage(own, action.chunk)
        is_forward = action.kind in (ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD)
        other = stage + (1 if action.kind in (ActionKind.SEND_FORWARD, ActionKind.RECV_BACKWARD) else -1)
        peer = self.placement.rank(other)
        upper, lower = (peer, own) if other > stage else (own, peer)
        goes_down = upper < lower  # the later virtual stage is on an earlier rank
        if is_forward:
            return (self.grid.pp_down if goes_down else self.grid.pp), peer
        return (self.grid.pp_down_backward if goes_down else self.grid.pp_backward), peer


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
