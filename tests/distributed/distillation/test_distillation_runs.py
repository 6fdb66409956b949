"""Runs with a teacher: from checkpoints of any layout and of other programs, resumed to the bit, and refused before a model is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from canonical_weights import hash_tensors
from everyday import nightly
from metrics_files import logged_steps
from run_here import MODEL, train_here, train_rank, trainer_of_command_line
from tiny_models import tiny_model, write
from torch.nn import functional as F
from transformers_reference import TRAINING, global_batches

from megatrain.tools.main import main
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.distillation.teacher import RunTeacher

CASE = "gpt/gpt3_mcore_te_tp2_pp1_modelopt_distill_resume"
STUDENT = [
    *MODEL,
    *"--num-layers 2 --hidden-size 16 --global-batch-size 4 --train-iters 4 --eval-iters 0 --log-interval 1".split(),
]
"""Of half the depth and width of `MODEL`."""
LOSSES = "--no-kd-skip-lm-loss --kd-temperature 2 --kd-layer-pairs final:final:mse".split()


@pytest.fixture(scope="module")
def teacher(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a teacher that two tensor ranks saved."""
    folder = tmp_path_factory.mktemp("teacher")
    flags = f"--train-iters 2 --lr-warmup-iters 0 --eval-iters 0 --save {folder} --tensor-model-parallel-size 2".split()
    assert pool.run(2, train_here, flags) == [0, 0]
    return folder


def steps(path: Path) -> list[dict[str, Any]]:
    """Return the losses and norms of the iterations in a metrics file."""
    names = ("iteration", "lm_loss", "kd_losses", "grad_norm")
    return [{name: line[name] for name in names} for line in logged_steps(path)]


def flags_of(folder: Path, teacher: Path | str, *more: str) -> list[str]:
    given = (
        f"--export-kd-teacher-load {teacher} --save {folder} --load {folder} --metrics-file {folder}/metrics"
    )
    return [*STUDENT, *given.split(), *LOSSES, *more]


@pytest.mark.parametrize(
    "layout", [nightly(""), nightly("--tensor-model-parallel-size 2"), "--pipeline-model-parallel-size 2"]
)
def test_two_and_two_iterations_are_four(
    teacher: Path, pool: WorkerPool, tmp_path: Path, layout: str
) -> None:
    size = 2 if layout else 1
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    first = [*flags_of(broken, teacher, *layout.split()), "--exit-interval", "2"]
    assert set(pool.run(size, train_rank, first)) == {75}
    assert set(pool.run(size, train_rank, first[:-2])) == {0}
    assert set(pool.run(size, train_rank, flags_of(whole, teacher, *layout.split()))) == {0}
    assert steps(broken / "metrics") == steps(whole / "metrics")
    names = [hash_tensors(folder / "iter_0000004", "weight") for folder in (broken, whole)]
    assert names[0] == names[1]
    assert "distillation.0.projection.weight" in names[0]
    kd = [step["kd_losses"] for step in steps(whole / "metrics")]
    assert list(kd[0]) == ["kd loss", "kd final:final:mse loss"]
    assert kd[-1]["kd final:final:mse loss"] < kd[0]["kd final:final:mse loss"]


def train_with_teacher(rank: int, world_size: int, words: list[str]) -> int:
    """Train; return the bytes that the rank keeps of its teacher."""
    trainer = trainer_of_command_line(rank, world_size, words)
    trainer.resume()
    assert trainer.train() == 0
    distillation = trainer.engine.model.distillation
    assert distillation is not None
    assert isinstance(distillation.teacher, RunTeacher)
    return sum(x.nbytes for x in distillation.teacher.buffers.weights.kept)


