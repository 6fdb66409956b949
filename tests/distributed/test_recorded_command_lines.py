"""Twenty of Megatron-LM's own command lines for GPT that start here train, five each for BERT, T5 and hybrids, and two with images, shrunk to two layers on two ranks."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from metrics_files import logged_steps
from run_here import train_rank
from tiny_tokenizers import NUM_SENTINELS, WORDS, write_corpus

from megatrain.tools.worker_pool import WorkerPool

NUM_LINES = {"gpt": 20, "bert": 5, "t5": 5, "hybrid": 5, "vlm": 2}
NUM_EVERYDAY = {"gpt": 1, "bert": 1, "t5": 1, "hybrid": 1, "vlm": 0}
VOCABULARIES = {"gpt": 256, "hybrid": 256, "vlm": 256, "bert": len(WORDS), "t5": len(WORDS) + NUM_SENTINELS}
NUM_DOCUMENTS = 12_000
"""So many that `--split 99982,9,9` leaves documents for evaluation."""


@pytest.fixture(scope="module")
def chosen(scripts: tuple[Any, Any]) -> dict[str, dict[str, list[str]]]:
    """Shrunk command lines by family and case: each is the one with the most flags, with their values, that none before it has."""
    recorded, shrink_command_line = scripts
    starting = set(recorded.STARTING.read_text(encoding="utf-8").split())
    lines: dict[str, dict[str, list[str]]] = {family: {} for family in NUM_LINES}
    for line in recorded.recorded_command_lines():
        if line.case in starting:
            family = dict(zip(line.flags, line.flags[1:], strict=False)).get("--model-family", "gpt")
            lines.setdefault(family, {})[line.case] = shrink_command_line.shrink(line.flags)
    found: dict[str, dict[str, list[str]]] = {family: {} for family in NUM_LINES}
    for family, count in NUM_LINES.items():
        own = lines[family]
        covered: set[tuple[str, ...]] = set()
        for _ in range(count):
            case = max(own, key=lambda case: len(settings(own[case]) - covered))
            covered |= settings(own[case])
            found[family][case] = own.pop(case)
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, num_documents=NUM_DOCUMENTS, num_letters=3)
    return folder


def settings(words: Sequence[str]) -> set[tuple[str, ...]]:
    """Return the flags of a command line, each with its values."""
    starts = [number for number, word in enumerate(words) if word.startswith("--")]
    return {tuple(words[a:b]) for a, b in zip(starts, [*starts[1:], len(words)], strict=True)}


def train_on_all(rank: int, world_size: int, words: list[str]) -> int:
    """Train on one rank with all of the mock data; return the exit code."""
    with patch("megatrain.data.samples.mock.NUM_SEQUENCES", 100_000):
        return train_rank(rank, world_size, words)


@pytest.mark.parametrize(
    ("family", "number"),
    [
        pytest.param(family, n, marks=[] if n < NUM_EVERYDAY[family] else pytest.mark.nightly)
        for family, count in NUM_LINES.items()
        for n in range(count)
    ],
)
def test_a_recorded_command_line_trains(
    chosen: dict[str, dict[str, list[str]]],
    pool: WorkerPool,
    corpus: Path,
    tmp_path: Path,
    family: str,
    number: int,
) -> None:
    case, words = list(chosen[family].items())[number]
    metrics = tmp_path / "metrics.jsonl"
    words = [word.replace("/tmp/megatrain", str(tmp_path)) for word in words]
    words += ["--device", "cpu", "--metrics-file", str(metrics)]
    if family in ("bert", "t5"):
        words += ["--vocab-file", f"{corpus}/vocab.txt", "--data-path", f"{corpus}/corpus"]
        words += ["--lr", "1e-2"]  # the recorded one of 1e-4 changes little in five iterations
    assert pool.run(2, train_on_all, words) == [0, 0], case
    steps = logged_steps(metrics)
    losses = [step["lm_loss"] for step in steps]
    assert [step["iteration"] for step in steps] == [1, 2, 3, 4, 5], case
    assert all(step["grad_norm"] > 0 and not step["skipped"] for step in steps), case
    assert losses[0] == pytest.approx(math.log(VOCABULARIES[family]), abs=0.3), case
    assert min(losses[2:]) < min(losses[:2]), case


def test_shrinking_changes_sizes_and_the_grid_only(scripts: tuple[Any, Any]) -> None:
    words = (
        "--num-layers 12 --hidden-size 512 --num-attention-heads 32 --num-query-groups 8 --kv-channels 128 --swiglu "
        "--tensor-model-parallel-size 4 --context-parallel-size {cp} --lr 0.1 --spec module function "
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3 --lr-decay-style=cosine"
    )
    shrunk = (
        "--num-layers {layers} --hidden-size 64 --num-attention-heads 8 --num-query-groups 2 --kv-channels 8 --swiglu "
        "--tensor-model-parallel-size 1 --context-parallel-size {cp} --lr 0.1 --spec module function "
    )
    _, script = scripts
    stages = (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --lr-decay-style cosine"
    )
    with_stages = (shrunk + stages).format(layers=4, cp=1)
    without = (shrunk + "--pipeline-model-parallel-size 1 --lr-decay-style cosine").format(layers=2, cp=2)
    assert script.shrink(words.format(cp=1).split()) == with_stages.split()
    assert script.shrink(words.format(cp=2).split()) == without.split()


@pytest.mark.parametrize(
    ("pattern", "grid", "shrunk"),
    [
        ("M-M-M*-M-", "1", "M-*"),
        ("MEMEM*EME/*E/*E", "1", "ME*/*E/*E"),
        ("M-M-|M*-M|M-M-|M*-", "2", "M|-|*|M"),
        ("M-E*M|M-M", "2", "ME|-*"),
        ("M-M-|M*-M", "1", "M-*"),
    ],
)
def test_shrinking_keeps_the_letters_stages_and_heads_of_a_pattern(
    scripts: tuple[Any, Any], pattern: str, grid: str, shrunk: str
) -> None:
    _, script = scripts
    for name in ("--hybrid-layer-pattern", "--hybrid-override-pattern"):
        words = script.shrink(
            [name, pattern, "--pipeline-model-parallel-size", grid, "--mamba-num-heads", "64"]
        )
        assert words[:2] == [name, shrunk]
        assert words[words.index("--mamba-num-heads") + 1] == "8"
        assert words[words.index("--mamba-head-dim") + 1] == "8"
