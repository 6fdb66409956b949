"""`config.yaml` of a run, alone in another folder, makes the same run again: every loss and every bit of its state."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from canonical_weights import hash_tensors
from metrics_files import logged_lines
from run_helpers import ROOT

import pretrain
from megatrain.checkpoint.find import newest_valid
from megatrain.data.indexed.writer import IndexedWriter

# A setting of every kind: switches and their opposites, numbers that binary fractions miss, texts, lists, open values.
FLAGS = (
    "--config model.yaml --hidden-dropout 0.1 --attention-dropout 0.3 --no-use-distributed-optimizer --lr 3.3e-3"
    " --min-lr 1e-7 --lr-decay-style WSD --lr-wsd-decay-samples 40 --lr-wsd-decay-style minus_sqrt --weight-decay 0.07"
    " --lr-warmup-samples 13 --rampup-batch-size 4 4 40 --global-batch-size 12 --micro-batch-size 2 --train-samples 188"
    " --seed 5 --adam-beta2 0.95 --clip-grad 0.7 --eval-interval 6 --eval-iters 2 --calculate-per-token-loss"
    " --reset-position-ids --eod-mask-loss --save run --log-interval 4 --save-interval 8 --device cpu"
)
MODEL = """
model:
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 4
  ffn_hidden_size: 56
  normalization: LayerNorm
  apply_layernorm_1p: true
  max_position_embeddings: 16
  init_method_std: 1.7e-2
  embedding_multiplier: 1.1
data: {seq_length: 16, split: "90,10,0"}
tokenizer: {tokenizer_type: NullTokenizer, vocab_size: 101}
"""
LAYOUTS = {
    "one process": (1, []),
    "tp2 dp2": (4, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
}
STATE_KINDS = ("weight", "exp_avg", "exp_avg_sq")
CHANGING = ("iteration_ms", "tokens_per_second_per_gpu", "max_memory_bytes", "save", "resumed")


def train(folder: Path, world_size: int, flags: list[str]) -> None:
    if world_size == 1:
        with contextlib.chdir(folder):
            assert pretrain.main(flags) == 0
        return
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    ended = subprocess.run(
        [sys.executable, *start, str(ROOT / "pretrain.py"), *flags],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


def measured(folder: Path) -> list[dict[str, Any]]:
    lines = logged_lines(folder / "run")
    return [{name: value for name, value in line.items() if name not in CHANGING} for line in lines]


@pytest.mark.parametrize("layout", ["one process", pytest.param("tp2 dp2", marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_a_saved_configuration_alone_makes_the_same_run(tmp_path: Path, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    random = np.random.default_rng(7)
    for name in ("first", "second"):
        with IndexedWriter(tmp_path / name, "uint16") as writer:
            for _ in range(200):
                writer.add_document([np.append(random.integers(0, 100, random.integers(3, 40)), 100)])
    first, again = tmp_path / "runs", tmp_path / "elsewhere"
    first.mkdir()
    again.mkdir()
    (first / "model.yaml").write_text(MODEL)
    data = ["--data-path", "0.7", str(tmp_path / "first"), "0.3", str(tmp_path / "second")]
    train(first, world_size, [*FLAGS.split(), *data, *flags])
    shutil.copy(first / "run" / "config.yaml", again)
    train(again, world_size, ["--config", "config.yaml"])
    expected, found = measured(first), measured(again)
    assert sum("lm_loss" in line for line in expected) == 20
    assert sum("lm_loss" not in line for line in expected) >= 3
    assert found == expected
    ends = [newest_valid(folder / "run") for folder in (first, again)]
    assert [end and end.iteration for end in ends] == [20, 20]
    for kind in STATE_KINDS:
        hashes = [hash_tensors(end.path, kind) for end in ends if end]
        assert hashes[0]
        assert hashes[0] == hashes[1]
