"""--qat: every layout trains as one process does, in fp64; the export computes what an evaluation does."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from canonical_weights import dequantized, hash_tensors
from everyday import only
from metrics_files import logged_steps
from run_here import MODEL, train_rank, trainer_of_command_line
from torch import Tensor

from megatrain.config import ConfigError
from megatrain.config.schema.quantization import SCALE_PREFIX
from megatrain.inference.stored_model import ModelOptions, TensorRanks, load_model
from megatrain.interop.hf.checkpoint import HfCheckpoint
from megatrain.kernels.quantization.rounding import scales_of
from megatrain.model.implementations.fake_quantized import (
    FakeQuantizedColumnLinear,
    FakeQuantizedRowLinear,
    rounded_weight,
)
from megatrain.parallel.batch import PassInfo
from megatrain.tools.checkpoint.source import opened
from megatrain.tools.compare_logits import logits_of_heads
from megatrain.tools.main import main
from megatrain.tools.quantization.plan import format_of
from megatrain.tools.worker_pool import WorkerPool

FLAGS = [
    *MODEL,
    *"--num-layers 2 --global-batch-size 4 --train-iters 4 --lr-warmup-iters 1 --eval-iters 0 --log-interval 1".split(),
    *"--params-dtype float64 --qat-group-size 4".split(),
]
LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel --recompute-mlp-act"),
    "tp2 dp2 pp2": (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "cp2 zero3": (4, "--context-parallel-size 2 --data-parallel-sharding-strategy optim_grads_params"),
}
FORMATS = ("int4", "int8", "fp8-channel")
DOWN = "decoder.layers.0.mlp.down.weight"
SCALES = f"{SCALE_PREFIX}{DOWN}"
TOKENS = torch.arange(16)[None] * 7 % 101


def losses(path: Path) -> list[float]:
    return [x for line in logged_steps(path) for x in (line["lm_loss"], line["grad_norm"])]


def stored(path: Path, name: str) -> Tensor:
    """Return a tensor of the newest checkpoint of a run."""
    with opened(path) as reader:
        return reader.values(name, reader.manifest.tensors[name].shape, dtype=torch.float64)


@pytest.fixture(scope="module")
def reference(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """Losses and norms of one process with a format of --qat; `none`: without it."""
    folder = tmp_path_factory.mktemp("reference")

    @functools.cache
    def of(name: str) -> list[float]:
        words = [*FLAGS, "--metrics-file", f"{folder}/{name}", *([] if name == "none" else ["--qat", name])]
        assert set(pool.run(1, train_rank, [*words, "--save", f"{folder}/{name}-run"])) == {0}
        scales = [] if name == "none" else stored(folder / f"{name}-run", SCALES).flatten().tolist()
        return [*losses(folder / name), *scales]

    return of


@pytest.mark.parametrize("layout", only({"tp2 dp2 pp2"}, LAYOUTS))
@pytest.mark.parametrize("name", only({"int4"}, FORMATS))
@pytest.mark.nightly
def test_every_layout_trains_as_one_process(
    name: str, layout: str, reference: Callable[[str], list[float]], pool: WorkerPool, tmp_path: Path
) -> None:
    size, flags = LAYOUTS[layout]
    words = [*FLAGS, *flags.split(), "--qat", name, "--metrics-file", f"{tmp_path}/metrics"]
    assert set(pool.run(size, train_rank, [*words, "--save", f"{tmp_path}/run"])) == {0}
    found = [*losses(tmp_path / "metrics"), *stored(tmp_path / "run", SCALES).flatten().tolist()]
    assert found == pytest.approx(reference(name), rel=1e-10)
    assert found[:2] != pytest.approx(reference("none")[:2], rel=1e-5)


def test_a_run_resumes_to_the_bit_and_others_start_from_its_weights(pool: WorkerPool, tmp_path: Path) -> None:
    """Scales of another format are taken anew, and a run without --qat leaves them out."""
    qat = [*FLAGS, "--qat", "int4"]
    broken, whole = ([*qat, "--save", f"{tmp_path}/{name}"] for name in ("broken", "whole"))
    broken += ["--load", f"{tmp_path}/broken"]
    assert pool.run(1, train_rank, [*broken, "--exit-interval", "2"]) == [75]
    assert pool.run(1, train_rank, broken) == [0]
    assert pool.run(1, train_rank, whole) == [0]
    names = [hash_tensors(tmp_path / one / "iter_0000004", "weight") for one in ("broken", "whole")]
    assert names[0] == names[1]
    assert SCALES in names[0]
    for name, flags in {"int8": ["--qat", "int8"], "none": []}.items():
        words = [
            *FLAGS,
            *flags,
            "--pretrained-checkpoint",
            f"{tmp_path}/whole",
            "--save",
            f"{tmp_path}/{name}",
        ]
        assert pool.run(1, train_rank, words) == [0]
        found = hash_tensors(tmp_path / name / "iter_0000004", "weight")
        assert (SCALES in found) == bool(flags)


def weights_in_evaluation(rank: int, world_size: int, words: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Train; return the logits of an evaluation, and the rounded weights that it computes with, by name."""
    trainer = trainer_of_command_line(rank, world_size, words)
    trainer.resume()
    assert trainer.train() == 0
    model, qat = trainer.engine.model, trainer.plan.derived.qat
    assert qat is not None
    found: dict[str, Tensor] = {}
    for layer in model.segments[1].modules():
        if isinstance(layer, FakeQuantizedColumnLinear | FakeQuantizedRowLinear):
            whole = rounded_weight(layer, qat.weights, PassInfo(is_training=False))
            pieces = layer.layouts["weight"].pieces
            found |= {piece.name: whole[piece.row : piece.row + piece.local_shape[0]] for piece in pieces}
    return logits_of_heads(model, TOKENS)[0], found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", only({"--bf16"}, ["", "--bf16"]))
