"""`megatrain alerts` reports what happens to runs once, to a webhook and to Prometheus."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tools.test_report import make_run

from megatrain.tools.alerts import Alerts, metrics_text, report, serve
from megatrain.tools.main import main
from megatrain.tools.report_data import read_run


def write(
    folder: Path, rows: list[dict[str, Any]], *, exit_code: int | None = None, last_save: int = 0
) -> None:
    text = "".join(json.dumps({"iteration_ms": 1000.0, "grad_norm": 1.0} | row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    status = {
        "exit_code": exit_code,
        "reason": "running" if exit_code is None else "target reached",
        "iteration": len(rows),
    }
    (folder / "status.json").write_text(
        json.dumps(status | {"last_save": {"iteration": last_save, "stall_ms": 1.0}})
    )


def test_each_event_is_reported_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "config.yaml").write_text("checkpoint:\n  save_interval: 10\n")
    rows: list[dict[str, Any]] = [{"iteration": n, "lm_loss": 2.0} for n in range(1, 16)]
    alerts = Alerts(spike=1.5, silence=300)

    def kinds(*, after: float = 1) -> list[tuple[str, int]]:
        found = read_run(run, "run")
        return [(one.kind, one.iteration) for one in alerts.new(found, now=found.last_activity + after)]

    write(run, rows, last_save=10)
    assert kinds() == []
    rows += [{"iteration": 16, "lm_loss": 3.5}, {"iteration": 17, "lm_loss": None, "nan": 1, "skipped": 1}]
    write(run, rows, last_save=10)
    assert kinds() == [("nan", 17), ("spike", 16)]
    assert kinds() == []
    assert kinds(after=311) == [("silent", 17)]  # 300 s and ten iterations
    assert kinds(after=400) == []
    rows += [{"iteration": n, "lm_loss": 2.0} for n in range(18, 31)]
    write(run, rows, last_save=10)
    assert kinds() == [("save", 30)]
    write(run, rows, last_save=30)
    assert kinds() == []
    write(run, rows, last_save=30, exit_code=0)
    assert kinds() == [("end", 30)]


def test_a_webhook_gets_json_and_a_silent_one_ends_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        run = make_run(tmp_path)
        url = f"http://127.0.0.1:{server.server_port}/"
        assert main(["alerts", str(run), "--once", "--webhook", url]) == 1
        server.shutdown()
    text = "run: signal SIGTERM (exit code 75), iteration 4"
    assert got == [{"run": "run", "kind": "end", "iteration": 4, "text": text}]
    report(Alerts(spike=2, silence=1).new(read_run(run, "run"), now=0.0), url)
    assert "WARNING: the alert was not sent" in capsys.readouterr().err
    assert main(["alerts", str(run), "--webhook", "file:///etc/passwd"]) == 2


def test_prometheus_gets_the_numbers_of_each_run(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path), 'a"b')
    text = metrics_text([run], now=run.last_activity + 7)
    for line in (
        'megatrain_iterations{run="a\\"b"} 4',
        'megatrain_loss{run="a\\"b"} 2',
        'megatrain_silence_seconds{run="a\\"b"} 7',
    ):
        assert line in text.splitlines()
    assert "megatrain_mfu{" not in text  # not known
    documented = set(re.findall(r"`(megatrain_\w+)`", Path("docs/watching.md").read_text()))
    assert documented == set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    server = serve("127.0.0.1", 0, lambda: [run])
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            assert b"megatrain_faults" in answer.read()
    finally:
        server.shutdown()
        server.server_close()
