"""What data parallelism does beside the computation changes no bit of the result."""

import numpy as np
import pytest

from megatrain.tools.parity_measure import NUM_STEPS, engine_of, own_batches, tiny_plan
from megatrain.tools.parity_rows import Layout
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.engine import schedules_of

BF16 = ("--bf16", "--params-dtype", "bfloat16")


def trained(
    rank: int, world_size: int, layout: Layout, flags: tuple[str, ...]
) -> tuple[list[tuple[float, float]], list[np.ndarray]]:
    """Loss and norm of three steps, the sums behind one more evaluation, and this rank's state."""
    engine = engine_of(tiny_plan(layout, world_size, *flags), rank)
    found = []
    for step in range(NUM_STEPS):
        batches = list(own_batches(step, layout, engine.grid.dp.rank))
        report = engine.step(
            batches, schedules_of(engine.plan).at(0), first_sample=step * layout.global_batch
        )
        found.append((report.lm_loss, report.grad_norm))
    loss, tokens = engine.evaluate(batches).tolist()
    state = [flat for kind in engine.optimizer.kinds for flat in engine.optimizer.state(kind)]
    return [*found, (loss, tokens)], [flat.double().numpy() for flat in state]


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout.of("dp3 zero1 overlap tied batch12"), ()),
        (Layout.of("dp4 zero1 overlap"), BF16),
        (Layout.of("dp2 overlap"), BF16),
        (Layout.of("tp2 sp dp2 pp2 zero1 overlap tied"), BF16),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "-".join(value),
)
def test_overlap_changes_no_bit(pool: WorkerPool, layout: Layout, flags: tuple[str, ...]) -> None:
    with_overlap = pool.run(layout.world_size, trained, layout, flags)
    without = pool.run(layout.world_size, trained, layout.but("nooverlap"), flags)
    for (numbers, state), (expected_numbers, expected_state) in zip(with_overlap, without, strict=True):
        assert numbers == expected_numbers
        assert all(np.array_equal(a, b) for a, b in zip(state, expected_state, strict=True))
