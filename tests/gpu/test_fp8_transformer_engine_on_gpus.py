"""FP8 with Transformer Engine's modules on GPUs: one layer against `local`, losses near bf16's, resuming, casts of weights.

Needs a GPU with FP8 tensor cores. All tests run in other processes, see test_transformer_engine_on_gpus.py.
"""

import importlib.util
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from canonical_weights import amaxes, hash_tensors
from metrics_files import logged_losses
from transformer_engine_fp8_stand_in import casting_once

from megatrain.checkpoint.find import newest_valid
from megatrain.checkpoint.parts import read_manifest
from megatrain.model.implementations.transformer_engine_fp8 import TEFp8Linear
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.fp8.amax_history import AmaxHistory
from megatrain.parallel.fp8.linear import fp8_column_linear
from megatrain.parallel.fp8.scaling import Fp8Recipe
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import TensorParallel
from megatrain.tools.worker_pool import WorkerPool

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU with FP8 tensor cores",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
    ),
    pytest.mark.filterwarnings("ignore"),  # warnings of the library's dependencies
]
ROOT = Path(__file__).parents[2]
ENGINE = "--transformer-impl transformer_engine"
FP8 = f"{ENGINE} --fp8-format hybrid"
DELAYED = f"{FP8} --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
FLAGS = (
    "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --group-query-attention --num-query-groups 2"
    " --ffn-hidden-size 1536 --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear"
    " --hidden-dropout 0 --attention-dropout 0 --seq-length 256 --mock-data --tokenizer-type NullTokenizer"
    " --vocab-size 1000 --micro-batch-size 4 --global-batch-size 12 --train-iters 24 --lr 1e-3 --bf16"
    " --eval-interval 4 --eval-iters 1 --log-interval 100"
)
HYBRID = (
    "--model-family hybrid --hybrid-layer-pattern M*G- --position-embedding-type none --mamba-num-heads 16 --mamba-head-dim 64"
    " --mamba-num-groups 2 --mamba-state-dim 64 --linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 64"
    " --linear-value-head-dim 64"
)
SLOW = "--lr 1e-4"
"""With 1e-3 the loss falls by a tenth per iteration: a run that is late by a fifth of an iteration would differ by 2 %."""
PLANTED = "import sys, test_fp8_transformer_engine_on_gpus as here; sys.exit(here.run_with_stale_casts(sys.argv[1:]))"


