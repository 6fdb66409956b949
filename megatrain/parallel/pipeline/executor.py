"""Runs a schedule over the model chunks of a rank: lists of segments with the autograd graph cut between them.

    batch -> [embedding] | [layer] | [layer] | [head] -> loss          | marks a cut of the graph

The executor knows segments only as callables. Since the graph is cut, it knows when a segment runs and when its
gradients are complete, and reports both to its `hooks`, which gather weights and reduce gradients meanwhile; there are
no autograd hooks. A combined action runs a segment backward and another one forward, in turn (`interleave.py`). The same
code runs one stage and many, in training and in evaluation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.profiler import record_function

from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.pipeline.actions import Action, ActionKind, Placement
from megatrain.parallel.pipeline.interleave import Turns
from megatrain.parallel.pipeline.point_to_point import PointToPoint
from megatrain.parallel.pipeline.segments import Segment, SegmentHooks, SegmentPass

LateGradients = Literal["none", "before_last", "all"]
HiddenRows = Sequence[tuple[int, int]]
"""Rows that each virtual stage receives: in evaluation, in training."""


@dataclass
class _InFlight:
    """A micro-batch of one chunk, between its forward and its last backward action."""

    info: PassInfo
    defers_weights: bool
    """Weight gradients are an action of their own."""
    hidden: Tensor | None = None
    """Received hidden states, then the output of the last segment that has run, until the next virtual stage has it."""
    gradient: Tensor | None = None
    """Received gradient, then that of the input of the last segment that has run backward."""
    inputs: list[Tensor | None] = field(default_factory=list)
    graphs: list[_Graph] = field(default_factory=list)
    deferred: list[list[Callable[[], None]]] = field(default_factory=list)
    """Weight gradients to compute, per segment, last segment first."""


@dataclass(frozen=True)
class _Run:
    """One run of a schedule."""

    batches: Sequence[Batch]
    states: dict[tuple[int, int], _InFlight]
    """By micro-batch and chunk."""
    num_done: list[int]
    """Micro-batches whose gradients are complete, by segment."""
    upcoming: Iterator[SegmentPass]

    def state(self, action: Action) -> _InFlight:
        return self.states[action.microbatch, action.chunk]


class Executor:
    """Runs schedules over this rank's segments.

    Args:
        segments: those of this rank's chunks, first to last.
        grid: hidden states and their gradients are sent over its `channels`.
        hidden_shape: shape of the hidden states between chunks, [s/tp, b, h] with sequence parallelism.
        hidden_rows: rows that each virtual stage receives; None: those of `hidden_shape`.
        dtype, device: those of the hidden states.
        hooks: called around each pass.
        chunks: numbers of the segments of each chunk; None: all segments are one chunk.
        placement: virtual stages of the chunks; None: one chunk per rank.
        late_gradients: weight gradients that overlap with transfers of the next segment's backward pass: none; of all
            micro-batches but the last, if `hooks` read gradients of no other; or all, if they read none.
        turns: of the two segments that a combined action runs; None: one runs after the other.
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
        hidden_rows: HiddenRows | None = None,
        late_gradients: LateGradients = "none",
        turns: Turns | None = None,
    ) -> None:
        self.segments, self.grid = segments, grid
        self.chunks = chunks or [range(len(segments))]
        self.placement = placement or Placement(grid.pp.size)
        self.hidden_shape = hidden_shape
        self.hidden_rows = hidden_rows or [(hidden_shape[0],) * 2] * self.placement.num_stages
        self.late_gradients = late_gradients
        self.turns = turns
        self.dtype, self.device = dtype, device
        self.hooks = hooks

    def run(self, actions: Sequence[Action], batches: Sequence[Batch], infos: Sequence[PassInfo]) -> None:
        """Run a schedule; sums for the log remain in `infos`."""
        run = self._begin(actions, batches, infos)
        messages = PointToPoint(self.grid, self.placement)
        for action in actions:
            state = run.state(action)
            empty = functools.partial(self._empty, action, state.info)
            match action.kind:
                case ActionKind.POST_FORWARD | ActionKind.POST_BACKWARD:
                    messages.post(action, empty())
                case ActionKind.RECV_FORWARD:
                    state.hidden = messages.receive(action, empty)
                case ActionKind.RECV_BACKWARD:
                    state.gradient = messages.receive(action, empty)
                case ActionKind.SEND_FORWARD:
                    assert state.hidden is not None
                    messages.send(action, state.hidden)
                    state.hidden = None
                case ActionKind.SEND_BACKWARD:
                    assert state.gradient is not None
                    messages.send(action, state.gradient)
                    state.gradient = None
                case _:
                    self._run_passes(run, action)
        messages.finish()

    def _begin(self, actions: Sequence[Action], batches: Sequence[Batch], infos: Sequence[PassInfo]) -> _Run:
        has_head = self.placement.has_head(self.grid.pp.rank)
        passes = segment_passes(actions, self.chunks, head=len(self.segments) - 1 if has_head else None)
        self.hooks.on_schedule(passes)
        deferred = deferred_weights(actions)
        states = {
            (n, chunk): _InFlight(info, defers_weights=(n, chunk) in deferred)
            for n, info in enumerate(infos)
            for chunk in range(len(self.chunks))
        }
        return _Run(batches, states, [0] * len(self.segments), iter(passes))

    def _empty(self, action: Action, info: PassInfo) -> Tensor:
        """Return memory for a message: hidden states, or the gradient of those that the next stage received."""
        stage = self.placement.stage(self.grid.pp.rank, action.chunk)
        stage += action.kind in (ActionKind.RECV_BACKWARD, ActionKind.POST_BACKWARD)
        _, samples, channels = self.hidden_shape
        rows = self.hidden_rows[stage][info.is_training] // info.pieces
        return torch.empty(rows, samples * info.pieces, channels, dtype=self.dtype, device=self.device)

    def _run_passes(self, run: _Run, action: Action) -> None:
        """Run the passes of an action, and give their results to an adjacent virtual stage of this rank."""
        for pair in segments_in_turn(action, self.chunks):
            works = [functools.partial(self._run_pass, run, one, number) for one, number in pair]
            if self.turns is not None and len(works) == 2:
                self.turns.run(*works)
            else:
                for work in works:
                    work()
        for one in action.passes:
            if one.kind is ActionKind.BACKWARD:
                run.state(one).info.compute_late()
            self._hand_over(run, one)

    def _run_pass(self, run: _Run, one: Action, number: int) -> None:
        """Run a pass through a segment between the calls of its hooks."""
        segment_pass = next(run.upcoming)
        self.hooks.before(segment_pass)
        if one.kind is ActionKind.FORWARD:
            self._forward(run, one, number)
        elif one.kind is ActionKind.BACKWARD:
            self._backward(run, one, number)
        else:
            self._weights(run.state(one))
        self.hooks.after(segment_pass)
        if one.kind is (ActionKind.WEIGHT if run.state(one).defers_weights else ActionKind.BACKWARD):
            run.num_done[number] += 1
            self.hooks.on_gradients(number, is_last=run.num_done[number] == len(run.batches))

    def _hand_over(self, run: _Run, one: Action) -> None:
        """Give the result of a pass to the next virtual stage, if it is a chunk of this rank."""
        is_forward = one.kind is ActionKind.FORWARD
        chunk, rank = one.chunk + (1 if is_forward else -1), self.grid.pp.rank
        if one.kind is ActionKind.WEIGHT or not 0 <= chunk < len(self.chunks):
            return  # as always with one chunk
        if abs(self.placement.stage(rank, chunk) - self.placement.stage(rank, one.chunk)) != 1:
            return
        state, other = run.state(one), run.states[one.microbatch, chunk]
        if is_forward:
            other.hidden, state.hidden = state.hidden, None
        else:
            other.gradient, state.gradient = state.gradient, None

    @record_function("forward")
    def _forward(self, run: _Run, one: Action, number: int) -> None:
        """Run a segment forward."""
        state = run.state(one)
        info, hidden = state.info, state.hidden
        info.splits_backward = state.defers_weights
        with torch.set_grad_enabled(info.is_training):
            if hidden is not None and info.is_training:
                hidden = hidden.detach().requires_grad_()
            output = self.segments[number](hidden, run.batches[one.microbatch], info)
            if info.is_training:
                state.inputs.append(hidden)
                state.graphs.append(_Graph.of(output))
        state.hidden = output.detach() if output.dim() else None  # the loss stays here

    @record_function("backward")
    def _backward(self, run: _Run, one: Action, number: int) -> None:
        """Compute the gradient of a segment's input, and weight gradients that are not deferred."""
        state = run.state(one)
        info, graph = state.info, state.graphs.pop()
        info.splits_backward, info.deferred = state.defers_weights, [] if state.defers_weights else None
        is_last = run.num_done[number] == len(run.batches) - 1
        may_be_late = self.late_gradients == "all" or (self.late_gradients == "before_last" and not is_last)
        info.late = (info.late or []) if may_be_late else None
        if state.gradient is not None:
            graph.gradient.append(state.gradient)
            state.gradient = None
        torch.autograd.backward(graph.root)
        hidden = state.inputs.pop()
        if hidden is not None:
            state.gradient = hidden.grad
        if info.deferred is not None:
            state.deferred.append(info.deferred)
            info.deferred = None

    @record_function("weight gradients")
    @torch.no_grad()
    def _weights(self, state: _InFlight) -> None:
        """Compute a segment's deferred weight gradients."""
        for compute in state.deferred.pop(0):
            compute()


