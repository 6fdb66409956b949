"""Checkpoints of Megatron-LM's FSDP, as torch.distributed.checkpoint writes them from DTensors: weights to start from."""

import argparse
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_folders import ARGUMENTS, SHAPES, weights, write
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import pretrain
from megatrain.config.errors import MegatrainError
from megatrain.interop.megatron.checkpoint import MegatronCheckpoint
from megatrain.tools.main import main
from megatrain.tools.worker_pool import WorkerPool

FORMATS = (pytest.param("torch_dcp", marks=pytest.mark.nightly), "fsdp_dtensor")


def parameters(kind: str) -> dict[str, Tensor]:
    """Return the master weights by the names of a format: layers one by one, and with fsdp_dtensor fc1 in halves."""
    found: dict[str, Tensor] = {}
    for name in SHAPES:
        values = weights()[f"optimizer.state.fp32_param.{name}"]
        layers = enumerate(values) if ".layers." in name else [(None, values)]
        for number, one in layers:
            whole = name if number is None else name.replace(".layers.", f".layers.{number}.")
            if kind == "fsdp_dtensor" and "linear_fc1" in name:
                found |= dict(zip((f"module.{whole}_w", f"module.{whole}_v"), one.chunk(2), strict=True))
            else:
                found[whole if kind == "torch_dcp" else f"module.{whole}"] = one
    return found


def saved(rank: int, world_size: int, path: Path, kind: str, stages: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in parameters(kind).items()}
    if rank == 4:
        assert any(one.to_local().numel() == 0 for one in model.values()), "a rank without rows of 8"
    moments = {name: {"step": torch.tensor(3.0), "exp_avg": one} for name, one in model.items()}
    arguments = {**ARGUMENTS, "pipeline_model_parallel_size": stages}
    state = {
        "model": {**model, "module.decoder.layers.0.mlp.linear_fc1._extra_state": None},
        "optimizer": {"state": moments, "param_groups": [{"step": 3, "lr": 1e-3}]},
        "args": argparse.Namespace(**arguments, bias_init=torch.nn.init.zeros_, params_dtype=torch.bfloat16),
        "iteration": 3,
        "opt_param_scheduler": {"num_steps": 6, "max_lr": 1e-3},
        "checkpoint_version": 3.0,
        "rng_state": [{"random": (1, 2)}],
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path))


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_those_of_torch_dist(kind: str, tmp_path: Path, pool: WorkerPool) -> None:
    path = tmp_path / kind / "iter_0000003"
    pool.run(5, saved, path, kind, 1)
    found, expected = MegatronCheckpoint(path), MegatronCheckpoint(write(tmp_path / "theirs", weights()))
    assert found.manifest.tensors.keys() == expected.manifest.tensors.keys()
    for name, stored in expected.manifest.tensors.items():
        assert found.manifest.tensors[name].shape == stored.shape
        values = [reader.values(name, stored.shape) for reader in (found, expected)]
        assert torch.equal(*values), name
    manifest = found.manifest
    assert (manifest.iteration, manifest.consumed_train_samples, manifest.state["scheduled_samples"]) == (
        3,
        6,
        6,
    )
    assert not manifest.state["has_optimizer"]


def test_a_run_starts_from_the_weights_and_stages_are_refused(
    tmp_path: Path, pool: WorkerPool, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    pool.run(2, saved, theirs / "iter_0000003", "fsdp_dtensor", 1)
    (theirs / "latest_checkpointed_iteration.txt").write_text("3")
    assert main(["convert", "megatron-to-megatrain", str(theirs), str(ours)]) == 0
    assert "it has no optimizer state: start from the weights with --finetune" in capsys.readouterr().out
    run = "--mock-data --micro-batch-size 1 --lr 1e-3 --eval-iters 0 --device cpu --use-checkpoint-args --train-iters 5"
    assert pretrain.main([*run.split(), "--load", str(theirs), "--no-load-optim"]) == 0
    assert pretrain.main([*run.split(), "--load", str(theirs)]) == 2
    printed = capsys.readouterr()
    assert "iteration 3, 6 samples consumed" in printed.out
    assert "--no-load-optim" in printed.err
    pool.run(2, saved, tmp_path / "stages", "fsdp_dtensor", 2)
    with pytest.raises(MegatrainError, match="has 2 stages of a pipeline") as error:
        MegatronCheckpoint(tmp_path / "stages")
    assert "--ckpt-format torch_dist" in error.value.problems[0].fix
