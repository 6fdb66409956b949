"""Forward passes of an evaluation over micro-batches of a replica, through all pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.parallel.batch import Batch, PassInfo
from megatrain.training.engine import Engine


def forward_passes(
    engine: Engine,
    batches: Sequence[Batch],
    num_samples: Sequence[int | None] | None = None,
    *,
    length: int | None = None,
) -> list[PassInfo]:
    """Run micro-batches of --eval-micro-batch-size samples; return their infos, with the head's sums on its stage.

    Args:
        batches: this context rank's rows of each.
        num_samples: samples of each micro-batch before its padding; None: all.
        length: tokens of a sample, a multiple of tp, less than in training without context ranks alone; None: as in training.
    """
    executor, config = engine.executor, engine.plan.config
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
    trained = executor.hidden_shape, executor.hidden_rows
    rows, _, channels = executor.hidden_shape
    if length is not None:
        rows = engine.model.tp.sequence_rows(length // engine.model.cp.size)
        executor.hidden_rows = [(rows, rows)] * len(executor.hidden_rows)
    executor.hidden_shape = rows, config.training.eval_micro_batch_size, channels
    executor.run(engine.pipeline.evaluation(engine.grid.pp.rank, len(batches)), batches, infos)
    executor.hidden_shape, executor.hidden_rows = trained
    return infos