def test_a_run_that_shards_its_weights_shards_those_of_its_teacher(
    teacher: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    sharded = ["--data-parallel-sharding-strategy", "optim_grads_params"]
    kept, losses = [], []
    for name, flags in {"whole": [], "sharded": sharded}.items():
        words = [*flags_of(tmp_path / name, teacher, *flags), "--train-iters", "2", "--lr-warmup-iters", "0"]
        kept.append(max(pool.run(2, train_with_teacher, words)))
        losses.append([step["kd_losses"]["kd loss"] for step in steps(tmp_path / name / "metrics")])
    assert kept[1] < 0.7 * kept[0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.nightly
def test_a_folder_of_transformers_teaches_what_it_computes(pool: WorkerPool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    models = {name: tiny_model(name) for name in ("Qwen3-MoE", "Llama 2")}
    folders = {name: write(model, tmp_path / name.replace(" ", "")) for name, model in models.items()}
    student, metrics = folders["Llama 2"], tmp_path / "metrics"
    run = [*TRAINING, *"--micro-batch-size 1 --global-batch-size 2 --train-iters 1".split()]
    run += ["--from-hf", str(student), "--metrics-file", str(metrics)]
    words = [*run, "--pretrained-checkpoint", f"hf:{student}", "--kd-temperature", "2"]
    words += ["--export-kd-teacher-load", f"hf:{folders['Qwen3-MoE']}"]
    assert pool.run(1, train_rank, words) == [0]
    ((tokens, _), *_) = global_batches(run, num_samples=2)
    with torch.no_grad():
        teacher, ours = (models[name](tokens, use_cache=False).logits / 2 for name in models)
    expected = F.kl_div(ours.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True)
    assert steps(metrics)[0]["kd_losses"]["kd loss"] == pytest.approx(
        4 * expected.sum(-1).mean().item(), rel=1e-5
    )


def test_a_teacher_in_fp8_computes_what_the_model_does_in_fp8(
    teacher: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    """A model in FP8 that starts from the teacher's weights differs from the teacher in fp32 only."""
    split = "--tensor-model-parallel-size 2 --sequence-parallel"
    losses = []
    for number, more in enumerate(("", "--kd-teacher-fp8", f"--kd-teacher-fp8 {split}")):
        metrics, num_ranks = tmp_path / str(number), 2 if split in more else 1
        words = (
            f"--train-iters 1 --lr-warmup-iters 0 --eval-iters 0 --fp8-format hybrid --metrics-file {metrics}"
            " --fp8-recipe tensorwise"
            f" --pretrained-checkpoint {teacher} --export-kd-teacher-load {teacher} {more}"
        )
        assert pool.run(num_ranks, train_rank, [*MODEL, *words.split()]) == [0] * num_ranks
        losses.append(steps(metrics)[0]["kd_losses"]["kd loss"])
    assert max(map(abs, losses[1:])) < 1e-6 * losses[0]


def test_a_checkpoint_of_megatron_teaches(golden_text: Path, pool: WorkerPool, tmp_path: Path) -> None:
    """A model that starts from the teacher's weights has no divergence from it."""
    recordings = golden_text.parent / "training"
    recorded = json.loads((recordings / "flags.json").read_text())["llama"]
    words = [word.format(corpus=golden_text / "corpus_text_document") for word in recorded]
    checkpoint, metrics = recordings / "llama.ckpt", tmp_path / "metrics"
    words += (
        f"--train-iters 1 --device cpu --vocab-size 3072 --load {checkpoint} --finetune --metrics-file {metrics}"
        f" --data-cache-path {tmp_path}/cache --export-kd-teacher-load {checkpoint} --eval-iters 0"
    ).split()
    assert pool.run(1, train_rank, words) == [0]
    (step,) = steps(metrics)
    assert abs(step["kd_losses"]["kd loss"]) < 1e-5
    assert step["grad_norm"] < 1e-4


def test_a_trained_model_is_distilled_trained_on_and_exported(
    teacher: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    """Projections are drawn for a model that had none, and are left out by a run and an export that have no teacher."""
    plain, distilled, folder = (tmp_path / name for name in ("plain", "distilled", "exported"))
    run = [*STUDENT, "--lr-decay-style", "constant", "--train-iters"]
    assert pool.run(1, train_rank, [*run, "2", "--save", str(plain), "--lr-warmup-iters", "0"]) == [0]
    start = f"4 --export-kd-teacher-load {teacher} --kd-layer-pairs 0:3:mse --pretrained-checkpoint {plain}"
    assert pool.run(2, train_rank, [*run, *start.split(), "--save", str(distilled)]) == [0, 0]
    names = hash_tensors(distilled / "iter_0000004", "weight")
    assert "distillation.0.projection.weight" in names
    more = f"5 --save {distilled} --load {distilled}"
    assert pool.run(1, train_rank, [*run, *more.split()]) == [0]
    left = hash_tensors(distilled / "iter_0000005", "weight")
    assert names.keys() - left.keys() == {"distillation.0.projection.weight"}
    pytest.importorskip("transformers")
    assert main(["convert", "megatrain-to-hf", str(distilled / "iter_0000004"), str(folder)]) == 0


@pytest.mark.nightly
def test_the_recorded_line_trains_with_its_file_and_a_teacher(
    scripts: tuple[Any, Any], pool: WorkerPool, tmp_path: Path
) -> None:
    recorded, script = scripts
    (line,) = (one for one in recorded.recorded_command_lines() if one.case == CASE)
    words = [word.replace("/tmp/megatrain", str(tmp_path)) for word in script.shrink(line.flags)]
    words += ["--device", "cpu", "--metrics-file", f"{tmp_path}/metrics"]
    teacher = tmp_path / "teacher"
    own = {"--save": str(teacher), "--metrics-file": f"{tmp_path}/other"}
    of_teacher = [own.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    of_teacher += ["--load", str(teacher), "--hidden-size", "128", "--train-iters", "1"]
    assert pool.run(2, train_rank, of_teacher) == [0, 0]
    file = tmp_path / "cache" / "distill" / "distill_config.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        'intermediate_layer_pairs: [["decoder.final_layernorm", "decoder.final_layernorm"]]\n'
        'logit_layers: ["output_layer", "output_layer"]\nskip_lm_loss: true\nkd_loss_scale: 10.0\n'
    )
    assert pool.run(2, train_rank, [*words, "--export-kd-teacher-load", str(teacher)]) == [0, 0]
    losses = [step["kd_losses"]["kd final:final:cosine loss"] for step in steps(tmp_path / "metrics")]
    assert len(losses) == 5
    assert min(losses[2:]) < losses[0]
