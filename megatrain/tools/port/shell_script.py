"""Read a shell script without executing it: its commands, with the variables that have known values replaced.

    TP=${TP:-2}                               assumed: TP=2
    SAVE=$1                                   open: ${SAVE} stays as it is
    ARGS=(--num-layers 12 --save "$SAVE")
    torchrun pretrain_gpt.py "${ARGS[@]}"  ->  torchrun pretrain_gpt.py --num-layers 12 --save "$SAVE"

Conditions, loops and functions are not evaluated: a variable that is assigned inside of one is open.
"""

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from megatrain.tools.port.shell_words import Piece, Token, quoted_pieces, tokens

_ASSIGNMENT: Final = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_DECLARATIONS: Final = frozenset({"export", "declare", "local", "readonly", "typeset"})
_OPENING: Final = frozenset({"if", "while", "until", "for", "case", "select", "{"})
_CLOSING: Final = frozenset({"fi", "done", "esac", "}"})
_BETWEEN: Final = frozenset({"then", "else", "do", "elif", "!", "time"})


@dataclass(frozen=True)
class Part:
    """A part of an expanded word."""

    text: str
    is_open: bool = False
    """True for shell text that is left as it is."""
    is_quoted: bool = False


Word = tuple[Part, ...]


def plain(word: Word) -> str:
    """Return the characters of a word; open parts as the script writes them."""
    return "".join(part.text for part in word)


