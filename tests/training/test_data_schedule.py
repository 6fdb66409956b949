"""Training data that changes at given iterations: the samples of each phase, and resuming in, at and after a change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_data_of_runs import flags_of, folder, metrics

import pretrain
from megatrain.config import parse, resolve
from megatrain.config.errors import ConfigError
from megatrain.data.samples.dataset import PlannedDataset
from megatrain.tools.main import main as megatrain
from megatrain.training.batches import build_samples
from megatrain.training.launch.facts import gather_data_facts

__all__ = ["folder"]


def schedule_of(folder: Path, name: str, phases: dict[int, str]) -> str:
    """Write a schedule of data in the folder; return its path."""
    entries = [
        {
            "from_iteration": start,
            "data_path": " ".join(
                str(folder / "data" / word) if word in "ab" else word for word in data.split()
            ),
        }
        for start, data in phases.items()
    ]
    (folder / name).write_text(json.dumps(entries))
    return str(folder / name)


def samples_of(flags: list[str]) -> tuple[Any, Any]:
    request = parse(flags, program="pretrain.py")
    facts = gather_data_facts(request, world_size=1, log=print)
    plan = resolve(request, facts)
    return plan, build_samples(plan, facts, print)


def rows(samples: Any, start: int, end: int) -> list[list[int]]:
    return [samples[number].tokens.tolist() for number in range(start, end)]


def test_each_phase_reads_a_plan_of_its_own(folder: Path) -> None:
    batch = 8
    base: dict[str, str | None] = {"save": None, "load": None, "global_batch_size": str(batch)}
    schedule = schedule_of(folder, "s.json", {2: "b", 4: "0.5 a 0.5 b"})
    plan, splits = samples_of(flags_of(folder, data_schedule=schedule, **base))
    assert plan.derived.train_plan == (2 * batch,)
    assert [(one.start, one.plan) for one in plan.derived.later_phases] == [
        (2 * batch, (2 * batch,)),
        (4 * batch, (2 * batch,)),
    ]
    assert isinstance(splits.train, PlannedDataset)
    alone = base | {"train_iters": "2"}
    _, first = samples_of(flags_of(folder, **alone))
    seed = plan.config.training.seed
    _, second = samples_of(flags_of(folder, **alone, data_path=str(folder / "data/b"), seed=str(seed + 1)))
    mixed = f"0.5 {folder / 'data/a'} 0.5 {folder / 'data/b'}"
    _, third = samples_of(flags_of(folder, **alone, data_path=mixed, seed=str(seed + 2)))
    expected = [row for one in (first, second, third) for row in rows(one.train, 0, 2 * batch)]
    assert rows(splits.train, 0, 6 * batch) == expected
    _, plain = samples_of(flags_of(folder, **base))
    assert rows(splits.valid, 0, 8) == rows(plain.valid, 0, 8), "validation data is that of --data-path"


def test_a_run_resumes_in_at_and_after_a_change(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = {"data_schedule": schedule_of(folder, "s.json", {2: "b", 4: "0.5 a 0.5 b"})}
    assert pretrain.main(flags_of(folder, **schedule)) == 0
    whole = metrics(folder / "run")
    stopped = schedule | {"save": str(folder / "stopped"), "load": str(folder / "stopped")}
    for exit_interval in ("2", "3", None):
        assert pretrain.main(flags_of(folder, exit_interval=exit_interval, **stopped)) in (0, 75)
    assert metrics(folder / "stopped") == whole
    constant = {"save": str(folder / "constant"), "load": None}
    assert pretrain.main(flags_of(folder, **constant)) == 0
    assert metrics(folder / "constant") != whole


@pytest.mark.nightly
def test_a_past_phase_is_kept_and_a_future_one_may_change(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = {"data_schedule": schedule_of(folder, "s.json", {2: "b", 4: "a"})}
    assert pretrain.main(flags_of(folder, exit_interval="3", **schedule)) in (0, 75)
    for name, phases, words in (
        ("moved", {1: "b", 4: "a"}, "its data changed at iterations 2, that of this run at 1"),
        ("removed", {4: "a"}, "its data changed at iterations 2, that of this run at none"),
        ("other", {2: "a", 4: "a"}, "data/a is not the dataset that the checkpoint read"),
        ("weighted", {2: "0.5 b 0.5 a"}, "the data cannot change on resume"),
    ):
        capsys.readouterr()
        changed = {"data_schedule": schedule_of(folder, f"{name}.json", phases)}
        assert pretrain.main(flags_of(folder, **changed)) == 2
        assert words in capsys.readouterr().err
    assert pretrain.main(flags_of(folder)) == 2, "without the schedule"
    shutil.copytree(folder / "run", folder / "copy")
    later = {
        "data_schedule": schedule_of(folder, "later.json", {2: "b", 5: "0.5 a 0.5 b"}),
        "train_iters": "8",
    }
    assert pretrain.main(flags_of(folder, **later)) == 0
    copy = {"save": str(folder / "copy"), "load": str(folder / "copy")}
    for exit_interval in ("5", None):
        assert pretrain.main(flags_of(folder, exit_interval=exit_interval, **later, **copy)) in (0, 75)
    assert metrics(folder / "copy") == metrics(folder / "run")


def test_a_run_may_get_a_schedule_later(folder: Path) -> None:
    """Iterations before the change are those of a run without one; those after it read the new data."""
    assert pretrain.main(flags_of(folder, exit_interval="3")) in (0, 75)
    before = metrics(folder / "run")
    added = {"data_schedule": schedule_of(folder, "s.json", {4: "b"}), "exit_interval": "6"}
    plan, splits = samples_of(flags_of(folder, **added))
    assert (plan.derived.train_plan, plan.derived.later_phases[0].plan) == ((6,), (2,))
    _, plain = samples_of(flags_of(folder))
    assert rows(splits.train, 0, 4) == rows(plain.train, 0, 4)
    assert rows(splits.train, 4, 6) != rows(plain.train, 4, 6)
    assert pretrain.main(flags_of(folder, **added)) in (0, 75)
    assert metrics(folder / "run")[: len(before)] == before


def test_growing_batches_change_the_data_at_the_right_sample(folder: Path) -> None:
    growing = {
        "rampup_batch_size": "4 4 16",
        "save": None,
        "load": None,
        "train_iters": None,
        "train_samples": "48",
        "global_batch_size": "8",
    }
    schedule = schedule_of(folder, "s.json", {5: "b"})
    ramp = flags_of(folder, **growing, lr_decay_iters=None, data_schedule=schedule)
    plan, _ = samples_of(ramp)
    (phase,) = plan.derived.later_phases
    assert plan.derived.train_plan == (phase.start,)
    assert phase.start < 5 * 8
    assert phase.start + phase.plan[0] == plan.derived.requested_train_samples


ERRORS = {
    "[]": "contains no list of phases",
    "{": "is neither YAML nor JSON",
    "- {from_iteration: 2}": "entry 1 does not have from_iteration and data_path",
    "- {from_iteration: two, data_path: a}": "from_iteration 'two' is not a whole number",
    "- {from_iteration: 0, data_path: a}": "entry 1 starts at iteration 0, which is not after 0",
    "[{from_iteration: 3, data_path: a}, {from_iteration: 3, data_path: a}]": "entry 2 starts at iteration 3",
    "- {from_iteration: 2, data_path: []}": "data_path [] is not a list of weights and prefixes",
    "- {from_iteration: 2, data_path: [-1, a, 1, b]}": "entry 1: the weight of a is -1",
    "- {from_iteration: 2, data_path: missing}": "missing.bin: there is no such file",
}


@pytest.mark.parametrize("content", ERRORS)
def test_an_invalid_schedule_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (folder / "s.yaml").write_text(content)
    assert pretrain.main(flags_of(folder, data_schedule=str(folder / "s.yaml"))) == 2
    message = capsys.readouterr().err
    assert ERRORS[content] in message
    assert "fix:" in message


def test_a_phase_without_enough_data_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Datasets without weights are read once."""
    schedule = schedule_of(folder, "s.json", {2: "a b", 900: "0.5 a 0.5 b"})
    assert pretrain.main(flags_of(folder, data_schedule=schedule, train_iters="910")) == 2
    assert "the training data from iteration 2 on holds" in capsys.readouterr().err


