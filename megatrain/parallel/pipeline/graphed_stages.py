"""CUDA graphs of a pipeline rank: one of each action, since ranks send messages between passes, or run two passes in turn.

    message -> fixed input -> graph of the pass -> fixed output -> message

The passes of a step are recorded in the order of the schedule and share memory: activations take what they take without graphs.
Nothing is sent meanwhile. The passes of another schedule, as another batch size has, are recorded anew.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.pipeline.actions import Action, ActionKind
from megatrain.parallel.pipeline.executor import Executor, _Run
from megatrain.parallel.pipeline.graphed_passes import Capture, FixedMicrobatch, align
from megatrain.parallel.tensor_overlap.peer_memory import PeerMemory, Slots


class StageGraphs:
    """Graphs of the passes of a step. Implements `Graphs`.

    Args:
        executor: records passes and runs them.
        peers: memory of the sends of overlapped products; None: there are none.
        schedule: returns the actions for a number of micro-batches in place of those of the step.
    """

    def __init__(
        self,
        executor: RecordedExecutor,
        recorder: Capture,
        peers: PeerMemory | None,
        schedule: Callable[[int], Sequence[Action]] | None = None,
    ) -> None:
        self._executor, self._recorder, self._peers, self._schedule = executor, recorder, peers, schedule
        self._actions: Sequence[Action] = ()
        self._microbatches: list[FixedMicrobatch] = []
        self._slots: Slots | None = None

    def run(self, actions: Sequence[Action], batches: Sequence[Batch], infos: Sequence[PassInfo]) -> None:
        align(self._peers)
        actions = actions if self._schedule is None else self._schedule(len(batches))
        if actions != self._actions:
            self.reset()
            self._actions = actions
            self._microbatches = [FixedMicrobatch(batch, number) for number, batch in enumerate(batches)]
            self._executor.record(actions, self._microbatches, self._recorder, self._peers)
            self._slots = (
                None if self._peers is None else self._peers.slots
            )  # evaluation may need larger ones
        for mine, batch, info in zip(self._microbatches, batches, infos, strict=True):
            mine.take(batch, info)
        self._executor.run(
            actions, [mine.batch for mine in self._microbatches], [mine.info for mine in self._microbatches]
        )
        for mine, info in zip(self._microbatches, infos, strict=True):
            mine.give_sums(info)

    def reset(self) -> None:
        self._executor.forget()


@dataclass(frozen=True)
class _Ends:
    """Fixed memory of what a pass receives and returns; None: nothing."""

    name: Literal["hidden", "gradient"]
    received: Tensor | None
    returned: Tensor | None


class RecordedExecutor(Executor):
    """An executor that runs passes by replays. It has no hooks."""

    _is_recording = False
    _recorded: dict[Action, torch.cuda.CUDAGraph]
    _ends: dict[tuple[ActionKind, int], _Ends]

    def record(
        self,
        actions: Sequence[Action],
        microbatches: Sequence[FixedMicrobatch],
        recorder: Capture,
        peers: PeerMemory | None,
    ) -> None:
        """Record the passes of a schedule. `run` then needs the same actions, batches and infos."""
        run = self._begin(actions, [one.batch for one in microbatches], [one.info for one in microbatches])
        run = dataclasses.replace(
            run, upcoming=itertools.cycle(run.upcoming)
        )  # a stand-in computes each replay
        passes = [action for action in actions if action.passes]
        self._ends = {}
        for one in (one for action in passes for one in action.passes):
            if (one.kind, one.chunk) not in self._ends:
                self._ends[one.kind, one.chunk] = self._ends_of(one, run.state(one).info)
        works = [functools.partial(self._record_passes, run, action, peers) for action in passes]
        self._recorded = dict(zip(passes, recorder.record(works), strict=True))

    def forget(self) -> None:
        """Forget what is recorded."""
        for recorded in getattr(self, "_recorded", {}).values():
            recorded.reset()
        self._recorded = {}

    def _ends_of(self, one: Action, info: PassInfo) -> _Ends:
        stage = self.placement.stage(self.grid.pp.rank, one.chunk)
        has_below, has_above = stage > 0, stage < self.placement.num_stages - 1
        below = self._empty(Action(ActionKind.RECV_FORWARD, 0, one.chunk), info) if has_below else None
        above = self._empty(Action(ActionKind.RECV_BACKWARD, 0, one.chunk), info) if has_above else None
        match one.kind:
            case ActionKind.FORWARD:
                return _Ends("hidden", below, above)
            case ActionKind.BACKWARD:
                return _Ends("gradient", above, below)
        return _Ends("gradient", None, None)

    def _record_passes(self, run: _Run, action: Action, peers: PeerMemory | None) -> None:
        for one in action.passes:
            ends = self._ends[one.kind, one.chunk]
            if ends.received is not None:  # a copy: passes keep it while the next message takes its place
                setattr(run.state(one), ends.name, ends.received.clone())
        self._is_recording = True
        super()._run_passes(run, action)
        self._is_recording = False
        for one in action.passes:
            ends, state = self._ends[one.kind, one.chunk], run.state(one)
            if ends.returned is not None:
                ends.returned.copy_(getattr(state, ends.name))
                setattr(state, ends.name, None)
        align(peers)

    def _run_passes(self, run: _Run, action: Action) -> None:
        for one in action.passes:
            ends, state = self._ends[one.kind, one.chunk], run.state(one)
            if ends.received is not None:
                ends.received.copy_(getattr(state, ends.name))
                setattr(state, ends.name, None)
        self._recorded[action].replay()
        for one in action.passes:
            ends = self._ends[one.kind, one.chunk]
            if ends.returned is not None:
                setattr(run.state(one), ends.name, ends.returned.clone())
            self._hand_over(run, one)

    def _hand_over(self, run: _Run, one: Action) -> None:
        if not self._is_recording:
            super()._hand_over(run, one)
