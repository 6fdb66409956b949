"""CUDA graphs: the host launches all kernels of a micro-batch at once, instead of one after the other.

    warm-up     the executor runs the schedule as always: kernels are compiled, libraries choose algorithms
    capture     the passes of one micro-batch are recorded, with fixed memory for its batch, activations and sums
    replay      batch -> fixed memory -> graph -> sums -> info, for each micro-batch

Communication of tokens, channels and rows within a layer is part of the graph. Weights and gradients have fixed memory
anyway, and their communication is not part of it: weights are complete before the first replay of a step, and gradients
are reduced after the last one. NCCL's watchdog does not see collectives of a graph: a hang there is found by the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.data_parallel import DataParallel
from megatrain.parallel.pipeline.actions import Action, ActionKind
from megatrain.parallel.pipeline.executor import Executor
from megatrain.parallel.pipeline.segments import SegmentPass
from megatrain.parallel.tensor_overlap.peer_memory import PeerMemory

Work = Callable[[], None]


class NoHooks:
    """Hooks of an executor that does nothing around passes. Implements `SegmentHooks`."""

    def on_schedule(self, passes: Sequence[SegmentPass]) -> None:
        """See `SegmentHooks`."""

    def before(self, segment_pass: SegmentPass) -> None:
        """See `SegmentHooks`."""

    def after(self, segment_pass: SegmentPass) -> None:
        """See `SegmentHooks`."""

    def on_gradients(self, segment: int, *, is_last: bool) -> None:
        """See `SegmentHooks`."""


class RecordedWork(Protocol):
    """Work that can be repeated, as `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Launch the recorded kernels again."""

    def reset(self) -> None:
        """Forget them: communicators whose kernels are recorded cannot be destroyed."""


class Recorder(Protocol):
    """Records work; tests without a GPU have a stand-in."""

    def warm_up(self, work: Work) -> None:
        """Run work that is not recorded."""

    def record(self, work: Work) -> RecordedWork:
        """Record the kernels that `work` launches."""


class Capture:
    """Records kernels on a stream of its own, on which the warm-up runs too. Implements `Recorder`.

    Autograd and libraries keep the stream that they last ran on, and a capture must not wait for work of another stream
    (pytorch issue 189977).
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def warm_up(self, work: Work) -> None:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, work: Work) -> RecordedWork:
        graph = torch.cuda.CUDAGraph()
        # The loader's thread may allocate meanwhile.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph


class GraphedPasses:
    """Runs the training schedule of one stage: by `executor` in the first steps, then by replays of a graph.

    Args:
        executor: runs the warm-up steps.
        bare: the same executor with `NoHooks`.
        data_parallel: communicates weights and gradients.
        num_warmup_steps: steps before the capture.
        recorder: records the passes.
        peers: memory of the sends of overlapped products; None: there are none.
    """

    def __init__(
        self,
        executor: Executor,
        bare: Executor,
        data_parallel: DataParallel,
        num_warmup_steps: int,
        recorder: Recorder,
        peers: PeerMemory | None = None,
    ) -> None:
        self._peers = peers
        self._executor, self._bare, self._data_parallel = executor, bare, data_parallel
        self._steps_left = num_warmup_steps
        self._recorder = recorder
        self._graph: _Graph | None = None

    def run(self, actions: Sequence[Action], batches: Sequence[Batch], infos: Sequence[PassInfo]) -> None:
        """Run a step's micro-batches, like `Executor.run`."""
        if self._steps_left:
            self._steps_left -= 1
            self._recorder.warm_up(lambda: self._executor.run(actions, batches, infos))
            return
        self._data_parallel.wait_for_weights()
        for batch, info in zip(batches, infos, strict=True):
            if self._peers is not None:
                self._peers.align()
            if self._graph is None:
                self._graph = _Graph(self._bare, batch, self._recorder, self._peers)
            self._graph.run(batch, info)
        for number in range(len(self._data_parallel.buffers.buckets)):
            self._data_parallel.gradients.mark_ready(number, is_last=True)

    def forget(self) -> None:
        """Release the graph, as memory has other sizes from now on: another one is recorded after a step of the executor."""
        self.close()
        self._steps_left = max(self._steps_left, 1)

    def close(self) -> None:
        """Release the graph; process groups can then be destroyed."""
        if self._graph is not None:
            self._graph.recorded.reset()
            self._graph = None


class _Graph:
    """The graph of a micro-batch's passes. Capturing it computes nothing."""

    def __init__(
        self, executor: Executor, batch: Batch, recorder: Recorder, peers: PeerMemory | None
    ) -> None:
        self._batch = batch.mapped(Tensor.clone)
        device = batch.tokens.device
        self._scale = torch.zeros((), dtype=torch.float64, device=device)
        self._router_scale = torch.zeros((), dtype=torch.float64, device=device)
        self._first_sample = torch.zeros((), dtype=torch.int64, device=device)
        self._info = PassInfo(
            loss_scale=self._scale,
            router_loss_scale=self._router_scale,
            first_sample=self._first_sample,
            is_token=self._batch.is_token,
        )
        passes = [Action(ActionKind.FORWARD, 0), Action(ActionKind.BACKWARD, 0)]
        self._memory = peers and peers.slots  # the graph's: evaluation may need larger ones

        def work() -> None:
            executor.run(passes, [self._batch], [self._info])
            if peers is not None:
                peers.align()

        self.recorded = recorder.record(work)

    def run(self, batch: Batch, info: PassInfo) -> None:
        """Run the passes of a micro-batch; sums for the log and metrics of routers remain in `info`."""
        for mine, given in zip(_tensors(self._batch), _tensors(batch), strict=True):
            mine.copy_(given)
        self._scale.fill_(info.loss_scale)
        self._router_scale.fill_(info.router_loss_scale)
        self._first_sample.fill_(info.first_sample)
        self.recorded.replay()
        info.sums |= {name: value.clone() for name, value in self._info.sums.items()}
        info.router_metrics |= {layer: value.clone() for layer, value in self._info.router_metrics.items()}


def _tensors(batch: Batch) -> list[Tensor]:
    found: list[Tensor] = []

    def append(x: Tensor) -> Tensor:
        found.append(x)
        return x

    batch.mapped(append)
    return found
