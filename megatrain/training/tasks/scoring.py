"""Scores of --eval-tasks by the model that trains, under any layout.

    rank 0: files ─> tasks ─> tokens ─> all ranks
    rounds of micro-batches, dealt to the replicas in turn ─> passes ─> losses of labels, summed over ranks ─> metrics

Each rank adds the losses of its labels to zeros at their places, so that a sum over ranks is exact and the scores do not
depend on how samples are split. Nothing is drawn at random, and no state of the training changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megatrain.config.derive.vision import text_length
from megatrain.data.tasks.files import Task, read_tasks
from megatrain.data.tasks.requests import (
    Request,
    Round,
    Score,
    batch_of,
    requests_of_run,
    round_scores,
    rounds,
    task_metrics,
)
from megatrain.model.families.token_scores import BatchScores, noted_scores
from megatrain.model.head import Head
from megatrain.parallel.collectives import all_reduce
from megatrain.training.engine import Engine
from megatrain.training.tasks.passes import forward_passes


class TaskEvaluation:
    """The tasks of a run. All ranks create it and call it alike."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.grid, self.tasks = engine, engine.grid, list[Task]()
        config, requests = engine.plan.config, tuple[Request, ...]()
        if self.grid.rank == 0:
            self.tasks = read_tasks(config.training.eval_tasks, config.training.eval_tasks_limit)
            requests = requests_of_run(tuple(self.tasks), config.tokenizer)
        self.requests = self._from_main(requests)

    def _from_main(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests of rank 0 on all ranks."""
        sizes = [[len(one.tokens), one.num_scored] for one in requests]
        (count,) = self._of_main([len(sizes)], 1)
        flat = self._of_main([number for pair in sizes for number in pair], 2 * count)
        tokens = iter(self._of_main([token for one in requests for token in one.tokens], sum(flat[::2])))
        return [
            Request(tuple(next(tokens) for _ in range(size)), num_scored)
            for size, num_scored in zip(flat[::2], flat[1::2], strict=True)
        ]

    def _of_main(self, numbers: Sequence[int], count: int) -> list[int]:
        """Return the numbers of rank 0 on all ranks."""
        values = torch.zeros(count, dtype=torch.int64, device=self.engine.device)
        if self.grid.rank == 0:
            values += torch.tensor(numbers, dtype=torch.int64, device=self.engine.device)
        found: list[int] = all_reduce(values, self.grid.world).tolist()
        return found

    def run(self, before_round: Callable[[], None]) -> dict[str, dict[str, float]]:
        """Return the metrics of each task, equal on all ranks; `before_round` is a collective."""
        grid, training = self.grid, self.engine.plan.config.training
        length, scores = text_length(self.engine.plan.config), dict[int, Score]()
        for one in rounds(
            self.requests,
            max_length=length,
            batch_size=training.eval_micro_batch_size,
            per_round=grid.dp.size * max(self.engine.plan.derived.num_eval_microbatches, grid.pp.size),
            # Context ranks have RoPE tables of their positions in samples of the whole length.
            divisor=grid.tp.size if grid.cp.size == 1 else length,
        ):
            before_round()
            scores |= round_scores(self.requests, one, self._values(one).cpu())
        return self._metrics([scores[number] for number in range(len(scores))])

    def _values(self, one: Round) -> Tensor:
        """Return losses and hits of the labels of a round: [micro-batches, 2, b, s], equal on all ranks."""
        engine, dp, length = self.engine, self.grid.dp, one.length
        size, count = engine.plan.config.training.eval_micro_batch_size, len(one.microbatches)
        mine = [one.microbatches[n : n + 1] for n in range(dp.rank, -(-count // dp.size) * dp.size, dp.size)]
        requests = [[self.requests[number] for number in (batch[0] if batch else ())] for batch in mine]
        batches = engine.shard_batches(
            [batch_of(part, length=length, size=size, device=engine.device) for part in requests]
        )
        head = engine.model.segments[-1]
        context: AbstractContextManager[dict[int, BatchScores]] = (
            noted_scores(head) if isinstance(head, Head) else nullcontext({})
        )
        with context as noted:
            forward_passes(engine, batches, [len(part) for part in requests], length=length)
        values = torch.zeros(len(mine) * dp.size, 2, size, length, dtype=torch.float64, device=engine.device)
        for number, found in noted.items():
            positions = engine.model.cp.positions(length // engine.model.cp.size, engine.device)
            values[number * dp.size + dp.rank].index_copy_(2, positions, found.values)
        return all_reduce(all_reduce(values, engine.grid.replicas), engine.grid.pp)[:count]

    def _metrics(self, scores: Sequence[Score]) -> dict[str, dict[str, float]]:
        """Return the metrics, which rank 0 computes, on all ranks."""
        found = task_metrics(self.tasks, scores) if self.grid.rank == 0 else {}
        metrics: dict[str, dict[str, float]] = self.grid.messages.broadcast(found)
        return metrics
