"""--lora-rank: every layout trains as one process does, in fp64; the base stays; exports compute what an evaluation does."""

from pathlib import Path

import pytest
import torch
from canonical_weights import hash_tensors
from everyday import only
from metrics_files import logged_steps
from run_here import MODEL, train_rank

from megatrain.checkpoint.reader import CheckpointReader
from megatrain.config.model_spec.lora import adapter_names, is_adapter
from megatrain.tools.main import main
from megatrain.tools.worker_pool import WorkerPool

FLAGS = [
    *MODEL,
    *"--num-layers 2 --global-batch-size 4 --train-iters 4 --lr-warmup-iters 1 --lr 1e-2 --eval-iters 0 --log-interval 1 --params-dtype float64".split(),
]
ADAPTERS = "--lora-rank 3 --lora-alpha 6 --lora-dropout 0.2".split()
LAYOUTS = {
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel --recompute-mlp-act"),
    "tp2 pp2 recomputed": (
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --recompute-granularity selective --recompute-modules layernorm",
    ),
    "cp2 zero3": (4, "--context-parallel-size 2 --data-parallel-sharding-strategy optim_grads_params"),
}


def losses(path: Path) -> list[float]:
    return [x for line in logged_steps(path) for x in (line["lm_loss"], line["grad_norm"])]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    with CheckpointReader(folder) as reader:
        for name, tensor in reader.manifest.tensors.items():
            assert (len(tensor.kinds) > 1) == is_adapter(name) or folder.parent.name != "run"
            found[name] = reader.values(name, tensor.shape, dtype=torch.float64)
    return found


@pytest.fixture(scope="module")
def folder(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model `base`, and one process that trains its adapters in `run`."""
    folder = tmp_path_factory.mktemp("adapters")
    assert set(pool.run(1, train_rank, [*FLAGS, "--train-iters", "2", "--save", f"{folder}/base"])) == {0}
    words = [*FLAGS, *ADAPTERS, "--pretrained-checkpoint", f"{folder}/base", "--save-interval", "2"]
    words += ["--metrics-file", f"{folder}/losses", "--save", f"{folder}/run"]
    assert set(pool.run(1, train_rank, words)) == {0}
    return folder


@pytest.mark.parametrize("layout", only("tp2 sp", LAYOUTS))
def test_layouts_train_the_same_adapters(pool: WorkerPool, folder: Path, tmp_path: Path, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    words = [*FLAGS, *ADAPTERS, *flags.split(), "--pretrained-checkpoint", f"{folder}/base"]
    words += ["--metrics-file", f"{tmp_path}/losses", "--save", f"{tmp_path}/run"]
    assert set(pool.run(world_size, train_rank, words)) == {0}
    assert losses(tmp_path / "losses") == pytest.approx(losses(folder / "losses"), rel=1e-10)
    expected = tensors(folder / "run" / "iter_0000004")
    for name, values in tensors(tmp_path / "run" / "iter_0000004").items():
        torch.testing.assert_close(values, expected[name], rtol=1e-9, atol=1e-11)


def test_adapters_are_resumed_and_merged(pool: WorkerPool, folder: Path, tmp_path: Path) -> None:
    words = [*FLAGS, *ADAPTERS, "--load", f"{folder}/run/iter_0000002", "--save", f"{tmp_path}/run"]
    assert set(pool.run(1, train_rank, words)) == {0}
    last = folder / "run" / "iter_0000004"
    assert hash_tensors(tmp_path / "run" / "iter_0000004") == hash_tensors(last)
    base, found = tensors(folder / "base" / "iter_0000002"), tensors(last)
    assert main(["checkpoint", "merge-lora", str(last), str(tmp_path / "merged")]) == 0
    merged = tensors(tmp_path / "merged" / "iter_0000004")
    assert merged.keys() == base.keys()
    for name, weight in base.items():
        assert torch.equal(found[name], weight), "the base is frozen"
        a, b = (found.get(one) for one in adapter_names(name))
        assert (
            (a is None)
            == (b is None)
            == ((".attention." not in name and ".mlp." not in name) or ".norm." in name)
        )
        expected = weight if a is None or b is None else weight + 6 / 3 * b @ a
        assert a is None or not torch.equal(expected, weight)
        torch.testing.assert_close(merged[name], expected, rtol=1e-12, atol=1e-14)
    # transformers computes the logits of the folder as the trained model, or the command fails
    assert main(["convert", "megatrain-to-hf", str(last), str(tmp_path / "hf")]) == 0
