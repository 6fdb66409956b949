"""--log-straggler: the slowest and the fastest ranks are printed after each log line."""

import re
import time
from pathlib import Path

import pytest
import torch
from metrics_files import logged_lines
from run_helpers import command_line

import pretrain
from megatrain.training.stragglers import ComputeTimes, straggler_line

TIMES = [("n0", 101.2), ("n0", 104.0), ("n1", 149.8), ("n1", 102.6)]


def test_the_line_names_slow_and_fast_ranks() -> None:
    assert straggler_line(TIMES, flops=0.0, count=1) == (
        "> stragglers: forward and backward 101.2 ms to 149.8 ms, median 103.3"
        " | slowest rank 2 on n1: 149.8 ms | fastest rank 0 on n0: 101.2 ms"
    )
    line = straggler_line(TIMES, flops=1e12, count=2)
    assert "slowest rank 2 on n1: 149.8 ms, 6.7 TFLOP/s, rank 1 on n0: 104.0 ms, 9.6 TFLOP/s |" in line
    assert "fastest rank 0 on n0: 101.2 ms, 9.9 TFLOP/s, rank 3 on n1" in line


def test_steps_are_timed_in_their_order() -> None:
    times = ComputeTimes(torch.device("cpu"))
    for seconds in (0.05, 0.0):
        with times:
            time.sleep(seconds)
    assert times.take() >= 0.05 > times.take()


def test_a_run_prints_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {
        "--log-straggler": "",
        "--log-interval": "1",
        "--save": str(tmp_path),
        "--straggler-ctrlr-port": "65535",
        "--print-config": "full",
    }
    assert pretrain.main(command_line(flags)) == 0
    output = capsys.readouterr().out
    assert (
        len(re.findall(r"> stragglers: forward and backward .* slowest rank 0 on \S+: [\d.]+ ms \|", output))
        == 2
    )
    assert "--straggler-ctrlr-port 65535 is ignored: --log-straggler reports" in " ".join(output.split())
    assert all(0 < line["compute_ms"] < line["iteration_ms"] for line in logged_lines(tmp_path))