def quoted(word: Word) -> str:
    """Return a word as a shell reads it back."""
    if not any(part.is_open for part in word):
        return shlex.quote(plain(word))
    if all(part.is_open or re.fullmatch(r"[\w@%+=:,./-]*", part.text) for part in word) and not any(
        part.is_quoted for part in word if part.is_open
    ):
        return plain(word)
    return '"' + "".join(
        part.text if part.is_open else re.sub(r'([$`"\\])', r"\\\1", part.text) for part in word
    ) + '"'  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command of the script."""

    line: int
    words: tuple[Word, ...]
    is_nested: bool
    """True inside a condition, a loop or a function."""
    following: str
    """The operator after the command: `|`, `>`, `&&`; empty at the end of a line."""


class ShellScript:
    """The variables of a script, while its commands are read."""

    def __init__(self, file: str, given: Mapping[str, str]) -> None:
        """Args:
        given: values of variables that count instead of the script's.
        """
        self.file = file
        self.given = given
        self.values: dict[str, tuple[Word, ...]] = {name: ((Part(text),),) for name, text in given.items()}
        self.open: dict[str, str] = {}
        """Place and assignment of the variables without a known value."""
        self.assumed: dict[str, str] = {}
        """Place and value of the variables for which a default is used."""
        self.not_read: list[str] = []
        """Parts of the script that are left out."""
        self.depth = 0
        self.line = 0

    def commands(self, text: str, *, first_line: int = 1) -> Iterator[Command]:
        """Yield the commands that are not assignments."""
        found: list[Token] = []
        before, following, is_redirected = "\n", "", False
        for token in (*tokens(text, first_line=first_line), Token("operator", 0, text="\n")):
            if is_redirected and token.kind == "word":
                is_redirected = False
            elif token.kind != "operator":
                found.append(token)
            elif ">" in token.text or "<" in token.text:
                is_redirected, following = True, following or token.text
            else:
                is_function_name = token.text == "(" and len(found) == 1
                if found and not is_function_name:
                    following = following or token.text.strip("\n;")
                    yield from self.command(found, following, is_conditional=before in ("&&", "||"))
                found, before, following, is_redirected = [], token.text, "", False

    def command(self, found: list[Token], following: str, *, is_conditional: bool) -> Iterator[Command]:
        """Follow one command: assign its variables, or yield it."""
        self.line = found[0].line
        while found and self.is_keyword(found):
            found = found[1:]
        if not found or self.first(found) == "function":
            self.depth += self.first(found[-1:]) == "{"
            return
        is_conditional = is_conditional or self.depth > 0
        num_assignments = 0
        while num_assignments < len(found) and _assignment(found[num_assignments]):
            num_assignments += 1
        if num_assignments == len(found) or self.first(found) in _DECLARATIONS:
            for token in filter(_assignment, found):
                self.assign(token, is_conditional=is_conditional)
            return
        words = tuple(word for token in found for word in self.expand(token.pieces))
        if words and plain(words[0]) in ("source", "."):
            self.not_read.append(f"{self.place}: {' '.join(map(plain, words))}: the file is not read")
        elif words:
            yield Command(self.line, words, self.depth > 0, following)

    def is_keyword(self, found: Sequence[Token]) -> bool:
        """Count conditions, loops and functions; return whether the first word is part of their syntax."""
        word = self.first(found)
        self.depth += (word in _OPENING) - (word in _CLOSING)
        return word in _OPENING or word in _CLOSING or word in _BETWEEN

    def first(self, found: Sequence[Token]) -> str:
        """Return the first word if it is plain text."""
        if not found or any(piece.kind != "text" or piece.is_quoted for piece in found[0].pieces):
            return ""
        return "".join(piece.text for piece in found[0].pieces)

    def assign(self, token: Token, *, is_conditional: bool) -> None:
        """Set a variable, or note that its value is open."""
        match = _assignment(token)
        assert match
        name, is_appended = match[1], bool(match[2])
        if name in self.given:
            return
        if is_conditional:
            self.assign_under_condition(name, is_extended=is_appended or _uses(name, token))
            return
        new = self.assigned(token, Piece("text", match[3], is_quoted=False))
        if is_appended:
            old = self.values.get(name, ())
            first = old[0] if old else ()
            new = (*old, *new) if token.kind == "array" else ((*first, *new[0]), *old[1:])
        parts = [part for word in new for part in word if part.text]
        if token.kind == "word" and len(parts) == 1 and parts[0].is_open:
            self.values.pop(name, None)
            self.open[name] = f"{self.place}: {name}={parts[0].text}"
        else:
            self.values[name] = new

    def assigned(self, token: Token, start: Piece) -> tuple[Word, ...]:
        """Return the assigned words; `start` is the text after `=`."""
        if token.kind == "array":
            return tuple(word for entry in token.entries for word in self.expand(entry.pieces))
        return (self.joined((start, *token.pieces[1:])),)

    def assign_under_condition(self, name: str, *, is_extended: bool) -> None:
        if is_extended and name in self.values:
            self.not_read.append(f"{self.place}: {name} is extended under a condition: left out")
        else:
            self.values.pop(name, None)
            self.open[name] = f"{self.place}: assigned under a condition"

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    def joined(self, pieces: Sequence[Piece]) -> Word:
        """Return pieces as one word, as in an assignment."""
        words = self.expand([dataclasses.replace(piece, is_quoted=True) for piece in pieces])
        return _in_one_word(words)

    def expand(self, pieces: Sequence[Piece]) -> list[Word]:
        """Replace known variables; unquoted values are split at spaces."""
        words: list[list[Part]] = [[]]
        for piece in pieces:
            values = self.value(piece) if piece.kind == "variable" else None
            if values is None:
                words[-1].append(Part(piece.text, piece.kind != "text", piece.is_quoted))
                continue
            for number, value in enumerate(values):
                if number:
                    words.append([])
                if piece.is_quoted:
                    words[-1] += [dataclasses.replace(part, is_quoted=True) for part in value]
                else:
                    _append_split(words, value)
            if piece.is_quoted and values and not piece.name.endswith("[@]"):
                words[-1].append(Part("", is_quoted=True))
        return [tuple(word) for word in words if word]

    def value(self, piece: Piece) -> Sequence[Word] | None:
        """Return the values of a variable; None: they are not known."""
        name = _without_suffix(piece.name)
        if name in self.values:
            values = self.values[name]
            if piece.name.endswith("[*]"):
                return (_in_one_word(values),)
            if piece.name.endswith("[@]") or not values:
                return values
            if any(map(plain, values[:1])) or piece.default is None:
                return values[:1]
        if piece.default is None or name in self.open:
            return None
        word = self.joined(quoted_pieces(piece.default))
        if not any(part.is_open for part in word):
            self.assumed[name] = f"{self.place}: {name}={plain(word)}"
        return (word,)


def _assignment(token: Token) -> re.Match[str] | None:
    if not token.pieces or token.pieces[0].kind != "text" or token.pieces[0].is_quoted:
        return None
    return _ASSIGNMENT.fullmatch(token.pieces[0].text)


def _uses(name: str, token: Token) -> bool:
    """Return whether an assignment reads a variable."""
    pieces = [piece for entry in (token, *token.entries) for piece in entry.pieces]
    return any(_without_suffix(piece.name) == name for piece in pieces)


def _without_suffix(name: str) -> str:
    return name.removesuffix("[@]").removesuffix("[*]")


def _in_one_word(words: Sequence[Word]) -> Word:
    """Return words with spaces between them, as `"${A[*]}"` does."""
    return tuple(part for number, word in enumerate(words) for part in ((Part(" "),) * (number > 0) + word))


def _append_split(words: list[list[Part]], value: Word) -> None:
    """Append an unquoted value to the last word; each space in it starts another word."""
    for part in value:
        if part.is_open:
            words[-1].append(dataclasses.replace(part, is_quoted=False))
            continue
        for number, text in enumerate(re.split(r"\s+", part.text)):
            if number:
                words.append([])
            if text:
                words[-1].append(Part(text))
