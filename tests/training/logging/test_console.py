"""Lines, the progress bar below them, and messages during long phases."""

import io
import sys
import time

import pytest

from megatrain.training.logging.console import Console, Phases, bar_text, format_duration


class Terminal(io.StringIO):
    encoding = "ascii"  # type: ignore[assignment] # a bar must not stop a run on an old terminal

    def isatty(self) -> bool:
        return True


def test_a_bar_stays_below_the_lines_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    console = Console()
    console.show_bar(done=1, total=4, status="loss 2.000")
    console.show_bar(done=2, total=4, status="too soon")
    console.print("a line")
    console.remove_bar()
    console.print("the end")
    bar, after_bar = terminal.getvalue().removeprefix("\r\x1b[2K").split("\r\x1b[2Ka line\n")
    assert bar.startswith("1/4 ==========---")
    assert bar.endswith(" 25 % | loss 2.000")
    assert after_bar == f"{bar}\r\x1b[2Kthe end\n"


def test_files_and_pipes_get_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.show_bar(done=1, total=4, status="loss 2.000")
    console.print("a line")
    console.remove_bar()
    assert capsys.readouterr().out == "a line\n"


def test_other_ranks_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases(Console(is_quiet=True), heartbeat_seconds=0.01)
    with phases.phase("waiting"):
        time.sleep(0.05)
    phases.console.print("a line")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("width", [10, 40, 80, 200])
@pytest.mark.parametrize("done", [0, 3, 800])
def test_a_bar_fits_its_line(width: int, done: int) -> None:
    assert len(bar_text(done=done, total=800, status="loss 1.234 | 5,000 tokens/s", width=width)) <= width


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.9, "0:59"), (61, "1:01"), (3723, "1:02:03")])
def test_a_duration_shows_hours_if_there_are_any(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


def test_a_long_phase_prints_its_name_and_duration(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases(Console(), heartbeat_seconds=0.2)
    began = time.monotonic()
    with phases.phase("loading the checkpoint"):
        time.sleep(0.5)
    most = (time.monotonic() - began) / 0.2  # a busy machine sleeps longer
    lines = [line for line in capsys.readouterr().out.splitlines() if " took " not in line]
    assert lines[:2] == ["> loading the checkpoint, 0 s so far"] * 2
    assert 2 <= len(lines) <= most


def test_heartbeats_wait_for_min_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases(Console(), heartbeat_seconds=0.1)
    with phases.heartbeat("iteration 5", min_seconds=0.4):
        time.sleep(0.3)
    with phases.heartbeat("iteration 6"):
        time.sleep(0.15)
    assert capsys.readouterr().out == "> iteration 6, 0 s so far\n"
    assert phases.seconds == {}


def test_a_phase_that_prints_needs_no_heartbeat(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases(Console(), heartbeat_seconds=1.0)
    with phases.phase("building indices"):
        for _ in range(3):
            time.sleep(0.5)
            phases.console.print("> one more")
    assert "so far" not in capsys.readouterr().out


def test_the_start_summary_has_all_phases(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases(Console())
    for name in ("a", "b", "a"):
        with phases.phase(name):
            pass
    assert list(phases.seconds) == ["a", "b"]
    phases.seconds = {"a": 1.26, "b": 0.5}
    assert phases.start_summary() == "> started in 1.8 s: a 1.3 s, b 0.5 s"
    assert capsys.readouterr().out == ""
