"""`megatrain report`: write the curves of one or more runs as one self-contained HTML page."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain import __version__
from megatrain.config.errors import ConfigError
from megatrain.tools.report_data import RunData, all_settings, differing_settings, read_runs
from megatrain.tools.subcommands import add_command, write_output

_TEMPLATE = Path(__file__).with_name("report.html")
_DATA_MARK = "/* data of the runs */"


def add_flags(commands: Any) -> None:
    """Add `megatrain report`."""
    report = add_command(commands, "report", run)
    report.add("runs RUN ...", "--save folder or --metrics-file of a run")
    report.add("--output FILE", "page to write", Path("report.html"))


def run(arguments: argparse.Namespace) -> None:
    """Write one HTML page with the curves, evaluations and settings of runs. It needs no network."""
    output: Path = arguments.output
    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            f"--output {output}: the report is an HTML page",
            fix=f"use --output {output.with_suffix('.html')}",
        )
    runs = read_runs(arguments.runs)
    text = page(runs)
    write_output(output, text)
    for one in runs:
        loss = one.summary["loss"]
        count = one.summary["num_losses"]
        mean = f" (mean of the last {count} iterations)" if count > 1 else ""
        suffix = f", loss {loss:.4f}{mean}" if loss is not None else ""
        print(f"{one.name}: {one.summary['iterations']:,} iterations{suffix}")
        if one.note is not None:
            print(f"{one.name}: its settings are unknown: {one.note}")
    print(f"{output}: {len(text.encode()) / 1e3:,.0f} kB, open it in a browser")


def page(runs: Sequence[RunData]) -> str:
    """Return the HTML page."""
    content = {
        "version": __version__,
        "runs": [
            {
                name: value
                for name, value in dataclasses.asdict(one).items()
                if name not in ("settings", "note")
            }
            for one in runs
        ],
        "differing": differing_settings(runs),
        "settings": all_settings(runs),
    }
    # A "</script>" in a name would end the script element, so "<" is escaped.
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return _TEMPLATE.read_text(encoding="utf-8").replace(_DATA_MARK, data)
