"""Hooks of mkdocs (mkdocs.yml): add the pages that are not files of docs/, and links to them.

pip install mkdocs-material          into the environment of megatrain
python -m mkdocs serve               the site at http://127.0.0.1:8000
python -m mkdocs build --strict      the site in dist/site; every link and anchor is checked
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

from megatrain.config import docs_reference
from megatrain.config.megatron.differences import docs_differences

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "`megatrain settings`": "configuration.md",
    "`megatrain settings --differences`": "differences.md",
}
"""Commands whose output is a page."""
WIDE = 4
"""Columns from which on a table does not fit a phone."""


def added_pages() -> dict[str, str]:
    """Return the text of each added page: README.md, where links to files outside docs/ become names, and the settings."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\[([^\]]+)\]\((?!docs/|http|#)[^)]*\)", r"\1", text).replace("](docs/", "](")
    return {"start.md": text, "configuration.md": docs_reference(), "differences.md": docs_differences()}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to the site."""
    from mkdocs.structure.files import File

    for name, text in added_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 (mkdocs names them)
    """Link the README to the start page, and each command that prints a page to this page; names of pages have no ending."""
    top = "../" * page.file.src_uri.count("/")
    for command, name in COMMANDS.items():
        markdown = markdown.replace(command, f"[{command}]({top}{name})")
    markdown = re.sub(r"\[([\w-]+)\.md\]\(", r"[\1](", markdown)
    markdown = re.sub(
        r"`[^`\n]+`", lambda code: code[0].replace(r"\|", "|"), markdown
    )  # GitHub's way to write it in a table
    return markdown.replace(f"]({top}../README.md", f"]({top}start.md")


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 (mkdocs names them)
    """Mark the pages of settings and wide tables, which images/site.css sets."""
    html = re.sub(r"<table>.*?</table>", lambda table: with_labels(table[0]), html, flags=re.DOTALL)
    return f'<div class="settings">{html}</div>' if page.file.src_uri in COMMANDS.values() else html


def with_labels(table: str) -> str:
    """Return a table too wide for a phone with the head of each column at its cells: there, a row becomes a block."""
    heads = [re.sub(r"<[^>]+>", "", head) for head in re.findall(r"<th\b[^>]*>(.*?)</th>", table, re.DOTALL)]
    if len(heads) < WIDE:
        return table
    labels = itertools.cycle(head.replace('"', "&quot;") for head in heads)
    cells = re.sub(r"<td", lambda _: f'<td data-label="{next(labels)}"', table)
    return cells.replace("<table>", "<table data-stacked>")
