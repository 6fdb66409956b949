"""Own layers, data, loss, learning rate and callbacks of a user together, over combined axes and a resume in the middle."""

import json
from pathlib import Path

import pytest
from user_files import losses, train, write_example

DEPTHS = f"{Path(__file__).parent / 'mixture_of_depths.py'}:with_depths"
EXAMPLES = ("my_layers.py", "my_dataset.py", "my_loss.py", "my_schedule.py", "my_callbacks.py")
AXES = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"


@pytest.mark.parametrize(
    ("spec", "first", "second"),
    [
        ("convolutions", (8, AXES), (4, f"{ZERO3} --tensor-model-parallel-size 2")),
        ("depths", (4, "--context-parallel-size 2"), (2, ZERO3)),
    ],
)
def test_combined_axes_and_a_resume_give_the_losses_of_one_process(tmp_path, spec, first, second):
    for name in EXAMPLES:
        write_example(tmp_path, name)
    named = DEPTHS if spec == "depths" else f"{tmp_path}/my_layers.py:with_convolutions"
    flags = (
        f"--spec {named} --dataset {tmp_path}/my_dataset.py:triples --loss {tmp_path}/my_loss.py:focal --lr-decay-style"
        f" {tmp_path}/my_schedule.py:cubic --callbacks {tmp_path}/my_callbacks.py:Recorder --params-dtype float64 --save"
    )
    alone = losses(tmp_path / "alone", f"{flags} {tmp_path}/alone")
    assert len(alone) == 9
    (ranks, layout), (other_ranks, other) = first, second
    save = tmp_path / "split"
    train(tmp_path / "first", f"{flags} {save} {layout} --exit-interval 4", ranks, exit_code=75)
    rest = losses(tmp_path / "second", f"{flags} {save} --load {save} {other}", other_ranks)
    events = [json.loads(line) for line in (save / "events-0.jsonl").read_text().splitlines()]
    assert [event["loss"] for event in events if "loss" in event] == pytest.approx(
        list(alone.values()), rel=1e-9
    )
    assert rest == pytest.approx({name: alone[name] for name in rest}, rel=1e-9)
    assert "train 6" in rest
