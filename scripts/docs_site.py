"""Hooks of mkdocs (mkdocs.yml): README.md becomes the page `start.md`, and links to it lead there.

pip install mkdocs-material
mkdocs serve               the site at http://127.0.0.1:8000
mkdocs build --strict      the site in dist/site; every link and anchor is checked
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Any, config: Any) -> Any:
    """Add README.md as start.md; its links to files outside docs/ become plain names."""
    from mkdocs.structure.files import File

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\[([^\]]+)\]\((?!docs/|http|#)[^)]*\)", r"\1", text).replace("](docs/", "](")
    files.append(File.generated(config, "start.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 (mkdocs names them)
    """Point links to the repository's README to the start page."""
    folders = page.file.src_uri.count("/")
    return markdown.replace("](" + "../" * (folders + 1) + "README.md", "](" + "../" * folders + "start.md")
