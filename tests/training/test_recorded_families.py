"""BERT, T5, models with delta nets and vision-language models, trained by Megatron-LM and recorded to the last digit: the same weights and batches give the same digits.

Both ran in fp32 on a CPU: sums are in another order. Batches are the recorded ones, so that this holds the models, not the data.
"""

import json
import math
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pytest
import torch
from canonical_weights import CopiedWeights, canonical
from safetensors.torch import load_file
from torch import Tensor

from megatrain.config import parse, resolve
from megatrain.config.schema.data import MASKED_FAMILIES
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.images.vectors import place_images, vector_tokens
from megatrain.data.samples.dataset import FamilySample
from megatrain.data.tokenizers.build import Tokenizer, load_tokenizer
from megatrain.parallel.batch import Batch
from megatrain.parallel.family_batch import family_batch
from megatrain.tools.parity.measure import gradients_of, master_weights_of
from megatrain.training.batches import build_samples
from megatrain.training.build import build_schedules
from megatrain.training.launch import facts
from megatrain.training.launch.ranks import joined_ranks
from megatrain.training.logging.console import Console, Phases
from megatrain.training.step_report import StepReport
from megatrain.training.trainer import Trainer

FOLDERS: Final = ("bert", "t5", "gdn", "hybrid", "vlm")
"""Folders of recordings."""
LOSS, NORM, GRADIENT = 5e-7, 2e-6, 1e-5
"""Largest relative differences of a loss and a gradient norm, and of a gradient, relative to its largest element."""
LOSS_OF_EXPERTS, RATE = 1e-6, 1e-12
"""The same of the losses of routers, which Megatron-LM sums in fp32, and of the learning rate."""
ENOUGH: Final = 64
"""Values of a tensor from which on their spread is compared."""
OF_DATA: Final = (
    "--tokenizer-type",
    "--tokenizer-model",
    "--vocab-file",
    "--vocab-extra-ids",
    "--data-path",
    "--train-data-path",
    "--valid-data-path",
    "--test-data-path",
    "--short-seq-prob",
)
"""Flags of the data, which is recorded."""
SHARED: Final = Path(__file__).parents[3] / "shared/golden/families"


