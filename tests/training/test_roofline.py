"""`scripts/roofline.py` agrees with counts by hand, part by part; its rates are measured."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("case", "tokens_per_second"),
    [
        ("A1", 23_500),
        ("A2", 32_000),
        ("B1", 12_700),
        ("B3", 12_500),
        ("B4", 12_700),
        ("B5", 8_440),
        ("B6", 65_050),
        ("B8", 53_600),
        ("H1", 26_580),
        ("S1", 613_000),
        ("V1", 14_190),
    ],
)
def test_a_case_has_the_roofline_counted_by_hand(
    case: str, tokens_per_second: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = script("roofline", monkeypatch).roofline_of(case)
    assert found.tokens_per_second == pytest.approx(tokens_per_second, rel=0.01)


def test_experts_are_split_over_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """B6 has 9.66 billion weights of experts and 0.92 billion others."""
    roofline = script("roofline", monkeypatch).roofline_of
    four = roofline("B6")
    two = roofline("B6", ["--expert-model-parallel-size", "2", "--global-batch-size", "16"], world_size=2)
    assert (two.tokens, two.products) == (four.tokens, four.products)
    assert four.gradients == pytest.approx(4 * (9.66e9 / 4 + 0.92e9) * 4 / 4e12 * 1e3, rel=0.01)
    assert two.gradients == pytest.approx(4 * (9.66e9 / 2 + 0.92e9) * 4 / 4e12 * 1e3, rel=0.01)
    assert two.optimizer == 2 * four.optimizer == pytest.approx(38 * 10.58e9 / 2 / 4e12 * 1e3, rel=0.01)


def test_the_parts_of_a1_in_microseconds_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    found = script("roofline", monkeypatch).roofline_of("A1")
    parts = (found.products, found.attention, found.element_wise, found.gradients, found.optimizer)
    by_token = [part / 32_768 * 1e3 for part in parts]
    assert by_token == pytest.approx([27.9 + 4.2, 6.6, 2.0, 0.5, 1.3], abs=0.06)


def test_the_parts_of_h1_in_microseconds_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 Mamba layers, 12 MLPs, 2 layers of attention and a head; 10,240 channels of each Mamba layer are convolved."""
    found = script("roofline", monkeypatch).roofline_of("H1")
    parts = (found.products, found.attention, found.element_wise)
    weights = (
        12 * (4096 * (2 * 8192 + 2048 + 128) + 8192 * 4096) + 12 * 2 * 4096 * 21504 + 2 * 42e6 + 131072 * 4096
    )
    scans = 12 * 3.5 * 8192 * 128
    moved = 26 * 23 * 4096 + 12 * (10 * 10240 + 16 * 8192 + 10 * 21504) + 6 * 131072
    assert [part / 32_768 * 1e3 for part in parts] == pytest.approx(
        [6 * (weights + scans) / 750e6, 2 * 2 * 4096 * 8192 / 1e6 * (1 / 644 + 2.5 / 541), moved / 4e6],
        rel=0.01,
    )


def test_a_benchmark_row_shows_peers_and_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = script("benchmark", monkeypatch)
    line = {"iteration_ms": 1000.0, "tokens_per_second_per_gpu": 477_000.0, "tflops_per_gpu": 380.0, "mfu": 0.386,
            "max_memory_bytes": 18e9}  # fmt: skip
    row = benchmark.row("S1", benchmark.CASES["S1"], [line] * 8, 12.0, 516_000.0, 450_000.0).split()
    assert row[:7] == ["S1", "1000", "477,000", "380.0", "38.6%", "18.0", "12.0"]
    assert "92.4%" in row
    assert row[-2:] == ["450,000", "x1.060"]
    assert "x1.141" in row  # of 333 TFLOP/s
