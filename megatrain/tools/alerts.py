"""`megatrain alerts`: calls a webhook when something happens to runs, and serves their numbers to Prometheus.

    --save folders ─> RunData, every --interval seconds ─┬─> alerts that are new ─> lines, and a POST to --webhook
                                                        └─> gauges of /metrics on --port

It reads files alone, as `megatrain watch` does: it never disturbs a run, and reports one that was killed or is silent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from megatrain.config import InputError
from megatrain.tools.report_data import RunData, read_runs
from megatrain.tools.subcommands import add_command, duration

_RECENT: Final = 100
"""Iterations whose median is compared with a loss."""
_WEBHOOK_SECONDS: Final = 10
_GAUGES: Final = {
    "iterations": "completed iterations",
    "loss": "training loss of the last iteration",
    "grad_norm": "gradient norm of the last iteration",
    "tokens_per_second_per_gpu": "tokens per second and GPU of the last iteration",
    "mfu": "share of the peak FLOPs in the run",
    "saves": "checkpoints",
    "faults": "iterations that updated nothing",
    "is_running": "1 while the run is active",
    "silence_seconds": "seconds since the last write of the run",
}


@dataclass(frozen=True)
class Alert:
    """Something that happened to a run."""

    run: str
    kind: str
    """nan, skipped, spike, silent, save, or end."""
    iteration: int
    text: str


@dataclass
class _Reported:
    """The state of a run, up to the last look."""

    iteration: int
    faults: int
    conditions: set[str] = field(default_factory=set)
    """Alerts that last: silence, a missing save, an end."""


class Alerts:
    """Finds alerts about runs. Those of iterations before the first look count as known."""

    def __init__(self, *, spike: float, silence: float) -> None:
        """Args:
        spike: factor between a loss and the median of those before it.
        silence: seconds without a write of an active run, besides ten iterations.
        """
        self._spike, self._silence = spike, silence
        self._known: dict[str, _Reported] = {}

    def new(self, run: RunData, *, now: float) -> list[Alert]:
        """Return the alerts since the last look; `now` in seconds since the epoch."""
        iteration = run.summary["iterations"] or 0
        known = self._known.setdefault(run.name, _Reported(iteration, len(run.faults)))
        found = [
            Alert(run.name, what.lower(), at, f"iteration {at:,}: {what}, no update")
            for at, what in run.faults[known.faults :]
        ]
        found += self._spikes(run, after=known.iteration)
        lasting = {alert.kind: alert for alert in self._lasting(run, iteration, now)}
        found += [alert for kind, alert in lasting.items() if kind not in known.conditions]
        self._known[run.name] = _Reported(iteration, len(run.faults), set(lasting))
        return found

    def _spikes(self, run: RunData, *, after: int) -> Iterator[Alert]:
        iterations, losses = run.x.get("iteration", []), run.curves.get("lm_loss", [])
        for number, (iteration, loss) in enumerate(zip(iterations, losses, strict=False)):
            if iteration is None or iteration <= after or loss is None:
                continue
            before = [one for one in losses[max(0, number - _RECENT) : number] if one is not None]
            if len(before) >= _RECENT // 10 and loss > self._spike * statistics.median(before):
                text = f"iteration {int(iteration):,}: loss {loss:.5g}, median before {statistics.median(before):.5g}"
                yield Alert(run.name, "spike", int(iteration), text)

    def _lasting(self, run: RunData, iteration: int, now: float) -> Iterator[Alert]:
        if not run.summary["is_running"]:
            yield Alert(run.name, "end", iteration, f"{run.summary['status']}, iteration {iteration:,}")
            return
        silence = now - run.last_activity
        if silence > self._silence + 10 * (run.recent("iteration_ms", _RECENT) or 0) / 1000:
            text = f"no sign of life for {duration(silence)}, iteration {iteration:,}: a rank may be late or hang"
            yield Alert(run.name, "silent", iteration, text)
        interval, saved = run.settings.get("checkpoint.save_interval"), _last_save(run)
        if isinstance(interval, int) and interval > 0 and iteration >= saved + 2 * interval:
            text = (
                f"iteration {iteration:,}, and no checkpoint since {saved:,} (--save-interval {interval:,})"
            )
            yield Alert(run.name, "save", iteration, text)


def _last_save(run: RunData) -> int:
    """Return the iteration of the newest save that the run names; its first iteration if it names none."""
    first = next((int(one) for one in run.x.get("iteration", []) if one is not None), 1) - 1
    return max(first, run.summary["last_save"] or 0)


def metrics_text(runs: Sequence[RunData], *, now: float) -> str:
    """Return the numbers of runs in Prometheus's text format."""
    values = {run.name: _gauges(run, now) for run in runs}
    lines = []
    for name, text in _GAUGES.items():
        lines += [f"# HELP megatrain_{name} {text}", f"# TYPE megatrain_{name} gauge"]
        for run, of_run in values.items():
            if of_run[name] is not None:
                lines.append(f"megatrain_{name}{{run={json.dumps(run)}}} {float(of_run[name]):.9g}")
    return "\n".join(lines) + "\n"


