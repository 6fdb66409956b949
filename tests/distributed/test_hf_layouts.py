"""Weights of transformers pass through runs of several ranks: what comes back from each layout's checkpoint is equal.

The learning rate is too small to change any weight, so that the checkpoints have the weights that the runs started from.
"""

import json
from pathlib import Path

import pytest
import torch
from run_here import trainer_of_command_line
from safetensors.torch import load_file
from tiny_models import MODELS, tiny_model, write

from megatrain.tools.main import main
from megatrain.tools.worker_pool import WorkerPool

RUN = (
    "--seq-length 16 --mock-data --micro-batch-size 2 --global-batch-size 4 --train-iters 1 --lr 1e-30"
    " --weight-decay 0 --eval-iters 0 --device cpu --log-interval 1000 --attention-dropout 0 --hidden-dropout 0"
    " --moe-router-bias-update-rate 0"
).split()
LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "ep2": "--expert-model-parallel-size 2",
}
FAMILIES = {kind: name for name, (kind, _) in reversed(MODELS.items())}
"""The first model of each architecture."""
CASES = [
    (name, layout, start)
    for name in FAMILIES.values()
    for layout in LAYOUTS
    for start in ("folder", "checkpoint")
    if layout != "ep2" or any("expert" in key for key in MODELS[name][1])
]
ALWAYS = [("Llama 2", "pp2", "checkpoint"), ("DeepSeek-V3", "ep2", "folder")]


def train(rank: int, world_size: int, words: list[str]) -> int:
    trainer = trainer_of_command_line(rank, world_size, words)
    trainer.resume()
    return trainer.train()


@pytest.mark.parametrize(
    ("model", "layout", "start"),
    [pytest.param(*case, marks=[] if case in ALWAYS else pytest.mark.nightly) for case in CASES],
)
@pytest.mark.filterwarnings("ignore")
def test_weights_come_back_from_any_layout(
    model: str, layout: str, start: str, tmp_path: Path, pool: WorkerPool
) -> None:
    """Start from the folder of transformers itself (hf:), or from a checkpoint that it was converted to."""
    pytest.importorskip("transformers")
    write(tiny_model(model), tmp_path / "theirs")
    if start == "folder":
        source = f"--from-hf {tmp_path}/theirs --pretrained-checkpoint hf:{tmp_path}/theirs"
    else:
        assert main(["convert", "hf-to-megatrain", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
        source = f"--use-checkpoint-args --pretrained-checkpoint {tmp_path}/ours"
    folders = f"{source} --load {tmp_path}/run --save {tmp_path}/run".split()
    assert set(pool.run(2, train, [*RUN, *folders, *LAYOUTS[layout].split()])) == {0}
    assert json.loads((tmp_path / "run" / "iter_0000001" / "manifest.json").read_text())["iteration"] == 1
    words = ["--no-compare", "--architecture", MODELS[model][0]]
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "run"), str(tmp_path / "back"), *words]) == 0
    found = {
        name: tensor
        for file in (tmp_path / "back").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
