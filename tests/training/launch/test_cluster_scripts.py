"""The batch jobs of scripts/slurm/ and scripts/kubernetes/: what they start, and when they are queued again.

Programs of the cluster (srun, scontrol, torchrun) are replaced by scripts in PATH, which print their words and run the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_helpers import ROOT, command_line

SLURM = sorted((ROOT / "scripts" / "slurm").glob("*.sh"))
KUBERNETES = ROOT / "scripts" / "kubernetes" / "job.yaml"
JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_ARRAY_TASK_ID": "1",
}
SRUN = 'echo srun "$@"\nwhile [ "${1#--}" != "$1" ]; do shift; done\n'
SCONTROL = 'if [ "$1" = show ]; then echo node1; else echo scontrol "$@"; fi\n'
TORCHRUN = 'echo torchrun "$@"\nwhile [ "$1" != pretrain.py ]; do shift; done\n'


def run_script(
    script: Path, folder: Path, ends: str, words: list[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a batch script. `ends`: shell code at the end of srun and torchrun, after their own options."""
    folder.mkdir(exist_ok=True)
    texts = {"srun": SRUN + ends, "torchrun": TORCHRUN + ends, "scontrol": SCONTROL}
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    if script.stem == "array":
        (folder / "runs.txt").write_text("--seed 1\n--seed 2\n")
        words = [str(folder / "runs.txt"), *words]
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = JOB | {"SLURM_JOB_NUM_NODES": "1"} if script.stem == "one_node" else JOB
    environment = os.environ | job | {"PATH": path, "PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(
        ["bash", str(script), *words], check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(("code", "is_queued_again"), [(0, False), (75, True), (1, False)])
@pytest.mark.parametrize("name", ["srun", "array"])
def test_a_job_of_srun_that_stopped_early_is_queued_again(
    tmp_path: Path, name: str, code: int, is_queued_again: bool
) -> None:
    ended = run_script(
        ROOT / f"scripts/slurm/{name}.sh", tmp_path, f"exit {code}", ["--config", "my run.yaml"]
    )
    assert ended.returncode == code, ended.stderr
    own = " --seed 2" if name == "array" else ""
    assert f"srun --kill-on-bad-exit=1 python pretrain.py --config my run.yaml{own}" in ended.stdout
    assert ("scontrol requeue 77" in ended.stdout) is is_queued_again


@pytest.mark.parametrize("code", [0, 75])
def test_a_job_with_a_spare_node_has_the_exit_code_of_rank_0(tmp_path: Path, code: int) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\necho python "$@"\nexit {code}\n')
    (tmp_path / "python").chmod(0o755)
    ended = run_script(
        ROOT / "scripts/slurm/srun.sh", tmp_path, '"$@"\nexit 137', ["--lr", "1"], SPARES="1"
    )  # 137: of a task of a lost node
    assert ended.returncode == code, ended.stderr
    assert "srun --kill-on-bad-exit=0 --no-kill" in ended.stdout
    assert "pretrain.py --lr 1 --inprocess-restart --inprocess-active-world-size 8" in ended.stdout
    assert ("scontrol requeue 77" in ended.stdout) is (code == 75)


@pytest.mark.parametrize("name", ["one_node", "torchrun"])
def test_a_job_of_torchrun_is_queued_again_only_at_its_time_limit(tmp_path: Path, name: str) -> None:
    script = ROOT / f"scripts/slurm/{name}.sh"
    for seconds_left, minutes, is_queued_again in ((650, 1, True), (86430, 1430, False)):
        end = str(int(time.time()) + seconds_left)
        ended = run_script(script, tmp_path, "exit 1", ["--lr", "1"], SLURM_JOB_END_TIME=end)
        assert ended.returncode == 1
        assert f"pretrain.py --lr 1 --exit-duration-in-mins {minutes}" in ended.stdout
        assert ("scontrol requeue 77" in ended.stdout) is is_queued_again
    if name == "torchrun":
        assert "--nnodes 2 --nproc-per-node 8" in ended.stdout
        assert "--rdzv-endpoint node1:15077" in ended.stdout


def test_torchrun_s_job_has_the_rendezvous_of_the_variables(tmp_path: Path) -> None:
    """As srun.sh, which leaves them to the ranks."""
    variables = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "6000"}
    ended = run_script(ROOT / "scripts/slurm/torchrun.sh", tmp_path, "exit 0", [], **variables)
    assert "--rdzv-endpoint 10.0.0.1:6000" in ended.stdout


