"""A process whose work is done ends in time, with its exit code, even if a library hangs."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import atexit, sys, threading, time
from megatrain.process import exit_deadline

exit_deadline.SECONDS_TO_LEAVE = 0.3

class Library:
    def hang(self):
        time.sleep(60)
    __del__ = hang

def main():
    print("work done")
    {hang}
    return {exit_code}

exit_deadline.run_program(main)
"""
HANGING = {
    "thread": "threading.Thread(target=Library().hang).start()",
    "exit handler": "atexit.register(Library().hang)",
    "groups": "\n    with exit_deadline.exit_deadline({exit_code}, 0.3): Library().hang()",
    "destructor": "sys.kept = Library()",
}


@pytest.mark.parametrize("exit_code", [0, 75])
def test_a_library_that_hangs_neither_keeps_the_process_nor_changes_its_exit_code(exit_code: int) -> None:
    began, running = time.monotonic(), {}
    for name, hang in HANGING.items():
        program = PROGRAM.format(hang=hang.format(exit_code=exit_code), exit_code=exit_code)
        running[name] = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    for name, process in running.items():
        output, errors = process.communicate(timeout=50)
        assert (process.returncode, output) == (exit_code, "work done\n"), name
        if name != "destructor":  # it does not run
            assert f"is done (exit code {exit_code})" in errors, name
        if name in ("exit handler", "groups"):
            assert "in hang" in errors, name
    assert time.monotonic() - began < 50


def test_an_exception_and_exit_handlers_are_those_of_python() -> None:
    program = PROGRAM.format(
        hang="atexit.register(print, 'handler'); Library.__del__ = None; raise ValueError('x')", exit_code=0
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "work done\nhandler\n")
    assert "ValueError: x" in ended.stderr
