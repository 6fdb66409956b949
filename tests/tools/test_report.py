"""`megatrain report`: the data that it reads, and the page, which needs no network."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatrain.tools.main import main
from megatrain.tools.report import page
from megatrain.tools.report_data import (
    CURVES,
    ROUTER_CURVES,
    differing_settings,
    kept_rows,
    read_run,
    run_names,
)

ROOT = Path(__file__).parents[2]


def make_run(folder: Path, *, num_iterations: int = 4, lr: float = 0.001, name: str = "run") -> Path:
    """Write the folder of a finished run."""
    run = folder / name
    run.mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {
            "iteration": n, "consumed_samples": 2 * n, "lm_loss": 8.0 / n, "grad_norm": None if n == 2 else 1.0,
            "learning_rate": lr, "iteration_ms": 1800.0, "tokens_per_second_per_gpu": 100.0 * n, "mfu": None,
            "max_memory_bytes": 10**9, "skipped": 0,
        }
        for n in range(1, num_iterations + 1)
    ]  # fmt: skip
    rows.insert(2, {"iteration": 2, "validation": "valid", "loss": 3.5, "ppl": 33.1})
    rows.append({"iteration": num_iterations, "validation": "valid", "loss": 2.5, "ppl": 12.2})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(text + '{"iteration": 99, "lm_')  # an unfinished line
    (run / "config.yaml").write_text(
        f"data:\n  seq_length: 8  # why\noptimizer:\n  lr: {lr}\ncheckpoint:\n  save: {run}\n"
    )
    (run / "status.json").write_text('{"exit_code": 75, "reason": "signal SIGTERM"}')
    return run


def test_a_run_is_read_with_its_axes_and_evaluations(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path), "run")
    assert run.x == {
        "iteration": [1, 2, 3, 4], "samples": [2, 4, 6, 8], "tokens": [16, 32, 48, 64],
        "hours": [0.0005, 0.001, 0.0015, 0.002],
    }  # fmt: skip
    assert run.curves["lm_loss"] == [8.0, 4.0, 2.66667, 2.0]
    assert run.curves["grad_norm"] == [1.0, None, 1.0, 1.0]
    assert "mfu" not in run.curves
    assert run.means is None
    assert run.validations == {"valid": [(2, 3.5), (4, 2.5)]}
    assert run.summary["validation"] == 2.5
    assert run.summary["tokens_per_second_per_gpu"] == 300.0
    assert run.summary["status"] == "signal SIGTERM (exit code 75)"


def test_evaluations_of_a_bert_have_their_losses_and_accuracies(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    row = {"iteration": 4, "validation": "test", "loss": 2.0, "ppl": 7.4, "sop_loss": 0.7}
    row |= {"sop_accuracy": 0.75, "token_accuracy": 0.25}
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps(row) + "\n")
    found = read_run(run, "run")
    assert found.validations == {"valid": [(2, 3.5), (4, 2.5)], "test": [(4, 2.0)], "test sop": [(4, 0.7)]}
    assert found.accuracies == {"test token": [(4, 0.25)], "test sop": [(4, 0.75)]}


def test_the_loss_is_a_mean_over_the_end_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, num_iterations=30)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('\n{"iteration": 31, "lm_loss": 99.0, "skipped": 1}\n')
    expected = (8 / 28 + 8 / 29 + 8 / 30) / 3
    summary = read_run(run, "run").summary
    assert summary["loss"] == pytest.approx(expected, rel=1e-5)
    assert summary["num_losses"] == 3


def test_a_refused_start_is_shown_after_the_end_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    refused = {"exit_code": 2, "reason": "--seed cannot change\n  of the checkpoint: 1\n  of this run: 2"}
    status = {"exit_code": 0, "reason": "the target is reached", "refused_start": refused}
    (run / "status.json").write_text(json.dumps(status))
    shown = read_run(run, "run").summary["status"]
    assert shown.startswith("the target is reached (exit code 0)")
    assert shown.endswith("--seed cannot change")


def test_routers_have_curves_of_all_layers(tmp_path: Path) -> None:
    layers = [
        {"max_load": 1.5, "entropy": 2.0, "dropped": 0.0},
        {"max_load": 3.0, "entropy": 1.0, "dropped": 0.5},
    ]
    rows = [{"iteration": 1, "routers": {"losses": {}, "layers": layers}}, {"iteration": 2, "routers": None}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    curves = read_run(tmp_path, "run").curves
    assert curves == {"max_load": [3.0, None], "entropy": [1.5, None], "dropped": [0.25, None]}


def test_iterations_that_ran_twice_count_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    again = {"iteration": 3, "consumed_samples": 6, "lm_loss": 7.0, "iteration_ms": 1800.0}
    text = (run / "metrics.jsonl").read_text().rpartition("\n")[0]
    (run / "metrics.jsonl").write_text(f"{text}\n{json.dumps(again)}\n[3]\n")
    assert read_run(run, "run").curves["lm_loss"] == [8.0, 4.0, 7.0, 2.0]


def test_settings_that_differ_are_found_without_the_folders(tmp_path: Path) -> None:
    one = read_run(make_run(tmp_path / "a"), "a")
    other = read_run(make_run(tmp_path / "b", lr=0.5), "b")
    assert differing_settings([one, other]) == [("optimizer.lr", ["0.001", "0.5"])]
    assert differing_settings([one]) == []


DEEP = "[" * 20_000
ALIASES = "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 8)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "is_valid"),
    [
        (DEEP, False),
        ("a: {b: " * 5000, False),
        (f"model:\n  x: {DEEP}", False),
        ("\udcff\udcfe", False),
        ("data: {seq_length: 8", False),
        ("data: {seq_length: 2001-99-99}", False),
        ("data: {seq_length: !!python/object/apply:os.system [exit 1]}", True),
        ("data: {seq_length: !!python/name:os.system x}", False),
        ("data: " + "x" * (1 << 20), False),
        (ALIASES + "model: {x: *i, y: [*i, *i]}", False),
        ("data: {seq_length: 'many'}", True),
        ("data: {seq_length: [8]}", True),
        ("data: {seq_length: .nan}", True),
        (f"data: {{seq_length: 0x{'f' * 10_000}}}", False),
        (f"data: {{seq_length: {'1' * 10_000}}}", False),
        ("data: {? [1, 2] : 3, ? {a: b} : 4, 5: 6}", True),
        ("? [model]\n: {x: 1}", True),
        ("- 1\n- 2", True),
        ("", True),
        ('model: {x: "\\ud800"}', False),
    ],
)  # fmt: skip
def test_a_damaged_configuration_stops_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, is_valid: bool
) -> None:
    run, output = make_run(tmp_path), tmp_path / "page.html"
    (run / "config.yaml").write_text(content, errors="surrogateescape")
    assert main(["report", str(run), "--output", str(output)]) == 0
    assert ("its settings are unknown" in capsys.readouterr().out) == (not is_valid)
    assert output.stat().st_size < 1 << 20
    assert embedded(output.read_text())["runs"][0]["curves"]["lm_loss"] == [8.0, 4.0, 2.66667, 2.0]


@pytest.mark.parametrize(
    "line",
    [
        {"lm_loss": 1e308, "iteration_ms": 1e308, "tokens_per_second_per_gpu": 1e308, "mfu": 1e308},
        {"routers": [1], "save": [2], "max_memory_bytes": math.nan, "consumed_tokens": [3]},
        {"routers": {"layers": {"a": 1}}, "save": {"iteration": [], "stall_ms": "x"}},
        {"routers": {"layers": [1, {"entropy": 1e308}, {"entropy": 1e308}]}, "consumed_samples": 10**400},
        {"validation": ["valid"], "loss": "low"},
        {"iteration": 10**30},
        {"iteration": True},
    ],
)
def test_hostile_metrics_stop_no_report(tmp_path: Path, line: dict[str, Any]) -> None:
    run = make_run(tmp_path)
    with (run / "metrics.jsonl").open("a") as file:
        for number in (5, 6, 7):
            file.write("\n" + json.dumps({"iteration": number} | line))
        file.write(f"\n{DEEP}\n")
    (run / "status.json").write_text(DEEP)
    found = embedded(page([read_run(run, "run")]))
    assert found["runs"][0]["summary"]["status"] == "unknown"


def test_saves_are_counted_with_the_time_that_they_cost(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    rows = [{"iteration": 5 + n, "save": {"iteration": 4 + n, "stall_ms": 1500.0}} for n in (0, 1)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"iteration": 9, "save": None}])))
    for last in ({"iteration": 9, "stall_ms": 500.0}, {"iteration": 5, "stall_ms": 1500.0}, None):
        (run / "status.json").write_text(json.dumps({"exit_code": 0, "reason": "done", "last_save": last}))
        summary = read_run(run, "run").summary
        is_new = last is not None and last["iteration"] == 9
        assert (summary["saves"], summary["save_stall_seconds"]) == ((3, 3.5) if is_new else (2, 3.0))
    for iteration in (0, 5, 7):  # weights from which it starts, and 7: the last save of a job before
        (run / f"iter_000000{iteration}").mkdir()
        (run / f"iter_000000{iteration}" / "manifest.json").touch()
    assert read_run(run, "run").saves == [4, 5, 7]


def test_a_resume_has_the_iteration_from_which_it_went_on(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            "\n" + "".join(json.dumps({"iteration": n, "resumed": int(n == 5)}) + "\n" for n in (5, 6))
        )
    assert read_run(run, "run").resumes == [4]


def test_run_names_differ() -> None:
    assert run_names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert run_names([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]
    assert run_names([Path("/x/a/metrics.jsonl")]) == ["a"]
    assert run_names([Path("/x/a/checkpoints/metrics.jsonl")]) == ["a"]
    assert run_names([Path("/x/a/checkpoints"), Path("/x/b/checkpoints")]) == ["a", "b"]
    assert run_names([Path("/x/a/checkpoints"), Path("/x/b")]) == ["a", "b"]
    assert run_names([Path("/x/a"), Path("/x/a")]) == ["1 /x/a", "2 /x/a"]


def test_downsampling_keeps_every_spike() -> None:
    column: list[float | None] = [float(n % 7) for n in range(10_000)]
    column[4321] = 99.0
    column[7777] = None
    rows = kept_rows([column], max_buckets=50)
    assert {0, 4321, 9999} <= set(rows)
    assert len(rows) <= 3 * 50 + 1
    assert kept_rows([column[:100]], max_buckets=50) == list(range(100))
    assert kept_rows([]) == []


def test_a_long_run_has_means_and_extremes(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, num_iterations=2000), "run")
    assert run.means is not None
    assert len(run.means.curves["lm_loss"]) == len(run.means.x["iteration"]) == 500
    assert run.means.x["iteration"][:2] == [4, 8]
    assert run.means.curves["lm_loss"][0] == pytest.approx((8 + 4 + 8 / 3 + 2) / 4, rel=1e-5)


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "pages" / "runs.html"
    runs = [str(make_run(tmp_path / name)) for name in ("a", "b")]
    assert main(["report", *runs, "--output", str(output)]) == 0
    assert "a/run: 4 iterations, loss 2.0000\n" in capsys.readouterr().out
    content = embedded(output.read_text())
    assert [run["name"] for run in content["runs"]] == ["a/run", "b/run"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["{run}", "--output", "page.pdf"], "fix: use --output page.html"),
        (["{run}", "--output", "/proc/page.html"], "error: --output /proc/page.html: "),
        (
            ["{empty}"],
            "fix: name the --save folder",
        ),
    ],
)
def test_errors_name_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    run = make_run(tmp_path)
    (tmp_path / "empty").mkdir()
    arguments = [word.format(run=run, empty=tmp_path / "empty") for word in words]
    assert main(["report", *arguments]) == 2
    assert expected in capsys.readouterr().err


class Links(HTMLParser):
    """Collector of the links that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data")]
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")


