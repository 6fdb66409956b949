"""Weights of transformers pass through runs of several ranks: what comes back from each layout's checkpoint is equal.

The learning rate is too small to change any weight, so that the checkpoints have the weights that the runs started from.
"""

import json
from pathlib import Path

import pytest
import torch
from run_here import trainer_of_command_line
from safetensors.torch import load_file

from megatrain.tools.main import main
from megatrain.tools.worker_pool import WorkerPool

RUN = (
    "--use-checkpoint-args --seq-length 16 --mock-data --micro-batch-size 2 --global-batch-size 4 --train-iters 1 --lr 1e-30"
    " --weight-decay 0 --eval-iters 0 --device cpu --log-interval 1000 --attention-dropout 0 --hidden-dropout 0"
).split()
LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "ep2": "--expert-model-parallel-size 2",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 33, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
           "tie_word_embeddings": False}  # fmt: skip
MODELS = {"Llama": LLAMA, "Mixtral": MIXTRAL}
CASES = [("Llama", "tp2"), ("Llama", "pp2"), ("Mixtral", "tp2"), ("Mixtral", "pp2"), ("Mixtral", "ep2")]
ALWAYS = [("Llama", "pp2"), ("Mixtral", "ep2")]


def train(rank: int, world_size: int, words: list[str]) -> int:
    trainer = trainer_of_command_line(rank, world_size, words)
    trainer.resume()
    return trainer.train()


@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*case, marks=[] if case in ALWAYS else pytest.mark.nightly) for case in CASES],
)
@pytest.mark.filterwarnings("ignore")
def test_weights_come_back_from_any_layout(model: str, layout: str, tmp_path: Path, pool: WorkerPool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, MODELS[model]["architectures"][0])
    kind(kind.config_class(**MODELS[model])).float().save_pretrained(tmp_path / "theirs")
    assert main(["convert", "hf-to-megatrain", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    folders = f"--pretrained-checkpoint {tmp_path}/ours --load {tmp_path}/run --save {tmp_path}/run".split()
    assert set(pool.run(2, train, [*RUN, *folders, *LAYOUTS[layout].split()])) == {0}
    assert json.loads((tmp_path / "run" / "iter_0000001" / "manifest.json").read_text())["iteration"] == 1
    assert (
        main(["convert", "megatrain-to-hf", str(tmp_path / "run"), str(tmp_path / "back"), "--no-compare"])
        == 0
    )
    found = {
        name: tensor
        for file in (tmp_path / "back").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
