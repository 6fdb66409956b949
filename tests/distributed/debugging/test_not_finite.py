"""NaNs planted under tp2: the message names rank, module, micro-batch and samples, and is the same on all ranks."""

import dataclasses
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from everyday import one_in
from run_here import LAYOUTS, make_trainer

from megatrain.optim import loss_scale
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.engine import Engine
from megatrain.training.faults.bad_steps import NotFiniteError
from megatrain.training.iterations import Iterations
from megatrain.training.trainer import Trainer

WORLD_SIZE, FLAGS = LAYOUTS["tp2 dp2 pp2"]
ITERATION = 2
"""Iteration before which faults are planted."""


def plant_weight(trainer: Trainer) -> None:
    """Spoil one key weight in layer 2, on both replicas: the all-gather after the step would repair a single one."""
    entries = trainer.engine.model.registry.entries.values()
    for entry in entries:
        for piece in entry.layout.pieces:
            if piece.name == "decoder.layers.2.attention.k.weight":
                entry.parameter.data[piece.row, 0] = torch.nan


def plant_gradient(trainer: Trainer) -> None:
    """Spoil the gradient inside layer 1 in the second micro-batch."""
    layer = trainer.engine.model.segments[2]  # after the embedding and layer 0

    def spoil_input(_module, arguments):
        info = next(x for x in arguments if hasattr(x, "microbatch"))
        if info.microbatch == 1 and info.is_training:
            arguments[0].register_hook(lambda gradient: gradient * torch.nan)

    layer.register_forward_pre_hook(spoil_input)


def plant_activation(trainer: Trainer) -> None:
    """Make the output of layer 3 infinite in the first micro-batch."""

    def spoil(_module, arguments, output):
        info = next(x for x in arguments if hasattr(x, "microbatch"))
        return output * torch.inf if info.microbatch == 0 and info.is_training else output

    trainer.engine.model.segments[1].register_forward_hook(spoil)


def plant_local_output(trainer: Trainer) -> None:
    """Spoil the output of fc1 in layer 0 on one tensor rank; the outputs of fc2 are summed over ranks."""

    def spoil(_module, _arguments, output):
        hidden, inner = output
        return hidden, inner * torch.nan

    trainer.engine.model.segments[1].get_submodule("branches.1.fc1").register_forward_hook(spoil)


def plant_local_gradient(trainer: Trainer) -> None:
    """Spoil the gradient of fc1's output in layer 0 on one tensor rank; fc1 sums its input gradients over ranks."""

    def spoil(_module, _arguments, output):
        output[1].register_hook(lambda gradient: gradient * torch.nan)

    trainer.engine.model.segments[1].get_submodule("branches.1.fc1").register_forward_hook(spoil)


def plant_sum(trainer: Trainer) -> None:
    """Make a sum over ranks infinite whose terms are finite."""

    def spoil(_module, _arguments, output):
        return output * torch.inf

    trainer.engine.model.segments[1].get_submodule("branches.1.fc2").register_forward_hook(spoil)


def plant_data(trainer: Trainer) -> None:
    """Spoil the loss mask of the second micro-batch."""
    loader = trainer.batches.train
    assert loader is not None
    read = loader.microbatches

    def spoiled(*arguments):
        batches = read(*arguments)
        mask = batches[1].loss_mask.clone()
        mask[0, 3] = torch.nan
        batches[1] = dataclasses.replace(batches[1], loss_mask=mask)
        return batches

    loader.microbatches = spoiled  # type: ignore[method-assign]


def plant_once(trainer: Trainer) -> None:
    """Spoil one gradient element once, as a hardware fault would."""
    finish = trainer.engine.data_parallel.finish_gradients

    def spoiled():
        finish()
        trainer.engine.buffers.gradients.shards[0][0] = torch.nan

    trainer.engine.data_parallel.finish_gradients = spoiled  # type: ignore[method-assign]


