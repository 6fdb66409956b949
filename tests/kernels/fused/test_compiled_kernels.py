"""Every Triton kernel compiles for compute capability 9.0, with the types and constants of runs, on a host without a GPU.

Dry runs launch the kernels of training, calls with tensors on the meta device the others: each `launch` in the source is covered.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.kernels.fused import (
    block_checksums,
    cross_entropy,
    decode_attention,
    launching,
    matrix_vector,
    norms,
    random,
)
from megatrain.kernels.fused.fp8_scales import rows

pytest.importorskip("triton", reason="needs Triton (pip install triton); no GPU")
pytestmark = pytest.mark.nightly  # compiles a minute
ROOT = Path(__file__).parents[3]
RUN = (
    "--hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 --seq-length 1024 --mock-data --tokenizer-type NullTokenizer"
    " --vocab-size 1000 --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-4 --bf16"
)
GPT = f"{RUN} --num-layers 2 --position-embedding-type rope"
LLAMA = f"{GPT} --normalization RMSNorm --swiglu --disable-bias-linear"
HYBRID = (
    f"{RUN} --model-family hybrid --hybrid-layer-pattern MG*- --normalization RMSNorm --disable-bias-linear"
    " --position-embedding-type none --mamba-num-heads 8 --mamba-head-dim 64 --mamba-num-groups 2 --mamba-state-dim 128"
    " --linear-num-key-heads 2 --linear-num-value-heads 4"
)
RUNS = {
    "GPT with dropout": f"{GPT} --hidden-dropout 0.1 --attention-dropout 0.1",
    "Llama": LLAMA,
    "gates and SGD": f"{LLAMA} --attention-output-gate --optimizer sgd",
    "FP8 by tensor": f"{LLAMA} --fp8-format hybrid --fp8-recipe delayed",
    "FP8 by block": f"{LLAMA} --fp8-format hybrid --fp8-recipe blockwise",
    "overlap": f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
    "experts": f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-aux-loss-coeff 1e-2",
    "hybrid": HYBRID,
    "hybrid with documents": f"{HYBRID} --reset-attention-mask",
    "T5": f"{RUN} --num-layers 2 --model-family t5 --decoder-seq-length 128 --position-embedding-type relative",
}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def other_launches() -> None:
    """Call the kernels of generation, checkpoints, distillation and FP8 by rows."""
    numbers = meta(8, dtype=torch.int32)
    decode_attention.write_rows(meta(64, 2, 64), meta(64, 2, 64), meta(8, 2, 64), meta(8, 2, 64), numbers)
    decode_attention.decode_attention(
        meta(8, 8, 64), meta(64, 2, 64), meta(64, 2, 64), numbers, numbers, scale=0.125
    )
    matrix_vector.matrix_vector(meta(1, 256), meta(512, 256), None)
    block_checksums.partial_checksums(meta(4, 1 << 17, dtype=torch.int64), meta(64, 1024, dtype=torch.int64))
    logits = meta(64, 1000)
    sums, *_ = cross_entropy.divergence_statistics(logits, logits, 2.0, 1000, is_reversed=False)
    log_sums, scale = meta(2, 64, dtype=torch.float32), meta(1, dtype=torch.float32)
    cross_entropy.write_divergence_gradient(
        logits, logits, log_sums, sums, scale, 2.0, 1000, is_reversed=False
    )
    norms.add_terms(logits, meta(2, 64, 1000))
    random.fill_normal(meta(64, 256, dtype=torch.float32), 11, 0, 256, 0.0, 0.02)
    rows.decode_rows(*rows.cast_rows(logits, rows.row_amax(logits), torch.float8_e4m3fn), torch.bfloat16)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_script", ROOT / "scripts/kernels/compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compile_script", module)
    spec.loader.exec_module(module)
    return module


def launched_kernels() -> set[str]:
    """Return the names of the kernels that calls of `launch` name."""
    found = set()
    for path in (ROOT / "megatrain/kernels/fused").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch":
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                kernel: Any = importlib.import_module(name)
                for attribute in ast.unparse(node.args[0]).split("."):
                    kernel = getattr(kernel, attribute)
                found.add(name_of(kernel))
    return found


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


@launching.jit
def unpack_list(x):  # type: ignore[no-untyped-def]
    [a, b] = 1, 2
    launching.tl.store(x, a + b)


def test_a_fault_names_its_launch(script: ModuleType) -> None:
    """Triton reads a tuple of names, but not a list."""
    with (
        script.compiling_launches(90),
        pytest.raises(Exception, match=r"unpack_list, launched with {.num_warps.: 2}"),
    ):
        launching.launch(unpack_list, (1,), meta(1), num_warps=2)


def test_every_kernel_compiles_for_hopper(script: ModuleType) -> None:
    compiled = [one for words in RUNS.values() for one in script.compile_run(words.split(), 90)]
    with script.compiling_launches(90) as others:
        other_launches()
    compiled += others
    assert launched_kernels() <= {name_of(one.kernel) for one in compiled}
    assert [str(one) for one in compiled if one.shared_bytes > script.MAX_SHARED_BYTES[90]] == []
