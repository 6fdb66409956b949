"""Reports read while the next step runs give the same lines, checkpoints and ends as if the host waited for each step."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics_files import logged_lines, logged_steps
from run_helpers import command_line

import pretrain
from megatrain.config import Facts, parse, resolve
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.rank_lists import GridShape
from megatrain.tools.parity.measure import local_batches, tiny_plan
from megatrain.tools.parity.rows import Layout
from megatrain.training.build import build_schedules
from megatrain.training.engine import Engine

TIMES = ("iteration_ms", "tokens_per_second_per_gpu", "timers", "max_memory_bytes", "save", "resumed")


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *, max_pending: int, **changed: str) -> int:
    monkeypatch.setattr(Engine, "max_pending", max_pending)
    flags: dict[str, str | None] = {"--train-iters": "9", "--save": str(folder), "--load": str(folder)}
    flags |= {"--log-interval": "2", "--save-interval": "4", "--eval-interval": "6", "--eval-iters": "1"}
    flags |= {"--log-params-norm": "", "--log-num-zeros-in-grad": "", "--global-batch-size": "4"}
    return pretrain.main(command_line(flags, **changed))


def before_step(number: int, do: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a function before the step with this number begins, counted from now on."""
    begin, calls = Engine.begin_step, []

    def begin_step(self: Engine, *arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        if len(calls) == number:
            do()
        return begin(self, *arguments, **more)

    monkeypatch.setattr(Engine, "begin_step", begin_step)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if name not in TIMES} for line in logged_lines(folder)
    ]


def shards_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def test_a_run_leaves_the_same_lines_and_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / "waits", tmp_path / "ahead"]
    for max_pending, folder in enumerate(folders):
        assert run(folder, monkeypatch, max_pending=max_pending) == 0
    waits, ahead = (lines_of(folder) for folder in folders)
    assert [line["iteration"] for line in ahead if "lm_loss" in line] == list(range(1, 10))
    assert ahead == waits
    assert all(line["params_norm"] > 0 and line["num_zeros"] == 0 for line in ahead if "lm_loss" in line)
    waits_shards, ahead_shards = (shards_of(folder) for folder in folders)
    assert len(ahead_shards) == 3  # after iterations 4, 8 and 9
    assert ahead_shards == waits_shards


def test_an_iteration_takes_its_own_time_whenever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_step(3, lambda: time.sleep(1), monkeypatch)  # the second is pending
    assert run(tmp_path, monkeypatch, max_pending=1) == 0
    times = {line["iteration"]: line["iteration_ms"] for line in logged_steps(tmp_path)}
    longest = times.pop(3)
    assert longest > 1000
    assert all(milliseconds < longest for number, milliseconds in times.items() if number > 1)


def test_a_signal_stops_the_run_within_two_iterations_and_it_resumes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run(whole, monkeypatch, max_pending=1) == 0
    before_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM), monkeypatch)
    assert run(stopped, monkeypatch, max_pending=1) == 75
    assert [line["iteration"] for line in lines_of(stopped)] == [1, 2, 3]
    assert run(stopped, monkeypatch, max_pending=1) == 0
    assert lines_of(stopped) == lines_of(whole)
    assert shards_of(stopped)["iter_0000009/shard_00000.safetensors"] == next(
        shard for name, shard in shards_of(whole).items() if "0000009" in name
    )


def test_the_interval_ends_a_run_that_is_ahead_on_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, monkeypatch, max_pending=1, exit_interval="3") == 75
    assert [line["iteration"] for line in lines_of(tmp_path)] == [1, 2, 3]


def test_after_a_step_that_is_not_finite_no_weight_changes() -> None:
    """The host reads it after later steps have begun, and looks for the cause in the same weights."""
    layout = Layout.of("")
    plan = tiny_plan(layout, 1)
    engine = Engine(plan, build_grid(GridShape(), 0), torch.device("cpu"))
    engine.initialize()
    batches, hyperparams = list(local_batches(0, layout, 0)), build_schedules(plan).at(0)
    assert engine.begin_step(batches, hyperparams).read().is_finite
    before = [x.clone() for kind in engine.optimizer.kinds for x in engine.optimizer.state(kind)]
    finish = engine.data_parallel.finish_gradients

    def spoiled() -> None:
        finish()
        engine.buffers.gradients.shards[0][0] = torch.nan

    engine.data_parallel.finish_gradients = spoiled  # type: ignore[method-assign]
    steps = [engine.begin_step(batches, hyperparams)]
    engine.data_parallel.finish_gradients = finish  # type: ignore[method-assign]
    steps.append(engine.begin_step(batches, hyperparams, flags=lambda: (0, 7)))
    reports = [step.read() for step in steps]
    assert [report.is_finite for report in reports] == [False, True]
    assert reports[1].flags == (0, 7)
    after = [x for kind in engine.optimizer.kinds for x in engine.optimizer.state(kind)]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("flags", "max_pending"),
    [
        ("", 1),
        ("--bf16", 1),
        ("--fp16", 0),
        ("--fp16 --loss-scale 8", 0),
        ("--no-check-for-nan-in-loss-and-grad", 0),
        ("--bf16 --timing-log-level 1", 0),
    ],
)
def test_steps_that_may_be_skipped_and_timed_ones_are_waited_for(flags: str, max_pending: int) -> None:
    plan = resolve(parse([*command_line({}), *flags.split()]), Facts(vocab_size=101, eod_id=100))
    engine = Engine(plan, build_grid(GridShape(), 0), torch.device("cpu"))
    assert engine.max_pending == 0  # what a CPU computes is there at once
    engine.device = torch.device("cuda")
    assert engine.max_pending == max_pending
