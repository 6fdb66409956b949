"""Every path and link in README.md and docs/ exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def missing_paths(page: Path) -> list[str]:
    """Return the paths to source files in backticks, and the linked files, that do not exist."""
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:[\w-]+/)+[\w-]*(?:\.(?:py|sh|yaml|md))?)`", text)
    candidates = [path for path in paths if path.split("/")[0] in TOPS]
    missing = [
        path for path in candidates if not any((base / path).exists() for base in (ROOT, ROOT / "megatrain"))
    ]
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    return missing + [link for link in links if not (page.parent / link).exists()]


TOPS = {path.name for base in (ROOT, ROOT / "megatrain") for path in base.iterdir() if path.is_dir()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_paths_of_a_page_exist(page: Path) -> None:
    assert not missing_paths(page)


def test_the_site_has_every_page() -> None:
    listed = set(
        re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    )
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
    assert listed == pages | {"start.md"}


def test_a_missing_path_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "see `parallel/nothing.py`, `parallel/grid.py`, `docs/` and [there](nowhere.md)", encoding="utf-8"
    )
    assert missing_paths(page) == ["parallel/nothing.py", "nowhere.md"]
