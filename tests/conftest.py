"""Golden files: recorded from Megatron-LM; those with text are not part of the project.

pytest                                     uses tests/golden; tests that need text or its token ids are skipped
pytest --golden=/path/to/golden/data       uses the whole recording, and runs all of them
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).with_name("golden")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", type=Path, metavar="DIR", help="the whole golden recording, with its text")


@pytest.fixture(scope="session")
def golden(pytestconfig: pytest.Config) -> Path:
    """The folder of golden files; only numbers and index files are sure to be there."""
    given: Path | None = pytestconfig.getoption("golden")
    return (given or GOLDEN).resolve()


@pytest.fixture(scope="session")
def golden_text(pytestconfig: pytest.Config) -> Path:
    """The folder of golden files with text and token ids; skips the test where it was not given."""
    given: Path | None = pytestconfig.getoption("golden")
    if given is None:
        pytest.skip("needs text: run with --golden DIR")
    return given.resolve()


@pytest.fixture(scope="session")
def expected(golden: Path) -> dict[str, Any]:
    """What Megatron-LM's data classes returned."""
    content: dict[str, Any] = json.loads((golden / "expected.json").read_text())
    return content
