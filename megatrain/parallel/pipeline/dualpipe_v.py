"""DualPipe-V: two chunks per rank in a V; a forward pass of one chunk runs together with a backward pass of the other.

    2 ranks, 4 micro-batches (capitals: the first chunk; F&b: together; W: deferred weight gradients)

    rank 0   F0 F1 F2 f0 b0 w0 f1 F3&b1 f2&B0 b2 f3&B1 b3 B2 W2 B3 W3
    rank 1   F0 f0 F1 f1 F2 b0 f2&B0 F3&b1 f3&B1 b2 B2 b3 B3 w3 W3

Each forward pass of a combined action has a backward pass to overlap with: the all-to-alls of experts of one pass can
run concurrently with the computation of the other. Weight gradients are deferred at the start and at the end only.

Source: DeepSeek, https://github.com/deepseek-ai/DualPipe, DualPipeV: DualPipe (arXiv:2412.19437, section 3.2.1) cut in half
as proposed by Qi et al. (Sea AI Lab).
"""

from __future__ import annotations

from collections import deque

from megatrain.parallel.pipeline.actions import Action, ActionKind, combined


def dualpipe_v_passes(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Return the passes of a rank.

    The schedule is defined for at least 2 * num_ranks micro-batches. With fewer, it is the schedule of 2 * num_ranks
    without the passes of the others: every rank keeps its order, so no deadlock can arise.
    """
    after = num_ranks - 1 - rank
    """Ranks after this one."""
    order = _Passes(num_microbatches)
    for _ in range(2 * after):
        order.forward(0)
    for _ in range(rank + 1):
        order.forward(0)
        order.forward(1)
    for _ in range(after):
        order.backward(1, defers_weights=True)
        order.weights()
        order.forward(1)
    for number in range(max(num_microbatches - 2 * num_ranks, 0) + rank + 1):
        if number == 0 and after == 0:  # here the forward pass need not wait for the gradient
            order.forward(0)
            order.backward(1)
        else:
            order.together(0, 1)
        order.together(1, 0)
    for _ in range(after):
        order.backward(1)
        order.together(1, 0)
    for number in range(2 * (rank + 1)):
        order.backward(1 - number % 2, defers_weights=number > rank)
    for _ in range(after):
        order.weights()
        order.backward(0, defers_weights=True)
    for _ in range(rank + 1):
        order.weights()
    return order.passes


class _Passes:
    """The passes of a rank so far. Each call appends the next micro-batch of its kind and chunk, if it exists."""

    def __init__(self, num_microbatches: int) -> None:
        self.passes: list[Action] = []
        self._num_microbatches = num_microbatches
        self._next = {(kind, chunk): 0 for kind in ("F", "B") for chunk in (0, 1)}
        self._deferred: deque[Action] = deque()
        """Weight gradients to compute, in the order of their backward passes."""

    def forward(self, chunk: int) -> None:
        self._append(self._action(ActionKind.FORWARD, chunk))

    def backward(self, chunk: int, *, defers_weights: bool = False) -> None:
        action = self._action(ActionKind.BACKWARD, chunk)
        self._append(action)
        if defers_weights:
            self._deferred.append(Action(ActionKind.WEIGHT, action.microbatch, chunk))

    def weights(self) -> None:
        self._append(self._deferred.popleft())

    def together(self, forward_chunk: int, backward_chunk: int) -> None:
        forward = self._action(ActionKind.FORWARD, forward_chunk)
        backward = self._action(ActionKind.BACKWARD, backward_chunk)
        if self._exists(forward) and self._exists(backward):
            self.passes.append(combined(forward, backward))
        else:
            self._append(forward)
            self._append(backward)

    def _action(self, kind: ActionKind, chunk: int) -> Action:
        number = self._next[kind.value, chunk]
        self._next[kind.value, chunk] += 1
        return Action(kind, number, chunk)

    def _append(self, action: Action) -> None:
        if self._exists(action):
            self.passes.append(action)

    def _exists(self, action: Action) -> bool:
        return action.microbatch < self._num_microbatches
