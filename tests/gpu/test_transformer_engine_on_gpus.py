"""Transformer Engine's modules on GPUs: signatures, and results equal to the local implementation within rounding.

All tests run in other processes: if PyTorch and the system have separate cuDNN versions, the library does not load after
PyTorch has used its own.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformer_engine_stand_in import differences

from megatrain.tools.main import main
from megatrain.tools.parity.low_precision import LowPrecisionComparer
from megatrain.tools.parity.rows import Layout
from megatrain.tools.worker_pool import WorkerPool

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
    ),
    pytest.mark.filterwarnings("ignore"),  # warnings of the library's dependencies
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def comparer() -> Iterator[LowPrecisionComparer]:
    num_gpus = min(torch.cuda.device_count(), 2)
    with WorkerPool(num_gpus, device="cuda", timeout_seconds=600) as pool:
        yield LowPrecisionComparer(pool, "bf16", "transformer_engine")


def test_the_library_has_the_signatures_of_the_stand_in(comparer: LowPrecisionComparer) -> None:
    (changed,) = comparer.pool.run(1, _differences)
    assert not changed, importlib.metadata.version("transformer_engine")


def _differences(_rank: int, _world_size: int) -> list[str]:
    import transformer_engine.pytorch as te

    return differences(te)


@pytest.mark.parametrize(
    "words",
    [
        *(
            "llama",
            "llama documents",
            "llama tied selective",
            "mup",
            "puzzle",
            "tp2",
            "tp2 sp",
            "tp2 sp mup tied",
        ),
        # with modules of local:
        *("gpt2", "olmo2", "gemma2", "gpt-oss", "qwen", "mixtral", "deepseek", "hybrid"),
        *("tp2 gpt2", "tp2 sp mixtral", "tp2 sp hybrid", "cp2 llama", "cp2 documents"),
    ],
)
def test_losses_and_gradients_match_local_within_rounding(comparer: LowPrecisionComparer, words: str) -> None:
    layout = Layout.of(words)
    if layout.world_size > comparer.pool.size:
        pytest.skip(f"needs {layout.world_size} GPUs")
    verdict = comparer.compare(layout)
    assert verdict.is_good, verdict


def test_a_checkpoint_resumes_in_either_implementation(tmp_path: Path) -> None:
    flags = (
        "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 384 --normalization RMSNorm"
        " --swiglu --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0"
        " --seq-length 64 --mock-data --tokenizer-type NullTokenizer --vocab-size 101 --micro-batch-size 2"
        f" --global-batch-size 4 --lr 1e-3 --lr-decay-iters 15 --bf16 --eval-iters 0 --save {tmp_path} --load {tmp_path}"
    ).split()
    for number, implementation in enumerate(("transformer_engine", "local", "transformer_engine"), 1):
        options = ["--transformer-impl", implementation, "--train-iters", str(5 * number)]
        subprocess.run([sys.executable, "pretrain.py", *flags, *options], cwd=ROOT, check=True)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "15"


def test_deterministic_mode_gives_the_same_bits() -> None:
    flags = (
        "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --group-query-attention --num-query-groups 2"
        " --ffn-hidden-size 1536 --normalization RMSNorm --swiglu --position-embedding-type rope --seq-length 1024"
        " --mock-data --tokenizer-type NullTokenizer --vocab-size 4000 --micro-batch-size 4 --global-batch-size 16"
        " --train-iters 8 --lr 1e-3 --hidden-dropout 0.1 --attention-dropout 0.1 --bf16 --eval-iters 2"
        " --transformer-impl transformer_engine"
    ).split()
    command = [sys.executable, "scripts/check_determinism.py", "--", *flags]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical bits" in done.stdout


def test_the_parity_command_runs_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "parity --device cuda --precision bf16 --transformer-impl transformer_engine --layouts mup uniform"
    )
    assert main([*flags.split(), "--slice", "1/3"]) == 0
    assert "transformer_engine in bf16" in capsys.readouterr().out
