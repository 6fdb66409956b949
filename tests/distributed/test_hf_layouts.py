"""Models of transformers in runs of several ranks: weights, greedy texts and losses from each layout's checkpoint are its own."""

import json
from pathlib import Path

import pytest
from canonical_weights import assert_same_tensors, tensors_of
from metrics_files import logged_losses
from run_here import train_rank
from safetensors.torch import load_file
from tiny_models import MODELS, tiny_model, write
from torch import Tensor
from transformers_reference import (
    END,
    LEARNING_RATE,
    TRAINING,
    global_batches,
    greedy_tokens,
    training_losses,
)

from megatrain.tools.main import main
from megatrain.tools.worker_pool import WorkerPool

GLOBAL_BATCH = 2
RUN = [*TRAINING, *f"--micro-batch-size 1 --global-batch-size {GLOBAL_BATCH}".split()]
FROZEN = "--train-iters 1 --lr 1e-30".split()
"""The learning rate is too small to change any weight: the checkpoint has the weights that the run started from."""
LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "ep2": "--expert-model-parallel-size 2",
}
FAMILIES = (
    *("Llama 2", "Llama 3", "Mistral", "Qwen2", "Qwen2.5", "Qwen3", "OLMo-2", "Phi-3", "GPT-2", "GPT-NeoX", "Pythia"),
    *("Gemma 2", "Gemma 3", "Qwen2-MoE", "Qwen3-MoE", "Qwen3-Next", "Qwen3.5", "Mixtral", "OLMoE", "DeepSeek-V2", "DeepSeek-V3", "gpt-oss"),
    *("Nemotron-H", "Nemotron 3", "Mamba-2", "Bamba"),
)  # fmt: skip
CASES = [
    (name, layout)
    for name in FAMILIES
    for layout in LAYOUTS
    if layout != "ep2" or any("expert" in key for key in MODELS[name][1])
]
ALWAYS = [("DeepSeek-V3", "ep2")]


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Tensor, Tensor]]:
    """The global batches of these runs: all models have the same vocabulary."""
    pytest.importorskip("transformers")
    folder = write(tiny_model("Llama 2"), tmp_path_factory.mktemp("theirs"))
    return global_batches([*RUN, "--from-hf", str(folder)], num_samples=GLOBAL_BATCH)


@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*case, marks=[] if case in ALWAYS else pytest.mark.nightly) for case in CASES],
)
@pytest.mark.filterwarnings("ignore")
def test_a_layout_s_checkpoint_has_the_model_of_transformers(
    model: str,
    layout: str,
    tmp_path: Path,
    pool: WorkerPool,
    batches: list[tuple[Tensor, Tensor]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ranks read the folder, save, continue from what they saved; tensors come back and one process writes text from it."""
    theirs = tiny_model(model)
    folder, run = write(theirs, tmp_path / "theirs"), tmp_path / "run"
    split = LAYOUTS[layout].split()
    source = f"--from-hf {folder} --pretrained-checkpoint hf:{folder} --load {run} --save {run}".split()
    assert set(pool.run(2, train_rank, [*RUN, *FROZEN, *source, *split])) == {0}
    assert json.loads((run / "iter_0000001" / "manifest.json").read_text())["iteration"] == 1

    back = tmp_path / "back"
    words = ["--no-compare", "--architecture", MODELS[model][0]]
    assert main(["convert", "megatrain-to-hf", str(run), str(back), *words]) == 0
    found = tensors_of(back)
    expected = load_file(folder / "model.safetensors")
    assert_same_tensors(found, expected)

    capsys.readouterr()
    prompt = [29, 5]  # with 15 tokens more, as many as the runs' context has
    flags = ["--temperature", "0", "--max-new-tokens", "15", "--termination-id", str(END), "--json"]
    assert main(["generate", "--load", str(run), "--prompt", " ".join(map(str, prompt)), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == greedy_tokens(theirs, prompt)

    metrics = tmp_path / "metrics.jsonl"
    again = f"--use-checkpoint-args --load {run} --finetune --metrics-file {metrics}".split()
    assert set(pool.run(2, train_rank, [*RUN, *again, *split])) == {0}
    expected_losses = training_losses(theirs, batches, lr=LEARNING_RATE)
    assert logged_losses(metrics) == pytest.approx(expected_losses, rel=1e-5)