def run(folder: Path, flags: str, *program: str, ranks: int = 1) -> list[float]:
    """Train in another process; return all losses of the folder."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    folders = [
        str(ROOT),
        str(ROOT / "tests"),
        str(ROOT / "tests" / "gpu"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    command = [sys.executable, *(launch if ranks > 1 else ()), *(program or ("pretrain.py",))]
    done = subprocess.run(
        [*command, *FLAGS.split(), *flags.split(), "--save", str(folder), "--load", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
    )  # fmt: skip
    assert done.returncode in (0, 75), done.stdout[-4000:] + done.stderr[-4000:]
    return logged_losses(folder)


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run(tmp_path_factory.mktemp("bf16"), f"{ENGINE} {SLOW}")


@pytest.mark.parametrize(
    "flags",
    [
        f"{FP8} --fp8-recipe tensorwise",
        f"{FP8} --fp8-recipe blockwise",
        DELAYED,
        f"{DELAYED} --first-last-layers-bf16 --num-layers-at-end-in-bf16 0",
        f"{FP8} --fp8-recipe blockwise --data-parallel-sharding-strategy optim_grads_params",
    ],
)
def test_losses_are_near_those_of_bf16(bf16: list[float], tmp_path: Path, flags: str) -> None:
    found = run(tmp_path, f"{flags} {SLOW}")
    assert found != bf16
    assert statistics.mean(found[-8:]) == pytest.approx(statistics.mean(bf16[-8:]), rel=0.02)


def test_losses_of_hybrids_are_near_those_of_bf16(tmp_path: Path) -> None:
    bf16, fp8 = (
        run(tmp_path / name, f"{flags} {HYBRID} {SLOW}")
        for name, flags in (("bf16", ENGINE), ("fp8", f"{FP8} --fp8-recipe tensorwise"))
    )
    assert fp8 != bf16
    assert statistics.mean(fp8[-8:]) == pytest.approx(statistics.mean(bf16[-8:]), rel=0.02)


def test_recomputation_changes_no_scale(tmp_path: Path) -> None:
    """Scales are those of the step, and the amaxes of a second forward pass are those of the first."""
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    saved, recomputed = (
        run(tmp_path / str(number), f"{DELAYED} --deterministic-mode --train-iters 8 {flags}")
        for number, flags in enumerate(("", full))
    )
    assert recomputed == pytest.approx(saved, rel=1e-4)
    assert amaxes(tmp_path / "1") == pytest.approx(amaxes(tmp_path / "0"), rel=0.05)


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    flags = f"{DELAYED} --deterministic-mode --train-iters 8"
    whole = run(tmp_path / "whole", flags)
    run(tmp_path / "parts", f"{flags} --exit-interval 4")
    assert run(tmp_path / "parts", flags) == whole
    newest = [newest_valid(tmp_path / name) for name in ("whole", "parts")]
    assert newest[0] is not None
    assert newest[1] is not None
    manifests = [read_manifest(one.path) for one in newest if one is not None]
    kinds = {kind for tensor in manifests[0].tensors.values() for kind in tensor.kinds}
    for kind in sorted(kinds):
        assert hash_tensors(newest[0].path, kind) == hash_tensors(newest[1].path, kind), kind
    assert manifests[0].state["amax_history"] == manifests[1].state["amax_history"]
    assert len(manifests[0].state["amax_history"]) == 2 * 4 * 3  # layers, linear layers, tensors


def test_a_run_continues_the_history_of_local(tmp_path: Path) -> None:
    local = DELAYED.replace(ENGINE, "--transformer-impl local")
    whole = run(tmp_path / "local", f"{local} --train-iters 12")
    run(tmp_path / "mixed", f"{local} --train-iters 12 --exit-interval 8")
    assert run(tmp_path / "mixed", f"{DELAYED} --train-iters 12") == pytest.approx(whole, rel=5e-3)
    assert amaxes(tmp_path / "mixed") == pytest.approx(amaxes(tmp_path / "local"), rel=0.3)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_casts_of_weights_are_those_of_this_step(tmp_path: Path, recipe: str) -> None:
    """Sharded weights are cast by every micro-batch; a cast of the first step, used to the end, gives other losses."""
    flags = f"{FP8} --fp8-recipe {recipe} --deterministic-mode --train-iters 8"
    kept = run(tmp_path / "kept", flags)
    sharded = run(tmp_path / "cast", f"{flags} --data-parallel-sharding-strategy optim_grads_params")
    assert sharded == pytest.approx(kept, rel=1e-5)
    stale = run(tmp_path / "stale", flags, "-c", PLANTED)
    assert stale != pytest.approx(kept, rel=1e-3)


def run_with_stale_casts(flags: list[str]) -> int:
    """Run pretrain.py, keeping the casts of the first step."""
    import pretrain

    TEFp8Linear.casting = casting_once  # type: ignore[method-assign,assignment]
    return int(pretrain.main(flags))


def test_tensor_parallel_ranks_train_like_one(bf16: list[float], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    ranks = "--tensor-model-parallel-size 2 --sequence-parallel"
    for number, recipe in enumerate((DELAYED, f"{FP8} --fp8-recipe tensorwise")):
        found = run(tmp_path / str(number), f"{recipe} {ranks} {SLOW}", ranks=2)
        assert statistics.mean(found[-8:]) == pytest.approx(statistics.mean(bf16[-8:]), rel=0.02)


def test_a_layer_computes_what_local_computes_with_the_same_scales() -> None:
    """Amaxes are those of all micro-batches; evaluation adds nothing."""
    with WorkerPool(1, device="cuda", timeout_seconds=300) as pool:
        (problems,) = pool.run(1, _differences_of_a_layer)
    assert not problems


def _differences_of_a_layer(_rank: int, _world_size: int) -> list[str]:
    import transformer_engine.pytorch as te

    device, alone = torch.device("cuda"), RankGroup("alone", (0,), 0)
    tp = TensorParallel(alone, alone, sequence_parallel=False)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(device, torch.bfloat16)

    problems = []

    def compare(what: str, found: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
        error = ((found - expected).float().norm() / expected.float().norm()).item()
        if not error < limit:
            problems.append(f"{what}: {error}")

    xs, dys = [drawn(256, 2, 512, std=std) for std in (2, 8, 1)], drawn(256, 2, 384, std=1e-5)
    first = drawn(384, 512, std=0.02)
    results = {}
    for implementation in ("local", "transformer_engine"):
        weight, grad = torch.nn.Parameter(first.clone()), torch.zeros(384, 512, device=device)
        weight.main_grad = grad  # type: ignore[attr-defined]
        history = AmaxHistory(3, "most_recent", 0, (), device)
        recipe = Fp8Recipe(
            name="delayed", format="hybrid", tokens=alone, tp=alone, has_fp8_wgrad=True,
            keeps_weights=True, history=history,
        )  # fmt: skip
        module = te.Linear(
            512, 384, bias=False, params_dtype=torch.bfloat16, device="meta", fuse_wgrad_accumulation=True
        )
        module.register_parameter("weight", weight)
        layer = TEFp8Linear(module, te, recipe, "w") if implementation != "local" else recipe.linear("w")
        outputs = []
        for step in range(3):
            grad.zero_()
            for number, x in enumerate(xs):
                info, x = PassInfo(microbatch=number), x.detach().requires_grad_()
                if isinstance(layer, TEFp8Linear):
                    with layer.casting(info) as options:
                        y = module(x, **options)
                else:
                    y = fp8_column_linear(layer, x, weight, grad, tp, info)
                y.backward(dys)
                outputs += [y.detach(), x.grad]
            if step < 2:
                history.finish_step()
                with torch.no_grad():
                    weight.mul_(1.5)  # a step of the optimizer
            if step == 1 and isinstance(layer, TEFp8Linear):
                with torch.no_grad(), layer.casting(PassInfo(is_training=False)) as options:
                    module(xs[1] * 100, **options)
        last = [grad.clone(), *outputs[-6:]]
        history.finish_step()
        results[implementation] = (last, history.state())
    (found, state), (expected, wanted) = results["transformer_engine"], results["local"]
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        compare(f"result {number} of the third step", one, other, 5e-3)
    if state != wanted:
        problems.append(f"histories: {state} {wanted}")
    if state["w.input"][0][1] != xs[1].abs().max().item():
        problems.append(f"amax of three micro-batches: {state['w.input']}")
    return problems
