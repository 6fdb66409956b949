"""`megatrain doctor` finds planted faults, names a remedy for each, and its exit code says so."""

from __future__ import annotations

import importlib.machinery
import json
import resource
import socket
import stat
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config.environment import LaunchEnvironment
from megatrain.tools.doctor import cli, gpus, host
from megatrain.tools.doctor.ranks import RankSpeed, check_ranks
from megatrain.tools.main import main

HEALTHY = "{index}, NVIDIA H100 80GB HBM3, 580.65.06, 4, 81559, 1980, 1980, 0x0, 0, 35, 700.00, 700.00"
Plant = Callable[[pytest.MonkeyPatch, Path], None]


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host with two GPUs and no fault."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host, "read_shared_memory", lambda: 64 << 30)
    monkeypatch.setattr(host, "read_limit", lambda kind: -1 if kind == resource.RLIMIT_MEMLOCK else 65536)
    monkeypatch.setattr(host, "has_infiniband", lambda: True)
    monkeypatch.setattr(host, "read_write_rate", lambda folder: 2e9)
    monkeypatch.setattr(host, "read_free_bytes", lambda folder: 10**13)
    monkeypatch.setattr(gpus, "cuda_of_torch", lambda: "13.0")
    monkeypatch.setattr(gpus, "torch_has_gpus", lambda: True)
    triton = types.ModuleType("triton")
    triton.__spec__ = importlib.machinery.ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", triton)
    put_nvidia_smi(monkeypatch, tmp_path, [HEALTHY.format(index=index) for index in range(2)])


