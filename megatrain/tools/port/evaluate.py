"""Evaluate a launch script with bash, in which no command runs (`sandbox.py`), and return the commands that it comes to.

    script ─> bash, record.bash ─> messages ─> Command, UncertainTest, ... ─> Evaluation
                 ^                    │
                 └── texts of files <─┘

What a script writes is not trusted: it is limited in time and size, and printed with control characters escaped.
"""

import contextlib
import os
import re
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatrain.config import InputError
from megatrain.tools.port.sandbox import end_group, start_bash
from megatrain.tools.port.variables import Assumed, OpenVariable, assumed, open_variables
from megatrain.tools.port.words import Part, Word, plain, quoted, without_quotes

_SECONDS: Final = 10.0
_MESSAGE_BYTES: Final = 16 << 20
_COMMANDS: Final = 5000
_TRAINING_COMMANDS: Final = 8
_FILES: Final = 50
_FILE_BYTES: Final = 1 << 20
_LINES: Final = 10000
"""The lines of each script that is read count from a multiple of this."""
_MESSAGES, _ANSWERS = 101, 102
_DRIVER: Final = Path(__file__).with_name("record.bash")
_STAND_IN: Final = re.compile(r"__port_(?:v_(\w+?)|c_(\d+_\d+))__")
_SEPARATORS: Final = ("__port_inner__", "__port_script__")
_OF_SHELL: Final = ("OLDPWD", "SHLVL", "_")
_START: Final = "__port_v_PWD__"
"""The folder in which the script starts."""
_PROGRAM: Final = re.compile(r"(?:.*/)?pretrain\w*\.py")


@dataclass(frozen=True)
class Command:
    """A command that the script would run."""

    place: str
    words: tuple[Word, ...]
    wrapper: tuple[Word, ...] = ()
    """The words before the text of `sh -c TEXT`, in which the command is; usually empty."""
    exports: Mapping[str, Word] = field(default_factory=dict)
    """The environment that the script gives it, with `PWD` if it changes the folder; only of a training command."""
    inner_exports: Mapping[str, Word] = field(default_factory=dict)
    """Variables that the shell of the wrapper sets itself, on each host."""
    batch: tuple[Word, ...] = ()
    """`sbatch` with its options, if it submits the script in which the command is."""

    @property
    def text(self) -> str:
        """The command as a shell reads it."""
        return " ".join(map(quoted, self.words))

    @property
    def program_at(self) -> int | None:
        """The place of a training program among the words."""
        words = (number for number, word in enumerate(self.words) if _PROGRAM.fullmatch(plain(word)))
        return next(words, None)

    @property
    def launcher(self) -> tuple[Word, ...]:
        """The words before the training program."""
        return self.words[: self.program_at]

    @property
    def program(self) -> str:
        assert self.program_at is not None
        return plain(self.words[self.program_at])

    @property
    def arguments(self) -> tuple[Word, ...]:
        """The words after the training program."""
        assert self.program_at is not None
        return self.words[self.program_at + 1 :]


@dataclass
class Evaluation:
    """The commands and variables of an evaluated script."""

    file: str
    known: Mapping[str, str]
    text: str = ""
    commands: list[Command] = field(default_factory=list)
    variables: dict[str, OpenVariable] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    uncertain: list[str] = field(default_factory=list)
    """Tests and computations that need an open value or a file."""
    not_read: list[str] = field(default_factory=list)
    """Files that could not be read, and why the script was not evaluated to its end."""
    exit: str = ""
    """The place at which the script ends itself, and its exit code."""


def evaluate(file: str, known: Mapping[str, str], numbers: Mapping[str, int]) -> Evaluation:
    """Evaluate a script.

    Args:
        known: values of variables that count instead of the script's; `1` is its first argument.
        numbers: values in arithmetic of variables that stay open.
    Raises:
        InputError: bash cannot be started in its sandbox, or does not understand the script.
    """
    return _Reader(Evaluation(file, known), numbers).read()


@dataclass
class _Message:
    kind: str
    line: int
    words: list[str]


