"""--eval-tasks under every layout: the scores of one process; the split of samples over ranks does not change a bit."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from everyday import only

from megatrain.parallel.batch import Batch
from megatrain.tools.parity.measure import engine_of, tiny_plan
from megatrain.tools.parity.rows import Layout
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.evaluation import evaluate
from megatrain.training.tasks.scoring import TaskEvaluation

Metrics = Mapping[str, Mapping[str, float]]
LENGTH = 256
LAYOUTS = [
    "dp2 pp2 zero3",
    "tp2 sp cp2 pp2 mixtral ep2",
    "dp4 ep4 mixtral dropping",
    "cp2 dp4 ep2 deepseek",
    "pp2 interleaved tied mtp1",
    "tp4 sp dp2 tied",
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of multiple choice, one of them longer than a half of the context, and one than all of it."""
    numbers = torch.randint(100, (11, 300), generator=torch.Generator().manual_seed(0)).tolist()
    rows = []
    for row, length in zip(numbers, (3, 200, 5, 0, 290, 7, 1, 60, 30, 2, 9), strict=True):
        words = list(map(str, row))
        rows.append(
            {
                "query": " ".join(words[:length]),
                "choices": [words[-1], " ".join(words[-4:])],
                "gold": row[0] % 2,
            }
        )
    path = tmp_path_factory.mktemp("tasks") / "numbers.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("text", only(LAYOUTS[1:2], LAYOUTS))
def test_scores_are_those_of_one_process(pool: WorkerPool, file: Path, text: str) -> None:
    layout = Layout.of(text)
    ((expected, sums),) = pool.run(1, scored, layout.alone, str(file))
    found = pool.run(layout.world_size, scored, layout, str(file))
    is_split = (
        any(layout.has(word) for word in ("tp2", "tp4", "cp2")) or "mixtral" in text or "deepseek" in text
    )
    for metrics, of_bytes in found:
        assert metrics == (pytest.approx(expected, rel=1e-10) if is_split else expected)
        assert of_bytes == pytest.approx(sums, rel=1e-10)
    assert sums[1] == sums[3], "bytes"


def scored(rank: int, world_size: int, layout: Layout, file: str) -> tuple[Mapping[str, float], list[float]]:
    """Return the metrics of a task, and the sums of bits per byte of one micro-batch for each replica, all the same."""
    plan = tiny_plan(layout, world_size, "--eval-tasks", file, "--seq-length", str(LENGTH))
    engine = engine_of(plan, rank)
    metrics = TaskEvaluation(engine).run(lambda: None)
    tokens = torch.arange(2 * (LENGTH + 1)).view(2, -1) % 101
    mask = (tokens[:, 1:] % 3 > 0).float()
    batch = Batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        loss_mask=mask,
        position_ids=torch.arange(LENGTH).expand(2, -1),
    )
    counts = torch.arange(101) % 7
    loss, _, tokens_found, num_bytes = evaluate(engine, [batch], None, counts).tolist()
    expected = float((counts[batch.labels] * mask).sum()) * engine.grid.dp.size
    sums = [loss, num_bytes, tokens_found, expected]
    return metrics["numbers"], [one / engine.grid.dp.size for one in sums]
