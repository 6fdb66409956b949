"""The generated pages in docs/ are up to date."""

from pathlib import Path

from megatrain.config import docs_reference
from megatrain.config.megatron.differences import docs_differences

REGENERATE = (
    "run python -c 'from pathlib import Path; from megatrain.config import docs_reference;"
    " from megatrain.config.megatron.differences import docs_differences;"
    ' Path("docs/configuration.md").write_text(docs_reference());'
    ' Path("docs/differences.md").write_text(docs_differences())\''
)


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    text = docs_reference()
    assert page.read_text(encoding="utf-8") == text, f"{page} is stale; {REGENERATE}"


def test_the_page_of_differences_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs" / "differences.md"
    text = docs_differences()
    assert page.read_text(encoding="utf-8") == text, f"{page} is stale; {REGENERATE}"
