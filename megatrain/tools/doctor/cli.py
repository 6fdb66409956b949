"""`megatrain doctor`: run all checks, print the findings with their remedies, and the line that launches the run.

this host: versions, GPUs, limits, /dev/shm, disk ─┐
launcher: rendezvous, speed of ranks and links    ─┴─> findings ─> text or JSON, exit code
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatrain.config import ConfigError, Request, parse
from megatrain.config.environment import LaunchEnvironment, read_environment
from megatrain.tools.doctor.finding import Finding
from megatrain.tools.doctor.gpus import check_gpus
from megatrain.tools.doctor.host import (
    check_disk,
    check_limits,
    check_rendezvous,
    check_shared_memory,
    check_versions,
)
from megatrain.tools.doctor.ranks import check_ranks, measure_ranks
from megatrain.tools.plan.hardware import Cluster
from megatrain.tools.plan.layouts import Layout
from megatrain.tools.plan.search import Run
from megatrain.tools.plan.step_time import rank_weights
from megatrain.tools.subcommands import add_command, launcher_of
from megatrain.training.launch.ranks import local_gpu
from megatrain.training.planning.gpus import GPUS


def add_flags(commands: Any) -> None:
    """Add `megatrain doctor`."""
    doctor = add_command(
        commands, "doctor", run, takes_run_flags=True, usage="%(prog)s [FLAGS] [--nodes N] [--json]"
    )
    doctor.add("--nodes N", "nodes of the launch line", 1, at_least=1)
    doctor.add("--json", "print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Check what a run needs, in less than a minute: versions, driver, GPUs, limits, shared memory, the disk of --save, the
    rendezvous; under torchrun or srun also the speed of each rank and of the links between them. FLAGS are the flags of
    pretrain.py, which may be left out. Exit code: 0 without errors, else 1.
    """
    environment = read_environment()
    findings = list(all_findings(arguments.run_flags, environment))
    is_wrong = any(one.level == "error" for one in findings)
    if environment.rank and not is_wrong:
        return 0
    line = launch_line(arguments.run_flags, arguments.nodes)
    if arguments.json:
        print(json.dumps({"findings": [dataclasses.asdict(one) for one in findings], "launch": line}))
    else:
        prefix = f"rank {environment.rank}: " if environment.rank else ""
        for one in findings:
            if not environment.rank or one.level == "error":
                print(f"{prefix}{one}")
        if not environment.rank:
            print(f"launch   {line}")
    return int(is_wrong)


def all_findings(words: Sequence[str], environment: LaunchEnvironment) -> Iterator[Finding]:
    """Run all checks. `words`: the flags of a run, or none."""
    request = parse(words, program="megatrain doctor") if words else None
    save = None if request is None else request.known("checkpoint.save")
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_versions,
        check_gpus,
        check_shared_memory,
        lambda: check_limits(0 if environment.rank else environment.open_files),
        lambda: check_disk(save, None if request is None else num_parameters(words, request)),
        lambda: check_rendezvous(environment),
    ]
    if environment.world_size > 1 and not environment.problems:
        checks.append(lambda: _ranks(environment))
    for check in checks:
        yield from check()
    for problem in () if request is None else request.problems:
        yield Finding.error("flags", problem.text, problem.fix)
    if request is not None and not request.problems:
        yield Finding.ok("flags", "not checked: pretrain.py with these and --dry-run checks them")


def num_parameters(words: Sequence[str], request: Request) -> float | None:
    """Return the number of the model's parameters; None if the flags describe no model that could train."""
    if request.known("model.num_layers") is None:
        return None
    gpu = GPUS["H100"]
    cluster = Cluster(gpu=gpu, num_gpus=1, gpus_per_node=8, network_rate=gpu.network_rate)
    try:
        workload = Run.of(words, cluster).workload()
    except ConfigError:
        return None  # a real start reports the problems of the flags
    layout = Layout(split=(len(workload.layers),))
    return sum(one.dense + one.experts for one in rank_weights(workload, layout))


def _ranks(environment: LaunchEnvironment) -> Iterator[Finding]:
    seen = torch.cuda.device_count()
    if seen and (local_gpu(environment).index or 0) >= seen:
        yield Finding.error(
            "ranks",
            f"local rank {environment.local_rank} has no GPU: {seen} are visible",
            f"start at most {seen} ranks on this host, or make more GPUs visible (CUDA_VISIBLE_DEVICES)",
        )
        return
    try:
        speeds = measure_ranks(environment, socket.gethostname())
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        yield Finding.error(
            "ranks",
            f"they cannot be joined: {first}",
            "check that each host reaches the others: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the interface",
        )
        return
    if environment.rank == 0:
        yield from check_ranks(speeds)


def launch_line(words: Sequence[str], nodes: int) -> str:
    """Return the command that starts the run, on all GPUs of each host."""
    count = max(torch.cuda.device_count(), 1)
    flags = shlex.join(words) or "FLAGS"
    return f"{launcher_of(nodes * count, count)} pretrain.py {flags}"
