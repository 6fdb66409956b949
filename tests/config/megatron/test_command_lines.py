"""Command lines of Megatron-LM's functional tests start here; a line that has started once never stops starting."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "command_lines.py"
LEAST_SHARE = 0.75


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("command_lines", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["command_lines"] = module
    spec.loader.exec_module(module)
    return module


def test_lines_start_and_none_that_started_is_lost(script: ModuleType) -> None:
    """No line ends with a traceback: `outcome_of` raises it."""
    outcomes = [script.outcome_of(line) for line in script.recorded_command_lines()]
    start, before = script.starting(outcomes), script.STARTING.read_text(encoding="utf-8").split()
    assert [case for case in before if case not in start] == [], "these lines started before"
    assert len(start) >= LEAST_SHARE * len(outcomes)
    page = script.PAGE.read_text(encoding="utf-8")
    hint = "run python scripts/command_lines.py"
    assert page == script.page_with(page, command_lines=script.table(outcomes), grades=script.grades()), hint
    assert start == before, hint