def put_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, folder: Path, lines: list[str], exit_code: int = 0
) -> None:
    """Place a program of this name first in PATH."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir(exist_ok=True)
    text = "\n".join(lines)
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {exit_code}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def diagnosed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, Any]]]:
    exit_code = main(["doctor", *words, "--json"])
    findings: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["findings"]
    return exit_code, findings


def gpu_with(old: str, new: str) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        assert old in HEALTHY
        broken = HEALTHY.replace(old, new, 1).format(index=1)
        put_nvidia_smi(monkeypatch, folder, [HEALTHY.format(index=0), broken])

    return plant


def reading(name: str, value: object) -> Plant:
    return lambda monkeypatch, _: monkeypatch.setattr(host, name, lambda *_: value)


def variable(name: str, value: str) -> Plant:
    return lambda monkeypatch, _: monkeypatch.setenv(name, value)


def dead_driver(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    put_nvidia_smi(monkeypatch, folder, ["NVIDIA-SMI has failed"], exit_code=9)


def old_driver(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    lines = [HEALTHY.replace("580.65.06", "535.104.05").format(index=index) for index in range(2)]
    put_nvidia_smi(monkeypatch, folder, lines)


def hidden_gpus(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setattr(gpus, "torch_has_gpus", lambda: False)


def few_files(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setattr(host, "read_limit", lambda kind: 1024 if kind == resource.RLIMIT_NOFILE else -1)


def silent_host(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    def no_answer(address: str, port: int) -> bool:
        raise TimeoutError("timed out")

    monkeypatch.setattr(host, "connect", no_answer)


def unwritable(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    def refuse(folder: Path) -> float:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(host, "read_write_rate", refuse)


FAULTS = {
    "memory errors": (gpu_with("0x0, 0,", "0x0, 3,"), "GPU 1", "3 uncorrected"),
    "heat": (gpu_with("1980, 1980, 0x0", "900, 1980, 0x40"), "GPU 1", "heat: 900 MHz"),
    "another program": (gpu_with(" 4, 81559", " 60000, 81559"), "GPU 1", "in use by another program"),
    "dead driver": (dead_driver, "GPUs", "NVIDIA-SMI has failed"),
    "hidden GPUs": (hidden_gpus, "GPUs", "torch can use none of them"),
    "old driver": (old_driver, "driver", "too old for torch's CUDA 13.0"),
    "small /dev/shm": (reading("read_shared_memory", 64 << 20), "shared memory", "64 MiB"),
    "open files": (few_files, "open files", "1,024"),
    "locked memory": (reading("read_limit", 65536), "locked memory", "InfiniBand"),
    "full disk": (reading("read_free_bytes", 10**9), "disk", "less than two"),
    "forbidden folder": (unwritable, "disk", "Permission denied"),
    "unknown host": (variable("MASTER_ADDR", "no-such-host.invalid"), "rendezvous", "not a known host"),
    "firewall": (silent_host, "rendezvous", "does not answer"),
}  # fmt: skip
MODEL = "--config configs/models/llama3_8b.yaml --save runs/doctor"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_with_a_remedy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, topic, words = FAULTS[name]
    plant(monkeypatch, tmp_path)
    if name == "unknown host":
        for variable_name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(variable_name, value)
        monkeypatch.setattr("megatrain.tools.doctor.cli._ranks", lambda environment: iter(()))
    exit_code, findings = diagnosed(capsys, *MODEL.split())
    errors = [one for one in findings if one["level"] == "error"]
    assert exit_code == 1
    assert [one["topic"] for one in errors] == [topic]
    assert words in errors[0]["text"]
    assert errors[0]["fix"]


def test_a_port_in_use_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        exit_code, findings = diagnosed(capsys)
    assert exit_code == 1
    assert "in use by another program" in findings[-1]["text"]


def test_rank_0_may_listen_when_another_rank_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as rank_0:
        rank_0.bind(("127.0.0.1", 0))
        rank_0.listen()
        port = rank_0.getsockname()[1]
        found = host.check_rendezvous(LaunchEnvironment(rank=1, world_size=2, launcher="srun", port=port))
        assert [one.level for one in found] == ["ok"]


def test_a_rank_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    (found,) = cli._ranks(LaunchEnvironment(rank=2, local_rank=2, world_size=3, local_world_size=3))
    assert (found.level, found.text) == ("error", "local rank 2 has no GPU: 2 are visible")


def test_a_save_folder_that_cannot_be_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, findings = diagnosed(capsys, "--save", "x" * 300)
    assert exit_code == 1
    assert any(one["topic"] == "disk" and "File name too long" in one["text"] for one in findings)


def test_a_healthy_host_has_no_error_and_the_launch_line_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", *MODEL.split(), "--nodes", "4"]) == 0
    out = capsys.readouterr().out
    assert "error" not in out
    assert "2 x NVIDIA H100" in out
    assert "a checkpoint has 96.4 GB" in out
    assert f"pretrain.py {MODEL}" in out
    assert "--nnodes 4" in out


@pytest.mark.parametrize("is_installed", [True, False])
def test_gpus_need_triton(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_installed: bool
) -> None:
    """Its module counts: packages of several names have it."""
    if not is_installed:
        monkeypatch.setitem(sys.modules, "triton", None)
    _, findings = diagnosed(capsys)
    errors = [one["text"] for one in findings if one["level"] == "error" and "Triton" in one["text"]]
    assert bool(errors) != is_installed


def test_a_slow_disk_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "read_write_rate", lambda folder: 50e6)
    exit_code, findings = diagnosed(capsys, *MODEL.split())
    assert exit_code == 0
    assert [one["topic"] for one in findings if one["level"] == "warning"] == ["disk"]


def test_words_that_are_no_flags_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, findings = diagnosed(capsys, "run.yaml", "--bf17")
    found = [one["text"] for one in findings if one["topic"] == "flags"]
    assert (exit_code, found) == (1, ["--bf17 is not a flag", "run.yaml follows no flag"])


def test_the_slow_rank_and_the_slow_link_are_named() -> None:
    speeds = [
        RankSpeed(rank, f"node{rank // 4}", "cuda", 1.0, 1.0 if rank % 4 < 3 else 5.0) for rank in range(16)
    ]
    assert [one.level for one in check_ranks(speeds)] == ["ok"]
    speeds[6] = RankSpeed(6, "node1", "cuda", 1.6, 1.0)
    speeds[11] = RankSpeed(11, "node2", "cuda", 1.0, 15.0)
    found = list(check_ranks(speeds))
    assert [one.topic for one in found] == ["rank 6", "link from rank 11 to rank 12"]
    assert "node1" in found[0].text
    assert "node2 to node3" in found[1].text


def test_speeds_of_ranks_that_share_cores_are_not_compared() -> None:
    speeds = [
        RankSpeed(rank, "desk", "cpu", 9.0 if rank == 3 else 1.0, 1.0, num_cores=4) for rank in range(4)
    ]
    assert [one.topic for one in check_ranks(speeds)] == ["rank 3"]
    (found,) = check_ranks([replace(one, num_cores=2) for one in speeds])
    assert (found.level, found.text) == (
        "ok",
        "4 ranks; 4 ranks of desk share 2 cores: speeds are not compared",
    )
