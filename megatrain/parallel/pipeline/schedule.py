"""Schedules: the list of a pipeline rank's actions in a step.

    1F1B, 2 ranks, 3 micro-batches           rank 0   F0 >   F1 >   < B0 F2 >   < B1     < B2
    (> sends, < receives)                    rank 1     < F0 B0 >  < F1 B1 >  < F2 B2 >

    interleaved, 2 ranks with 2 chunks       rank 0   F0 F1 f0 f1 b0 ...        virtual stages 0 and 2 (f, b)
    each (capitals: the first chunk)         rank 1      F0 F1 f0 b0 f1 ...     virtual stages 1 and 3

    zero bubble: backward passes compute the gradient of the input only; weight gradients (W) fill the bubble

    combined, 1 rank                         rank 0   F0 F1&B0 F2&B1 B2         experts of one pass communicate during the other

A schedule is built in three steps: the passes of a rank in order, the messages that they need (`with_messages`), and
receives posted ahead (`with_posts`), so that a message arrives during the pass before the one that needs it.
Pure functions of the rank and the numbers of ranks, chunks and micro-batches; `simulator.py` checks them.

Sources: Narayanan et al., arXiv:2104.04473, section 2.2 (1F1B, there PipeDream-Flush, and interleaving); Qi et al.,
arXiv:2401.10241 (zero bubble).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from megatrain.config.schema.pipeline_schedules import PIPELINE_SCHEDULES
from megatrain.parallel.pipeline.actions import Action, ActionKind, Placement, combined
from megatrain.parallel.pipeline.dualpipe_v import dualpipe_v_passes

RECEIVED_AS: Final = {
    ActionKind.POST_FORWARD: ActionKind.RECV_FORWARD,
    ActionKind.POST_BACKWARD: ActionKind.RECV_BACKWARD,
}
"""The receive that waits for what a post has begun to receive."""
_POSTS: Final = {receive: post for post, receive in RECEIVED_AS.items()}


@dataclass(frozen=True)
class PipelineSchedule:
    """The schedules of a run: training steps and evaluation, for any number of micro-batches."""

    kind: str
    """One of `PIPELINE_SCHEDULES`."""
    placement: Placement
    group_size: int | None = None
    """Micro-batches that one chunk computes before the next, at least the number of ranks; None: that number (interleaved)."""
    posts_receives: bool = True
    """Post each receive before the pass that precedes the one that needs it."""
    combines: bool = False
    """Run a forward pass together with the backward pass of an earlier micro-batch (one stage, interleaved)."""

    @functools.lru_cache(maxsize=64)  # noqa: B019 (there is one schedule per run)
    def training(self, rank: int, num_microbatches: int) -> list[Action]:
        """Return the actions of a rank in a training step. The list is built once per number of micro-batches."""
        return self._posted(ACTIONS[self.kind](self, rank, num_microbatches))

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def evaluation(self, rank: int, num_microbatches: int) -> list[Action]:
        """Return the actions of a rank in an evaluation."""
        return self._posted(forward_only(rank, self.placement, num_microbatches))

    def _posted(self, actions: Sequence[Action]) -> list[Action]:
        return with_posts(actions) if self.posts_receives else list(actions)


def one_forward_one_backward(schedule: PipelineSchedule, rank: int, num_microbatches: int) -> list[Action]:
    """Return 1F1B: a rank runs ahead by one forward pass per later rank. One rank: F B F B ..., or combined F FB FB ... B."""
    ranks = schedule.placement.num_ranks
    forward = [Action(ActionKind.FORWARD, number) for number in range(num_microbatches)]
    backward = [Action(ActionKind.BACKWARD, number) for number in range(num_microbatches)]
    combines = schedule.combines and ranks == 1  # a later rank would wait for both passes of an earlier one
    passes = _alternating(forward, backward, ranks - rank - 1, combines=combines)
    return with_messages(passes, rank, Placement(ranks))


def interleaved(schedule: PipelineSchedule, rank: int, num_microbatches: int) -> list[Action]:
    """Return interleaved 1F1B over the chunks of a rank. A rest of fewer micro-batches than ranks joins the first group.

    With `combines`, a rank runs ahead by one more pass, and then a forward pass together with each backward pass.
    """
    placement = schedule.placement
    ranks, chunks = placement.num_ranks, placement.num_chunks
    groups = _groups(num_microbatches, schedule.group_size or ranks, ranks)
    order = [(microbatch, chunk) for group in groups for chunk in range(chunks) for microbatch in group]
    forward = [Action(ActionKind.FORWARD, microbatch, chunk) for microbatch, chunk in order]
    backward = [Action(ActionKind.BACKWARD, microbatch, chunks - 1 - chunk) for microbatch, chunk in order]
    ahead = 2 * (ranks - rank - 1) + (chunks - 1) * len(groups[0])
    passes = _alternating(forward, backward, ahead, combines=schedule.combines)
    return with_messages(passes, rank, placement)


def _groups(num_microbatches: int, size: int, smallest: int) -> list[range]:
    """Return consecutive micro-batches in groups of `size`; a rest below `smallest` joins the first group."""
    rest = num_microbatches % size
    first = min(size + rest, num_microbatches) if rest < smallest else size
    starts = [0, *range(first, num_microbatches, size)]
    return [range(a, b) for a, b in itertools.pairwise([*starts, num_microbatches])]


def zero_bubble(schedule: PipelineSchedule, rank: int, num_microbatches: int) -> list[Action]:
    """Return ZB-H1 for one chunk, ZB-V for two chunks in a V: weight gradients are deferred into the bubble.

    The peak number of passes between forward and weight gradients is that of the first rank of 1F1B, per chunk.
    """
    passes = _zero_bubble(schedule.placement, num_microbatches)[rank]
    return with_messages(passes, rank, schedule.placement)


@functools.lru_cache(maxsize=4)
def _zero_bubble(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Return the passes of all ranks."""
    ranks = _ZeroBubbleRanks(placement, num_microbatches)
    for time in itertools.count():
        if ranks.num_left == 0:
            break
        for rank in range(placement.num_ranks):
            ranks.run_first_possible(rank, time)
    return ranks.passes


