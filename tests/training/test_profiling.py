"""Profiles: what a trace says, and that a run writes one."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from test_broken_command_lines import command_line

import pretrain
from megatrain.training.trace_summary import summarize


def span(cat: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


TRACE = [
    span("user_annotation", "ProfilerStep#1", 0, 10_000),
    span("user_annotation", "forward", 0, 1000),
    span("user_annotation", "reduce", 200, 300),  # inside of forward
    span("user_annotation", "optimizer", 2000, 1000),
    span("cuda_runtime", "cudaLaunchKernel", 100, 5, 1),
    span("cuda_runtime", "cudaLaunchKernel", 300, 5, 2),
    span("cuda_runtime", "cudaLaunchKernel", 600, 5, 3),
    span("cuda_runtime", "cudaLaunchKernel", 2500, 5, 4),
    span("cuda_runtime", "cudaStreamSynchronize", 2600, 5, 5),
    span("kernel", "gemm", 1000, 2000, 1),
    span("kernel", "ncclDevKernel_ReduceScatter", 2000, 4000, 2),  # the first 1000 are hidden behind gemm
    span("kernel", "norm", 4000, 1000, 3),  # and these too
    span("kernel", "adam", 8000, 1000, 4),  # after 2000 of nothing
]


def test_stretches_are_computation_exposed_communication_or_idle() -> None:
    summary = summarize(TRACE, num_steps=1)
    found = {name: (part.compute, part.exposed, part.idle) for name, part in summary.parts.items()}
    assert found == {
        "forward": (3.0, 0.0, 0.0),
        "reduce": (0.0, 2.0, 0.0),
        "optimizer": (1.0, 0.0, 2.0),
    }
    assert summary.kernels[0] == ("ncclDevKernel_ReduceScatter", 1, 4.0)
    assert summary.host_waits == {"cudaStreamSynchronize": 1}
    text = summarize(TRACE, num_steps=2).text()
    assert "all                     4.00      2.00          1.00 ( 25.0%)      1.00" in text
    assert "cudaStreamSynchronize 0.5" in text


def test_traffic_is_counted_where_the_trace_tells_of_it() -> None:
    told = {"Collective name": "_reduce_scatter_base", "Group size": 4, "dtype": "Float"}
    sizes = {"In msg nelems": 4_000_000, "Out msg nelems": 1_000_000}
    kernels = [span("kernel", "ncclDevKernel_ReduceScatter", at, 500) for at in (0, 1000, 2000)]
    for kernel in kernels:
        kernel["args"] |= {**told, **sizes}
    summary = summarize([*TRACE, *kernels], num_steps=2)
    assert list(summary.traffic) == ["_reduce_scatter_base over 4"]
    assert "     0.75       1.5     0.024  _reduce_scatter_base over 4" in summary.text()
    assert "collective" not in summarize(TRACE, num_steps=1).text()


def test_a_trace_without_kernels_says_so() -> None:
    assert "no kernels" in summarize([span("cpu_op", "aten::add", 0, 1)], num_steps=1).text()


def test_a_run_profiles_the_iterations_that_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"--train-iters": "4", "--profile-step-start": "1", "--profile-step-end": "3", "--profile": ""}
    assert pretrain.main(command_line({**flags, "--save": str(tmp_path)})) == 0
    assert f"> profiled iterations 2 to 3: {tmp_path}/profile/rank0.json.gz" in capsys.readouterr().out
    with gzip.open(tmp_path / "profile" / "rank0.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    assert names.count("optimizer") == 2
    assert names.count("forward") == names.count("backward") > 0
