"""`megatrain settings`: the tables of the settings and of the differences from Megatron-LM."""

import re

import pytest

from megatrain.config.megatron.flags import megatron_flags
from megatrain.config.schema.tree import settings
from megatrain.tools.main import main


def rows(page: str) -> list[list[str]]:
    """Return the cells of each row of the tables of a page."""
    return [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["settings", *flags]) == 0
    return capsys.readouterr().out


def test_the_reference_describes_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    cells = {row[0].strip("`"): row[1:] for row in rows(printed(capsys)) if row[0] != "flag"}
    assert list(cells) == [setting.flag for setting in settings()]
    assert {flag for flag, row in cells.items() if len(row) != 3 or not all(row)} == set()
    assert cells["--swiglu"][:2] == ["switch", "off"]
    assert cells["--on-nan"][:2] == ["one or more values", "stop"]


def test_the_differences_answer_every_flag_that_is_no_setting(capsys: pytest.CaptureFixture[str]) -> None:
    page = printed(capsys, "--differences")
    named = set(re.findall(r"`(--[\w-]+)", page))
    assert {flag.flag for flag in megatron_flags().values()} - named == set()
    assert [row for row in rows(page) if not all(row)] == []
    tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    widths = [{len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()} for table in tables]
    assert [width for width in widths if len(width) > 1] == []