class _ZeroBubbleRanks:
    """Ranks that run passes with equal costs of F, B and W. Each runs the first pass of this list that it can:

    forward passes of the last chunk to the first, backward passes of the first chunk to the last, weight gradients of
    the last chunk to the first. So the first segment completes the gradient of a tied embedding.
    """

    def __init__(self, placement: Placement, num_microbatches: int) -> None:
        self.placement = placement
        self.num_microbatches = num_microbatches
        self.passes: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
        self.num_left = 3 * num_microbatches * placement.num_stages
        self._done = Counter[tuple[ActionKind, int]]()
        """Number of passes by kind and virtual stage."""
        self._ends: dict[tuple[ActionKind, int, int], int] = {}
        """End of each pass, by kind, virtual stage and micro-batch."""
        up, down = range(placement.num_chunks), range(placement.num_chunks - 1, -1, -1)
        orders = {ActionKind.FORWARD: down, ActionKind.BACKWARD: up, ActionKind.WEIGHT: down}
        self._order = [(kind, chunk) for kind, chunks in orders.items() for chunk in chunks]

    def run_first_possible(self, rank: int, time: int) -> None:
        """Run the first possible pass of a rank, if there is one."""
        for kind, chunk in self._order:
            stage = self.placement.stage(rank, chunk)
            microbatch = self._done[kind, stage]
            if self._has_input(kind, stage, microbatch, time) and self._has_room(kind, rank, stage):
                self.passes[rank].append(Action(kind, microbatch, chunk))
                self._ends[kind, stage, microbatch] = time + 1
                self._done[kind, stage] += 1
                self.num_left -= 1
                return

    def _has_input(self, kind: ActionKind, stage: int, microbatch: int, time: int) -> bool:
        """Return whether the pass exists and those that it needs have ended."""
        if microbatch == self.num_microbatches:
            return False
        match kind:
            case ActionKind.FORWARD:
                source = (ActionKind.FORWARD, stage - 1)
            case ActionKind.BACKWARD if stage < self.placement.num_stages - 1:
                source = (ActionKind.BACKWARD, stage + 1)
            case ActionKind.BACKWARD:
                source = (ActionKind.FORWARD, stage)
            case _:
                source = (ActionKind.BACKWARD, stage)
        is_first = kind is ActionKind.FORWARD and stage == 0
        return is_first or self._ends.get((*source, microbatch), time + 1) <= time

    def _has_room(self, kind: ActionKind, rank: int, stage: int) -> bool:
        """Return whether the rank may hold the activations of one more forward pass."""
        if kind is not ActionKind.FORWARD:
            return True
        stages = [self.placement.stage(rank, chunk) for chunk in range(self.placement.num_chunks)]
        held = sum(self._done[kind, each] - self._done[ActionKind.WEIGHT, each] for each in stages)
        ahead = self._done[kind, stage] - self._done[ActionKind.BACKWARD, stage]
        is_ahead = len(stages) == 1 and ahead >= self.placement.num_ranks - rank
        return held < self.placement.num_stages and not is_ahead


