"""A program that answers lines of JSON, and what its parent learns when it ends instead."""

from __future__ import annotations

import sys

import pytest

from megatrain.process.line_program import LineProgram, ProgramEndedError

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
KILLED = "import os, sys; sys.stdin.readline(); os.kill(os.getpid(), 9)"
HALF = "import sys; sys.stdin.readline(); print('[1', end=''); sys.exit(3)"


def test_answers_come_in_order() -> None:
    program = LineProgram([sys.executable, "-c", ECHO])
    program.send('{"a": "ä"}')
    program.send("[1]")
    assert program.receive() == {"a": "ä"}
    assert program.receive() == [1]
    assert not program.has_answer()
    program.end()
    assert program.process.returncode == 0


@pytest.mark.parametrize(
    ("source", "text", "code"), [(KILLED, "killed by SIGKILL", -9), (HALF, "exit code 3", 3)]
)
def test_a_program_that_ends_is_an_error(source: str, text: str, code: int) -> None:
    program = LineProgram([sys.executable, "-c", source])
    program.send("[1]")
    for _ in range(2):
        with pytest.raises(ProgramEndedError, match=text) as error:
            program.receive()
        assert error.value.code == code
        assert program.has_answer()
        program.send("[2]")
    program.end()
