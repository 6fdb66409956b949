"""The pages in docs/ that code makes are the ones that it makes now."""

from pathlib import Path

from megatrain.config import docs_reference
from megatrain.config.megatron.differences import docs_differences


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    text = docs_reference()
    assert page.read_text(encoding="utf-8") == text, "write docs_reference() to docs/configuration.md"


def test_the_page_of_differences_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "differences.md"
    text = docs_differences()
    assert page.read_text(encoding="utf-8") == text, "write docs_differences() to docs/differences.md"