def test_the_tools_show_the_phases(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = schedule_of(folder, "s.json", {2: "b"})
    flags = flags_of(folder, data_schedule=schedule, save=None, load=None)
    assert megatrain(["data", "sample", "--of", "train", "--index", "20", *flags]) == 0
    assert "data/b, document" in capsys.readouterr().out
    assert megatrain(["data", "index", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    of_training = [line.split() for line in lines if line.startswith("train")]
    assert [(line[1], line[-1].rpartition("/")[2]) for line in of_training] == [
        ("1234", "a"),
        ("1234", "b"),
        ("1234", "2"),
        ("1235", "b"),
    ]


@pytest.fixture
def phases(folder: Path) -> list[dict[str, Any]]:
    """The flags of three phases of training: after iterations 2 and 4 the data changes."""
    shared = {"phase_transition_iterations": "4, 2"}
    data = (
        str(folder / "data/a"),
        f"0.5 {folder / 'data/a'} 0.5 {folder / 'data/b'}",
        str(folder / "data/b"),
    )
    return [shared | {"data_path": words} for words in data]


def test_a_phase_counts_its_samples_from_its_first_iteration_on(
    folder: Path, phases: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """As Megatron-LM: each phase plans its own iterations and shuffles with --seed."""
    whole = {"global_batch_size": "8", "save": None, "load": None, "eval_iters": "0"}
    expected = []
    for phase in phases:
        alone = whole | {"data_path": phase["data_path"], "train_iters": "2"}
        _, splits = samples_of(flags_of(folder, **alone))
        expected.append(rows(splits.train, 0, 16))
    run = {"global_batch_size": "8"}
    for number, phase in enumerate(phases):
        plan, splits = samples_of(flags_of(folder, **phase, **run))
        assert (plan.derived.train_start, plan.derived.train_plan) == (16 * number, (16,))
        assert rows(splits.train, 16 * number, 16 * number + 16) == expected[number]
        if number:
            with pytest.raises(ConfigError, match=f"ended before sample {16 * number}"):
                splits.train[16 * number - 1]
        assert pretrain.main(flags_of(folder, **phase, **run)) == (75 if number < 2 else 0)
    assert "--phase-transition-iterations 4" in capsys.readouterr().out


def test_a_run_resumes_within_phases(folder: Path, phases: list[dict[str, Any]]) -> None:
    for phase in phases:
        assert pretrain.main(flags_of(folder, **phase)) in (0, 75)
    stopped = {"save": str(folder / "stopped"), "load": str(folder / "stopped")}
    for phase in phases:
        for exit_interval in ("1", None):
            stop = {"exit_interval": exit_interval} if exit_interval else {}
            assert pretrain.main(flags_of(folder, **phase, **stopped, **stop)) in (0, 75)
    assert metrics(folder / "stopped") == metrics(folder / "run")


def test_wrong_phases_are_refused_on_resume(
    folder: Path, phases: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain.main(flags_of(folder, **phases[0])) == 75
    assert pretrain.main(flags_of(folder, **phases[0])) == 2
    assert (
        "a phase starts after iteration 2, but the training data is that of the phase before"
        in capsys.readouterr().err
    )
    assert pretrain.main(flags_of(folder, **phases[1], exit_interval="3")) == 75
    for changed, words in (
        ({"phase_transition_iterations": "1,4"}, "cannot change before iteration 3 of the checkpoint"),
        (
            {"phase_transition_iterations": None},
            "its phase started after iteration 2, that of this run after 0",
        ),
        ({"data_path": str(folder / "data/b")}, "the data cannot change on resume"),
        ({"global_batch_size": "2"}, "has consumed 3 samples"),
    ):
        flags = {name: value for name, value in (phases[1] | changed).items() if value is not None}
        assert pretrain.main(flags_of(folder, **flags)) == 2
        assert words in capsys.readouterr().err
    later = phases[1] | {"phase_transition_iterations": "2 5"}
    assert pretrain.main(flags_of(folder, **later)) == 75
