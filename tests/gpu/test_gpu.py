"""Tests that need a GPU: the CPU's initial weights, training equal to the CPU's within rounding, speed metrics."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from metrics_files import logged_steps

import pretrain
from megatrain.config import Facts, parse, resolve
from megatrain.kernels.linear import accumulate_weight_gradient
from megatrain.kernels.random import fill_normal
from megatrain.optim.lr_schedule import Hyperparams
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.rank_lists import GridShape
from megatrain.tools.parity.measure import local_batches, on_device, tiny_plan
from megatrain.tools.parity.models import MODELS
from megatrain.tools.parity.rows import Layout
from megatrain.training.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 384 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 24 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 101 --micro-batch-size 2 --global-batch-size 16 "
    "--train-iters 3 --lr 1e-3"
)
GPT2 = SMALL.replace(
    "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear --hidden-dropout 0",
    ("--max-position-embeddings 24 --hidden-dropout 0.1"),
)
SOME_EXPERTS = "--num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 64"
MANY_EXPERTS = (
    "--num-experts 32 --moe-router-topk 8 --moe-ffn-hidden-size 512 --hidden-size 1024 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 2 --seq-length 2048"
)
HYBRID = (
    "--model-family hybrid --hybrid-layer-pattern M*GE --position-embedding-type none --mamba-num-heads 16 --mamba-head-dim 16 "
    "--mamba-num-groups 2 --mamba-state-dim 32 --linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 32 "
    f"--linear-value-head-dim 32 --seq-length 192 {SOME_EXPERTS}"
)
EXPERTS = f"{SMALL} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 1e-2"
NEEDS_ENGINE = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_initial_weights_are_bit_identical_to_the_cpus(dtype: torch.dtype) -> None:
    on_cpu, on_gpu = torch.empty(777, 1001, dtype=dtype), torch.empty(777, 1001, dtype=dtype, device="cuda")
    for out in (on_cpu, on_gpu):
        fill_normal(out, key=11, first=3, row_stride=1003, std=0.02)
    assert torch.equal(on_cpu, on_gpu.cpu())


@pytest.mark.parametrize("shape", [(64, 128, 96), (333, 17, 5), (8192, 512, 1024)])
def test_weight_gradients_accumulate_in_fp32(shape: tuple[int, int, int]) -> None:
    tokens, outputs, inputs = shape
    dy = torch.randn(tokens, outputs, device="cuda").bfloat16()
    x = torch.randn(tokens, inputs, device="cuda").bfloat16()
    found, expected = (
        torch.ones(outputs, inputs, device="cuda"),
        torch.ones(outputs, inputs, device="cuda").double(),
    )
    accumulate_weight_gradient(found, dy, x)
    expected.addmm_(dy.double().t(), x.double())
    assert (found - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recompute", ["norecompute", "uniform"])
def test_training_in_fp64_equals_the_cpus(model: str, recompute: str) -> None:
    reports = {}
    words = f"{'untied' if model == 'llama' else 'tied'} {model} {recompute}"
    layout = Layout.of(words)
    plan = tiny_plan(layout, 1, "--cuda-graph-impl", "none", device="cuda")  # a CPU records none
    for device in ("cpu", "cuda"):
        engine = Engine(plan, build_grid(GridShape(), 0), torch.device(device))
        engine.initialize()
        moved = [
            [on_device(batch, torch.device(device)) for batch in local_batches(step, layout, 0)]
            for step in range(3)
        ]
        reports[device] = [engine.step(batches, Hyperparams(lr=1e-2, weight_decay=0.01)) for batches in moved]
    for cpu, cuda in zip(reports["cpu"], reports["cuda"], strict=True):
        assert cuda.lm_loss == pytest.approx(cpu.lm_loss, rel=1e-10)
        assert cuda.grad_norm == pytest.approx(cpu.grad_norm, rel=1e-10)


@pytest.mark.parametrize("flags", ["", "--recompute-activations", "--bf16"])
def test_a_shared_expert_on_its_own_stream_changes_no_bit(flags: str) -> None:
    shared = "--moe-shared-expert-intermediate-size 2048 --moe-shared-expert-gate --eval-iters 0"
    command = [sys.executable, "scripts/check_determinism.py", "--second=--moe-shared-expert-overlap", "--"]
    command += f"{EXPERTS} {shared} {flags} --train-iters 20".split()
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "flags",
    [
        "--bf16",
        "--bf16 --calculate-per-token-loss --recompute-activations --eval-interval 5",
        "--fp16 --initial-loss-scale 1e12",  # the first steps are skipped, each with another scale
        "--params-dtype float32 --cuda-graph-warmup-steps 1",
        "--bf16 --hidden-dropout 0.1 --attention-dropout 0.1 --eval-interval 7",
        "--bf16 --fp8-format hybrid --fp8-recipe delayed --seq-length 64 --eval-interval 7",
        "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --seq-length 64 --swiglu --disable-bias-linear",
        f"--bf16 --fp8-format hybrid --fp8-recipe tensorwise --seq-length 64 {SOME_EXPERTS}",
        f"--bf16 {SOME_EXPERTS} --moe-input-jitter-eps 0.1 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3",
        f"--bf16 {SOME_EXPERTS} --moe-router-force-load-balancing --mtp-num-layers 1 --global-batch-size 12",
        pytest.param("--bf16 --transformer-impl transformer_engine --no-recompute-norms", marks=NEEDS_ENGINE),
        f"--bf16 {HYBRID} --reset-attention-mask",
        f"--bf16 {HYBRID} --fp8-format hybrid --fp8-recipe delayed",
    ],
)
def test_cuda_graphs_change_no_bit(flags: str) -> None:
    compare_with_graphs(flags, num_gpus=1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "flags",
    [
        f"{SOME_EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2",
        f"{SOME_EXPERTS} --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
        "--context-parallel-size 2",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --eval-interval 7",
        f"{MANY_EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    ],
    ids=["ep", "ep tp", "tp", "tp overlap", "cp", "pp", "large ep"],
)
def test_cuda_graphs_with_communication_change_no_bit(flags: str) -> None:
    compare_with_graphs(f"--bf16 {flags}", num_gpus=2)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_cuda_graphs_of_sends_between_four_gpus_change_no_bit() -> None:
    flags = "--tensor-model-parallel-size 4 --sequence-parallel --tp-comm-overlap --eval-interval 7"
    compare_with_graphs(f"--bf16 {flags}", num_gpus=4)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_steps_computed_again_with_more_memory_for_experts_change_no_bit() -> None:
    flags = f"--bf16 {MANY_EXPERTS} --expert-model-parallel-size 4 --moe-expert-rank-capacity-factor none"
    compare_with_graphs(
        flags, num_gpus=4, more="--moe-expert-rank-capacity-factor 0.5 --cuda-graph-warmup-steps 1"
    )


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_cuda_graphs_of_passes_in_turn_on_four_gpus_change_no_bit() -> None:
    flags = f"--bf16 {MANY_EXPERTS} --expert-model-parallel-size 4 --global-batch-size 24"
    compare_with_graphs(f"{flags} --overlap-moe-expert-parallel-comm", num_gpus=4)


def compare_with_graphs(flags: str, num_gpus: int, more: str = "") -> None:
    """Compare 20 iterations with and without graphs, and `more` flags with them. Fails if a bit differs."""
    command = [sys.executable, "scripts/check_determinism.py", "--gpus", str(num_gpus)]
    command += [f"--second=--cuda-graph-impl local {more}", "--"]
    command += f"{SMALL} {flags} --deterministic-mode --eval-iters 1 --train-iters 20".split()
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "precision", [["--bf16"], ["--fp16", "--initial-loss-scale", "65536"]], ids=["bf16", "fp16"]
)
def test_training_in_16_bits_stays_near_fp32(precision: list[str]) -> None:
    losses = []
    for flags in (["--params-dtype", "float32"], precision):
        request = parse([*SMALL.split(), *flags])
        plan = resolve(request, Facts(vocab_size=101, eod_id=100, device="cuda"))
        engine = Engine(plan, build_grid(GridShape(), 0), torch.device("cuda"))
        engine.initialize()
        batches = [on_device(b, torch.device("cuda")) for b in local_batches(0, Layout.of(""), 0)]
        hyperparams = Hyperparams(lr=1e-3, weight_decay=0.01)
        reports = [engine.step(batches, hyperparams) for _ in range(10)]
        assert all(report.is_finite for report in reports)
        losses.append([report.lm_loss for report in reports])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.filterwarnings("ignore")  # warnings of flash-attn-4's dependencies
def test_a_run_shows_speed_memory_and_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--bf16 --device cuda --log-throughput --timing-log-level 2 --log-params-norm --log-num-zeros-in-grad"
    )
    assert pretrain.main([*SMALL.split(), *flags.split(), "--eval-iters", "1", "--save", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "throughput per GPU (TFLOP/s/GPU): " in out
    assert "> speed: " in out
    assert "tokens/s/GPU: " in out
    for step in logged_steps(tmp_path):
        assert step["max_memory_bytes"] >= step["memory_bytes"] > 0
        assert step["reserved_memory_bytes"] >= step["memory_bytes"]
        assert sum(step["timers"].values()) <= step["iteration_ms"]


@pytest.mark.parametrize("model", [SMALL, GPT2, EXPERTS], ids=["llama", "gpt2", "experts"])
@pytest.mark.parametrize("precision", ["--params-dtype float32", "--bf16"])
def test_without_compiled_kernels_a_run_is_the_same_within_rounding(
    model: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.jit import JITFunction

    def launch(kernel: object, *_: object, **__: object) -> None:
        raise AssertionError(f"{kernel} was compiled")

    losses = []
    for flags in ([], ["--no-compile"]):
        if flags:
            monkeypatch.setattr(JITFunction, "run", launch)
        plan = resolve(
            parse([*model.split(), *precision.split(), *flags]),
            Facts(vocab_size=101, eod_id=100, device="cuda"),
        )
        engine = Engine(plan, build_grid(GridShape(), 0), torch.device("cuda"))
        engine.initialize()
        batches = [on_device(b, torch.device("cuda")) for b in local_batches(0, Layout.of(""), 0)]
        hyperparams = Hyperparams(lr=1e-3, weight_decay=0.01)
        losses.append([engine.step(batches, hyperparams).lm_loss for _ in range(5)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if "float32" in precision else 5e-3)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        (SMALL, ""),
        (SMALL, "--calculate-per-token-loss --log-params-norm --log-num-zeros-in-grad"),
        (SMALL, "--reset-attention-mask"),
        (GPT2, ""),
        (EXPERTS, ""),
    ],
    ids=["plain", "counted", "documents", "gpt2", "experts"],
)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_does_not_synchronize_the_host(model: str, flags: str) -> None:
    plan = resolve(
        parse([*model.split(), "--bf16", *flags.split()]), Facts(vocab_size=101, eod_id=100, device="cuda")
    )
    engine = Engine(plan, build_grid(GridShape(), 0), torch.device("cuda"))
    engine.initialize()
    assert engine.max_pending == 1
    batches = [
        on_device(b, torch.device("cuda"))
        for b in local_batches(0, Layout.of("documents" if "reset" in flags else ""), 0)
    ]
    hyperparams = Hyperparams(lr=1e-3, weight_decay=0.01)
    for _ in range(2):
        engine.step(batches, hyperparams)  # one-time setup
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = engine.begin_step(batches, hyperparams, flags=lambda: (0, 0))
        second = engine.begin_step(batches, hyperparams, flags=lambda: (0, 0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert first.read().lm_loss > second.read().lm_loss


def test_a_deterministic_run_gives_the_same_bits() -> None:
    """Run in other processes, since the mode applies to a whole process."""
    command = [sys.executable, "scripts/check_determinism.py"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
