"""The reference page in docs/ is the one that the dataclasses make."""

from pathlib import Path

from megatrain.config import docs_reference


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    text = docs_reference()
    assert page.read_text(encoding="utf-8") == text, "write docs_reference() to docs/configuration.md"
