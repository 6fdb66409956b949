"""Own layers, data, loss, learning rate and callbacks of a user together, over combined axes and a resume in the middle."""

import json
import re
from pathlib import Path

import pytest
from everyday import nightly
from run_here import MODEL, train_rank

DEPTHS = f"{Path(__file__).parents[1] / 'extending' / 'mixture_of_depths.py'}:with_depths"
DOCS = Path(__file__).parents[2] / "docs"
AXES = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write the examples of the pages; return the flags that name them, without --spec."""
    folder = tmp_path_factory.mktemp("files")
    text = "".join((DOCS / page).read_text() for page in ("extending.md", "training.md"))
    for name, block in re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(block)
    return folder, (
        f"--dataset {folder}/my_dataset.py:triples --loss {folder}/my_loss.py:focal --lr-decay-style"
        f" {folder}/my_schedule.py:cubic --callbacks {folder}/my_callbacks.py:Recorder --params-dtype float64"
        " --train-iters 6 --eval-interval 3 --lr-warmup-iters 1"
    )


def losses(pool, num_ranks, flags, save, exit_code=0):
    """Train; return the losses of iterations and evaluations that the callbacks of rank 0 got."""
    words = [*(word for word in MODEL if word != "--mock-data"), *flags.split(), "--save", str(save)]
    assert set(pool.run(num_ranks, train_rank, words)) == {exit_code}
    events = [json.loads(line) for line in (save / "events-0.jsonl").read_text().splitlines()]
    named = [event for event in events if "loss" in event]
    return {f"{event.get('split', 'train')} {number}": event["loss"] for number, event in enumerate(named)}


@pytest.mark.parametrize(
    ("spec", "layouts"),
    [
        nightly("convolutions", {8: AXES, 4: f"{ZERO3} --tensor-model-parallel-size 2"}),
        ("depths", {4: "--context-parallel-size 2", 2: ZERO3}),
    ],
)
@pytest.mark.nightly
def test_combined_axes_and_a_resume_give_the_losses_of_one_process(pool, files, tmp_path, spec, layouts):
    folder, flags = files
    named = DEPTHS if spec == "depths" else f"{folder}/my_layers.py:with_convolutions"
    flags = f"{flags} --spec {named}"
    alone = losses(pool, 1, flags, tmp_path / "alone")
    assert len(alone) > 6
    for number, (ranks, layout) in enumerate(layouts.items()):
        assert losses(pool, ranks, f"{flags} {layout}", tmp_path / str(number)) == pytest.approx(
            alone, rel=1e-9
        )
    save = tmp_path / "resumed"
    (first, one), (second, other) = layouts.items()
    losses(pool, first, f"{flags} {one} --exit-interval 3", save, exit_code=75)
    assert losses(pool, second, f"{flags} {other} --load {save}", save) == pytest.approx(alone, rel=1e-9)
