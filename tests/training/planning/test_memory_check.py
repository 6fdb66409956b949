"""Runs that keep more than a GPU, a host or a process has are refused before the first collective, with the numbers and remedies."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from run_helpers import command_line

import pretrain
from megatrain.config import ConfigError, Facts, Plan, parse, resolve
from megatrain.config.environment import LaunchEnvironment
from megatrain.parallel.build_grid import build_grid
from megatrain.training.launch.ranks import grid_shape
from megatrain.training.planning import memory_check
from megatrain.training.planning.memory_check import check_memory
from megatrain.training.planning.memory_plan import planned_rank_memory, planned_resident_memory

HUGE: dict[str, str | None] = {"--num-layers": "20", "--hidden-size": "23296", "--ffn-hidden-size": None}


def plan_of(changed: dict[str, str | None], **facts: Any) -> Plan:
    return resolve(
        parse(command_line(changed)), Facts(**{"vocab_size": 128, "eod_id": 1, "device": "cpu", **facts})
    )


def test_a_model_larger_than_the_host_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "available_bytes", lambda: 23 * 10**9)
    assert pretrain.main(command_line(HUGE)) == 2
    printed = capsys.readouterr()
    assert "building the model" not in printed.out
    assert "GB of host memory for weights, gradients and optimizer state" in printed.err
    assert "23.00 GB are available" in printed.err
    assert "fix: use" in printed.err
    assert "a smaller model (--num-layers, --hidden-size)" in printed.err


def test_a_run_that_fits_is_not_refused() -> None:
    plan = plan_of({})
    held = planned_resident_memory(plan, build_grid(grid_shape(plan), 0))
    assert check_memory(plan, LaunchEnvironment(), None) == held.total > 0


def test_a_limit_of_the_process_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "process_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"ulimit -v.* leave 0.0000 GB"):
        check_memory(plan_of({}), LaunchEnvironment(), None)


def test_a_rank_larger_than_its_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 80 * 10**9))
    plan = plan_of({"--device": "cuda", "--bf16": ""}, device="cuda", world_size=2)
    with pytest.raises(ConfigError) as error:
        check_memory(plan, LaunchEnvironment(), None)
    problem, fix = error.value.problems[0].text, error.value.problems[0].fix
    assert "0.0000 of the 80.00 GB of its GPU are free" in problem
    assert "--data-parallel-sharding-strategy optim_grads_params" in fix
    assert "--recompute" not in fix  # activations are not what is compared
    assert "--micro-batch-size" not in fix


def test_an_ignored_flag_for_memory_is_an_error_if_the_step_exceeds_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = {"--device": "cuda", "--bf16": "", "--recompute-modules": "mlp"}
    plan, plain = (plan_of(one, device="cuda") for one in (flags, {**flags, "--recompute-modules": None}))
    grid = build_grid(grid_shape(plan), 0)
    step, held = planned_rank_memory(plan, grid).total, planned_resident_memory(plan, grid).total
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (step - 1, 80 * 10**9))
    assert check_memory(plain, LaunchEnvironment(), None) == held < step
    with pytest.raises(
        ConfigError, match=r"--recompute-modules mlp has no effect .*at the peak of a step"
    ) as error:
        check_memory(plan, LaunchEnvironment(), None)
    assert "--recompute-activations" in error.value.problems[0].fix
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (step, 80 * 10**9))
    assert check_memory(plan, LaunchEnvironment(), None) == held


def test_offloaded_activations_need_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"--device": "cuda", "--bf16": "", "--cpu-offloading-num-layers": "2"}
    plan = plan_of({**flags, "--min-offloaded-tensor-size": "0"}, device="cuda")
    on_host = planned_rank_memory(plan, build_grid(grid_shape(plan), 0)).activations_on_host
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * 10**9, 80 * 10**9))
    monkeypatch.setattr(memory_check, "available_bytes", lambda: on_host)
    check_memory(plan, LaunchEnvironment(), None)
    monkeypatch.setattr(memory_check, "available_bytes", lambda: on_host - 1)
    with pytest.raises(ConfigError, match=r"GB of host memory for .* offloaded activations"):
        check_memory(plan, LaunchEnvironment(), None)


def on_threads(count: int, run: Callable[[int, dist.Store], Any]) -> list[Any]:
    """Return what `run` returns or raises on threads that share a store."""
    store, found = dist.HashStore(), [None] * count

    def one(rank: int) -> None:
        try:
            found[rank] = run(rank, store)
        except ConfigError as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_the_ranks_of_a_host_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank would fit, and two do not: none starts, and one message names the sum."""
    plan = plan_of({}, world_size=2)
    needed = [planned_resident_memory(plan, build_grid(grid_shape(plan), rank)).total for rank in range(2)]

    def checked(rank: int, store: dist.Store) -> int:
        return check_memory(plan, LaunchEnvironment(rank=rank, world_size=2, local_world_size=2), store)

    monkeypatch.setattr(memory_check, "available_bytes", lambda: sum(needed))
    assert on_threads(2, checked) == needed
    monkeypatch.setattr(memory_check, "available_bytes", lambda: sum(needed) - 1)
    errors = on_threads(2, checked)
    assert [type(error) for error in errors] == [ConfigError, ConfigError]
    assert all(error.is_reported and error.exit_code == 2 for error in errors)
    assert capsys.readouterr().err.count("the 2 ranks of") == 1


def test_a_problem_of_one_rank_stops_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of({}, world_size=2)
    monkeypatch.setattr(
        memory_check, "_problems", lambda _, environment, *__: iter(["rank 1 is small"] * environment.rank)
    )
    errors = on_threads(
        2, lambda rank, store: check_memory(plan, LaunchEnvironment(rank=rank, world_size=2), store)
    )
    assert all("rank 1 is small" in str(error) for error in errors)
    assert capsys.readouterr().err.count("error:") == 1