@dataclass(frozen=True)
class Case:
    """A recorded run of Megatron-LM: the files `NAME.*` of a folder."""

    folder: Path
    name: str

    @property
    def flags(self) -> list[str]:
        """Return the recorded command line, which reads the sentences next to the folder, or the shared ones."""
        flags: list[str] = json.loads((self.folder / "flags.json").read_text())[self.name]
        sentences = self.folder.parent / "sentences"
        sentences = sentences if sentences.is_dir() else SHARED / "sentences"
        return [flag.replace("{sentences}", str(sentences)) for flag in flags]

    @property
    def family(self) -> str:
        """Return the family of the model: the name of the folder, unless it holds several."""
        if self.folder.name in (*MASKED_FAMILIES, "vlm"):
            return self.folder.name
        return "hybrid" if any(flag.startswith("--hybrid-") for flag in self.flags) else "gpt"

    @property
    def vocab_size(self) -> int:
        """Return the rows of the vocabulary's tensors, padding included."""
        return next(
            len(x) for name, x in self.tensors("weights").items() if name.endswith("word_embeddings.weight")
        )

    @property
    def checkpoint(self) -> Path:
        """Return the archive of its checkpoint, which not every run has."""
        return self.folder / f"{self.name}.ckpt.tar.xz"

    def lines(self, run: str = "") -> list[dict[str, Any]]:
        """Return the recorded iterations of the first run, or the `resumed` one."""
        lines: list[dict[str, Any]] = json.loads((self.folder / f"{self.name}{run}.json").read_text())
        return lines

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """Return `weights`, `gradients`, `batches` or `resumed.batches`."""
        return load_file(self.file(kind))

    def file(self, kind: str) -> Path:
        """Return the file of these tensors."""
        return self.folder / f"{self.name}.{kind}.safetensors"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test for every case in the folders of the families."""
    if "case" not in metafunc.fixturenames:
        return
    folder: Path = metafunc.config.getoption("families") or SHARED
    cases = [
        Case(folder / family, name)
        for family in FOLDERS
        if (folder / family / "flags.json").is_file()
        for name in json.loads((folder / family / "flags.json").read_text())
    ]
    if "stopped" in metafunc.fixturenames:
        cases = [case for case in cases if case.checkpoint.is_file()]
    metafunc.parametrize("case", cases, ids=lambda case: case.name)


@pytest.fixture
def stopped(case: Case, tmp_path: Path) -> Path:
    """The folder of the checkpoint of a recorded run."""
    with tarfile.open(case.checkpoint) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / f"{case.name}.ckpt"


@contextmanager
def trainer_of(case: Case, *more_flags: str) -> Iterator[Trainer]:
    """Build the trainer of a recorded command line, with the recorded weights.

    Megatron-LM counts the padded vocabulary in the softmax: with all its ids as vocabulary, so do we.
    """
    flags = [*without(case.flags, OF_DATA), *more_flags, "--mock-data", "--tokenizer-type", "NullTokenizer"]
    with joined(case, [*flags, "--vocab-size", str(case.vocab_size)]) as trainer:
        weights = CopiedWeights(canonical(case.tensors("weights"), trainer.plan.config.model))
        trainer.engine.optimizer.fill("weight", weights)
        trainer.engine.optimizer.sync_model_weights()
        assert not weights.unused
        yield trainer


@contextmanager
def resumed_trainer_of(case: Case, load: Path) -> Iterator[Trainer]:
    """Build the trainer of a recorded command line that resumes from a checkpoint of Megatron-LM. The data is the run's own."""

    def padded(config: TokenizerConfig) -> Tokenizer:
        tokenizer = load_tokenizer(config)
        tokenizer.vocab_size = case.vocab_size
        return tokenizer

    flags = [*case.flags, "--load", str(load), "--allow-pickle"]
    with patch.object(facts, "load_tokenizer", padded), joined(case, flags) as trainer:
        trainer.resume()
        yield trainer


@contextmanager
def joined(case: Case, flags: Sequence[str]) -> Iterator[Trainer]:
    """Build the trainer of a command line of a recorded model."""
    words = [*flags, "--model-family", case.family, "--device", "cpu", "--transformer-impl", "local"]
    if "vision_projection.encoder.linear_fc1.layer_norm_weight" in case.tensors("weights"):
        words += ["--vision-projection-norm"]
    with joined_ranks(parse(words), Phases(Console(is_quiet=True))) as ranks:
        yield Trainer(ranks)


