"""Summaries of traces, and the traces that runs write, also when they end early."""

import contextlib
import gzip
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import command_line

import pretrain
from megatrain.config import Facts, parse, resolve
from megatrain.config.errors import InputError
from megatrain.tools.main import main
from megatrain.training.debugging import profiling as profiling_module
from megatrain.training.debugging import trace_summary
from megatrain.training.debugging.profiling import Profiling
from megatrain.training.debugging.trace_summary import FIRST_ITERATION, REPORT, read_trace, summarize
from megatrain.training.engine import Engine


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
    span("kernel", "ncclDevKernel_ReduceScatter", 2000, 4000, 2),  # the first 1000 overlap with gemm
    span("kernel", "norm", 4000, 1000, 3),  # as do these
    span("kernel", "adam", 8000, 1000, 4),  # after 2000 of nothing
]


def test_intervals_are_compute_exposed_communication_or_idle() -> None:
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


def test_what_was_launched_before_the_first_profiled_iteration_does_not_count() -> None:
    marker = span("user_annotation", FIRST_ITERATION, 400, 1)
    summary = summarize([*TRACE, marker], num_steps=1)
    assert [name for name, *_ in summary.kernels] == ["norm", "adam"]
    found = {name: (part.compute, part.exposed, part.idle) for name, part in summary.parts.items()}
    assert found == {"forward": (1.0, 0.0, 0.0), "optimizer": (1.0, 0.0, 3.0)}
    assert summary.host_waits == {"cudaStreamSynchronize": 1}
    late = span("user_annotation", FIRST_ITERATION, 2700, 1)
    assert summarize([*TRACE, late], num_steps=1).host_waits == {}


def test_waits_are_counted_for_the_reports_of_the_profiled_iterations_alone() -> None:
    """Iterations 2 and 3 are profiled: while each runs, the one before is read; then 3 is read, and the profiler waits."""
    events = [span("user_annotation", FIRST_ITERATION, 0, 1)]
    for at in (100, 200, 290):
        events += [
            span("user_annotation", REPORT, at, 80),
            span("cuda_runtime", "cudaEventSynchronize", at + 1, 70),
        ]
        events.append(span("cuda_runtime", "cudaEventSynchronize", at + 75, 1))
    events += [span("cuda_runtime", "cudaMemcpy", at, 5) for at in (50, 190)]
    events.append(span("cuda_runtime", "cudaDeviceSynchronize", 380, 5))
    summary = summarize(events, num_steps=2)
    assert summary.host_waits == {"cudaEventSynchronize": 4, "cudaMemcpy": 2}
    waited = summarize(
        events[:1] + events[4:], num_steps=2
    )  # the first iteration depended on the report before
    assert waited.host_waits == summary.host_waits


def test_traffic_and_its_exposed_part_are_counted_by_group_if_the_trace_records_it() -> None:
    recorded = {"Collective name": "_reduce_scatter_base", "Group size": 4, "dtype": "Float"}
    recorded["Process Group Description"] = "ep"
    sizes = {"In msg nelems": 4_000_000, "Out msg nelems": 1_000_000}
    kernels = [span("kernel", "ncclDevKernel_ReduceScatter", at, 500) for at in (0, 1000, 2000)]
    for kernel in kernels:
        kernel["args"] |= {**recorded, **sizes}
    summary = summarize([*TRACE, *kernels], num_steps=2)
    assert list(summary.traffic) == ["_reduce_scatter_base over 4 ep"]
    assert "     0.75    0.25 (  5.6%)       1.5     0.024  _reduce_scatter_base over 4 ep" in summary.text()
    assert "collective" not in summarize(TRACE, num_steps=1).text()


def test_a_trace_without_kernels_says_so() -> None:
    assert "no kernels" in summarize([span("cpu_op", "aten::add", 0, 1)], num_steps=1).text()


FLAGS: dict[str, str | None] = {
    "--train-iters": "4",
    "--profile-step-start": "1",
    "--profile-step-end": "3",
    "--profile": "",
}


def ranges_of(file: Path) -> list[str]:
    """The names of all ranges of a trace."""
    with gzip.open(file) as trace:
        return [event.get("name") for event in json.load(trace)["traceEvents"] if event.get("ph") == "X"]


def test_a_run_profiles_the_iterations_that_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain.main(command_line({**FLAGS, "--save": str(tmp_path)})) == 0
    said = capsys.readouterr().out
    assert f"> profiled iterations 2 to 3: {tmp_path}/profile/rank0.json.gz\nno kernels in this trace" in said
    assert "cut short" not in said
    names = ranges_of(tmp_path / "profile" / "rank0.json.gz")
    assert names.count("optimizer") == 2
    assert names.count("forward") == names.count("backward") > 0
    assert names.count(REPORT) == 2


