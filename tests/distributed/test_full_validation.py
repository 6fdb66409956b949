"""Full validation with a capacity of experts: the same loss under every layout, and padding samples have no part in it."""

import numpy as np
import pytest
import torch

from megatrain.data.samples.sampler import DataShard, FullSampler
from megatrain.parallel.batch import Batch
from megatrain.tools.parity.measure import engine_of, tiny_plan
from megatrain.tools.parity.rows import MICRO_BATCH, Layout
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.evaluation import evaluate

LENGTH, TOTAL = 24, 5


@pytest.mark.parametrize(
    "text",
    [
        "mixtral dropping",
        "dp2 mixtral dropping",
        "dp4 ep4 mixtral dropspadded",
        "tp2 sp dp2 pp2 ep2 alltoall mixtral dropping",
        "cp2 dp4 ep2 deepseek dropspadded batch8",
    ],
)
def test_the_loss_is_that_of_one_process_without_padding(pool: WorkerPool, text: str) -> None:
    layout = Layout.of(text)
    ((expected, tokens),) = pool.run(1, evaluated, layout.alone, False)
    found = pool.run(layout.world_size, evaluated, layout, True)
    assert [count for _, count in found] == [tokens] * len(found)
    assert [loss for loss, _ in found] == pytest.approx([expected] * len(found), rel=1e-10)


def evaluated(rank: int, world_size: int, layout: Layout, is_padded: bool) -> tuple[float, float]:
    """Return the sums of losses and of tokens over all samples; the last micro-batches are padded as by the loader, or short."""
    engine = engine_of(tiny_plan(layout, world_size), rank)
    dp = engine.grid.dp
    sampler = FullSampler(DataShard(micro_batch_size=MICRO_BATCH, dp_rank=dp.rank, dp_size=dp.size), TOTAL)
    indices = [sampler.indices(0, number) for number in range(sampler.num_microbatches)]
    if not is_padded:
        sums = [evaluate(engine, [batch_of(one, len(one))]) for one in indices]
        loss, tokens = torch.stack(sums).sum(0).tolist()
    else:
        batches = [batch_of(one, MICRO_BATCH) for one in indices]
        loss, tokens = evaluate(engine, batches, [len(one) for one in indices]).tolist()
    return loss, tokens


def batch_of(indices: range, size: int) -> Batch:
    """Return a micro-batch of these samples, filled up with samples of zeros that do not count."""
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, 101, (TOTAL, LENGTH + 1)))[list(indices)]
    mask = torch.from_numpy((rng.random((TOTAL, LENGTH)) < 0.67).astype(np.float32))[list(indices)]
    padding = size - len(indices)
    tokens = torch.cat((tokens, tokens.new_zeros(padding, LENGTH + 1)))
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        loss_mask=torch.cat((mask, mask.new_zeros(padding, LENGTH))),
        position_ids=torch.arange(LENGTH).expand(size, -1),
    )
