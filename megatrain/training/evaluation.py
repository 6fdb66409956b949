"""Evaluation of a run: losses over validation and test samples, at the iterations that the configuration asks for.

evaluation sets ─> micro-batches ─> `evaluate` ─> loss, accuracy ─> RunLog      a stop request ends it before the log
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.config.subjects.data_plans import evaluations
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.training.batches import EvaluationSet
from megatrain.training.engine import Engine
from megatrain.training.faults.bad_steps import NotFiniteError
from megatrain.training.garbage import GarbageCollection
from megatrain.training.losses import evaluation_sums, quotients
from megatrain.training.training_run import TrainingRun


def evaluate(
    engine: Engine, batches: Sequence[Batch], num_samples: Sequence[int | None] | None = None
) -> Tensor:
    """Return sums over the batch of all replicas, fp64: the dividends of `evaluation_sums`, then the divisors.

    For a GPT: the sum of token losses, and the number of tokens.

    Args:
        num_samples: samples of each micro-batch before its padding; None: all.
    """
    batches = engine.shard_batches(batches)
    infos = [
        PassInfo(
            microbatch=number,
            documents=batch.documents,
            is_token=batch.is_token,
            num_samples=samples,
            is_training=False,
        )
        for number, (batch, samples) in enumerate(
            zip(batches, num_samples or [None] * len(batches), strict=True)
        )
    ]
    rows, trained, channels = engine.executor.hidden_shape
    engine.executor.hidden_shape = rows, engine.plan.config.training.eval_micro_batch_size, channels
    engine.executor.run(engine.pipeline.evaluation(engine.grid.pp.rank, len(batches)), batches, infos)
    engine.executor.hidden_shape = rows, trained, channels
    dividends, divisors = zip(*evaluation_sums(engine.model.spec.head).values(), strict=True)
    return engine.sum_over_ranks(infos, [*dividends, *divisors])


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

    def run_if_due(self) -> str | None:
        """Evaluate if this iteration asks for it; return the reason to stop if the evaluation is incomplete.

        Raises:
            NotFiniteError: see `run`; the evaluation is pending, so that a resumed run repeats it.
        """
        if not self.schedule.is_due(self.progress.iteration):
            return None
        is_last = self.progress.iteration >= self.plan.derived.train_iters
        self.progress.is_evaluation_pending = True
        with self.garbage.evaluation():
            reason = self.run(("valid", "test") if is_last else ("valid",))
        self.log.restart_clock()
        self.progress.is_evaluation_pending = reason is not None
        if reason is None and self.plan.derived.requested_valid_samples is not None:
            self.progress.consumed_valid_samples += self.schedule.samples
        return reason

    def run(self, splits: tuple[str, ...]) -> str | None:
        """Log the values of these splits once all are complete; return the reason to stop if they are not.

        Raises:
            NotFiniteError: on all ranks; a loss is infinite or NaN.
        """
        found: dict[EvaluationSet, dict[str, float]] = {}
        with self.ranks.phases.heartbeat("evaluating"):
            for evaluation_set in self.sets:
                if evaluation_set.split in splits:
                    values, reason = self._values(evaluation_set)
                    if reason is not None:
                        return reason
                    found[evaluation_set] = values
            for evaluation_set, values in found.items():
                self.log.log_evaluation(
                    name=evaluation_set.name,
                    split=evaluation_set.split,
                    dataset=evaluation_set.dataset,
                    values=values,
                    iteration=self.progress.iteration,
                    consumed_samples=self.progress.consumed_train_samples,
                )
        for evaluation_set, values in found.items():
            loss = sum(value for name, value in values.items() if name.endswith("loss"))
            if not math.isfinite(loss):
                raise NotFiniteError(
                    f"{evaluation_set.name} loss at iteration {self.progress.iteration} is {loss}",
                    fix="resume from an older checkpoint with --ckpt-step N, and inspect the samples if the error repeats",
                )
        return None

    def _values(self, evaluation_set: EvaluationSet) -> tuple[dict[str, float], str | None]:
        """Return the values of `evaluation_sums` over the next samples of a set, or the reason to stop if there is one."""
        continues = evaluation_set.split == "valid" and not evaluation_set.is_whole
        consumed = self.progress.consumed_valid_samples if continues else 0
        samples_per_pass = self.plan.config.training.eval_micro_batch_size * self.ranks.grid.dp.size
        per_batch = self.plan.derived.num_eval_microbatches
        names = evaluation_sums(self.engine.model.spec.head)
        sums = torch.zeros(2 * len(names), dtype=torch.float64, device=self.ranks.device)
        for done in range(0, evaluation_set.num_microbatches, per_batch):
            reason = self._reason_to_stop()
            if reason is not None:
                return {}, reason
            count = min(per_batch, evaluation_set.num_microbatches - done)
            start = consumed + done * samples_per_pass
            batches = evaluation_set.batches.microbatches(start, count)
            sums += evaluate(self.engine, batches, evaluation_set.num_samples(start, count))
        return dict(zip(names, quotients(sums).tolist(), strict=True)), None

    def _reason_to_stop(self) -> str | None:
        """Return the reason to stop during an evaluation, or None; commit a pending save that all ranks have written.

        A collective: all ranks call it.

        Raises:
            CheckpointError: the save failed, see `RunSaves.commit_if_written`.
        """
        flags = torch.tensor((*self.stop.flags(), int(self.saves.is_writing)), device=self.ranks.device)
        *stop_flags, is_any_rank_writing = all_reduce(flags, self.ranks.grid.world, "max").tolist()
        self.saves.commit_if_written(is_any_rank_writing=bool(is_any_rank_writing))
        return self.stop.urgent_reason(stop_flags)
