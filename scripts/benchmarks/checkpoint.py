"""Time saving and loading the state of a run, and torch.distributed.checkpoint (DCP) on the same tensors.

    python scripts/benchmarks/checkpoint.py --folder /fast/disk -- --config configs/benchmarks/A1.yaml
    torchrun --nproc-per-node 2 scripts/benchmarks/checkpoint.py --folder /fast/disk -- --config configs/benchmarks/B1.yaml

Flags after `--` are those of pretrain.py; nothing is trained. Every rank holds random weights and moments. All files are synced to
disk. Figures are medians of the rounds, of the slowest rank:

    stall      seconds in which training would wait
    duration   seconds from the begin to the commit
    load       seconds into the same tensors, from the page cache; unchecked: without comparing checksums of blocks

`copy to host` is the copy of a rank's state into allocated (on a GPU: pinned) host memory alone: the least stall of any
program that saves in the background. DCP gets each rank's shards as they are, under names of their own, so that it neither
splits nor deduplicates anything; its process group for saves in the background uses gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatrain.checkpoint import reader, tensor_file
from megatrain.checkpoint.background import BackgroundWriter
from megatrain.checkpoint.block_checksums import BlockFormat
from megatrain.checkpoint.chunks import plan_chunks
from megatrain.checkpoint.load import load_checkpoint
from megatrain.checkpoint.save import DirectWriter, Save
from megatrain.config import parse
from megatrain.parallel.collectives import all_reduce
from megatrain.training.checkpoints import state_to_save
from megatrain.training.launch.ranks import Ranks, joined_ranks, report_errors
from megatrain.training.trainer import Trainer

PARTS = ("save", "load", "async-save", "dcp", "dcp-async-save")
_SECONDS_BETWEEN_POLLS = 0.002


@dataclass
class Times:
    """Seconds of one way to save or load, by round."""

    stall: list[float] = field(default_factory=list)
    duration: list[float] = field(default_factory=list)


class Benchmark:
    """The state of one rank, and the ways to save it."""

    def __init__(self, ranks: Ranks, arguments: argparse.Namespace) -> None:
        self.ranks, self.grid, self.rounds = ranks, ranks.grid, arguments.rounds
        self.load_rounds = arguments.load_rounds or arguments.rounds
        self.load_threads, self.skipped = arguments.load_threads, arguments.skip
        with contextlib.redirect_stdout(io.StringIO()):
            self.trainer = Trainer(ranks)
        self.optimizer = self.trainer.engine.optimizer
        self.folder = arguments.folder / "megatrain-benchmark"
        self.kinds = self.optimizer.kinds
        generator = torch.Generator(ranks.device).manual_seed(ranks.grid.rank)
        for tensor in self.tensors().values():
            if tensor.device == ranks.device:
                tensor.uniform_(0.0, 1.0, generator=generator)
            else:
                tensor.uniform_(0.0, 1.0)
        self.times: dict[str, Times] = {}
        self.num_bytes = sum(chunk.num_bytes for chunk in plan_chunks(self.optimizer, self.grid))
        self.dcp_group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of this rank by names that no other rank has."""
        return {
            f"rank{self.grid.rank}.{kind}.{number}": tensor
            for kind in self.kinds
            for number, tensor in enumerate(self.optimizer.state(kind))
        }

    def run(self) -> None:
        self.time_copy()
        if "save" not in self.skipped:
            self.time_save("megatrain save", DirectWriter(self.optimizer, self.grid, self.kinds))
        for num_threads in self.load_threads if "load" not in self.skipped else ():
            with mock.patch.object(reader, "_MAX_THREADS", num_threads):
                checked, unchecked = (
                    f"{name}, {num_threads} threads" for name in ("megatrain load", "the same, unchecked")
                )
                self.time_loads({checked: self._load, unchecked: self._load_unchecked})
        if "async-save" not in self.skipped:
            background = BackgroundWriter(self.optimizer, self.grid, self.kinds)
            self.time_save("megatrain --async-save", background)
            background.close()
        if "dcp" not in self.skipped:
            self.time_dcp("DCP save", self._dcp_save)
            self.time_loads({"DCP load": lambda: dcp.load(self.tensors(), checkpoint_id=self.folder / "0")})
        if "dcp-async-save" not in self.skipped:
            self.time_dcp("DCP async_save", self._dcp_async_save)

    def time_copy(self) -> None:
        with self._measured("copy to host") as times:
            for _ in range(self.rounds):
                self._synchronize()
                # The first copy touches the memory; the second is the one that counts.
                if not times.stall:
                    copies = [
                        torch.empty_like(tensor, device="cpu").fill_(1) for tensor in self.tensors().values()
                    ]
                    self._pin(copies)
                start = time.perf_counter()
                for copy, tensor in zip(copies, self.tensors().values(), strict=True):
                    copy.copy_(tensor, non_blocking=True)
                self._synchronize_device()
                times.stall.append(time.perf_counter() - start)
                times.duration.append(times.stall[-1])
            self._unpin(copies)

    def _pin(self, tensors: list[Tensor]) -> None:
        """Pin memory without torch's cache, which would keep it for the rest of the process."""
        for tensor in tensors if self.ranks.device.type == "cuda" else ():
            torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)

    def _unpin(self, tensors: list[Tensor]) -> None:
        for tensor in tensors if self.ranks.device.type == "cuda" else ():
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())

    def time_save(self, name: str, writer: DirectWriter | BackgroundWriter) -> None:
        with self._measured(name) as times:
            for number in range(1, self.rounds + 1):
                self._prepare()
                start = time.perf_counter()
                writer.begin(self._new_save(number))
                if (
                    self.optimizer.state_copied is not None
                ):  # the next update would wait for the copy on the GPU
                    self.optimizer.state_copied.synchronize()
                    self.optimizer.state_copied = None
                stall = time.perf_counter() - start
                self._poll(lambda: writer.is_ready)
                self._synchronize()  # a run commits when all ranks are ready
                commit = time.perf_counter()
                writer.commit()
                end = time.perf_counter()
                times.stall.append(stall + end - commit)
                times.duration.append(end - start)

    def time_dcp(self, name: str, save: Callable[[], float]) -> None:
        with self._measured(name) as times:
            for _ in range(self.rounds):
                self._prepare()
                start = time.perf_counter()
                times.stall.append(save())
                times.duration.append(time.perf_counter() - start)

    def time_loads(self, loads: dict[str, Callable[[], Any]]) -> None:
        """Time each load once a round, so that a change of the machine changes all."""
        with contextlib.ExitStack() as stack:
            times = {name: stack.enter_context(self._measured(name)) for name in reversed(loads)}
            for _ in range(self.load_rounds):
                for name, load in loads.items():
                    self._synchronize()
                    start = time.perf_counter()
                    load()
                    self._synchronize_device()
                    times[name].stall.append(time.perf_counter() - start)
                    times[name].duration.append(times[name].stall[-1])

    def _new_save(self, number: int) -> Save:
        progress = self.trainer.progress
        progress.iteration = number
        progress.consumed_train_samples = number * self.ranks.plan.config.training.global_batch_size
        progress.scheduled_samples = progress.consumed_train_samples
        return Save(
            self.folder,
            iteration=number,
            consumed_train_samples=progress.consumed_train_samples,
            optimizer_step_count=number,
            grid=self.grid,
            state=state_to_save(self.ranks, self.ranks.plan, self.trainer.engine, progress),
            config=self.ranks.plan.config.to_dict(),
        )

    def _load(self) -> None:
        load_checkpoint(self.folder, self.optimizer, self.grid)

    def _load_unchecked(self) -> None:
        with (
            mock.patch.object(BlockFormat, "matches", return_value=True),
            mock.patch.object(tensor_file, "begin_check_on_gpu", _check_nothing),
            mock.patch.object(reader, "finish_checks", return_value=[]),
        ):
            self._load()

    def _dcp_save(self) -> float:
        start = time.perf_counter()
        dcp.save(self.tensors(), checkpoint_id=self.folder / "0", process_group=self.dcp_group)
        return time.perf_counter() - start

    def _dcp_async_save(self) -> float:
        start = time.perf_counter()
        found: Any = dcp.async_save(
            self.tensors(), checkpoint_id=self.folder / "0", process_group=self.dcp_group
        )
        stall = time.perf_counter() - start
        self._poll(found.done)
        found.result()
        return stall

    def _poll(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            time.sleep(_SECONDS_BETWEEN_POLLS)

    def _prepare(self) -> None:
        """Remove the checkpoints of the last round, once no rank needs them."""
        self._synchronize()
        if self.ranks.is_main:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
        self._synchronize()

    def _synchronize(self) -> None:
        self._synchronize_device()
        all_reduce(torch.zeros(1, device=self.ranks.device), self.grid.world).item()

    def _synchronize_device(self) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def _measured(self, name: str) -> Iterator[Times]:
        gc.collect()
        times = self.times[name] = Times()
        yield times
        medians = torch.tensor(
            [statistics.median(times.stall), statistics.median(times.duration)],
            dtype=torch.float64,
            device=self.ranks.device,
        )
        stall, duration = all_reduce(medians, self.grid.world, "max").tolist()
        if self.ranks.is_main:
            speed = self.num_bytes / duration / 1e9
            print(f"| {name} | {stall:.3f} | {duration:.3f} | {speed:.2f} |", flush=True)


def _check_nothing(*_: object) -> None:
    """Stand in for `begin_check_on_gpu`, in less time than a mock."""


def measure(arguments: argparse.Namespace, flags: list[str]) -> int:
    with joined_ranks(parse(flags)) as ranks:
        benchmark = Benchmark(ranks, arguments)
        if ranks.is_main:
            where = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "CPU"
            print(
                f"\n{benchmark.num_bytes / 1e9:.2f} GB a rank, {ranks.grid.world.size} ranks, {where}, torch {torch.__version__}"
            )
            print("\n| | stall s | duration s | GB/s a rank |\n|---|---|---|---|", flush=True)
        benchmark.run()
        if ranks.is_main:
            shutil.rmtree(benchmark.folder, ignore_errors=True)
    return 0


def main() -> int:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder for the checkpoints, on the disk to measure"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load-rounds", type=int, help="rounds of loads [--rounds]")
    parser.add_argument(
        "--load-threads", type=int, nargs="+", default=[8], help="most threads of a rank that read"
    )
    parser.add_argument(
        "--skip", nargs="+", choices=PARTS, default=[], help="parts to leave out; loading needs a save"
    )
    arguments = parser.parse_args(words[:split])
    return report_errors(lambda: measure(arguments, words[split + 1 :]))


if __name__ == "__main__":
    sys.exit(main())
