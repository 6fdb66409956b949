"""CUDA graphs: the host launches all kernels of a micro-batch at once, instead of one after the other.

    warm-up     the executor runs the schedule as always: kernels are compiled, libraries choose algorithms
    capture     the passes of one micro-batch are recorded, with fixed memory for its batch, activations and sums
    replay      batch -> fixed memory -> graph -> sums -> info, for each micro-batch

In FP8 the first micro-batch of a step has a graph of its own, which casts the weights. Stages of a pipeline have a graph of each
pass (`graphed_stages.py`).

Communication of tokens, channels and rows within a layer is part of the graph. Weights and gradients have fixed memory
anyway, and their communication is not part of it: weights are complete before the first replay of a step, and gradients
are reduced after the last one. NCCL's watchdog does not see collectives of a graph: a hang there is found by the reduction.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.data_parallel import DataParallel
from megatrain.parallel.pipeline.actions import Action, ActionKind
from megatrain.parallel.pipeline.executor import Executor
from megatrain.parallel.pipeline.graph_trial import StepKind, Trial
from megatrain.parallel.tensor_overlap.peer_memory import PeerMemory, Slots

Work = Callable[[], None]


class Capture:
    """Records kernels on a stream of its own, on which the warm-up runs too.

    Autograd and libraries keep the stream that they last ran on, and a capture must not wait for work of another stream
    (pytorch issue 189977).
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def warm_up(self, work: Work) -> None:
        """Run work that is not recorded."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, works: Sequence[Work]) -> Sequence[torch.cuda.CUDAGraph]:
        """Record the kernels that each of `works` launches. They share memory: replays have the order of the records.

        Communicators whose kernels are recorded cannot be destroyed before the records are `reset`.
        """
        torch.cuda.synchronize(self._stream.device)
        gc.collect()
        torch.cuda.empty_cache()
        pool = torch.cuda.graph_pool_handle()
        graphs = [torch.cuda.CUDAGraph() for _ in works]
        with torch.cuda.stream(self._stream):
            for graph, work in zip(graphs, works, strict=True):
                # The loader's thread may allocate meanwhile.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                work()
                graph.capture_end()
        return graphs


class Graphs(Protocol):
    """The recorded passes of a step."""

    def run(self, actions: Sequence[Action], batches: Sequence[Batch], infos: Sequence[PassInfo]) -> None:
        """Run a step's micro-batches by replays."""

    def reset(self) -> None:
        """Forget the records."""


class GraphedPasses:
    """Runs the training schedule of a stage: by `executor` in the first steps, then by replays of graphs if they pay.

    Args:
        executor: runs the warm-up steps.
        make_graphs: returns graphs whose records are made in their first run.
        data_parallel: communicates weights and gradients.
        num_warmup_steps: steps before the capture.
        recorder: runs the warm-up.
        trial: times steps and decides whether graphs stay. None: they do.
    """

    def __init__(
        self,
        executor: Executor,
        make_graphs: Callable[[], Graphs],
        data_parallel: DataParallel,
        num_warmup_steps: int,
        recorder: Capture,
        trial: Trial | None = None,
    ) -> None:
        self._executor, self._make_graphs, self._data_parallel = executor, make_graphs, data_parallel
        self._steps_left = num_warmup_steps
        self._recorder, self._trial = recorder, trial
        self._is_rejected = False
        self._graphs: Graphs | None = None

    def run(self, actions: Sequence[Action], batches: Sequence[Batch], infos: Sequence[PassInfo]) -> None:
        """Run a step's micro-batches, like `Executor.run`."""
        if self._is_rejected or not self._may_go_on(len(batches)):
            self._executor.run(actions, batches, infos)
            return
        if self._steps_left:
            self._steps_left -= 1
            device = batches[0].tokens.device
            like_graphs = [
                replace(info, first_sample=torch.tensor(info.first_sample, device=device)) for info in infos
            ]
            self._recorder.warm_up(lambda: self._executor.run(actions, batches, like_graphs))
            return
        self._data_parallel.wait_for_weights()
        self._graphs = self._graphs or self._make_graphs()
        self._graphs.run(actions, batches, infos)
        for number in range(len(self._data_parallel.buffers.buckets)):
            self._data_parallel.gradients.mark_ready(number, is_last=True)

    def _may_go_on(self, num_microbatches: int) -> bool:
        """Return False, and release the graphs, if the trial rejects them; it knows that a step begins."""
        replays = StepKind.RECORD if self._graphs is None else StepKind.REPLAY
        kind = StepKind.WARMUP if self._steps_left else replays
        if self._trial is None or self._trial.allows(kind, num_microbatches):
            return True
        self.close()
        torch.cuda.empty_cache()  # of the stream of warm-up and record
        self._is_rejected = True
        return False

    def forget(self) -> None:
        """Release the graphs, as memory has other sizes from now on: others are recorded after a step of the executor."""
        self.close()
        self._steps_left = max(self._steps_left, 1)

    def close(self) -> None:
        """Release the graphs; process groups can then be destroyed."""
        if self._graphs is not None:
            self._graphs.reset()
            self._graphs = None


