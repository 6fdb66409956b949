"""Text generation over tensor ranks: tokens are those of one process, from checkpoints of any layout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_here import MODEL, train_here, trainer_of_command_line

from megatrain.config import ConfigError
from megatrain.inference.sampling import Sampling
from megatrain.inference.stored_model import ModelOptions, TensorRanks, load_model
from megatrain.inference.texts import TextEngine, plan_cache
from megatrain.parallel.process_groups import make_group
from megatrain.tools.worker_pool import WorkerPool

CPU = torch.device("cpu")
PROMPTS = [[5, 3, 8], [1], [9, 9, 2, 7, 1, 4]]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 0 --moe-expert-capacity-factor 0.5"
MODELS = {
    "groups": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"),
    "latents": (
        1,
        (
            "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 4 --qk-pos-emb-head-dim 4"
            " --v-head-dim 4 --q-lora-rank 20 --qk-layernorm --rope-type rope --softmax-type vanilla"
        ),
    ),
    "states and experts": (
        1,
        (
            "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-conv-kernel-dim 3"
            " --linear-num-key-heads 4 --linear-key-head-dim 8 --linear-num-value-heads 4 --linear-value-head-dim 4"
            f" --attention-output-gate --moe-shared-expert-intermediate-size 8 {EXPERTS}"
        ),
    ),
}


def texts(rank: int, world_size: int, folder: str) -> list[list[int]]:
    """Return the sampled tokens of each prompt."""
    ranks = TensorRanks(world_size, rank, make_group if world_size > 1 else None)
    options = ModelOptions(device=CPU, dtype=torch.float64, ranks=ranks, is_unlimited=True)
    loaded = load_model(Path(folder), options)
    plan = plan_cache(loaded.model, dtype=torch.float64, max_tokens=15, num_sequences=2, limit_bytes=1 << 30)
    engine = TextEngine(loaded.model, loaded.tokenizer, plan, CPU, eod=None)
    found = [engine.submit(prompt, Sampling(max_new_tokens=8, seed=3)) for prompt in PROMPTS]
    while not engine.engine.is_idle:
        engine.step()
    assert engine.engine.model.cache.is_empty
    return [one.completion.tokens for one in found]


TRAINING = "--train-iters 1 --lr-warmup-iters 0 --init-method-std 0.2"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pool: WorkerPool) -> str:
    folder = str(tmp_path_factory.mktemp("trained"))
    assert pool.run(1, train_here, [*TRAINING.split(), "--save", folder]) == [0]
    return folder


def test_tokens_are_those_of_one_process(trained: str, pool: WorkerPool) -> None:
    (expected,) = pool.run(1, texts, trained)
    assert len({token for tokens in expected for token in tokens}) > 8
    assert pool.run(2, texts, trained) == [expected] * 2


def train(rank: int, world_size: int, words: list[str]) -> int:
    return trainer_of_command_line(rank, world_size, words).train()


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_other_models_and_of_four_ranks(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    world_size, flags = MODELS[name]
    words = " ".join([*MODEL, TRAINING, flags, "--save", str(tmp_path)])
    if "latent" in flags:  # each head has keys of its own
        words = words.replace("--group-query-attention --num-query-groups 2", "")
    assert set(pool.run(world_size, train, words.split())) == {0}
    (expected,) = pool.run(1, texts, str(tmp_path))
    for size in (2, 4):
        assert pool.run(size, texts, str(tmp_path)) == [expected] * size


def refused(rank: int, world_size: int, folder: str) -> str:
    with pytest.raises(ConfigError) as caught:
        texts(rank, world_size, folder)
    return str(caught.value)


def test_sizes_that_do_not_divide_are_refused(trained: str, pool: WorkerPool) -> None:
    for message in pool.run(3, refused, trained):
        assert "3 tensor ranks: 4 attention heads of the model do not divide over them" in message
        assert "fix: start fewer ranks" in message


@pytest.mark.nightly
@pytest.mark.parametrize("prompt", ["5 3 8", "200"])
def test_the_command_runs_on_the_ranks_of_a_launcher(trained: str, prompt: str) -> None:
    words = ["generate", "--load", trained, "--prompt", prompt, "--device", "cpu", "--json", "--seed", "2"]
    one = [sys.executable, "-m", "megatrain.tools.main", *words]
    two = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *one[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    alone, together = (subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
                       for command in (one, two))  # fmt: skip
    if prompt == "200":
        assert alone.returncode == 2
        assert together.returncode != 0
        assert together.stderr.count("200 is outside the vocabulary of 101") == 1
        return
    assert together.returncode == 0, together.stderr
    assert json.loads(together.stdout)["tokens"] == json.loads(alone.stdout)["tokens"]