def without(flags: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the flags without these and the words after each."""
    kept, is_kept = [], True
    for flag in flags:
        is_kept = flag.partition("=")[0] not in names if flag.startswith("--") else is_kept
        kept += [flag] * is_kept
    return kept


def batches_of(case: Case, kind: str, size: int) -> list[list[Batch]]:
    """Return the recorded micro-batches of each iteration, `size` of them."""
    arrays = case.tensors(kind)
    if case.family == "vlm":
        first = 0 if kind == "batches" else case.tensors("batches")["tokens"].flatten(0, 1).shape[0]
        arrays = with_images(arrays, case, first)
    count = len(arrays["labels"])
    samples = [{key: x[number] for key, x in arrays.items()} for number in range(count)]
    batches = [batch_of(case.family, sample) for sample in samples]
    assert count % size == 0
    return [batches[first : first + size] for first in range(0, count, size)]


def batch_of(family: str, sample: dict[str, Tensor]) -> Batch:
    """Return a micro-batch from its recorded arrays."""
    if family in (*MASKED_FAMILIES, "vlm"):
        return family_batch(family, sample)
    return Batch(
        tokens=sample["tokens"].long(),
        labels=sample["labels"].long(),
        loss_mask=sample["loss_mask"].float(),
        position_ids=sample["position_ids"].long(),
    )


def with_images(arrays: dict[str, Tensor], case: Case, first: int) -> dict[str, Tensor]:
    """Return the arrays with the recorded images, and a token for each vector of an image; `first`: number of the first sample.

    Images are random, or black, which gives the patches no gradient.
    """
    flags = case.flags
    height, width, patch = (
        int(flags[flags.index(flag) + 1]) for flag in ("--img-h", "--img-w", "--patch-dim")
    )
    count = (height // patch) * (width // patch) + ("--disable-vision-class-token" not in flags)
    steps, samples, length = arrays["tokens"].shape
    shape = (steps * samples, 1, 3, height, width)
    images = np.zeros(shape, np.float32)
    of_patches = case.tensors("gradients").get("vision_model.conv1.weight")
    if of_patches is None or of_patches.any():
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


def train(trainer: Trainer, case: Case, kind: str = "batches") -> list[dict[str, float]]:
    """Train on all recorded batches; return the numbers of each iteration by their recorded names."""
    first = trainer.progress.iteration
    schedules, size = build_schedules(trainer.plan), trainer.plan.config.training.global_batch_size
    numbers = []
    for iteration, batches in enumerate(batches_of(case, kind, trainer.plan.derived.num_microbatches), first):
        start = iteration * size
        report = trainer.engine.step(batches, schedules.at(start), first_sample=start)
        next_rate = schedules.at(start + size).lr
        numbers.append({"iteration": iteration + 1, "learning_rate": next_rate, **losses_of(report)})
    return numbers


def losses_of(report: StepReport) -> dict[str, float]:
    """Return the losses and the norm of an iteration, by Megatron-LM's names."""
    losses = {"lm loss": report.lm_loss, "grad_norm": report.grad_norm}
    if report.sop_loss is not None:
        losses["sop loss"] = report.sop_loss
    losses |= {f"mtp_{depth} loss": loss for depth, loss in enumerate(report.mtp_losses, 1)}
    for layer in report.routers.layers if report.routers else ():
        losses |= {f"{name} of layer {layer.layer}": loss for name, loss in layer.losses.items()}
    return losses


def recorded_losses(line: dict[str, Any]) -> dict[str, float]:
    """Return the recorded numbers of an iteration under the names of `train`; layers without experts have 0."""
    numbers = {}
    for name, value in line.items():
        if name.startswith("moe ") and name.endswith(" by layer"):
            loss = name.removeprefix("moe ").removesuffix(" by layer")
            numbers |= {f"{loss} of layer {layer}": one for layer, one in enumerate(value) if one}
        elif name.endswith("loss") or name in ("iteration", "grad_norm", "learning_rate"):
            numbers[name] = value
    return numbers


def bound_of(name: str) -> float:
    """Return the largest relative difference of a number."""
    bounds = {"iteration": 0.0, "learning_rate": RATE, "grad_norm": NORM}
    return bounds.get(name, LOSS_OF_EXPERTS if " of layer " in name else LOSS)


def assert_recorded(found: Sequence[dict[str, float]], recorded: Sequence[dict[str, Any]]) -> None:
    """Compare the numbers of all iterations."""
    assert len(found) == len(recorded)
    for ours, line in zip(found, recorded, strict=True):
        theirs = recorded_losses(line)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=bound_of(name), abs=0), name


def test_families_train_to_the_recorded_digits(case: Case) -> None:
    with trainer_of(case) as trainer:
        assert_recorded(train(trainer, case), case.lines())


def test_a_small_fault_is_above_the_bounds(case: Case) -> None:
    with trainer_of(case, "--weight-decay", "0.11") as trainer:
        numbers = train(trainer, case)
    with pytest.raises(AssertionError):
        assert_recorded(numbers, case.lines())


