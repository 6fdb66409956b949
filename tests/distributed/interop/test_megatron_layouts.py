"""Runs of Megatron-LM continue directly from its checkpoints, over ranks: the recorded iterations 9 to 12 under every layout."""

import json
from pathlib import Path

import pytest
from metrics_files import assert_near_recorded, logged_steps
from run_here import train_rank
from tf32_routers import routers_in_tf32

from megatrain.tools.worker_pool import WorkerPool

LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout auto",
    "ep2": "--expert-model-parallel-size 2",
    "tp2 ep2": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
    " --expert-tensor-parallel-size 1",
}
DENSE, EXPERTS = ("gpt2", "llama", "mtp"), ("mixtral", "qwen3moe", "dsv3")
BOUND = {False: 1e-6, True: 1e-5}
"""Largest relative difference of losses and norms without and with experts."""
ALWAYS = ("mixtral", "ep2")
CASES = [
    pytest.param(case, layout, marks=() if (case, layout) == ALWAYS else pytest.mark.nightly)
    for layout in LAYOUTS
    for case in (*(DENSE if "ep2" not in layout else ()), *EXPERTS)
    if (case, layout) != ("qwen3moe", "ep2")  # its global auxiliary loss depends on the number of replicas
]


def train(rank: int, world_size: int, words: list[str]) -> int:
    with routers_in_tf32():
        return train_rank(rank, world_size, words)


@pytest.mark.parametrize(("case", "layout"), CASES)
def test_a_checkpoint_of_megatron_continues_over_ranks(
    case: str, layout: str, golden_text: Path, tmp_path: Path, pool: WorkerPool
) -> None:
    recordings = golden_text.parent / "training"
    recorded = json.loads((recordings / "flags.json").read_text())[case]
    words = [word.format(corpus=golden_text / "corpus_text_document") for word in recorded]
    words += (
        f"--train-iters 12 --device cpu --vocab-size 3072 --load {recordings / case}.ckpt --metrics-file {tmp_path}/metrics"
        f" --data-cache-path {tmp_path}/cache {LAYOUTS[layout]}"
    ).split()
    assert pool.run(2, train, words) == [0, 0]
    expected = json.loads((recordings / f"{case}.resumed.json").read_text())
    bound = BOUND[case in EXPERTS]
    assert_near_recorded(logged_steps(tmp_path / "metrics"), expected, loss=bound, norm=bound)
