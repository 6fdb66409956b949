"""The programs of Megatron-LM's names are `pretrain.py`, and name the family of the model."""

import importlib
import runpy
import sys
from pathlib import Path

import pytest

from megatrain.process import exit_deadline
from megatrain.tools.port.launch import FAMILIES

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "scripts" / "megatron"


def test_every_family_has_a_program() -> None:
    assert {path.name for path in SCRIPTS.iterdir() if path.is_file()} == FAMILIES.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_program_trains_its_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def main(argv: list[str]) -> int:
        found.extend(argv)
        return 0

    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(importlib.import_module("pretrain"), "main", main)
    monkeypatch.setattr(exit_deadline, "run_program", lambda program: program())
    monkeypatch.setattr(sys, "argv", [name, "--num-layers", "2"])
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    assert found == ["--model-family", FAMILIES[name], "--num-layers", "2"]