def test_gradients_of_the_first_iteration_are_the_recorded_ones(case: Case) -> None:
    with trainer_of(case) as trainer:
        first, *_ = batches_of(case, "batches", trainer.plan.derived.num_microbatches)
        trainer.engine.accumulate_gradients(first)
        found = {part.name: torch.from_numpy(part.values).clone() for part in gradients_of(trainer.engine)}
        expected = canonical(case.tensors("gradients"), trainer.plan.config.model)
    assert found.keys() == expected.keys()
    # Exact gradients of biases of keys are 0, since softmax ignores what all scores have in common.
    smallest = 1e-7 * max(float(gradient.abs().max()) for gradient in expected.values())
    for key, gradient in expected.items():
        largest = max(float(gradient.abs().max()), smallest)
        difference = float((found[key] - gradient).abs().max())
        assert difference <= GRADIENT * largest or difference <= smallest, key


def test_a_resumed_run_continues_with_the_recorded_digits(case: Case, stopped: Path) -> None:
    """The data is recorded too: `tests/interop/megatron/test_continued_families.py` reads the corpus."""
    with resumed_trainer_of(case, stopped) as trainer:
        assert_recorded(train(trainer, case, "resumed.batches"), case.lines(".resumed"))


@pytest.mark.usefixtures("whole_mock_data")
def test_samples_of_the_flags_are_the_recorded_ones(case: Case) -> None:
    """Of both runs. Mock data has other images than the recorded runs, see `with_images`."""
    request = parse([*case.flags, "--model-family", case.family, "--device", "cpu"])
    found = facts.gather_data_facts(request, world_size=1, log=print)
    samples = build_samples(resolve(request, found), found).train
    assert samples is not None
    kinds = [kind for kind in ("batches", "resumed.batches") if case.file(kind).is_file()]
    batches = [batch for kind in kinds for (batch,) in batches_of(case, kind, 1)]
    b = len(batches[0].tokens)
    for number, batch in enumerate(batches):
        read = [arrays_of(samples[number * b + row]) for row in range(b)]
        ours = batch_of(case.family, {name: torch.stack([one[name] for one in read]) for name in read[0]})
        assert ours.tokens.shape == batch.tokens.shape
        for name, tensor in tensors_of(ours).items():
            assert torch.equal(tensor, tensors_of(batch)[name]), (number, name)


def arrays_of(sample: Any) -> dict[str, Tensor]:
    """Return the arrays of a sample; those of a GPT are fields."""
    arrays = sample.arrays if isinstance(sample, FamilySample) else vars(sample)
    return {name: torch.from_numpy(x) for name, x in arrays.items() if isinstance(x, np.ndarray)}


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors of a micro-batch without images."""
    encoder = (
        {} if batch.encoder is None else {f"encoder.{name}": x for name, x in vars(batch.encoder).items()}
    )
    tensors = {**vars(batch), **encoder}
    return {name: x for name, x in tensors.items() if isinstance(x, Tensor) and name != "images"}


def test_initial_values_have_the_recorded_spread(case: Case) -> None:
    """Six times the deviation that the mean and the spread of as many independent values have."""
    with trainer_of(case) as trainer:
        trainer.engine.initialize()
        parts = {part.name: torch.from_numpy(part.values) for part in master_weights_of(trainer.engine)}
        recorded = canonical(case.tensors("weights"), trainer.plan.config.model)
    assert parts.keys() == recorded.keys()
    for name, theirs in recorded.items():
        ours, values = parts[name], theirs.double()
        spread = float(values.std(correction=0))
        if spread == 0:
            assert torch.equal(ours, values), name
        elif len(values.flatten()) >= ENOUGH:
            noise = 6 * math.sqrt(2 / values.numel())
            assert abs(float(ours.mean() - values.mean())) <= noise * spread, name
            assert abs(math.log(float(ours.std(correction=0)) / spread)) <= noise, name