def test_a_job_of_one_node_on_several_is_an_error(tmp_path: Path) -> None:
    ended = run_script(ROOT / "scripts/slurm/one_node.sh", tmp_path, "exit 0", [], SLURM_JOB_NUM_NODES="8")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "fix: sbatch --nodes=8 scripts/slurm/torchrun.sh" in ended.stderr


def test_an_array_task_without_a_line_is_an_error(tmp_path: Path) -> None:
    ended = run_script(ROOT / "scripts/slurm/array.sh", tmp_path, "exit 0", [], SLURM_ARRAY_TASK_ID="5")
    assert ended.returncode == 2
    assert "--array=0-1" in ended.stderr


@pytest.mark.parametrize("script", SLURM, ids=lambda script: script.stem)
def test_srun_gives_a_task_the_cores_of_the_job(tmp_path: Path, script: Path) -> None:
    ended = run_script(
        script, tmp_path, "echo cores $SRUN_CPUS_PER_TASK; exit 0", [], SLURM_CPUS_PER_TASK="12"
    )
    assert "cores 12" in ended.stdout, ended.stderr


@pytest.mark.parametrize("script", SLURM, ids=lambda script: script.stem)
def test_a_container_is_passed_to_srun(tmp_path: Path, script: Path) -> None:
    ended = run_script(
        script, tmp_path, "exit 0", [], CONTAINER_IMAGE="image.sqsh", CONTAINER_MOUNTS="/data:/data"
    )
    assert ended.returncode == 0, ended.stderr
    assert f"--container-image=image.sqsh --container-mounts={ROOT}:{ROOT},/data:/data" in ended.stdout


@pytest.mark.parametrize(
    "script",
    [
        script if script.stem == "torchrun" else pytest.param(script, marks=pytest.mark.nightly)
        for script in SLURM
    ],
    ids=lambda script: script.stem,
)
def test_the_flags_that_a_script_passes_start_a_dry_run(tmp_path: Path, script: Path) -> None:
    words = [*command_line({"--world-size": "2"}), "--dry-run"]
    # srun and torchrun end with the program and its words.
    ends = 'if [ "$1" = python ] || [ "$1" = torchrun ]; then exec "$@"; else exec python "$@"; fi'
    end = str(int(time.time()) + 86400)
    ended = run_script(script, tmp_path, ends, words, SLURM_JOB_END_TIME=end)
    assert ended.returncode == 0, ended.stderr
    assert "> dry run: nothing was started" in ended.stdout


def documents() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(KUBERNETES.read_text())}


def test_the_pods_of_the_kubernetes_job_find_each_other() -> None:
    job, service = documents()["Job"], documents()["Service"]
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(values["NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(values["GPUS"])
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--master-addr {job['metadata']['name']}-0.{pod['subdomain']} " in container["args"][0]
    mounted, volumes = container["volumeMounts"], pod["volumes"]
    assert {one["name"] for one in mounted} == {one["name"] for one in volumes}


def test_the_command_of_the_kubernetes_job_starts_torchrun_on_each_node(tmp_path: Path) -> None:
    container = documents()["Job"]["spec"]["template"]["spec"]["containers"][0]
    values = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    script = tmp_path / "command.sh"
    script.write_text(container["args"][0])
    ended = run_script(
        script,
        tmp_path / "bin",
        "exit 0",
        [],
        **(values | {"JOB_COMPLETION_INDEX": "1", "EXTRA_FLAGS": "--lr 2"}),
    )
    assert ended.returncode == 0, ended.stderr
    assert "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 8" in ended.stdout
    assert ended.stdout.rstrip().endswith("--save /shared/run --load /shared/run --lr 2")
