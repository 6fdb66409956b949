"""Count the files and lines between the start of a step and its first backward pass.

    python tests/distributed/step_path.py           print both lists, in reading order

As docs/contributing.md defines it, a file of megatrain/ counts with all its lines if a function in it runs on some rank;
config/, data/ and kernels/ do not count.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest does, for the helpers of tests
from run_here import make_trainer

PACKAGE = Path(__file__).resolve().parents[2] / "megatrain"
NOT_COUNTED = ("config", "data", "kernels")
ALL_AXES = (
    "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall --data-parallel-sharding-strategy optim_grads_params"
).split()
LAYOUTS: dict[str, tuple[int, list[str]]] = {"dense, one process": (1, []), "all axes": (8, ALL_AXES)}


@dataclass(frozen=True)
class StepPath:
    """The files of a step in the order in which they are entered, and the functions that run in each."""

    functions: dict[str, list[str]]

    @property
    def num_files(self) -> int:
        return len(self.functions)

    @property
    def num_lines(self) -> int:
        return sum(map(num_lines, self.functions))

    def lines(self) -> Iterator[str]:
        """A table for readers."""
        for file, names in self.functions.items():
            yield f"{num_lines(file):5}  {file:<40} {', '.join(names)}"
        yield f"{self.num_lines:5}  lines in {self.num_files} files"


def num_lines(file: str) -> int:
    """Count the lines of a file of megatrain/."""
    return len((PACKAGE / file).read_text(encoding="utf-8").splitlines())


def step_path(rank: int, world_size: int, flags: list[str]) -> dict[str, list[str]]:
    """Run two steps on one rank; return the functions by file that the second one enters before its first backward pass."""
    trainer = make_trainer(rank, world_size, flags)
    trainer.resume()
    recorder = _Recorder()
    for _ in range(2):
        recorder.start()
        batches, hyperparams = next_step(trainer)
        sys.setprofile(recorder)
        try:
            trainer.engine.step(batches, hyperparams)
        finally:
            sys.setprofile(None)
    return recorder.functions


def union_of_ranks(paths: list[dict[str, list[str]]]) -> StepPath:
    """Merge the ranks' paths: the first rank's order, then what only later ranks enter (the last stage has the head)."""
    merged: dict[str, list[str]] = {}
    for path in paths:
        for file, names in path.items():
            known = merged.setdefault(file, [])
            known += [name for name in names if name not in known]
    return StepPath(merged)


class _Recorder:
    """A profile function (`sys.setprofile`) that records calls until the first backward pass."""

    def __init__(self) -> None:
        self.functions: dict[str, list[str]] = {}
        self._is_recording = False

    def start(self) -> None:
        """Forget the step before."""
        self.functions, self._is_recording = {}, True

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not self._is_recording:
            return
        if code.co_name == "backward" and code.co_filename.endswith("torch/autograd/__init__.py"):
            self._is_recording = False
            return
        path = Path(code.co_filename)
        if PACKAGE not in path.parents or path.relative_to(PACKAGE).parts[0] in NOT_COUNTED:
            return
        names = self.functions.setdefault(str(path.relative_to(PACKAGE)), [])
        if not code.co_name.startswith("<") and code.co_name not in names:
            names.append(code.co_name)


def next_step(trainer: Any) -> tuple[Any, Any]:
    """The micro-batches and hyperparams of a run's first iteration."""
    from megatrain.config.derive.batch_sizes import batch_sizes
    from megatrain.training.build import build_schedules

    if trainer.batches.train is None:
        trainer.open_data()
    plan = trainer.plan
    sizes = batch_sizes(plan.config, data_parallel_size=plan.derived.data_parallel_size)
    return trainer.batches.train.microbatches(0, sizes.num_microbatches(0)), build_schedules(plan).at(0)


def main() -> None:
    """Print both lists."""
    from megatrain.tools.worker_pool import WorkerPool

    with WorkerPool(8) as pool, tempfile.TemporaryDirectory() as folder:
        for name, (world_size, flags) in LAYOUTS.items():
            paths = pool.run(world_size, step_path, [*flags, "--data-cache-path", folder])
            print(
                f"\n{name}, from Engine.step to the first backward pass:",
                *union_of_ranks(paths).lines(),
                sep="\n",
            )


if __name__ == "__main__":
    main()
