"""`UserFunction`: names of the user's functions, their digests, and errors that name file and line."""

import importlib
import os
import sys
from pathlib import Path

import pytest

from megatrain.config.errors import ConfigError
from megatrain.config.user_function import UserFunction

NAMED = UserFunction("my files/a.py", "f", "--loss")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("my files/a.py:f", NAMED),
        (["my files/a.py:f"], NAMED),
        (["a.b", "f"], UserFunction("a.b", "f", "--loss")),
        ("a.b f", UserFunction("a.b", "f", "--loss")),
        *((words, None) for words in ("", "f", ":f", "a:", "a.py:f()", ["a", "b", "c"], [])),
    ],
)
def test_names_of_functions(words: str | list[str], found: UserFunction | None) -> None:
    assert UserFunction.parse(words, "--loss") == found


def test_a_file_is_run_once_until_it_changes(tmp_path: Path) -> None:
    file, runs = tmp_path / "mine.py", tmp_path / "runs"
    text = f"with open({str(runs)!r}, 'a') as file: file.write('x')\ndef f(): return 1\ndef g(): return 2\n"
    file.write_text(text)
    f, g = (UserFunction(str(file), name, "--loss") for name in "fg")
    first = f.digest()
    assert not runs.exists()
    assert f.load() is f.load()
    assert (f.load()(), g.load()(), runs.read_text()) == (1, 2, "x")
    file.write_text(
        text.replace("return 1", "return 3")
    )  # same size, same second: a compiled copy would be stale
    assert (f.load()(), runs.read_text()) == (3, "xx")
    f.load(f.digest())
    with pytest.raises(ConfigError, match=rf"--loss .*mine.py:f: this rank's file has .*{first}\n  fix: "):
        f.load(first)


def test_a_module_runs_from_the_bytes_of_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a compiled copy of another file of the same size and second runs, nor the module of an earlier import."""
    package = tmp_path / "package_of_bytes"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from .inner import f\n"
    )  # the package imports the module before we do
    file = package / "inner.py"
    file.write_text("def f(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    inner = importlib.import_module(f"{package.name}.inner")  # writes a compiled copy
    before = file.stat()
    file.write_text("def f(): return 2\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    function = UserFunction(f"{package.name}.inner", "f", "--loss")
    found = function.load(function.digest())
    assert (found(), inner.f()) == (2, 1)
    assert function.load() is found
    for name in (package.name, f"{package.name}.inner"):
        del sys.modules[name]
    assert function.load(function.digest())() == 2
    assert sys.modules[package.name].f is function.load()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:", r"SyntaxError: .*mine.py:1\)"),
        ("import json\njson.loads('')", r"JSONDecodeError: .*mine.py:2\)"),
        ("x = 1", "has no function f"),
    ],
)
def test_errors_of_a_file_name_the_flag_and_the_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=f"--loss .*mine.py:f: .*{words}[\\s\\S]*fix: "):
        UserFunction(str(tmp_path / "mine.py"), "f", "--loss").load()