def forward_only(rank: int, placement: Placement, num_microbatches: int) -> list[Action]:
    """Return the schedule of evaluation: every micro-batch forward, in order, one group of ranks after the other."""
    ranks = placement.num_ranks
    passes = [
        Action(ActionKind.FORWARD, microbatch, chunk)
        for first in range(0, num_microbatches, ranks)
        for chunk in range(placement.num_chunks)
        for microbatch in range(first, min(first + ranks, num_microbatches))
    ]
    return with_messages(passes, rank, placement)


def with_messages(passes: Sequence[Action], rank: int, placement: Placement) -> list[Action]:
    """Return a rank's passes, each between the messages that it needs and those that it sends to adjacent virtual stages."""
    return [action for one in passes for action in _with_messages(one, rank, placement)]


def _with_messages(action: Action, rank: int, placement: Placement) -> Iterator[Action]:
    sends: list[Action] = []
    for one in action.passes:
        stage = placement.stage(rank, one.chunk)
        before, after = (
            0 <= other < placement.num_stages and placement.rank(other) != rank
            for other in (stage - 1, stage + 1)
        )
        if one.kind is ActionKind.FORWARD and before:
            yield Action(ActionKind.RECV_FORWARD, one.microbatch, one.chunk)
        if one.kind is ActionKind.BACKWARD and after:
            yield Action(ActionKind.RECV_BACKWARD, one.microbatch, one.chunk)
        if one.kind is ActionKind.FORWARD and after:
            sends.append(Action(ActionKind.SEND_FORWARD, one.microbatch, one.chunk))
        if one.kind is ActionKind.BACKWARD and before:
            sends.append(Action(ActionKind.SEND_BACKWARD, one.microbatch, one.chunk))
    yield action
    yield from sends


def with_posts(actions: Sequence[Action]) -> list[Action]:
    """Return the schedule with the receives of each pass posted one pass earlier: before the receives of that pass.

    So a message arrives while another pass runs. Posts keep the order of the receives; at most those of two passes are
    pending.
    """
    steps: list[list[Action]] = [[]]
    """Each pass, with its receives before and its sends after it."""
    for action in actions:
        if (action.passes or action.kind in _POSTS) and any(one.passes for one in steps[-1]):
            steps.append([])
        steps[-1].append(action)
    posts = [
        [Action(_POSTS[one.kind], one.microbatch, one.chunk) for one in step if one.kind in _POSTS]
        for step in steps
    ]
    later = [*posts[1:], []]
    return [
        *posts[0],
        *(action for post, step in zip(later, steps, strict=True) for action in (*post, *step)),
    ]


def _alternating(
    forward: Sequence[Action], backward: Sequence[Action], ahead: int, *, combines: bool
) -> list[Action]:
    """Return `ahead` forward passes, then one forward and one backward pass in turn, then the other backward passes.

    With `combines`, a pass more is ahead, so that no backward pass needs the forward pass with which it runs.
    """
    ahead = min(ahead + combines, len(forward))
    passes = [*forward[:ahead]]
    for one_forward, one_backward in zip(forward[ahead:], backward, strict=False):
        passes += [combined(one_forward, one_backward)] if combines else [one_forward, one_backward]
    return [*passes, *backward[len(forward) - ahead :]]


def placement_of(kind: str, num_ranks: int, num_chunks: int) -> Placement:
    """Return where a schedule places the model chunks."""
    return Placement(num_ranks, num_chunks, is_v=PIPELINE_SCHEDULES[kind].is_v)


ActionsOf = Callable[[PipelineSchedule, int, int], list[Action]]
"""The actions of a training step, of a schedule, a rank and a number of micro-batches."""


def dualpipe_v(schedule: PipelineSchedule, rank: int, num_microbatches: int) -> list[Action]:
    """Return DualPipeV, or 1F1B for one stage."""
    if schedule.placement.num_chunks == 1:
        return one_forward_one_backward(schedule, rank, num_microbatches)
    passes = dualpipe_v_passes(rank, schedule.placement.num_ranks, num_microbatches)
    return with_messages(passes, rank, schedule.placement)


ACTIONS: Final[Mapping[str, ActionsOf]] = {
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zero_bubble,
    "zb-v": zero_bubble,
    "dualpipe-v": dualpipe_v,
}
"""Actions of `PIPELINE_SCHEDULES`."""