class MicrobatchGraphs:
    """Graphs of all passes of a micro-batch, of a rank without pipeline stages. Implements `Graphs`.

    Args:
        executor: runs the passes that are recorded, without hooks.
        casts_weights: the first micro-batch of a step casts weights that the others read.
        peers: memory of the sends of overlapped products; None: there are none.
    """

    def __init__(
        self, executor: Executor, recorder: Capture, *, casts_weights: bool, peers: PeerMemory | None
    ) -> None:
        self._executor, self._recorder, self._peers = executor, recorder, peers
        self._casts_weights = casts_weights
        self._microbatches: list[FixedMicrobatch] = []
        self._recorded: Sequence[torch.cuda.CUDAGraph] = ()
        self._kept: Slots | None = None

    def run(self, actions: Sequence[Action], batches: Sequence[Batch], infos: Sequence[PassInfo]) -> None:  # noqa: ARG002
        if not self._recorded:
            self._record(batches[0])
        for batch, info in zip(batches, infos, strict=True):
            align(self._peers)
            number = min(info.microbatch, len(self._recorded) - 1)
            self._microbatches[number].take(batch, info)
            self._recorded[number].replay()
            self._microbatches[number].give_sums(info)

    def _record(self, batch: Batch) -> None:
        align(self._peers)
        self._microbatches = [FixedMicrobatch(batch, number) for number in range(1 + self._casts_weights)]
        self._recorded = self._recorder.record([self._passes(one) for one in self._microbatches])
        self._kept = None if self._peers is None else self._peers.slots  # evaluation may need larger ones

    def _passes(self, one: FixedMicrobatch) -> Work:
        actions = [Action(ActionKind.FORWARD, 0), Action(ActionKind.BACKWARD, 0)]

        def work() -> None:
            self._executor.run(actions, [one.batch], [one.info])
            align(self._peers)

        return work

    def reset(self) -> None:
        for recorded in self._recorded:
            recorded.reset()


class FixedMicrobatch:
    """Memory of a micro-batch that a graph reads."""

    def __init__(self, batch: Batch, number: int) -> None:
        self.batch = batch.mapped(Tensor.clone)
        device = batch.tokens.device
        self.info = PassInfo(
            microbatch=number,
            loss_scale=torch.zeros((), dtype=torch.float64, device=device),
            router_loss_scale=torch.zeros((), dtype=torch.float64, device=device),
            first_sample=torch.zeros((), dtype=torch.int64, device=device),
            is_token=self.batch.is_token,
        )

    def take(self, batch: Batch, info: PassInfo) -> None:
        """Copy what differs between micro-batches."""
        for mine, given in zip(_tensors(self.batch), _tensors(batch), strict=True):
            mine.copy_(given)
        for name in ("loss_scale", "router_loss_scale", "first_sample"):
            getattr(self.info, name).fill_(getattr(info, name))
        self.info.token_indices.clear()  # of another first sample

    def give_sums(self, info: PassInfo) -> None:
        """Copy sums for the log and metrics of layers into `info`."""
        info.sums |= {name: value.clone() for name, value in self.info.sums.items()}
        info.router_metrics |= {layer: value.clone() for layer, value in self.info.router_metrics.items()}
        info.indexer_losses |= {layer: value.clone() for layer, value in self.info.indexer_losses.items()}


def align(peers: PeerMemory | None) -> None:
    """See `PeerMemory.align`."""
    if peers is not None:
        peers.align()


def _tensors(batch: Batch) -> list[Tensor]:
    found: list[Tensor] = []

    def append(x: Tensor) -> Tensor:
        found.append(x)
        return x

    batch.mapped(append)
    return found