def error_text(
    rank: int,
    world_size: int,
    plant: Callable[[Trainer], None],
    culprits: tuple[int, ...],
    flags: list[str],
    max_pending: int,
) -> str:
    """Return the error of a run in which `plant` spoils the `culprits` before the step of `ITERATION`.

    Without a dynamic loss scale, that step is the last.
    """
    trainer = make_trainer(rank, world_size, [*FLAGS, "--eval-iters", "0", *flags])
    trainer.resume()
    run_next = Iterations.run_next

    def planted(self, **more):
        if self.next_number == ITERATION and rank in culprits:
            plant(trainer)
        return run_next(self, **more)

    with (
        mock.patch.object(Iterations, "run_next", planted),
        mock.patch.object(Engine, "max_pending", max_pending),
        mock.patch.object(loss_scale, "MOST_STUCK_STEPS", 2),
    ):
        try:
            trainer.train()
        except NotFiniteError as error:
            assert trainer.progress.iteration == ITERATION + ("--fp16" in flags)
            return str(error)
    return "no error"


CASES = [
    (plant_weight, (5, 7),
     "first on ranks 5, 7: 1 values of the weight decoder.layers.2.attention.k.weight"),
    pytest.param(
        plant_activation, (6,), "first on rank 6: the forward pass of decoder.layers.3 in micro-batch 0, samples 10 to 11",
        marks=pytest.mark.nightly,
    ),
    (plant_gradient, (2,), "first on rank 2: the backward pass of decoder.layers.1 in micro-batch 1, samples 14 to 15"),
    pytest.param(
        plant_local_output, (1,), "first on rank 1: the forward pass of decoder.layers.0 in micro-batch 0, samples 8 to 9",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        plant_local_output, (7,), "first on rank 7: the forward pass of decoder.layers.3 in micro-batch 0, samples 10 to 11",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        plant_local_gradient, (3,), ("first on rank 3: the backward pass of decoder.layers.0 in micro-batch 0, samples 10 to 11"
        "; affected gradients: decoder.layers.0."), marks=pytest.mark.nightly,
    ),
    (plant_sum, (0, 1), "first on ranks 0, 1: the forward pass of decoder.layers.0 in micro-batch 0, samples 8 to 9"),
    (plant_data, (7,), ("first on rank 7: the loss mask of samples 14 to 15\n"
     "  fix: inspect these samples, and resume from the last checkpoint")),
    (plant_once, (0,), "a second run of the same step was finite, as after a hardware fault"),
]  # fmt: skip


@pytest.mark.parametrize("max_pending", [pytest.param(0, marks=pytest.mark.nightly), 1])
@pytest.mark.parametrize(("plant", "culprits", "words"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_the_first_module_is_named(
    pool: WorkerPool,
    plant: Callable[[Trainer], None],
    culprits: tuple[int, ...],
    words: str,
    max_pending: int,
) -> None:
    answers = pool.run(WORLD_SIZE, error_text, plant, culprits, [], max_pending)
    for answer in answers:
        assert answer.startswith(f"iteration {ITERATION}: lm loss is ")
        assert words in answer
        assert "\n  fix: " in answer
        assert answer.endswith("; nothing was updated or saved")


@pytest.mark.parametrize(
    ("plant", "words"), one_in(2, [(plant_local_gradient, "backward"), (plant_local_output, "forward")])
)
def test_the_rank_is_named_without_sequence_parallelism(
    pool: WorkerPool, plant: Callable[[Trainer], None], words: str
) -> None:
    for answer in pool.run(WORLD_SIZE, error_text, plant, (1,), ["--no-sequence-parallel"], 0):
        assert f"; first on rank 1: the {words} pass of decoder.layers.0 in micro-batch 0" in answer


def test_a_run_of_fp16_that_stays_infinite_ends_on_all_ranks(pool: WorkerPool) -> None:
    flags = ["--fp16", "--initial-loss-scale", "1", "--train-iters", "4"]
    for answer in pool.run(WORLD_SIZE, error_text, plant_local_output, (1,), flags, 0):
        assert answer.startswith(f"iteration {ITERATION + 1}: lm loss is nan, gradient norm nan; ")
        assert (
            "; the last of 2 such steps in a row with a loss scale of 1; first on rank 1: the forward pass of "
            in answer
        )


def test_an_overflow_under_a_dynamic_scale_is_not_an_error(pool: WorkerPool) -> None:
    assert set(pool.run(WORLD_SIZE, error_text, plant_once, (0,), ["--fp16", "--train-iters", "4"], 0)) == {
        "no error"
    }
