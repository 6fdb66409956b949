"""--check-weight-hash-across-dp-replicas-interval: one flipped bit of a weight is found, and the rank that holds it is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from everyday import one_in
from run_here import LAYOUTS, folder_flags, make_trainer, train_here

from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.debugging.replicas import ReplicaError, check_replicas

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --expert-model-parallel-size 2"
ZERO_3 = "--data-parallel-sharding-strategy optim_grads_params --use-megatron-fsdp"


def error_text(rank: int, world_size: int, flags: list[str], culprit: int, name: str) -> str:
    """Flip the lowest bit of a tensor's first weight on one rank after two iterations; return the error."""
    trainer = make_trainer(
        rank, world_size, [*flags, "--train-iters", "2", "--lr-warmup-iters", "0", "--eval-iters", "0"]
    )
    trainer.resume()
    assert trainer.train() == 0
    trainer.engine.data_parallel.wait_for_weights()
    if rank == culprit:
        for number, bucket in enumerate(trainer.engine.buffers.buckets):
            for param in bucket.params:
                for piece in param.entry.layout.pieces:
                    if piece.name == name:
                        weights = trainer.engine.buffers.weights.full[number][param.start : param.stop]
                        rows = weights.view(torch.int32).view(param.entry.layout.shape)
                        rows[piece.row].view(-1)[0] ^= 1
    try:
        check_replicas(trainer.engine, 2)
    except ReplicaError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "flags", "culprit", "name", "named"),
    [
        ("dp4", "", 2, "decoder.layers.1.mlp.down.weight", [2]),
        ("dp4", "", 0, "decoder.final_norm.weight", [0]),
        ("tp2", "", 1, "decoder.layers.0.attention.norm.weight", [0, 1]),  # no majority among two
        ("dp4", EXPERTS, 3, "decoder.layers.0.mlp.experts.2.down.weight", [1, 3]),
        (
            "tp2",
            "",
            1,
            "decoder.layers.0.mlp.down.weight",
            [],
        ),  # split over the ranks: no other rank holds it
    ],
)
def test_a_flipped_bit_names_the_rank(
    pool: WorkerPool, layout: str, flags: str, culprit: int, name: str, named: list[int]
) -> None:
    world_size, words = LAYOUTS[layout]
    answers = pool.run(world_size, error_text, [*words, *flags.split()], culprit, name)
    assert len(set(answers)) == 1
    for rank in range(world_size):
        assert (f"rank {rank} on " in answers[0]) == (rank in named)
    assert (name in answers[0]) == bool(named)


def error_of_run(rank: int, world_size: int, flags: list[str]) -> str:
    """Flip a bit of a weight of another rank's shard on the last rank, at the begin of the second step; return the error."""
    trainer = make_trainer(rank, world_size, flags)
    begin, calls = trainer.engine.accumulate_gradients, []

    def spoiled(*arguments: Any, **more: Any) -> Any:
        calls.append(None)
        if len(calls) == 2 and rank == world_size - 1:
            trainer.engine.data_parallel.wait_for_weights()
            trainer.engine.buffers.weights.full[0].view(torch.int32)[0] ^= 1 << 20
        return begin(*arguments, **more)

    trainer.engine.accumulate_gradients = spoiled
    trainer.resume()
    try:
        trainer.train()
    except ReplicaError as error:
        return str(error)
    return ""


def test_a_bit_that_the_update_would_replace_is_found_before_it(pool: WorkerPool, tmp_path: Path) -> None:
    flags = ["--train-iters", "4", "--lr-warmup-iters", "0", "--eval-iters", "0"]
    flags += ["--save", str(tmp_path), "--check-weight-hash-across-dp-replicas-interval", "2"]
    world_size, words = LAYOUTS["tp2 dp2"]
    (error,) = set(pool.run(world_size, error_of_run, [*words, *flags]))
    assert error.startswith("iteration 2: weights differ from the weights of the other ranks that hold them")
    assert "rank 3 on " in error
    assert not list(tmp_path.glob("iter_*"))


@pytest.mark.parametrize(("layout", "flags"), one_in(2, [("tp2 dp2", "--bf16"), ("dp4", ZERO_3)]))
def test_an_intact_run_passes(pool: WorkerPool, tmp_path: Path, layout: str, flags: str) -> None:
    world_size, words = LAYOUTS[layout]
    words = [*words, *flags.split(), *folder_flags(tmp_path), "--train-iters", "3", "--lr-warmup-iters", "0"]
    words += ["--check-weight-hash-across-dp-replicas-interval", "1"]
    assert set(pool.run(world_size, train_here, words)) == {0}