def segments_in_turn(action: Action, chunks: Sequence[range]) -> Iterator[list[tuple[Action, int]]]:
    """Yield the segments of an action's pass, up in forward passes, down in others; of two passes pairs, the backward pass first."""
    numbers = [
        [(one, number) for number in chunks[one.chunk][:: 1 if one.kind is ActionKind.FORWARD else -1]]
        for one in reversed(action.passes)
    ]
    for pair in itertools.zip_longest(*numbers):
        yield list(filter(None, pair))


def segment_passes(
    actions: Sequence[Action], chunks: Sequence[range], head: int | None = None
) -> list[SegmentPass]:
    """Return the passes of a schedule through a rank's segments, in order; `head`: number of the head's segment."""
    deferred = deferred_weights(actions)
    passes = [one for action in actions for one in action.passes]
    trained = {(one.microbatch, one.chunk) for one in passes if one.kind is ActionKind.BACKWARD}
    found: list[SegmentPass] = []
    for action in actions:
        for one, number in itertools.chain.from_iterable(segments_in_turn(action, chunks)):
            is_fused = number == head and (one.microbatch, one.chunk) in trained - deferred
            found.append(SegmentPass(one.kind, number, one.kind is not ActionKind.FORWARD or is_fused))
    return found


def deferred_weights(actions: Sequence[Action]) -> set[tuple[int, int]]:
    """Return the micro-batches and chunks whose weight gradients are actions of their own."""
    return {(one.microbatch, one.chunk) for one in actions if one.kind is ActionKind.WEIGHT}


@dataclass(frozen=True)
class _Graph:
    """The autograd graph of a segment's pass. It does not keep the segment's output alive."""

    root: Tensor
    """The loss, or a scalar whose backward pass begins with `gradient`."""
    gradient: list[Tensor]
    """The gradient of the output, once it is known."""

    @classmethod
    def of(cls, output: Tensor) -> _Graph:
        """Return the graph of an output; a scalar is the loss."""
        gradient: list[Tensor] = []
        return cls(output if output.dim() == 0 else _Seed.apply(output, gradient), gradient)


class _Seed(Function):
    """A scalar whose backward pass returns the tensor in `gradient` for `output`.

    torch.autograd.backward imports sympy if it is given gradients, to compare symbolic sizes: 2 s.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient, ctx.shape = gradient, output.shape
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 (autograd's signature)
        gradient: Tensor = ctx.gradient.pop()
        assert gradient.shape == ctx.shape
        return gradient, None