def _gauges(run: RunData, now: float) -> dict[str, Any]:
    def last(curve: str) -> float | None:
        return next(iter(run.curves.get(curve, [])[-1:]), None)

    return {
        **{name: run.summary[name] for name in ("iterations", "mfu", "saves", "faults", "is_running")},
        "loss": last("lm_loss"),
        "grad_norm": last("grad_norm"),
        "tokens_per_second_per_gpu": last("tokens_per_second_per_gpu"),
        "silence_seconds": now - run.last_activity,
    }


def add_flags(commands: Any) -> None:
    """Add `megatrain alerts`."""
    alerts = add_command(commands, "alerts", run)
    alerts.add("runs RUN ...", "--save folder or --metrics-file of a run")
    alerts.add("--webhook URL", 'address that gets each alert as JSON: {"text", "run", "kind", "iteration"}')
    alerts.add(
        "--port N",
        "port of /metrics for Prometheus, on this host's loopback address",
        of=int,
        at_least=0,
        at_most=65535,
    )
    alerts.add("--host", "address of /metrics", "127.0.0.1")
    alerts.add("--interval SECONDS", "time between two looks", 30.0)
    alerts.add("--spike FACTOR", "loss over the median of the 100 before", 1.5)
    alerts.add("--silence SECONDS", "silence to report, besides ten iterations", 300.0)
    alerts.add(
        "--once", "print what lasts now (silence, a missing save, an end), and exit with 1 if there is some"
    )


def run(arguments: argparse.Namespace) -> int:
    """Report NaN, skipped updates, spikes of the loss, silence (a late or dead rank), missing saves and the end of runs to a
    webhook, and serve their numbers to Prometheus, until Ctrl-C.
    """
    webhook = arguments.webhook
    if webhook is not None and urllib.parse.urlsplit(webhook).scheme not in ("http", "https"):
        raise InputError(
            f"--webhook {webhook} is no address of HTTP", fix="give --webhook an http:// or https:// address"
        )
    alerts = Alerts(spike=arguments.spike, silence=arguments.silence)

    def look() -> list[Alert]:
        return [alert for one in read_runs(arguments.runs) for alert in alerts.new(one, now=time.time())]

    if arguments.once:
        found = look()
        report(found, webhook)
        return 1 if found else 0
    server = (
        None
        if arguments.port is None
        else serve(arguments.host, arguments.port, lambda: read_runs(arguments.runs))
    )
    try:
        while True:
            report(look(), webhook)
            time.sleep(max(arguments.interval, 0.1))
    except KeyboardInterrupt:
        return 0
    finally:
        if server is not None:
            server.shutdown()


def report(alerts: Sequence[Alert], webhook: str | None) -> None:
    """Print alerts, and send them; an address that does not answer is an error line, and ends nothing."""
    for alert in alerts:
        text = f"{alert.run}: {alert.text}"
        print(text, flush=True)
        if webhook is None:
            continue
        body = json.dumps(asdict(alert) | {"text": text}).encode()
        request = urllib.request.Request(webhook, body, {"Content-Type": "application/json"})  # noqa: S310 (run checks it)
        try:
            urllib.request.urlopen(request, timeout=_WEBHOOK_SECONDS).close()  # noqa: S310
        except (urllib.error.URLError, OSError) as error:
            print(f"WARNING: the alert was not sent: {webhook}: {error}", file=sys.stderr, flush=True)


def serve(host: str, port: int, runs: Callable[[], Sequence[RunData]]) -> ThreadingHTTPServer:
    """Start to serve /metrics in a thread. Raises InputError if the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.path.partition("?")[0] == "/metrics"
            body = metrics_text(runs(), now=time.time()).encode() if is_known else b"see /metrics\n"
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Print nothing: Prometheus asks all the time."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise InputError(f"--port {port}: {error.strerror}", fix="use another --port") from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
