"""Evaluation of a run: losses over validation and test samples, at the iterations that the configuration asks for.

evaluation sets ─> micro-batches ─> `evaluate` ─> loss, accuracy ─> RunLog      a stop request ends it before the log
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property

import torch
from torch import Tensor

from megatrain.config.errors import InputError
from megatrain.config.subjects.data_plans import evaluations
from megatrain.data.tokenizers.build import load_tokenizer
from megatrain.data.tokenizers.byte_counts import token_byte_counts
from megatrain.optim.averaged_weights import averaged_weights
from megatrain.parallel.batch import Batch
from megatrain.parallel.collectives import all_reduce
from megatrain.training.batches import EvaluationSet
from megatrain.training.engine import Engine
from megatrain.training.faults.bad_steps import NotFiniteError
from megatrain.training.garbage import GarbageCollection
from megatrain.training.losses import evaluation_sums, quotients
from megatrain.training.tasks.passes import forward_passes
from megatrain.training.tasks.scoring import TaskEvaluation
from megatrain.training.training_run import TrainingRun


def evaluate(
    engine: Engine,
    batches: Sequence[Batch],
    num_samples: Sequence[int | None] | None = None,
    byte_counts: Tensor | None = None,
) -> Tensor:
    """Return sums over the batch of all replicas, fp64: the dividends of `evaluation_sums`, then the divisors.

    For a GPT: the sum of token losses, and the number of tokens.

    Args:
        num_samples: samples of each micro-batch before its padding; None: all.
        byte_counts: bytes of each id, int64 [v]; adds the sums of bits per byte.
    """
    batches = engine.shard_batches(batches)
    infos = forward_passes(engine, batches, num_samples)
    has_bytes = byte_counts is not None
    if byte_counts is not None:
        for info, batch in zip(infos, batches, strict=True):
            if info.sums:
                bytes_of_labels = byte_counts[batch.labels.clamp(0, len(byte_counts) - 1)]
                info.sums["bytes"] = (bytes_of_labels * batch.loss_mask.double()).sum()
    sums = evaluation_sums(engine.model.spec.head, has_bytes=has_bytes)
    dividends, divisors = zip(*sums.values(), strict=True)
    return engine.sum_over_ranks(infos, [*dividends, *divisors])


class _StoppedError(Exception):
    """The reason to stop during an evaluation."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Evaluation:
    """The evaluations of a run.

    Args:
        run: the run whose model is evaluated.
        sets: evaluation sets of all splits.
        garbage: collects before and after an evaluation.
    """

    def __init__(
        self, run: TrainingRun, sets: tuple[EvaluationSet, ...], *, garbage: GarbageCollection
    ) -> None:
        self.ranks, self.plan, self.engine, self.sets = run.ranks, run.plan, run.engine, sets
        self.log, self.progress, self.saves, self.stop = run.log, run.progress, run.saves, run.stop
        self.garbage = garbage
        self.schedule = evaluations(run.plan)
        training = run.plan.config.training
        self.tasks = TaskEvaluation(run.engine) if training.eval_tasks else None

    def is_due(self, iteration: int) -> bool:
        """Return whether an evaluation of samples or tasks follows this iteration."""
        return self.schedule.is_due(iteration) or self._has_tasks(iteration)

    def _has_tasks(self, iteration: int) -> bool:
        interval = self.plan.config.training.eval_tasks_interval
        is_at_interval = interval is not None and iteration > 0 and iteration % interval == 0
        is_due = is_at_interval or (interval is None and self.schedule.is_due(iteration))
        return self.tasks is not None and (is_due or iteration >= self.plan.derived.train_iters)

    def run_if_due(self) -> str | None:
        """Evaluate if this iteration asks for it; return the reason to stop if the evaluation is incomplete.

        Raises:
            NotFiniteError: see `run`; the evaluation is pending, so that a resumed run repeats it.
        """
        iteration = self.progress.iteration
        if not self.is_due(iteration):
            return None
        has_samples, is_last = self.schedule.is_due(iteration), iteration >= self.plan.derived.train_iters
        splits = ("valid", "test") if is_last else ("valid",)
        self.progress.is_evaluation_pending = True
        with self.garbage.evaluation():
            reason = self.run(splits if has_samples else (), has_tasks=self._has_tasks(iteration))
        self.log.restart_clock()
        self.progress.is_evaluation_pending = reason is not None
        if reason is None and has_samples and self.plan.derived.requested_valid_samples is not None:
            self.progress.consumed_valid_samples += self.schedule.samples
        return reason

    def run(self, splits: tuple[str, ...], *, has_tasks: bool = True) -> str | None:
        """Log the values of these splits, and the scores of tasks, once all are complete; return the reason to stop if they are not.

        Raises:
            NotFiniteError: on all ranks; a loss is infinite or NaN.
        """
        optimizer = self.engine.optimizer
        weights = averaged_weights(optimizer) if self.plan.config.training.eval_with_ema else nullcontext()
        try:
            with weights, self.ranks.phases.heartbeat("evaluating"):
                found = [(one, self._values(one)) for one in self.sets if one.split in splits]
                of_tasks = self.tasks.run(self._stop_if_asked) if self.tasks is not None and has_tasks else {}
                self._log(found, of_tasks)
        except _StoppedError as stopped:
            return stopped.reason
        for evaluation_set, values in found:
            loss = sum(value for name, value in values.items() if name.endswith("loss"))
            if not math.isfinite(loss):
                raise NotFiniteError(
                    f"{evaluation_set.name} loss at iteration {self.progress.iteration} is {loss}",
                    fix="resume from an older checkpoint with --ckpt-step N, and inspect the samples if the error repeats",
                )
        return None

    def _log(
        self, found: list[tuple[EvaluationSet, dict[str, float]]], of_tasks: dict[str, dict[str, float]]
    ) -> None:
        iteration, consumed = self.progress.iteration, self.progress.consumed_train_samples
        position = {"iteration": iteration, "consumed_samples": consumed}
        for one, values in found:
            if "loss" in values:
                self.log.log_evaluation(
                    f"{one.name} loss", values, split=one.split, dataset=one.dataset, **position
                )
            else:
                self.ranks.console.print(
                    f"> WARNING: {one.name} at iteration {iteration}: no token of its samples has a loss: nothing is logged"
                )
        for name, values in of_tasks.items():
            self.log.log_evaluation(f"task {name}", values, split="task", dataset=name, **position)

    def _values(self, evaluation_set: EvaluationSet) -> dict[str, float]:
        """Return the values of `evaluation_sums` over the next samples of a set.

        A mean over nothing, such as the loss of samples without a label, is left out.
        """
        continues = evaluation_set.split == "valid" and not evaluation_set.is_whole
        consumed = self.progress.consumed_valid_samples if continues else 0
        samples_per_pass = self.plan.config.training.eval_micro_batch_size * self.ranks.grid.dp.size
        per_batch = self.plan.derived.num_eval_microbatches
        names = evaluation_sums(self.engine.model.spec.head, has_bytes=self._byte_counts is not None)
        sums = torch.zeros(2 * len(names), dtype=torch.float64, device=self.ranks.device)
        for done in range(0, evaluation_set.num_microbatches, per_batch):
            self._stop_if_asked()
            count = min(per_batch, evaluation_set.num_microbatches - done)
            start = consumed + done * samples_per_pass
            batches = evaluation_set.batches.microbatches(start, count)
            sums += evaluate(
                self.engine, batches, evaluation_set.num_samples(start, count), self._byte_counts
            )
        counts = sums.chunk(2)[1].tolist()
        quotient_of_name = zip(names, quotients(sums).tolist(), counts, strict=True)
        values = {name: value for name, value, count in quotient_of_name if count}
        if "bits_per_byte" in values:
            values["bits_per_byte"] /= math.log(2)
        return values

    @cached_property
    def _byte_counts(self) -> Tensor | None:
        """Bytes of each id of the vocabulary on all ranks, from rank 0: int64 [v]; None: bits per byte are not known."""
        training = self.plan.config.training
        if self.engine.model.spec.head.has_accuracy or training.loss is not None:
            return None  # of a family that predicts some tokens, or a loss that is no cross-entropy
        if self.plan.config.tokenizer.tokenizer_type is None:
            return None
        counts = torch.zeros(self.plan.derived.vocab_size, dtype=torch.int64, device=self.ranks.device)
        if self.ranks.is_main:
            try:
                known = token_byte_counts(load_tokenizer(self.plan.config.tokenizer))
            except InputError as error:
                known = None
                self.ranks.console.print(f"> no bits per byte: {error.problems[0].text}")
            if known is not None:
                counts[: len(known)] = torch.tensor(known)
        counts = all_reduce(counts, self.ranks.grid.world)
        return counts if bool(counts.any()) else None

    def _stop_if_asked(self) -> None:
        """End the evaluation if there is a reason to stop; commit a pending save that all ranks have written.

        A collective: all ranks call it.

        Raises:
            _StoppedError: on all ranks.
            CheckpointError: the save failed, see `RunSaves.commit_if_written`.
        """
        flags = torch.tensor((*self.stop.flags(), int(self.saves.is_writing)), device=self.ranks.device)
        *stop_flags, is_any_rank_writing = all_reduce(flags, self.ranks.grid.world, "max").tolist()
        self.saves.commit_if_written(is_any_rank_writing=bool(is_any_rank_writing))
        reason = self.stop.urgent_reason(stop_flags)
        if reason is not None:
            raise _StoppedError(reason)