def test_a_trace_of_another_format_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(events: object, *, num_steps: int) -> None:
        raise KeyError("dur")

    monkeypatch.setattr(trace_summary, "summarize", fail)
    assert pretrain.main(command_line({**FLAGS, "--save": str(tmp_path)})) == 0
    assert "WARNING: the trace has no table: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "code", "reason"),
    [({"--exit-interval": "2"}, 75, "--exit-interval 2"), ({"--train-iters": "2"}, 0, "the run is done")],
)
def test_a_run_that_stops_while_it_profiles_writes_its_trace(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, str | None],
    code: int,
    reason: str,
) -> None:
    assert pretrain.main(command_line({**FLAGS, **changed, "--save": str(tmp_path)})) == code
    file, said = tmp_path / "profile" / "rank0.json.gz", capsys.readouterr().out
    table = f"> profiling was cut short ({reason}), iterations 2 to 2 instead of 3: {file}\nno kernels in this trace"
    assert table in said
    assert said.index("> committed") < said.index(table), "the checkpoint matters more where time is short"
    assert ranges_of(file).count("optimizer") == 1
    assert read_trace(file).num_steps == 1


def test_a_run_that_fails_while_it_profiles_writes_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, calls = Engine.begin_step, []

    def failing(self: Engine, *arguments: Any, **more: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("no memory is left")
        return begin(self, *arguments, **more)

    monkeypatch.setattr(Engine, "begin_step", failing)
    assert pretrain.main(command_line({**FLAGS, "--save": str(tmp_path)})) == 1
    said = capsys.readouterr()
    file = tmp_path / "profile" / "rank0.json.gz"
    assert f"> profiling was cut short (RuntimeError), iterations 2 to 3 instead of 3: {file}\n" in said.out
    assert "no memory is left" in said.err
    assert "optimizer" in ranges_of(file)


def test_a_profile_that_cannot_be_written_does_not_hide_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU may wait for a rank that waits for this one."""
    profiling = started(plan_of({"--profile-dir": str(tmp_path)}), rank=0)
    never = threading.Event()
    monkeypatch.setattr(profiling_module, "_MAX_SYNCHRONIZE_SECONDS", 0.05)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: never.wait())
    profiling._device = "cuda"
    text = profiling.at_failure(RuntimeError())
    never.set()
    profiling._profile.stop()
    assert text is not None
    assert text.startswith("> the profile from iteration 2 on is lost: TimeoutError: the GPU was still busy")
    assert not any(tmp_path.iterdir())


def test_a_run_that_ends_before_its_profile_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain.main(command_line({**FLAGS, "--exit-interval": "1", "--save": str(tmp_path)})) == 75
    message = "> nothing was profiled: --exit-interval 1 at iteration 1, and --profile-step-start is 1"
    assert message in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()


def test_a_run_that_resumes_after_the_profiled_iterations_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {"--save": str(tmp_path), "--load": str(tmp_path)}
    assert pretrain.main(command_line({**FLAGS, **folders, "--profile": None, "--profile-step-start": None,
                                       "--profile-step-end": None, "--exit-interval": "3"})) == 75  # fmt: skip
    capsys.readouterr()
    assert pretrain.main(command_line({**FLAGS, **folders})) == 0
    said = capsys.readouterr().out
    assert said.count("profiled") == 1
    assert "> --profile-step-end 3: nothing is profiled, because the run resumes from iteration 3\n" in said
    assert not (tmp_path / "profile").exists()


def plan_of(changed: dict[str, str | None]) -> Any:
    request = parse(command_line({**FLAGS, "--global-batch-size": "4", **changed}))
    return resolve(request, Facts(world_size=4, vocab_size=101, eod_id=100))


def started(plan: Any, *, rank: int) -> Profiling:
    """Return a profiler during iteration 2, the first that is profiled."""
    profiling = Profiling(plan, rank=rank, start=0)
    for iteration in (1, 2):
        profiling.before_iteration(iteration)
    return profiling


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
@pytest.mark.parametrize("last", [3, 1])
def test_the_recording_of_a_gpu_begins_an_iteration_earlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    for name in ("_synchronize", "_synchronize_with_timeout"):
        monkeypatch.setattr(Profiling, name, lambda _: None)
    plan = plan_of({"--profile-dir": str(tmp_path), "--device": "cpu"})
    training = replace(plan.config.training, device="cuda")
    plan = replace(plan, config=replace(plan.config, training=training))
    profiling = Profiling(plan, rank=0, start=0)
    assert [number for number in range(5) if profiling.is_boundary(number)] == [0, 3]
    for iteration in range(1, last + 1):
        profiling.before_iteration(iteration)
        with torch.profiler.record_function(f"step {iteration}"):
            pass
        text = profiling.after_iteration(iteration, is_stopping=iteration == last == 1)
    file = tmp_path / "rank0.json.gz"
    if last == 1:
        assert profiling.at_failure(ValueError()) is None, "the iterations to profile did not begin"
        assert (profiling.at_end("a signal") or "").startswith(
            "> nothing was profiled: a signal at iteration 1"
        )
        assert not file.exists()
        return
    assert text is not None
    assert text.startswith("> profiled iterations 2 to 3: ")
    names = [name for name in ranges_of(file) if name.startswith("step") or name == FIRST_ITERATION]
    assert names == ["step 1", FIRST_ITERATION, "step 2", "step 3"]
    assert read_trace(file).num_steps == 2


def test_rank_0_names_the_traces_of_others(tmp_path: Path) -> None:
    plan = plan_of({"--profile-dir": str(tmp_path), "--profile-ranks": "1 3"})
    rank_0, rank_1 = started(plan, rank=0), started(plan, rank=1)
    files = f"{tmp_path}/rank1.json.gz, {tmp_path}/rank3.json.gz"
    others = f"> traces of ranks 1, 3: {files}; `megatrain trace FILE` prints a file's table"
    assert rank_0.at_end("signal SIGTERM") == (
        f"> profiling was cut short (signal SIGTERM), iterations 2 to 2 instead of 3\n{others}"
    )
    text = rank_1.at_end("signal SIGTERM")
    assert text is not None
    assert "rank1.json.gz\nno kernels" in text
    rank_0 = started(plan, rank=0)
    rank_0.before_iteration(3)
    assert rank_0.after_iteration(3) == f"> profiled iterations 2 to 3\n{others}"
    assert rank_0.at_end(None) is None
    assert started(plan, rank=2).at_failure(RuntimeError()) is None


def test_the_table_of_a_trace_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, packed = tmp_path / "rank1.json", tmp_path / "rank1.json.gz"
    plain.write_text(json.dumps({"traceEvents": TRACE, "profiled_iterations": [11, 12]}))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for file in (plain, packed):
        assert main(["trace", str(file)]) == 0
        assert capsys.readouterr().out == summarize(TRACE, num_steps=2).text() + "\n"


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"no gzip",
        gzip.compress(b"{")[:-4],
        gzip.compress(b"{"),
        gzip.compress(b"[]"),
        gzip.compress(b"{}"),
    ],
    ids=["missing", "no-gzip", "cut", "no-json", "a-list", "no-events"],
)
def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "rank0.json.gz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=r"rank0.json.gz is not a readable trace of --profile"):
        read_trace(file)


def test_nvtx_ranges_and_the_history_of_memory_are_of_the_ranks_and_iterations_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's calls in place of a GPU; tests/gpu has the files."""
    calls: list[str] = []
    cuda, memory = torch.cuda, torch.cuda.memory
    for place, name in ((cuda, "synchronize"), (cuda.profiler, "start"), (cuda.profiler, "stop"),
                        (memory, "_record_memory_history"), (memory, "_dump_snapshot")):  # fmt: skip
        monkeypatch.setattr(place, name, lambda *_, name=name, **__: calls.append(name))
    monkeypatch.setattr(profiling_module, "emit_nvtx", lambda **_: contextlib.nullcontext())
    flags = {
        "--nvtx-ranges": "",
        "--record-memory-history": "",
        "--log-interval": "2",
        "--profile-ranks": "0 2",
    }
    flags["--memory-snapshot-path"] = str(tmp_path / "out" / "memory.pickle")
    plan = plan_of(flags)
    training = replace(plan.config.training, device="cuda")
    plan = replace(plan, config=replace(plan.config, training=training))
    profiling = started(plan, rank=0)
    assert calls == ["_record_memory_history", "synchronize", "start"]
    assert profiling._history.name == "memory0.pickle"
    assert profiling.after_iteration(2) is None
    assert calls.pop() == "_dump_snapshot"
    assert profiling.after_iteration(3) == "> profiled iterations 2 to 3: as NVTX ranges, for Nsight Systems"
    assert calls[3:] == ["synchronize", "stop"]
    assert profiling.at_failure(RuntimeError("out of memory")) is None
    assert calls[5:] == ["_dump_snapshot"]
    calls.clear()
    started(plan, rank=1)
    assert calls == []
