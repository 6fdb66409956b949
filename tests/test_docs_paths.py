"""Every path and link in README.md and docs/ is tracked by git; outputs in the checkout (runs/, dist/) do not count.

The pages for maintainers also name no function, class or setting that the code lacks.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
SITE = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "docs_site.py")))
LOST_ITEMS = r"(?:\d\.|\*) .*\n\n {1,3}\S.*|\n\n {4}\S.*\n(?: {4}.*\n)*(?:\d+\.|\*) .*"
"""Items of lists whose blocks become text of the page or of the item before them."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES_ON_CODE = [
    *(ROOT / "docs" / name for name in ("contributing.md", "architecture.md", "extending.md")),
    *sorted((ROOT / "docs" / "internals").glob("*.md")),
]
"""Pages for maintainers."""
OF_OTHERS = {
    "global", "None", "megatrain", "linear_qkv", "GroupedLinear", "LayerNormMLP", "symm_mem", "all_to_all_single",
    "gpt3_7b_tp4_pp1_memory_speed", "dsv3", "nightly",
}  # fmt: skip
"""Names on these pages that Python, Megatron-LM, Transformer Engine, torch, recordings and tests define."""


def tracked_paths() -> frozenset[Path]:
    """Return the files that git tracks, and their folders."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]
    return frozenset({path for file in files for path in (file, *file.parents)})


TRACKED = tracked_paths()
TOPS = {path.name for path in TRACKED if path.parent in {ROOT, ROOT / "megatrain"} and path.is_dir()}


def missing_paths(page: Path) -> list[str]:
    """Return the paths to source files in backticks, and the linked files, that are not in the repository."""
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:[\w-]+/)+[\w-]*(?:\.(?:py|sh|yaml|md))?)`", text)
    candidates = [path for path in paths if path.split("/")[0] in TOPS]
    missing = [
        path for path in candidates if not any(base / path in TRACKED for base in (ROOT, ROOT / "megatrain"))
    ]
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    return missing + [link for link in links if Path(os.path.normpath(page.parent / link)) not in TRACKED]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_paths_of_a_page_exist(page: Path) -> None:
    assert not missing_paths(page)


@functools.cache
def names_of_the_code() -> frozenset[str]:
    """Return all that the code without tests defines, the names in its texts, such as choices, and all file names."""
    found = {path.name for path in TRACKED}
    for path in sorted(TRACKED):
        if path.suffix != ".py" or ROOT / "tests" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.arg(arg=name):
                    found.add(name)
                case ast.Constant(value=str() as text) if text.isidentifier():
                    found.add(text)
    return frozenset(found)


def unknown_names(text: str) -> set[str]:
    """Return the names in backticks, and the files in drawings, that neither the code nor other programs have."""
    prose, drawings = (
        re.sub(r"```.*?```", "", text, flags=re.DOTALL),
        re.findall(r"```\n(.*?)```", text, re.DOTALL),
    )
    names = [re.split(r"[(=]", one)[0] for one in re.findall(r"`@?([A-Za-z_][\w.]*(?:\(.*?\)|=)?)`", prose)]
    last = {name if name.endswith(".py") else name.split(".")[-1] for name in names}
    files = {Path(one).name for drawing in drawings for one in re.findall(r"[\w/]+\.py\b", drawing)}
    return (last | files) - names_of_the_code() - OF_OTHERS


@pytest.mark.parametrize("page", PAGES_ON_CODE, ids=lambda page: page.name)
def test_the_names_of_a_page_for_maintainers_exist(page: Path) -> None:
    assert not unknown_names(page.read_text(encoding="utf-8"))


def test_an_unknown_name_is_found() -> None:
    text = '`Trainer.step_backwards`, `Engine.begin_step`, `@derives("a")`, `no_such()`, `grid.py`\n```\n├─ a  model/no_file.py\n```\n'
    assert unknown_names(text) == {"step_backwards", "no_such", "no_file.py"}


def test_the_site_has_every_page() -> None:
    listed = set(
        re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    )
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
    assert listed == pages | set(SITE.added_pages())


def test_the_links_of_added_pages_lead_to_pages_of_the_site() -> None:
    added = SITE.added_pages()
    links = {link for text in added.values() for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)}
    assert {link for link in links - set(added) if ROOT / "docs" / link not in TRACKED} == set()
    page = SimpleNamespace(file=SimpleNamespace(src_uri="internals/glossary.md"))
    text = SITE.on_page_markdown("[start](../../README.md), `megatrain settings`", page, None, None)
    assert text == "[start](../start.md), [`megatrain settings`](../configuration.md)"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="data.md"))
    text = SITE.on_page_markdown(r"[models.md](models.md), `<\|end\|>`", page, None, None)
    assert text == "[models](models.md), `<|end|>`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_render(page: Path) -> None:
    """Python-Markdown wants blocks of an item indented by four spaces, and an empty line before the next item."""
    assert not re.findall(LOST_ITEMS, page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", ["1. a\n\n   b\n", "1. a\n\n    b\n    c\n2. d\n"])
def test_a_list_that_does_not_render_is_found(text: str) -> None:
    assert re.findall(LOST_ITEMS, text)


def test_a_missing_path_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "see `parallel/nothing.py`, `parallel/grid.py`, `docs/` and [there](nowhere.md)", encoding="utf-8"
    )
    assert missing_paths(page) == ["parallel/nothing.py", "nowhere.md"]


def test_outputs_of_runs_are_no_paths_of_the_repository() -> None:
    """`runs/corpus_text_document` on a page names a file of the reader, also once the quickstart has made the folder."""
    assert {"docs", "parallel", "tests"} <= TOPS
    assert TOPS.isdisjoint({"runs", "dist", "__pycache__"})


def test_cells_of_wide_tables_have_their_head_as_label() -> None:
    heads = ["case", "a <code>flag</code>", "", 'a "word"']
    head, row = ("".join(f"<{tag}>{text}</{tag}>" for text in heads) for tag in ("th", "td"))
    table = f"<table>\n<thead>\n<tr>{head}</tr>\n</thead>\n<tbody>\n<tr>{row}</tr>\n<tr>{row}</tr>\n</tbody>\n</table>"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="benchmarks.md"))
    html = SITE.on_page_content(table * 2, page, None, None)
    assert html.count("<table data-stacked>") == 2
    assert re.findall(r'<td data-label="([^"]*)">', html) == ["case", "a flag", "", "a &quot;word&quot;"] * 4
    narrow = re.sub(r"<(t[hd])>case</\1>", "", table)
    assert SITE.on_page_content(narrow, page, None, None) == narrow
