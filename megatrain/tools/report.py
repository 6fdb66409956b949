"""`megatrain report`: the curves of one or several runs as one HTML page, which needs nothing but a browser."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from megatrain import __version__
from megatrain.config.errors import ConfigError
from megatrain.tools.report_data import RunData, all_settings, differing_settings, read_run, run_names

_TEMPLATE = Path(__file__).with_name("report.html")
_DATA_MARK = "/* the runs go here */"


def run(arguments: argparse.Namespace) -> int:
    """The subcommand."""
    paths = [Path(text) for text in arguments.runs]
    output = Path(arguments.output)
    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            f"--output {output}: the report is a web page", fix=f"name it {output.with_suffix('.html').name}"
        )
    runs = [read_run(path, name) for path, name in zip(paths, run_names(paths), strict=True)]
    output.parent.mkdir(parents=True, exist_ok=True)
    text = page(runs)
    output.write_text(text, encoding="utf-8")
    for one in runs:
        loss = one.summary["loss"]
        shown = f", loss {loss:.4f}" if loss is not None else ""
        print(f"{one.name}: {one.summary['iterations']:,} iterations{shown}")
    print(f"{output}: {len(text.encode()) / 1e3:,.0f} kB, to be opened in a browser")
    return 0


def page(runs: Sequence[RunData]) -> str:
    """The whole page."""
    content = {
        "version": __version__,
        "runs": [
            {name: value for name, value in dataclasses.asdict(one).items() if name != "settings"}
            for one in runs
        ],
        "differing": differing_settings(runs),
        "settings": all_settings(runs),
    }
    # A "</script>" in a name would end the script; JSON may escape any character of a text.
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return _TEMPLATE.read_text(encoding="utf-8").replace(_DATA_MARK, data)
