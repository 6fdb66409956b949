"""The quickstart's model and optimizer over fifty iterations in fp32: layouts give the losses of one process."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from megatrain.config import Facts, parse, resolve
from megatrain.parallel.batch import Batch
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.process_groups import make_group
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.build import build_schedules
from megatrain.training.engine import Engine
from megatrain.training.launch.ranks import grid_shape

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
VOCAB, SEQ, GLOBAL_BATCH, NUM_ITERATIONS = 4096, 64, 4, 50
FLAGS = (
    f"--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB} --seq-length {SEQ} --micro-batch-size 1"
    f" --global-batch-size {GLOBAL_BATCH} --device cpu"
)


@pytest.mark.nightly
def test_fifty_iterations_give_the_losses_of_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    sections = yaml.safe_load(QUICKSTART.read_text())
    kept = {name: sections[name] for name in ("model", "training", "optimizer", "schedule")}
    config = tmp_path / "quickstart.yaml"
    config.write_text(yaml.safe_dump(kept))
    command = [*FLAGS.split(), "--config", str(config)]
    (alone,) = pool.run(1, train, command)
    assert len(alone) == NUM_ITERATIONS
    assert alone[-1] < 0.8 * alone[0]
    for more in ("", "--sequence-parallel"):
        layout = ["--tensor-model-parallel-size", "2", *more.split()]
        for losses in pool.run(4, train, [*command, *layout]):
            assert losses == pytest.approx(alone, rel=1e-5, abs=0)


def train(rank: int, world_size: int, command: list[str]) -> list[float]:
    """Train; return the loss of each iteration."""
    plan = resolve(parse(command), Facts(world_size=world_size, vocab_size=VOCAB, eod_id=VOCAB - 1))
    assert plan.config.precision.params_dtype == "float32"
    grid = build_grid(grid_shape(plan), rank, make_group)
    engine = Engine(plan, grid, torch.device("cpu"))
    engine.initialize()
    schedules = build_schedules(plan)
    return [
        engine.step(local_batches(step, grid), schedules.at(step * GLOBAL_BATCH)).lm_loss
        for step in range(NUM_ITERATIONS)
    ]


def local_batches(step: int, grid: RankGrid) -> list[Batch]:
    """Return this replica's micro-batches of ids with a Zipf distribution."""
    ids = torch.from_numpy(np.random.default_rng(step).zipf(1.3, (GLOBAL_BATCH, SEQ + 1)) % VOCAB)
    return [
        Batch(
            tokens=sample[None, :-1].contiguous(),
            labels=sample[None, 1:].contiguous(),
            loss_mask=torch.ones(1, SEQ),
            position_ids=torch.arange(SEQ)[None],
        )
        for sample in ids[grid.dp.rank :: grid.dp.size]
    ]