def embedded(text: str) -> dict[str, Any]:
    """Return the data in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found.group(1))
    return content


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    text = page([read_run(make_run(tmp_path), "run")])
    links = Links()
    links.feed(text)
    assert links.found == []
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {
        "http://www.w3.org/2000/svg"
    }  # an XML namespace, not a link
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|import\(|@import|url\((?!#)", text)
    assert "default-src 'none'" in text


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script>"
    text = page([read_run(make_run(tmp_path), name)])
    assert "alert(1)</script>" not in text
    assert embedded(text)["runs"][0]["name"] == name
    assert "innerHTML" not in text


def test_every_curve_has_a_chart(tmp_path: Path) -> None:
    text = page([read_run(make_run(tmp_path), "run")])
    charts = set(re.findall(r'\{ name: "(\w+)", title:', text))
    assert charts == {*CURVES, *ROUTER_CURVES, "validations", "accuracies", "bits"}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (1.38412, 1.38429, ["1.38415", "1.3842", "1.38425"]),
        (0, 10, ["0", "2.5", "5", "7.5", "10"]),
        (1e-4, 3e-4, ["1e-4", "1.5e-4", "2e-4", "2.5e-4", "3e-4"]),
        (50_000, 50_020, ["50k", "50.005k", "50.01k", "50.015k", "50.02k"]),
        (-2e9, 2e9, ["-2B", "-1B", "0", "1B", "2B"]),
    ],
)
def test_ticks_differ_from_each_other(low: float, high: float, labels: list[str]) -> None:
    script = (ROOT / "megatrain" / "tools" / "report.html").read_text(encoding="utf-8")
    functions = [
        re.search(rf"^(function {name}\(.*?^}}|const {name} = .*?;)$", script, re.MULTILINE | re.DOTALL)
        for name in ("tick", "stepOf", "niceTicks")
    ]
    assert all(functions)
    code = "\n".join(found[0] for found in functions if found is not None)
    code += f"\nconst t = niceTicks({low}, {high}, 4); console.log(JSON.stringify(t.map((v) => tick(v, stepOf(t)))));"
    ended = subprocess.run(["node", "-e", code], check=True, capture_output=True, text=True, timeout=60)
    assert json.loads(ended.stdout) == labels


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    output = tmp_path / "runs.html"
    output.write_text(page([read_run(make_run(tmp_path), "run")]))
    words = "chromium --headless --no-sandbox --disable-gpu --virtual-time-budget=2000 --dump-dom".split()
    ended = subprocess.run(
        [*words, f"--user-data-dir={tmp_path / 'chromium'}", f"file://{output}"],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.stdout.count('<section class="chart') == 7
    assert ended.stdout.count("<path") >= 7
    assert ">no data<" not in ended.stdout
