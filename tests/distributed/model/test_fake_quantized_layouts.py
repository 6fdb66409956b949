"""--qat: every layout trains as one process does, in fp64; the export computes what the model in training does."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from everyday import only
from run_here import MODEL, trainer_of_command_line
from torch import Tensor

from megatrain.model.implementations.fake_quantized import FakeQuantizedRowLinear, rounded
from megatrain.tools.compare_logits import logits_of_heads
from megatrain.tools.main import main
from megatrain.tools.worker_pool import WorkerPool

FLAGS = [
    *MODEL,
    *"--train-iters 4 --lr-warmup-iters 1 --eval-iters 0 --log-interval 1 --params-dtype float64 --qat-group-size 4".split(),
]
LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tp2 dp2 pp2": (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "cp2 zero3": (4, "--context-parallel-size 2 --data-parallel-sharding-strategy optim_grads_params"),
}
FORMATS = ("int4", "int8", "fp8-channel")
TOKENS = torch.arange(16)[None] * 7 % 101


def train(rank: int, world_size: int, words: list[str]) -> int:
    trainer = trainer_of_command_line(rank, world_size, words)
    trainer.resume()
    return trainer.train()


def losses(path: Path) -> list[float]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [x for line in lines if "lm_loss" in line for x in (line["lm_loss"], line["grad_norm"])]


@pytest.fixture(scope="module")
def reference(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """Losses and norms of one process with a format of --qat; `none`: without it."""
    folder = tmp_path_factory.mktemp("reference")

    @functools.cache
    def of(name: str) -> list[float]:
        words = [*FLAGS, "--metrics-file", f"{folder}/{name}", *([] if name == "none" else ["--qat", name])]
        assert set(pool.run(1, train, words)) == {0}
        return losses(folder / name)

    return of


@pytest.mark.parametrize("layout", only({"tp2 dp2 pp2"}, LAYOUTS))
@pytest.mark.parametrize("name", only({"int4"}, FORMATS))
def test_every_layout_trains_as_one_process(
    name: str, layout: str, reference: Callable[[str], list[float]], pool: WorkerPool, tmp_path: Path
) -> None:
    size, flags = LAYOUTS[layout]
    words = [*FLAGS, *flags.split(), "--qat", name, "--metrics-file", f"{tmp_path}/metrics"]
    assert set(pool.run(size, train, words)) == {0}
    found = losses(tmp_path / "metrics")
    assert found == pytest.approx(reference(name), rel=1e-10)
    assert found != pytest.approx(reference("none"), rel=1e-5)


def logits_in_training(rank: int, world_size: int, words: list[str]) -> tuple[Tensor, Tensor]:
    """Return the logits of the model in training, and the weight with which its first MLP ends a pass."""
    trainer = trainer_of_command_line(rank, world_size, words)
    trainer.resume()
    assert trainer.train() == 0
    model, qat = trainer.engine.model, trainer.plan.derived.qat
    assert qat is not None
    (layer,) = (
        one
        for one in model.segments[1].modules()
        if isinstance(one, FakeQuantizedRowLinear) and one.activation
    )
    return logits_of_heads(model, TOKENS)[0], rounded(layer.weight.detach(), qat.weights)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["", "--bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_export_computes_what_the_model_in_training_does(
    name: str, dtype: str, pool: WorkerPool, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    words = [*MODEL, *dtype.split(), "--qat", name, "--save", f"{tmp_path}/run"]
    words += "--qat-group-size 4 --train-iters 4 --lr-warmup-iters 1 --eval-iters 0".split()
    ((ours, weight),) = pool.run(1, logits_in_training, words)
    groups = ["--group-size", "4"] if name == "int4" else []
    assert main(["quantize", f"{tmp_path}/run", f"{tmp_path}/hf", "--format", name, *groups]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype="auto", attn_implementation="eager"
    )
    with torch.no_grad():
        theirs = model.eval()(TOKENS, use_cache=False).logits  # decompresses the weights
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, weight)
    # A sum in another order may round an input to the next number; bf16 rounds every sum.
    limit = 1e-5 if name == "int4" and not dtype else 5e-2
    assert float((ours - theirs).abs().max()) < limit * float(theirs.abs().max())
