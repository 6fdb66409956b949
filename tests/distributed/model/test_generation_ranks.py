"""Text generation over tensor ranks: tokens are those of one process, from checkpoints of any layout."""

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_job import ForkedJob
from run_here import MODEL, train_here, trainer_of_command_line

from megatrain.config import ConfigError
from megatrain.inference.leading_engine import LeadingEngine, follow
from megatrain.inference.sampling import Sampling
from megatrain.inference.stored_model import ModelOptions, TensorRanks, load_model
from megatrain.inference.texts import TextEngine, plan_cache
from megatrain.parallel.messages import Messages
from megatrain.parallel.process_groups import make_group
from megatrain.tools.generation.load import joined_process
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.launch.ranks import report_errors

CPU = torch.device("cpu")
PROMPTS = [[5, 3, 8], [1], [9, 9, 2, 7, 1, 4]]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 0 --moe-expert-capacity-factor 0.5"
LATENTS = (
    "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 4 --qk-pos-emb-head-dim 4"
    " --v-head-dim 4 --q-lora-rank 20 --qk-layernorm --rope-type rope --softmax-type vanilla"
)
INDEXER = (
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8"
    " --dsa-indexer-topk 4 --dsa-indexer-loss-coeff 0.5"
)
LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
MODELS = {
    "groups": (4, LAYOUT),
    "latents": (1, LATENTS),
    "selected keys": (4, f"{LATENTS} {INDEXER} {LAYOUT}"),
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
    engine = TextEngine(loaded.model, loaded.tokenizer, plan, CPU, end_ids=())
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


def served(rank: int, world_size: int, folder: str) -> list[list[int]] | bool:
    """Return the tokens of texts that join later; one is removed and one ends with a stop word. Other ranks: whether memory is free."""
    make = make_group if world_size > 1 else None
    options = ModelOptions(device=CPU, dtype=torch.float64, ranks=TensorRanks(world_size, rank, make))
    loaded = load_model(Path(folder), options)
    plan = plan_cache(loaded.model, dtype=torch.float64, max_tokens=15, num_sequences=2, limit_bytes=1 << 30)
    store = None if make is None else make("messages", [range(world_size)], timeout=timedelta(minutes=1))
    messages = Messages(rank, world_size, store)
    built = (loaded.model, loaded.tokenizer, plan, CPU, ())
    if rank:
        engine = TextEngine(*built)
        follow(engine, messages)
        return engine.engine.model.cache.is_empty
    engine, found = LeadingEngine(*built, messages), []
    for number, prompt in enumerate([*PROMPTS, *PROMPTS]):
        stop = ("9",) if number == 4 else ()
        found.append(engine.submit(prompt, Sampling(max_new_tokens=8, seed=number, stop=stop)))
        engine.step()
        if number == 3:
            engine.remove(found[2])
            engine.keep_alive()
    while not engine.engine.is_idle:
        engine.step()
    engine.close()
    return [one.completion.tokens for one in found]


def test_other_ranks_repeat_what_the_first_one_does(trained: str, pool: WorkerPool) -> None:
    (expected,) = pool.run(1, served, trained)
    assert len(expected[2]) < 8
    assert [len(tokens) for tokens in expected[:2]] == [8, 8]
    assert pool.run(2, served, trained) == [expected, True]


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
        assert "3 tensor ranks: 4 heads of the model do not divide over them" in message
        assert "fix: start fewer ranks" in message


def failing(words: list[str]) -> int:
    """Fail on one rank or on all, once they have joined."""
    arguments = argparse.Namespace(device="cpu")

    def run() -> int:
        with joined_process(arguments) as process:
            if words == ["all"] or process.ranks.rank == int(words[0]):
                raise ConfigError("the files of this host differ", fix="copy them")
            dist.barrier()
        return 0

    return report_errors(run)


@pytest.mark.parametrize("where", ["0", "1", "all"])
def test_an_error_of_any_rank_is_printed_once(where: str, tmp_path: Path) -> None:
    job = ForkedJob([where], 2, tmp_path, main=failing)
    job.wait()
    assert set(job.exit_codes.values()) == {2}
    texts = [job.output(rank) for rank in range(2)]
    assert sum(text.count("the files of this host differ\n  fix: copy them") for text in texts) == 1, texts


@pytest.mark.nightly
@pytest.mark.parametrize("prompt", ["5 3 8", "200"])
def test_the_command_runs_on_the_ranks_of_a_launcher(trained: str, prompt: str) -> None:
    words = ["generate", "--load", trained, "--prompt", prompt, "--device", "cpu", "--json", "--seed", "2"]
    one = [sys.executable, "-m", "megatrain.tools.main", *words]
    two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *one[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    alone, together = (subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
                       for command in (one, two))  # fmt: skip
    if prompt == "200":
        assert alone.returncode == 2
        assert together.returncode != 0
        assert (
            len(re.findall("^.*error: .*200 is outside the vocabulary of 101", together.stderr, re.MULTILINE))
            == 1
        )
        return
    assert together.returncode == 0, together.stderr
    assert json.loads(together.stdout)["tokens"] == json.loads(alone.stdout)["tokens"]


@pytest.mark.nightly
def test_the_server_runs_on_the_ranks_of_a_launcher(trained: str, tmp_path: Path) -> None:
    """Requests are answered as by `generate` in one process, a taken port is one error, and a signal ends all ranks."""
    pytest.importorskip("uvicorn")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "megatrain.tools.main",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    serve = [*launch, "serve", "--load", trained, "--device", "cpu", "--port"]
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen([*serve, "0"], stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + 120
        while (found := re.search(r"http://127.0.0.1:(\d+)/", log.read_text())) is None:
            assert time.monotonic() < deadline, log.read_text()
            assert server.poll() is None, log.read_text()
            time.sleep(0.1)
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
        fields = {"prompt": [5, 3, 8], "max_tokens": 6, "temperature": 0}
        texts = []
        for _ in range(3):
            connection.request(
                "POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"}
            )
            texts.append(json.loads(connection.getresponse().read())["choices"][0]["text"])
        connection.close()
        words = [
            "generate",
            "--load",
            trained,
            "--prompt",
            "5 3 8",
            "--device",
            "cpu",
            "--json",
            "--temperature",
            "0",
        ]
        one = [sys.executable, "-m", "megatrain.tools.main", *words, "--max-new-tokens", "6"]
        alone = subprocess.run(one, capture_output=True, text=True, env=environment, check=True, timeout=120)
        assert texts == [json.loads(alone.stdout)["text"]] * 3
        taken = subprocess.run(
            [*serve, found[1]], capture_output=True, text=True, env=environment, check=False, timeout=120
        )
        assert taken.returncode != 0
        assert len(re.findall("^.*error: .*Address already in use", taken.stderr, re.MULTILINE)) == 1, (
            taken.stderr
        )
        server.terminate()
        server.wait(90)
        assert "stopped; all memory of the cache is free" in log.read_text()
        assert "Traceback" not in log.read_text().split("stopped;")[0]
    finally:
        server.kill()
