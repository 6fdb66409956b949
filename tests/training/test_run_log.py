"""Log lines, their means, and timers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_job import ForkedJob
from metrics_files import logged_steps
from run_helpers import ROOT, command_line

import pretrain
from megatrain.training.logging.metrics import evaluation_line, log_line, peak_tflops
from megatrain.training.run_log import averaged, mean_times
from megatrain.training.timers import Timers, across_ranks

VALUES: dict[str, Any] = {
    "iteration": 20, "consumed_samples": 640, "global_batch_size": 32, "lm_loss": 2.0, "sop_loss": None, "z_loss": None, "indexer_loss": None, "routers": None, "mtp_losses": None, "kd_losses": None,
    "grad_norm": 1.5, "params_norm": 50.0, "num_zeros": 7, "max_attention_logit": 12.5, "learning_rate": 1e-3, "decoupled_learning_rate": None, "loss_scale": 1.0, "iteration_ms": 100.0,
    "timers": {"optimizer": 4.0}, "tokens_per_second_per_gpu": 1000.0, "tflops_per_gpu": 100.0, "mfu": 0.4, "skipped": 0, "nan": 0,
}  # fmt: skip
MEGATRON_LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration       20/     100 \| consumed samples:          640 \|"
    r" elapsed time per iteration \(ms\): 100\.0 \| throughput per GPU \(TFLOP/s/GPU\): 100\.0 \|"
    r" learning rate: 1\.000000E-03 \| global batch size:    32 \| lm loss: 2\.000000E\+00 \| loss scale: 1\.0 \|"
    r" grad norm: 1\.500 \| num zeros: 7 \| params norm: 50\.000 \| number of skipped iterations:   0 \|"
    r" number of nan iterations:   0 \|"
)


def line(values: dict[str, Any], *, has_throughput: bool = True) -> str:
    return log_line(
        values, train_iters=100, has_throughput=has_throughput, speed_unit="tokens/s/GPU", world_size=1
    )


def test_the_line_is_megatrons_followed_by_speed() -> None:
    found = line(VALUES)
    matched = MEGATRON_LINE.match(found)
    assert matched, found
    assert found[matched.end() :] == " tokens/s/GPU: 1000 | MFU: 40.0 % | max attention logit: 12.500 |"


def test_the_decoupled_rate_has_megatrons_column() -> None:
    found = line({**VALUES, "decoupled_learning_rate": 2e-4})
    assert (
        " | learning rate: 1.000000E-03 | decoupled learning rate: 2.000000E-04 | global batch size: "
        in found
    )


def test_a_narrow_terminal_has_a_line_of_its_width() -> None:
    values = {**VALUES, "skipped": 2, "mtp_losses": {"mtp_1 loss": 3.0}}
    for columns in (60, 80, 120, 159):
        found = log_line(
            values, train_iters=100, has_throughput=True, speed_unit="tokens/s", world_size=8, columns=columns
        )
        assert len(found) <= columns
        assert "20/100 | loss 2.0000 | 2 skipped" in found
    assert found.endswith("lr 1.00e-03 | 8,000 tokens/s | MFU 40.0 % | 100 ms | mtp_1 loss 3.0000")

    found = evaluation_line("valid loss at iteration 20", {"loss": 2.0, "bits_per_byte": 0.5}, columns=80)
    assert found == " valid loss at iteration 20 | loss 2 | bits per byte 0.5"


def test_columns_without_their_flag_are_left_out() -> None:
    found = line(
        {**VALUES, "num_zeros": None, "params_norm": None, "max_attention_logit": None, "mfu": None},
        has_throughput=False,
    )
    assert not any(
        words in found for words in ("z loss", "zeros", "params", "throughput", "MFU", "attention")
    )


def test_losses_of_routers_are_averaged_and_stand_behind_the_loss() -> None:
    layers = [{"layer": 1, "max_load": 1.5, "dropped": 0.0, "entropy": 2.0}]
    routers = [{"losses": {"load_balancing_loss": loss}, "layers": layers} for loss in (1.0, 2.0)]
    means = averaged([{**VALUES, "routers": one} for one in routers])
    line = log_line(means, train_iters=100, has_throughput=False, speed_unit="tokens/s", world_size=1)
    assert " | lm loss: 2.000000E+00 | load_balancing_loss: 1.500000E+00 | loss scale: " in line
    assert means["routers"]["layers"] == layers


def test_the_z_loss_is_a_column_after_the_loss() -> None:
    means = averaged(
        [{**VALUES, "z_loss": 0.25}, {**VALUES, "skipped": 1, "z_loss": 9.0}, {**VALUES, "z_loss": 0.75}]
    )
    assert "| lm loss: 2.000000E+00 | z loss: 5.000000E-01 |" in line(means)


def test_the_loss_of_indexers_is_a_column() -> None:
    means = averaged([{**VALUES, "indexer_loss": 0.25}, {**VALUES, "indexer_loss": 0.75}])
    assert "| lm loss: 2.000000E+00 | indexer loss: 5.000000E-01 |" in line(means)


def test_losses_of_multi_token_prediction_stand_behind_the_loss() -> None:
    losses = [{"mtp_1 loss": 2.0, "mtp_2 loss": 3.0}, {"mtp_1 loss": 4.0, "mtp_2 loss": 5.0}]
    means = averaged([{**VALUES, "mtp_losses": one} for one in losses])
    assert (
        "| lm loss: 2.000000E+00 | mtp_1 loss: 3.000000E+00 | mtp_2 loss: 4.000000E+00 | loss scale: "
        in line(means)
    )


def test_means_are_over_time_and_leave_out_skipped_losses() -> None:
    slow = {**VALUES, "iteration_ms": 300.0, "tokens_per_second_per_gpu": 200.0, "mfu": 0.08, "lm_loss": 4.0}
    skipped = {**VALUES, "skipped": 1, "lm_loss": float("inf")}
    means = averaged([slow, skipped, VALUES])
    assert means["lm_loss"] == 3.0
    assert means["skipped"] == 1
    assert means["iteration_ms"] == pytest.approx(500 / 3)
    assert means["tokens_per_second_per_gpu"] == pytest.approx((60 + 100 + 100) / 0.5)
    assert means["mfu"] == pytest.approx((0.08 * 300 + 0.4 * 200) / 500)
    assert mean_times([VALUES, {**VALUES, "timers": {"optimizer": 6.0}}]) == {"optimizer": 5.0}


def test_timers_record_what_their_level_enables() -> None:
    timers = Timers(1, torch.device("cpu"))
    for _ in range(2):
        with timers.span("forward-backward"), timers.span("batch-generator"):
            pass
    assert list(timers.take()) == ["forward-backward"]
    assert timers.take() == {}


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("max", f"max time across ranks (ms):\n    optimizer {'.' * 38}: 3.00"),
        ("minmax", f"(min, max) time across ranks (ms):\n    optimizer {'.' * 38}: (1.00, 3.00)"),
        ("all", "times across ranks (ms):\n  optimizer:\n     rank  0: 1.00\n     rank  1: 3.00"),
    ],
)
def test_times_have_megatrons_format(option: str, expected: str) -> None:
    assert across_ranks([{"optimizer": 1.0}, {"optimizer": 3.0}], option) == expected


def test_a_run_on_a_cpu_logs_what_its_flags_enable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, str | None] = {
        "--train-iters": "5", "--log-interval": "2", "--eval-iters": "1", "--log-throughput": "",
        "--log-params-norm": "", "--log-num-zeros-in-grad": "", "--timing-log-level": "2", "--save": str(tmp_path),
        "--untie-embeddings-and-output-weights": "", "--decoupled-lr": "2e-3", "--min-lr": "0", "--log-max-attention-logit": "",
    }  # fmt: skip
    assert pretrain.main(command_line(flags)) == 0
    out = capsys.readouterr().out
    assert [int(n) for n in re.findall(r"\] iteration +(\d+)/ +5 \|", out)] == [1, 2, 4, 5]
    assert "TFLOP/s/GPU" not in out
    assert "> speed: in tokens/s" in out
    assert "> started in " in out
    assert out.count("forward-backward ......") == 4
    steps = logged_steps(tmp_path)
    means = re.findall(r"lm loss: (\S+) \|", out)
    assert float(means[2]) == pytest.approx((steps[2]["lm_loss"] + steps[3]["lm_loss"]) / 2, rel=1e-6)
    assert all(step["max_attention_logit"] > 0 for step in steps)
    assert all(step["params_norm"] > 0 and step["num_zeros"] > 0 for step in steps)
    assert set(steps[0]["timers"]) == {
        "forward-backward", "optimizer", "batch-generator", "optimizer-clip-main-grad",
    }  # fmt: skip
    assert all(step["decoupled_learning_rate"] == pytest.approx(2 * step["learning_rate"]) for step in steps)
    assert out.count(" | decoupled learning rate: ") == 4
    assert steps[0]["tflops_per_gpu"] is None
    assert steps[-1]["consumed_tokens"] == 5 * 16


def test_times_of_all_ranks_are_printed_together(tmp_path: Path) -> None:
    flags: dict[str, str | None] = {
        "--timing-log-level": "1", "--timing-log-option": "all", "--train-iters": "3", "--save": str(tmp_path),
        "--log-num-zeros-in-grad": "",
    }  # fmt: skip
    job = ForkedJob(command_line(flags), 2, tmp_path)
    job.wait()
    assert job.exit_codes == {0: 0, 1: 0}, job.output(0)
    assert job.output(0).count("times across ranks (ms):\n  forward-backward:\n     rank  0: ") == 2
    assert job.output(0).count("     rank  1: ") == 4
    assert job.output(0).count("started in") == 1
    assert "started in" not in job.output(1)
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    speeds = re.findall(r"tokens/s: (\d+) \|", job.output(0))
    assert int(speeds[0]) == pytest.approx(2 * rows[0]["tokens_per_second_per_gpu"], abs=1)


def test_every_field_of_the_metrics_is_documented(tmp_path: Path) -> None:
    assert pretrain.main(command_line({"--save": str(tmp_path), "--eval-iters": "1"})) == 0
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    fields = {name for row in rows for name in row}
    assert {name for name in fields if f"| `{name}` |" not in page} == set()


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", None),
        (None, None),
    ],
)
def test_the_peak_of_a_gpu(name: str | None, peak: float | None) -> None:
    assert peak_tflops(name) == peak
