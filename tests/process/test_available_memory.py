"""Host memory that can still be allocated: control groups of both versions, and limits of the process."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.process.available_memory import available_bytes, control_groups, held_bytes, process_bytes


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("memory_", "memory.", 1)).write_text(text)


def test_the_control_groups_above_this_one_count(tmp_path: Path) -> None:
    """A job of Slurm has its limit above the group of the process. Page cache can be freed."""
    step = tmp_path / "groups" / "job_1" / "step_0"
    step.mkdir(parents=True)
    (tmp_path / "own").write_text("1:name=other:/x\n0::/job_1/step_0\n")
    own, job, root = control_groups(tmp_path / "own", tmp_path / "groups")
    assert [one.folder for one in (own, job, root)] == [step, step.parent, step.parent.parent]
    assert list(control_groups(tmp_path / "none", tmp_path)) == []
    assert own.bytes_left() is None
    write(
        step.parent,
        memory_max="4000\n",
        memory_current="3000\n",
        memory_stat="inactive_file 500\nactive_file 70\n",
    )
    assert job.bytes_left() == 1570
    write(step.parent, memory_max="max\n")
    assert job.bytes_left() is None


def test_version_1_of_control_groups(tmp_path: Path) -> None:
    job = tmp_path / "groups" / "memory" / "job_1"
    write(
        job, memory_limit_in_bytes="4000\n", memory_usage_in_bytes="3000\n",
        memory_stat="inactive_file 1\ntotal_inactive_file 500\n",
    )  # fmt: skip
    (tmp_path / "own").write_text("9:cpu,cpuacct:/job_1\n4:memory:/job_1\n")
    found, root = control_groups(tmp_path / "own", tmp_path / "groups")
    assert (found.folder, root.folder) == (job, job.parent)
    assert found.bytes_left() == 1500
    write(job, memory_limit_in_bytes=f"{(1 << 63) - 4096}\n")
    assert found.bytes_left() is None


def test_the_least_of_machine_and_groups_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, memory_max="4000\n", memory_current="3000\n", memory_stat="")
    (tmp_path / "own").write_text("0::/\n")
    limited = list(control_groups(tmp_path / "own", tmp_path))
    monkeypatch.setattr("megatrain.process.available_memory.control_groups", lambda: iter(limited))
    assert available_bytes() == 1000


SHOW = "from megatrain.process.available_memory import process_bytes; print(process_bytes())"


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_a_limit_of_this_process_counts(limit: int) -> None:
    if resource.getrlimit(limit)[0] == resource.RLIM_INFINITY and process_bytes() is not None:
        pytest.skip("this process has another limit")
    ended = subprocess.run(
        [sys.executable, "-c", f"import resource; resource.setrlimit({limit}, (4 << 30, 4 << 30)); {SHOW}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert 2 << 30 < int(ended.stdout) < 4 << 30
    assert held_bytes() > 1 << 20