@pytest.mark.parametrize("name", only({"int4"}, FORMATS))
def test_the_export_computes_what_an_evaluation_does(
    name: str, dtype: str, pool: WorkerPool, tmp_path: Path
) -> None:
    """Bit for bit, with scales of the last pass of training: those of the weights now are others."""
    words = [*MODEL, *dtype.split(), "--qat", name, "--save", f"{tmp_path}/run", "--lr", "0.05"]
    words += "--qat-group-size 4 --train-iters 4 --lr-warmup-iters 1 --eval-iters 0".split()
    ((ours, weights),) = pool.run(1, weights_in_evaluation, words)
    for is_rounded in (False, True):  # generated texts and scores are those of evaluations
        kind = torch.bfloat16 if dtype else torch.float32
        options = ModelOptions(device=torch.device("cpu"), dtype=kind, is_rounded=is_rounded)
        found = logits_of_heads(load_model(tmp_path / "run", options).model, TOKENS)[0]
        assert torch.equal(found, ours) == is_rounded
    assert main(["quantize", f"{tmp_path}/run", f"{tmp_path}/hf", "--format", name]) == 0
    plain = HfCheckpoint(dequantized(tmp_path / "hf", name, tmp_path / "plain", group_size=4))
    assert len(weights) == 7
    for key, weight in weights.items():
        assert torch.equal(plain.values(key, tuple(weight.shape), dtype=weight.dtype), weight), key
    numbers = format_of(name, 4 if name == "int4" else None, "rtn").weights
    kept, now = stored(tmp_path / "run", SCALES), scales_of(stored(tmp_path / "run", DOWN), numbers)
    assert kept.shape == now.shape
    assert float((kept / now - 1).abs().max()) > 1e-3
    # A sum in another order may round an input to the next number; bf16 rounds every sum.
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype="auto", attn_implementation="eager"
    )
    with torch.no_grad():
        theirs = model.eval()(TOKENS, use_cache=False).logits  # decompresses the weights
    limit = 1e-5 if name == "int4" and not dtype else 5e-2
    assert float((ours - theirs).abs().max()) < limit * float(theirs.abs().max())


def test_tensor_ranks_of_a_text_have_whole_groups(pool: WorkerPool, tmp_path: Path) -> None:
    words = [*FLAGS, "--qat", "int4", "--qat-group-size", "8", "--train-iters", "2", "--save", str(tmp_path)]
    assert pool.run(1, train_rank, words) == [0]
    options = ModelOptions(
        device=torch.device("cpu"), dtype=torch.float32, ranks=TensorRanks(4), is_rounded=True
    )
    with pytest.raises(ConfigError, match=r"4 tensor ranks: groups of 8 weights \(--qat-group-size\)"):
        load_model(tmp_path, options)
