"""BERT and T5 on a GPU with dropout: the fused attention trains as the eager one, which drops the same probabilities."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from metrics_files import logged_losses

from megatrain.data.indexed.writer import IndexedWriter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROOT = Path(__file__).parents[2]
WORDS = 400
RUN = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 2 --max-position-embeddings 192 --seq-length 192 --lr 1e-3 --bf16"
    " --micro-batch-size 4 --global-batch-size 8 --train-iters 8 --eval-iters 0 --device cuda --seed 11 --log-interval 1"
)
FAMILIES = {
    "bert": "--model-family bert --tokenizer-type BertWordPieceLowerCase",
    "t5": "--model-family t5 --decoder-seq-length 64 --tokenizer-type BertWordPieceCase --vocab-extra-ids 50"
    " --position-embedding-type relative --relative-attention-max-distance 40",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_attention_trains_as_eager_attention(family: str, tmp_path: Path) -> None:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{k}" for k in range(WORDS))]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    random = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "corpus", np.uint16) as writer:
        for _ in range(100):
            writer.add_document([random.integers(5, 60, random.integers(5, 30)) for _ in range(8)])
    data = f"--vocab-file {tmp_path}/vocab.txt --data-path {tmp_path}/corpus --split 98,1,1"
    losses = []
    for kernel in ("auto", "math"):
        metrics = tmp_path / f"{kernel}.jsonl"
        flags = f"{FAMILIES[family]} {RUN} {data} --attention-backend {kernel} --metrics-file {metrics}"
        command = [sys.executable, "pretrain.py", *flags.split()]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ("Triton kernel" in ended.stdout) == (kernel == "auto")
        losses.append(logged_losses(metrics))
    assert losses[0] == pytest.approx(losses[1], rel=3e-3)
    assert losses[0][-1] < losses[0][0] - 0.1