@dataclass(frozen=True)
class _Output:
    """Shell text that stands for the output of a command."""

    text: str
    """The command, and those whose output it reads."""
    name: str
    """The variable that takes the output; empty: none is known."""


_NO_TEXT: Final = _Output("?", "")


class _Reader:
    """Reads the messages of a script, and answers with the text of files."""

    def __init__(self, found: Evaluation, numbers: Mapping[str, int]) -> None:
        self.found = found
        self.numbers = numbers
        self.files: list[str] = []
        self.texts: dict[str, _Output] = {}
        """The output of each command, by its number."""
        self.parts: dict[str, _Message] = {}
        self.environment: list[str] = []
        """The environment of the next command."""
        self.answers = -1
        self.errors = b""

    def read(self) -> Evaluation:
        text, known = script_text(self.found.file) or "", self.found.known
        # A loop with `shift` reads arguments until there are none.
        names = {} if re.search(r"\bshift\b", text) else open_variables(text, {})
        stand_ins = {name: f"__port_v_{name}__" for name in names if name.isdigit()}
        count = max([0, *(int(name) for name in (*known, *stand_ins) if name.isdigit())])
        words = [known.get(str(n), stand_ins.get(str(n), "")) for n in range(1, count + 1)]
        messages, their_messages = os.pipe()
        their_answers, self.answers = os.pipe()
        descriptors = {_MESSAGES: their_messages, _ANSWERS: their_answers}
        try:
            process = start_bash(self._driver(), [self.found.file, *words], descriptors)
        finally:
            os.close(their_messages)
            os.close(their_answers)
        try:
            self._follow(process, messages)
        finally:
            end_group(process)
            os.close(messages)
            os.close(self.answers)
            assert process.stderr is not None
            process.stderr.close()
        self._check_syntax()
        return self.found

    def _driver(self) -> str:
        """Return the text that bash evaluates first, with the given values."""
        given = {name: value for name, value in self.found.known.items() if not name.isdigit()}
        entries = " ".join(f"[{name}]={quoted((Part(value),))}" for name, value in given.items())
        return _DRIVER.read_text(encoding="utf-8").replace("__port_given=()", f"__port_given=({entries})")

    def _follow(self, process: subprocess.Popen[bytes], messages: int) -> None:
        """Read messages until no process of the script is left, or a limit is reached."""
        assert process.stderr is not None
        errors, until, buffer, size = process.stderr.fileno(), time.monotonic() + _SECONDS, b"", 0
        sources = [messages, errors]
        while messages in sources:
            ready = select.select(sources, [], [], 0.2)[0]
            for source in ready:
                data = os.read(source, 1 << 16)
                if not data:
                    sources.remove(source)
                elif source == errors:
                    self.errors = (self.errors + data)[-4096:]
                else:
                    size += len(data)
                    *whole, buffer = (buffer + data).split(b"\0")
                    for one in whole:
                        self._take(one.decode(errors="backslashreplace"))
            if not ready and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return
            if limit := self._limit(size, time.monotonic() > until):
                self.found.not_read.append(
                    f"{self.found.file}: evaluated up to a limit of {limit}: it may loop"
                )
                return

    def _limit(self, size: int, is_late: bool) -> str:
        """Return the limit that the script has reached; empty: none."""
        is_training = [command.program_at is not None for command in self.found.commands[-_COMMANDS:]]
        if sum(is_training) >= _TRAINING_COMMANDS:
            return f"{_TRAINING_COMMANDS} training commands"
        if len(self.found.commands) >= _COMMANDS or size > _MESSAGE_BYTES:
            return f"{_COMMANDS} commands or {_MESSAGE_BYTES >> 20} MiB of their words"
        return f"{_SECONDS:.0f} seconds" if is_late else ""

    def _take(self, text: str) -> None:
        """Take a piece of a message; what is not one is a script's own, and left out."""
        process, _, rest = text.partition(" ")
        current = self.parts.get(process)
        if match := re.fullmatch(r"([CEKXS]) (\d+)", rest):
            self.parts[process] = _Message(match[1], int(match[2]), [""])
        elif current and rest.startswith(("+", "=")):
            current.words[-1] += rest[1:]
            current.words += [""] * (rest[0] == "=")
        elif current and rest == ".":
            del self.parts[process], current.words[-1]
            self._handle(current)

    def _handle(self, message: _Message) -> None:
        words, place = message.words, self._place(message.line)
        if message.kind == "S" and words:
            self._answer(words[0], place)
        elif message.kind == "C" and len(words) > 2:
            self._command(place, *words)
        elif message.kind == "E":
            self.environment = words
        elif message.kind == "K" and words:
            self.found.uncertain += self._uncertain(place, words[0], words[1:])
        elif message.kind == "X" and words:
            self.found.exit = f"{place}: exit {words[0]}"

    def _place(self, line: int) -> str:
        """Return file and line of a line as bash counts it."""
        file, line = divmod(line - _driver_lines(), _LINES)
        return f"{self.files[file]}:{line + 1}" if 0 <= file < len(self.files) else self.found.file

    def _source_line(self, place: str) -> str:
        file, _, line = place.rpartition(":")
        lines = self.found.text.split("\n") if file == self.found.file and line.isdigit() else []
        return lines[int(line) - 1] if 0 < int(line or 0) <= len(lines) else ""

    def _command(self, place: str, number: str, given: str, *words: str) -> None:
        batch, launcher, rest, is_inner = _separated(words)
        outer = list(map(self._word, launcher))
        exports, inner_exports = self._environment()
        if inner_exports and not is_inner:  # a script that another host runs
            is_inner = True
            outer += [(Part("bash"),), (Part("-c"),)]
        own = [self._word(word, is_inner=is_inner) for word in rest]
        command = Command(
            place,
            tuple(own if is_inner else [*outer, *own]),
            tuple(outer) if is_inner else (),
            exports,
            inner_exports,
            tuple(map(self._word, batch)),
        )
        given = given.strip()
        before = "" if not given else plain(self._word(given))
        before = (
            before[2:-1]
            if before.startswith("$(") and before.endswith(")")
            else before and f"echo '{before}'"
        )
        text = f"{before} | {command.text}" if before else command.text
        assignment = re.search(r"(\w+)=[\"'(\s]*(?:\$\(|`)", self._source_line(place))
        self.texts[number] = _Output(without_quotes(text), assignment[1] if assignment else "")
        self.found.commands.append(command)

    def _environment(self) -> tuple[dict[str, Word], dict[str, Word]]:
        """Return the environment of the next command, and what its inner shell sets."""
        words, self.environment = self.environment, []
        at = words.index("__port_inner__") if "__port_inner__" in words else len(words)
        outer, inner = (
            {
                name: self._word(value, is_inner=is_inner)
                for name, _, value in (word.partition("=") for word in part)
                if name not in _OF_SHELL and value != _START
            }
            for part, is_inner in ((words[:at], False), (words[at + 1 :], True))
        )
        return outer, inner

    def _word(self, text: str, *, is_inner: bool = False) -> Word:
        """Return a word in which stand-ins for open values are shell text."""
        parts, at = [], 0
        for match in _STAND_IN.finditer(text):
            parts.append(Part(text[at : match.start()]))
            name = match[1] or self.texts.get(match[2], _NO_TEXT).name
            parts.append(
                Part(self._open_text(match[1], match[2], is_inner=is_inner), is_open=True, name=name)
            )
            at = match.end()
        return tuple(part for part in (*parts, Part(text[at:])) if part.text) or (Part(""),)

    def _open_text(self, name: str | None, number: str | None, *, is_inner: bool) -> str:
        if name is not None:
            variable = self.found.variables.get(name)
            text = variable.text if variable else f"${{{name}}}"
            # The shell inside expands what each of its tasks has.
            return f"\\{text}" if is_inner and variable and variable.is_of_launcher else text
        return f"$({self.texts.get(number or '', _NO_TEXT).text})"

    def _uncertain(self, place: str, text: str, names: Sequence[str]) -> Iterator[str]:
        unknown = [name for name in dict.fromkeys(names) if name not in self.numbers]
        needs = [f"${{{name}}}" for name in unknown if name != "__port_file"]
        if "__port_exit" in unknown:
            yield f"{place}: `{text}` is passed over: the file before it may be there"
            return
        if "__port_file" in unknown:
            needs.append("a file, and no file is looked at")
        if needs:
            yield f"{place}: `{text.strip()}` needs {', '.join(needs)}"

    def _answer(self, name: str, place: str) -> None:
        """Send the text of a file, and the variables that it reads without having set them."""
        is_script = not self.files
        path = plain(self._word(name)).replace("${PWD}", str(Path.cwd()))
        text = None if len(self.files) >= _FILES else script_text(path, Path(self.found.file).parent)
        if text is None or text.count("\n") >= _LINES:
            self.found.not_read.append(f"{place}: {path}: no script that can be read: left out")
            return self._send("-", "")
        new = open_variables(text, self.found.known)
        self.found.variables = {**new, **self.found.variables}
        self.found.assumed += [f"{path}:{one.line}: {one.name}={one.value}" for one in self._assumed(text)]
        names = [
            f"{one}={self.numbers.get(one, 1)}"
            for one in dict.fromkeys((*self.found.variables, *self.numbers))
        ]
        if is_script:
            self.found.text = text
        else:  # the file is evaluated in a function, in which declared variables are local
            text = re.sub(r"^([ \t]*(?:declare|typeset))\b", r"\1 -g", text, flags=re.MULTILINE)
        text = re.sub(r"\$\(<(?!<)[ \t]*", "$(cat ", text)  # bash reads such a file itself
        text = re.sub(
            r"\$\{?BASH_SOURCE(\[0\]\}?|\b\}?)", "$0" if is_script else path.replace("\\", ""), text
        )
        self.files.append(path)
        return self._send(" ".join(names), "\n" * (_LINES * (len(self.files) - 1)) + text)

    def _assumed(self, text: str) -> Iterator[Assumed]:
        return assumed(text, {**self.found.known, **dict.fromkeys(self.found.variables, "")})

    def _send(self, names: str, text: str) -> None:
        data = f"{names}\0{text}\0".encode()
        with contextlib.suppress(BrokenPipeError):  # the script has ended
            while data:
                data = data[os.write(self.answers, data) :]

    def _check_syntax(self) -> None:
        lines = self.errors.decode(errors="backslashreplace").split("\n")
        wrong = next((line for line in lines if "syntax error" in line or "unexpected EOF" in line), None)
        if wrong is None or any(command.program_at is not None for command in self.found.commands):
            return
        message = (
            wrong.rpartition(": ")[2] if "unexpected EOF" in wrong else wrong.partition("syntax error")[2]
        )
        raise InputError(
            f"{self.found.file}: bash does not understand it: syntax error {message.strip()}",
            fix=f"run `bash -n {self.found.file}`, and correct the script",
        )


def _separated(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str], Sequence[str], bool]:
    """Return the words of `sbatch`, of the launcher and of a command, and whether it is in the text of a shell."""
    batch: Sequence[str] = ()
    if words[0] == "sbatch" and "__port_script__" in words:
        first = words.index("__port_script__")
        batch, words = words[:first], words[first + 1 :]
    separators = [number for number, word in enumerate(words) if word in _SEPARATORS]
    at = separators[-1] + 1 if separators else 0
    launcher = [word for word in words[:at] if word not in _SEPARATORS]
    return batch, launcher, words[at:], at > 0 and words[at - 1] == "__port_inner__"


def _driver_lines() -> int:
    return _DRIVER.read_text(encoding="utf-8").count("\n")


def script_text(path: str, folder: Path | None = None) -> str | None:
    """Return the text of a script of at most 1 MiB; None: there is none."""
    for place in (Path(path), *([folder / path] if folder else [])):
        with contextlib.suppress(OSError, UnicodeDecodeError, ValueError):
            if place.is_file() and place.stat().st_size <= _FILE_BYTES:
                return place.read_text(encoding="utf-8").replace("\0", "").replace("\r\n", "\n")
    return None
