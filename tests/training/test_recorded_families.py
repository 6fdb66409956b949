"""BERT, T5, models with delta nets and vision-language models, trained by Megatron-LM and recorded to the last digit: the same weights and batches give the same digits.

Both ran in fp32 on a CPU: sums are in another order. Batches are the recorded ones, so that this holds the models, not the data.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from canonical_weights import CopiedWeights
from safetensors.torch import load_file
from torch import Tensor

from megatrain.config import parse
from megatrain.config.schema.data import MASKED_FAMILIES
from megatrain.data.images.vectors import place_images, vector_tokens
from megatrain.interop.megatron.names import FusedRows, parts_of
from megatrain.parallel.batch import Batch
from megatrain.parallel.family_batch import family_batch
from megatrain.tools.parity.measure import gradients_of
from megatrain.training.build import build_schedules
from megatrain.training.launch.ranks import joined_ranks
from megatrain.training.logging.console import Console, Phases
from megatrain.training.step_report import StepReport
from megatrain.training.trainer import Trainer

FOLDERS: Final = ("bert", "t5", "gdn", "hybrid", "vlm")
"""Folders of recordings."""
LOSS, NORM, GRADIENT = 5e-7, 2e-6, 1e-5
"""Largest relative differences of a loss and a gradient norm, and of a gradient, relative to its largest element."""
MICROBATCHES, ITERATIONS = 2, 8
OF_DATA: Final = (
    "--tokenizer-type",
    "--vocab-file",
    "--vocab-extra-ids",
    "--data-path",
    "--short-seq-prob",
)
"""Flags of the data, which is recorded."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test for every case in the folders of the families."""
    if "case" not in metafunc.fixturenames:
        return
    default = Path(__file__).parents[3] / "shared/golden/families"
    folder: Path = metafunc.config.getoption("families") or default
    cases = [
        pytest.param((family, folder / family, case), id=case)
        for family in FOLDERS
        if (folder / family / "flags.json").is_file()
        for case in json.loads((folder / family / "flags.json").read_text())
    ]
    metafunc.parametrize("case", cases)


Case = tuple[str, Path, str]


@contextmanager
def trainer_of(case: Case, *more_flags: str) -> Iterator[Trainer]:
    """Build the trainer of a recorded command line, with the recorded weights.

    Megatron-LM counts the padded vocabulary in the softmax: with all its ids as vocabulary, so do we.
    """
    family, folder, name = case
    recorded = json.loads((folder / "flags.json").read_text())[name]
    parameters = load_file(folder / f"{name}.weights.safetensors")
    vocab_size = next(str(len(x)) for key, x in parameters.items() if key.endswith("word_embeddings.weight"))
    flags = [
        *without(recorded, OF_DATA),
        "--model-family",
        family_of(family, recorded),
        "--device",
        "cpu",
        "--mock-data",
    ]
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", vocab_size, *more_flags]
    if "vision_projection.encoder.linear_fc1.layer_norm_weight" in parameters:
        flags += ["--vision-projection-norm"]
    if "transformer_engine" in flags:
        flags += ["--transformer-impl", "local"]
    with joined_ranks(parse(flags), Phases(Console(is_quiet=True))) as ranks:
        trainer = Trainer(ranks)
        weights = CopiedWeights(canonical(parameters, trainer))
        trainer.engine.optimizer.fill("weight", weights)
        trainer.engine.optimizer.sync_model_weights()
        assert not weights.unused
        yield trainer


def family_of(folder: str, flags: Sequence[str]) -> str:
    """Return the family of a recorded model."""
    if folder in (*MASKED_FAMILIES, "vlm"):
        return folder
    return "hybrid" if "--hybrid-layer-pattern" in flags else "gpt"


