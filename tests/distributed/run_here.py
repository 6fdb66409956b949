"""Train inside the ranks of a worker pool, without the seconds that `pretrain.py` takes to start."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from metrics_files import logged_lines

from megatrain.config import parse, resolve
from megatrain.config.environment import LaunchEnvironment
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.process_groups import make_group
from megatrain.training.launch.agreement import agreed_plan
from megatrain.training.launch.facts import gather_facts
from megatrain.training.launch.ranks import Ranks, grid_shape
from megatrain.training.launch.save_lock import SaveLocks
from megatrain.training.logging.console import Console, Phases
from megatrain.training.trainer import Trainer

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 48 --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear "
    "--hidden-dropout 0 --attention-dropout 0 --seq-length 16 --tokenizer-type NullTokenizer --vocab-size 101 "
    "--make-vocab-size-divisible-by 1 --mock-data --micro-batch-size 2 --global-batch-size 8 --train-iters 20 "
    "--lr 1e-2 --lr-decay-style cosine --lr-warmup-iters 3 --eval-interval 7 --eval-iters 1 --eval-at-start "
    "--device cpu --log-interval 1000"
).split()
_TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = {
    "one process": (1, []),
    "tp2": (2, _TP2.split()),
    "dp4": (4, []),
    "pp4": (4, "--pipeline-model-parallel-size 4".split()),
    "dp2 pp2 zero0": (4, "--pipeline-model-parallel-size 2 --no-use-distributed-optimizer".split()),
    "tp2 dp2": (4, _TP2.split()),
    "tp2 dp2 pp2": (8, f"{_TP2} --pipeline-model-parallel-size 2".split()),
}


def train_here(rank: int, world_size: int, flags: list[str], seconds_to_live: float | None = None) -> int:
    """Train with these flags; return the exit code. SIGKILL ends all ranks after `seconds_to_live`."""
    if seconds_to_live is not None:
        timer = threading.Timer(seconds_to_live, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    exit_code = train_rank(rank, world_size, [*MODEL, *flags])
    if seconds_to_live is not None:
        timer.cancel()
    return exit_code


def train_rank(rank: int, world_size: int, words: list[str]) -> int:
    """Resume and train; return the exit code."""
    trainer = trainer_of_command_line(rank, world_size, words)
    trainer.resume()
    return trainer.train()


def make_trainer(rank: int, world_size: int, flags: list[str]) -> Trainer:
    """Build the trainer of a run of the tiny model."""
    return trainer_of_command_line(rank, world_size, [*MODEL, *flags])


def trainer_of_command_line(
    rank: int,
    world_size: int,
    words: list[str],
    store: dist.Store | None = None,
    ranks_per_node: int | None = None,
) -> Trainer:
    """Build the trainer as `joined_ranks` and `pretrain.py` do, in a process whose process groups exist already.

    Args:
        store: shares the facts of rank 0, for ranks that see other files; None: each rank gathers the same.
        ranks_per_node: None: all ranks are of one node.
    """
    per_node = ranks_per_node or world_size
    environment = LaunchEnvironment(
        rank=rank, world_size=world_size, local_rank=rank % per_node, local_world_size=per_node
    )
    request = parse(words)
    if store is None:
        facts = gather_facts(request, environment)
        plan = resolve(request, facts)
    else:
        facts, plan = agreed_plan(request, environment, store, SaveLocks({}, print))
    grid = build_grid(grid_shape(plan), rank, make_group)
    if plan.config.checkpoint.save:
        Path(plan.config.checkpoint.save).mkdir(parents=True, exist_ok=True)  # as the lock of --save does
    return Trainer(
        Ranks(
            request=request,
            plan=plan,
            facts=facts,
            grid=grid,
            device=torch.device("cpu"),
            local_rank=environment.local_rank,
            phases=Phases(Console(is_quiet=rank != 0)),
        )
    )


class UnbrokenRuns(dict[str, Path]):
    """The folder of an unbroken run by name; a run trains when its folder is first requested.

    Args:
        train: trains a run into a folder and returns the exit codes of its ranks.
    """

    def __init__(self, train: Callable[[str, Path], set[int]], folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self.train, self.folders = train, folders

    def __missing__(self, name: str) -> Path:
        folder = self.folders.mktemp("unbroken")
        assert self.train(name, folder) == {0}
        self[name] = folder
        return folder


NOT_REPRODUCIBLE = (
    "iteration_ms",
    "tokens_per_second_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "max_memory_bytes",
    "resumed",
    "save",
)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` without times."""
    lines = logged_lines(folder)
    return [{key: value for key, value in line.items() if key not in NOT_REPRODUCIBLE} for line in lines]


def folder_flags(folder: Path) -> list[str]:
    """Return flags that save to and load from one folder, as for a job that is restarted repeatedly."""
    return ["--save", str(folder), "--load", str(folder), "--save-interval", "4"]
