"""A training loop of your own, under any layout:

    torchrun --nproc-per-node 4 examples/train_loop.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

Flags describe model, layout and optimizer, as in `pretrain.py`; the loop and its batches are yours.
"""

import sys
from pathlib import Path

import torch

from megatrain.config import parse
from megatrain.parallel.batch import Batch
from megatrain.training.build import build_schedules
from megatrain.training.checkpoints import Progress, resume_run
from megatrain.training.engine import Engine
from megatrain.training.evaluation import evaluate
from megatrain.training.launch.ranks import Ranks, joined_ranks, report_errors
from megatrain.training.losses import mean_losses
from megatrain.training.saving import RunSaves

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope --seq-length 32"
    " --vocab-size 128 --mock-data --micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 1e-2"
    " --lr-decay-style constant"
)


def microbatches(ranks: Ranks, first_sample: int) -> list[Batch]:
    """Return this replica's micro-batches of the global batch that starts at `first_sample`: here, counting sequences."""
    training, length, dp = ranks.plan.config.training, ranks.plan.config.data.seq_length, ranks.grid.dp
    size, positions = training.micro_batch_size, torch.arange(length + 1, device=ranks.device)
    batches = []
    for first in range(dp.rank * size, training.global_batch_size, dp.size * size):
        samples = first_sample + first + torch.arange(size, device=ranks.device)
        ids = (samples[:, None] * 7 + positions) % ranks.plan.derived.vocab_size  # [b, s + 1]
        batches.append(
            Batch(
                tokens=ids[:, :-1],
                labels=ids[:, 1:],
                loss_mask=torch.ones(size, length, device=ranks.device),
                position_ids=positions[:-1].expand(size, -1),
            )
        )
    return batches


def train(argv: list[str]) -> int:
    """Train, evaluate and save; return the exit code."""
    with joined_ranks(parse([*FLAGS.split(), *argv])) as ranks:
        engine, progress = Engine(ranks.plan, ranks.grid, ranks.device), Progress()
        plan = resume_run(ranks, engine, progress)  # --load, or initial weights
        schedules = build_schedules(plan)
        while progress.iteration < plan.derived.train_iters:
            first = progress.consumed_train_samples
            hyperparams = schedules.at(progress.scheduled_samples)
            report = engine.step(microbatches(ranks, first), hyperparams, first_sample=first)
            progress.advance(plan.config.training.global_batch_size, is_updated=report.is_updated)
            ranks.console.print(f"iteration {progress.iteration}: loss {report.lm_loss:.6f}")
        loss = mean_losses(evaluate(engine, microbatches(ranks, progress.consumed_train_samples))).item()
        ranks.console.print(f"validation: loss {loss:.6f}")
        if plan.config.checkpoint.save is not None:
            RunSaves(ranks, plan, engine, progress).save(Path(plan.config.checkpoint.save))
    return 0


def main(argv: list[str]) -> int:
    """Train; print errors, and return their exit code."""
    return report_errors(lambda: train(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
