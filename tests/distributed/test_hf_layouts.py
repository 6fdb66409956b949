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
    "--seq-length 16 --mock-data --micro-batch-size 2 --global-batch-size 4 --train-iters 1 --lr 1e-30"
    " --weight-decay 0 --eval-iters 0 --device cpu --log-interval 1000 --attention-dropout 0 --hidden-dropout 0"
    " --moe-router-bias-update-rate 0"
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
DEEPSEEK = {
    **LLAMA, "architectures": ["DeepseekV3ForCausalLM"], "tie_word_embeddings": False, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 12,
    "first_k_dense_replace": 1, "num_mtp_layers": 0,
}  # fmt: skip
GPT_OSS = {
    **LLAMA, "architectures": ["GptOssForCausalLM"], "tie_word_embeddings": False, "head_dim": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
MODELS = {"Llama": LLAMA, "Mixtral": MIXTRAL, "DeepSeek-V3": DEEPSEEK, "gpt-oss": GPT_OSS}
CASES = [
    (model, layout, start)
    for model in MODELS
    for layout in LAYOUTS
    for start in ("folder", "checkpoint")
    if not (model == "Llama" and layout == "ep2")
]
ALWAYS = [("Llama", "pp2", "checkpoint"), ("DeepSeek-V3", "ep2", "folder")]


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
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, MODELS[model]["architectures"][0])
    theirs = kind(kind.config_class(**MODELS[model])).float()
    with torch.no_grad():
        for weight in theirs.parameters():  # a bias of 0 would be changed by the smallest learning rate
            weight.add_(0.1 * torch.randn(weight.shape))
    theirs.save_pretrained(tmp_path / "theirs")
    if start == "folder":
        source = f"--from-hf {tmp_path}/theirs --pretrained-checkpoint hf:{tmp_path}/theirs"
    else:
        assert main(["convert", "hf-to-megatrain", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
        source = f"--use-checkpoint-args --pretrained-checkpoint {tmp_path}/ours"
    folders = f"{source} --load {tmp_path}/run --save {tmp_path}/run".split()
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