def without(flags: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the flags without these and the word after each."""
    left_out = {place for place, flag in enumerate(flags) if flag in names}
    return [flag for place, flag in enumerate(flags) if not {place, place - 1} & left_out]


def canonical(parameters: dict[str, Tensor], trainer: Trainer) -> dict[str, Tensor]:
    """Return Megatron-LM's parameters as canonical tensors."""
    fused = FusedRows.of(trainer.plan.config.model)
    return {
        part.name: torch.cat([tensor[part.place][rows] for rows in part.rows]).view(part.shape)
        for theirs, tensor in parameters.items()
        for part in parts_of(theirs, tuple(tensor.shape), fused)
    }


def batches_of(case: Case, iteration: int) -> list[Batch]:
    """Return the recorded micro-batches of an iteration, from 0."""
    family, folder, name = case
    arrays = load_file(folder / f"{name}.batches.safetensors")
    if family == "vlm":
        arrays = with_images(arrays, case)
    numbers = range(iteration * MICROBATCHES, (iteration + 1) * MICROBATCHES)
    samples = [{key: x[number] for key, x in arrays.items()} for number in numbers]
    if family in (*MASKED_FAMILIES, "vlm"):
        return [family_batch(family, sample) for sample in samples]
    return [
        Batch(
            tokens=sample["tokens"].long(),
            labels=sample["labels"].long(),
            loss_mask=sample["loss_mask"].float(),
            position_ids=sample["position_ids"].long(),
        )
        for sample in samples
    ]


def with_images(arrays: dict[str, Tensor], case: Case, first: int = 0) -> dict[str, Tensor]:
    """Return the arrays with the recorded images, and a token for each vector of an image; `first`: number of the first sample."""
    _, folder, name = case
    flags = json.loads((folder / "flags.json").read_text())[name]
    height, width, patch = (
        int(flags[flags.index(flag) + 1]) for flag in ("--img-h", "--img-w", "--patch-dim")
    )
    count = (height // patch) * (width // patch) + ("--disable-vision-class-token" not in flags)
    steps, samples, length = arrays["tokens"].shape
    shape = (steps * samples, 1, 3, height, width)
    images = np.zeros(shape, np.float32)
    if "mock" not in name:
        for number in range(len(images)):
            generator = np.random.RandomState(1000 + first + number)
            images[number] = generator.standard_normal(shape[2:])
    names = ("tokens", "labels", "loss_mask", "position_ids")
    rows = zip(*(arrays[one].flatten(0, 1).numpy() for one in names), strict=True)
    vectors = [vector_tokens(np.arange(count), 0)]
    placed = [place_images(*row, vectors=vectors, length=length - 1 + count) for row in rows]
    found = {one: torch.from_numpy(np.stack([sample[one] for sample in placed])) for one in names}
    return {
        one: x.unflatten(0, (steps, samples))
        for one, x in {**found, "images": torch.from_numpy(images)}.items()
    }


def train(trainer: Trainer, case: Case) -> list[StepReport]:
    """Train all iterations on the recorded batches."""
    schedules, size = build_schedules(trainer.plan), trainer.plan.config.training.global_batch_size
    return [
        trainer.engine.step(batches_of(case, number), schedules.at(number * size), first_sample=number * size)
        for number in range(ITERATIONS)
    ]


def assert_recorded(reports: Sequence[StepReport], case: Case) -> None:
    """Compare the losses and the norms of all iterations."""
    _, folder, name = case
    recorded: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())
    assert [line["iteration"] for line in recorded] == [*range(1, ITERATIONS + 1)]
    for ours, theirs in zip(reports, recorded, strict=True):
        assert ours.lm_loss == pytest.approx(theirs["lm loss"], rel=LOSS, abs=0)
        assert (ours.sop_loss is not None) == ("sop loss" in theirs)
        if ours.sop_loss is not None:
            assert ours.sop_loss == pytest.approx(theirs["sop loss"], rel=LOSS, abs=0)
        assert ours.grad_norm == pytest.approx(theirs["grad_norm"], rel=NORM, abs=0)


def test_families_train_to_the_recorded_digits(case: Case) -> None:
    with trainer_of(case) as trainer:
        assert_recorded(train(trainer, case), case)


def test_a_small_fault_is_above_the_bounds(case: Case) -> None:
    with trainer_of(case, "--weight-decay", "0.11") as trainer:
        reports = train(trainer, case)
    with pytest.raises(AssertionError):
        assert_recorded(reports, case)


def test_gradients_of_the_first_iteration_are_the_recorded_ones(case: Case) -> None:
    _, folder, name = case
    with trainer_of(case) as trainer:
        trainer.engine.accumulate_gradients(batches_of(case, 0))
        found = {part.name: torch.from_numpy(part.values).clone() for part in gradients_of(trainer.engine)}
        expected = canonical(load_file(folder / f"{name}.gradients.safetensors"), trainer)
    assert found.keys() == expected.keys()
    # Exact gradients of biases of keys are 0, since softmax ignores what all scores have in common.
    smallest = 1e-7 * max(float(gradient.abs().max()) for gradient in expected.values())
    for key, gradient in expected.items():
        largest = max(float(gradient.abs().max()), smallest)
        difference = float((found[key] - gradient).abs().max())
        assert difference <= GRADIENT * largest or difference <= smallest, key
