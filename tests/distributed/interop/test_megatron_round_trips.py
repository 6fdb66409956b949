"""Runs in any layout go to Megatron-LM and come back: arguments as it has them, the same bits, the same next iterations."""

import math
from pathlib import Path

import pytest
from canonical_weights import assert_same_tensors, stored_values
from metrics_files import logged_steps
from run_here import train_here

from megatrain.checkpoint.reader import CheckpointReader
from megatrain.interop.megatron.checkpoint import MegatronCheckpoint
from megatrain.interop.megatron.torch_dist import TorchDistFolder
from megatrain.tools.main import main
from megatrain.tools.worker_pool import WorkerPool

EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall"
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
}
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
VIRTUAL = "virtual_pipeline_model_parallel_size"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS: dict[str, tuple[int, str, dict[str, object]]] = {
    "dp2": (2, "", {}),
    "tp2": (2, TP2, {SIZES["tp"]: 2, ETP: 2, "padded_vocab_size": 102}),
    "pp2 vpp2": (
        2,
        f"{PP2} --num-layers-per-virtual-pipeline-stage 1",
        {SIZES["pp"]: 2, VIRTUAL: 2, "transformer_pipeline_model_parallel_size": 2},
    ),
    "pp2 layout": (2, f"{PP2} --pipeline-model-parallel-layout Et|t|t|tL", {SIZES["pp"]: 2, VIRTUAL: 2}),
    "pp2 auto": (
        2,
        f"{PP2} --pipeline-model-parallel-layout auto",
        {VIRTUAL: None, "pipeline_model_parallel_layout": None},
    ),
    "cp2": (2, "--context-parallel-size 2", {SIZES["cp"]: 2}),
    "ep2": (2, f"{EXPERTS} --expert-model-parallel-size 2", {EP: 2, ETP: 1}),
    "tp2 ep2 etp1": (
        2,
        f"{EXPERTS} {TP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
        {SIZES["tp"]: 2, EP: 2, ETP: 1},
    ),
    "tp2 pp2 dp2": (8, f"{TP2} {PP2}", {SIZES["tp"]: 2, SIZES["pp"]: 2, "world_size": 8, "data_parallel_size": 2}),
}  # fmt: skip
ALWAYS = ("tp2 ep2 etp1",)
SHORT = "--global-batch-size 4 --eval-iters 0".split()


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.nightly) for name in LAYOUTS]
)
@pytest.mark.nightly
def test_a_run_goes_to_megatron_and_comes_back(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    world_size, flags, expected = LAYOUTS[layout]
    ours, theirs, back = (tmp_path / name for name in ("ours", "theirs", "back"))

    def train(folder: Path, *own: str) -> set[int]:
        words = [*flags.split(), *SHORT, *own, "--save", str(folder)]
        return set(pool.run(world_size, train_here, words))

    assert train(ours, "--exit-interval", "2") == {75}
    assert main(["convert", "megatrain-to-megatron", str(ours), str(theirs)]) == 0
    assert main(["convert", "megatron-to-megatrain", str(theirs), str(back), "--vocab-size", "101"]) == 0

    arguments = TorchDistFolder(theirs / "iter_0000002").object("common_state")[0]["args"].state
    assert {name: arguments[name] for name in expected} == expected
    assert_consistent(arguments, world_size)
    with CheckpointReader(ours / "iter_0000002") as first, CheckpointReader(back / "iter_0000002") as last:
        saved = stored_values(first)
        for other in (last, MegatronCheckpoint(theirs / "iter_0000002", 101)):
            assert_same_tensors(stored_values(other), saved)
        assert last.manifest.state["pass_size"] == first.manifest.state["pass_size"]

    for start in (ours, theirs, back):
        folder = tmp_path / f"after {start.name}"
        assert train(folder, "--load", str(start), "--exit-interval", "4") == {75}
    after = [losses(tmp_path / f"after {start.name}") for start in (ours, theirs, back)]
    assert len(after[0]) == 2
    assert after[1] == after[2] == after[0]


def assert_consistent(arguments: dict[str, object], world_size: int) -> None:
    """Assert what Megatron-LM asserts of its arguments."""

    def sizes(*names: str) -> int:
        return math.prod(int(str(arguments[name])) for name in names)

    assert arguments["world_size"] == world_size == sizes(*SIZES.values(), "data_parallel_size")
    assert world_size % sizes(SIZES["pp"], EP, ETP) == 0
    assert sizes("padded_vocab_size") % sizes("make_vocab_size_divisible_by", SIZES["tp"]) == 0
    assert sizes("global_batch_size") % sizes("micro_batch_size", "data_parallel_size") == 0


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(line["lm_loss"], line["grad_norm"]) for line in logged_steps(folder)]
