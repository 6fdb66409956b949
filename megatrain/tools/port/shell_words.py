"""Scan shell text into tokens: words of pieces, arrays, operators. Nothing is executed or expanded.

A="x ${B:-1}"   ->  word [text `A=`, text `x `, variable B with default `1`]
$(date +%s)     ->  a piece that stays as it is
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

_OPERATOR: Final = re.compile(r"\d*(?:>>|>&|<<<|<<-?|[<>])|&>>|&>|&&|\|\||;;|[;|&()\n]")
_BLANKS: Final = re.compile(r"(?:[ \t\r]|\\\r?\n)*(?:#[^\n]*)?")
_PLAIN: Final = re.compile(r"[^\s;&|()<>'\"$`\\]+")
_VARIABLE: Final = re.compile(r"\$(\w+|[@*#?$!-])")
_BRACED: Final = re.compile(r"(\w+|[@*])(\[[@*]\])?(?::?-(.*))?", re.DOTALL)
_ARRAY: Final = re.compile(r"\w+\+?=")


@dataclass(frozen=True)
class Piece:
    """A part of a word."""

    kind: Literal["text", "variable", "open"]
    """`open`: shell text that is left as it is, such as a command substitution."""
    text: str
    """The characters without quotes; of a variable its text in the script."""
    is_quoted: bool
    name: str = ""
    """Name of a variable; `name[@]` for all entries of an array, `name[*]` for all in one word."""
    default: str | None = None


@dataclass(frozen=True)
class Token:
    """A word, an operator, or the assignment of an array."""

    kind: Literal["word", "operator", "array"]
    line: int
    pieces: tuple[Piece, ...] = ()
    """Pieces of a word; of an array the one piece `NAME=` or `NAME+=`."""
    text: str = ""
    """The operator."""
    entries: tuple["Token", ...] = ()
    """Words of an array."""


def tokens(text: str, *, first_line: int = 1) -> Iterator[Token]:
    """Yield the tokens of shell text; comments and line continuations are left out."""
    yield from _Scanner(text, first_line).tokens()


def quoted_pieces(text: str) -> tuple[Piece, ...]:
    """Return the pieces of text that is read as if it were in double quotes."""
    return tuple(_Scanner(text, 1).double_quoted(until=""))


class _Scanner:
    def __init__(self, text: str, first_line: int) -> None:
        self.text = text
        self.at = 0
        self.first_line = first_line
        self.here_document = ""

    @property
    def line(self) -> int:
        return self.first_line + self.text.count("\n", 0, self.at)

    def tokens(self) -> Iterator[Token]:
        while self.skip_blanks():
            line = self.line
            operator = _OPERATOR.match(self.text, self.at)
            if operator:
                self.at = operator.end()
                self.skip_here_document(operator[0])
                yield Token("operator", line, text=operator[0])
                continue
            pieces = tuple(self.word())
            head = "".join(piece.text for piece in pieces)
            if self.text.startswith("(", self.at) and _ARRAY.fullmatch(head):
                self.at += 1
                yield Token("array", line, pieces, entries=tuple(self.entries()))
            else:
                yield Token("word", line, pieces)

    def entries(self) -> Iterator[Token]:
        """Yield the words of an array up to its `)`."""
        while self.skip_blanks():
            if self.text[self.at] == ")":
                self.at += 1
                return
            if self.text[self.at] in "\n;&|<>(":
                self.at += 1
            else:
                line = self.line
                yield Token("word", line, tuple(self.word()))

    def skip_here_document(self, operator: str) -> None:
        """Remember the end word of `<< END`; at the end of that line, move after the document."""
        if operator.startswith("<<") and operator != "<<<":
            found = re.compile(r"\s*(['\"]?)(\w+)\1").match(self.text, self.at)
            self.here_document = found[2] if found else ""
        elif operator == "\n" and self.here_document:
            end = re.compile(rf"^\s*{self.here_document}\s*$", re.MULTILINE).search(self.text, self.at)
            self.at, self.here_document = (end.end() if end else len(self.text)), ""

    def skip_blanks(self) -> bool:
        """Move to the next token; False at the end."""
        found = _BLANKS.match(self.text, self.at)
        assert found
        self.at = found.end()
        return self.at < len(self.text)

    def word(self) -> Iterator[Piece]:
        start = self.at
        while self.at < len(self.text):
            rest = self.text[self.at]
            if rest in " \t\r\n;&|()<>":
                break
            if rest == "'":
                yield Piece("text", self.until("'", self.at + 1), is_quoted=True)
            elif rest == '"':
                self.at += 1
                if self.text.startswith('"', self.at):
                    yield Piece("text", "", is_quoted=True)
                yield from self.double_quoted(until='"')
            elif rest in "$`":
                yield self.dollar(is_quoted=False)
            elif rest == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                if escaped == "$":
                    yield Piece("open", "\\$", is_quoted=False)
                elif escaped != "\n":
                    yield Piece("text", escaped, is_quoted=True)
            else:
                plain = _PLAIN.match(self.text, self.at)
                assert plain
                self.at = plain.end()
                yield Piece("text", plain[0], is_quoted=False)
        assert self.at > start, "a word has a character"

    def double_quoted(self, *, until: str) -> Iterator[Piece]:
        while self.at < len(self.text) and self.text[self.at] != until:
            if self.text[self.at] in "$`":
                yield self.dollar(is_quoted=True)
            elif self.text[self.at] == "\\" and self.text[self.at + 1 : self.at + 2] in {*'$`"\\', "\n"}:
                escaped = self.text[self.at + 1]
                self.at += 2
                if escaped == "$":
                    yield Piece("open", "\\$", is_quoted=True)
                elif escaped != "\n":
                    yield Piece("text", escaped, is_quoted=True)
            else:
                start = self.at
                self.at += 1
                while self.at < len(self.text) and self.text[self.at] not in {"$", "`", "\\", until}:
                    self.at += 1
                yield Piece("text", self.text[start : self.at], is_quoted=True)
        self.at += 1

    def dollar(self, *, is_quoted: bool) -> Piece:
        """Return the piece that starts with `$` or a backquote."""
        start = self.at
        if self.text[start] == "`":
            return Piece("open", f"`{self.until('`', start + 1)}`", is_quoted)
        for opening, closing in (("$(", ")"), ("${", "}")):
            if self.text.startswith(opening, start):
                inner = self.balanced(opening[1], closing)
                text, found = self.text[start : self.at], _BRACED.fullmatch(inner)
                if opening == "$(" or not found:
                    return Piece("open", text, is_quoted)
                is_joined = is_quoted and found[2] == "[*]"
                name = found[1] + (("[*]" if is_joined else "[@]") if found[2] else "")
                return Piece("variable", text, is_quoted, name, found[3])
        found = _VARIABLE.match(self.text, start)
        if not found:
            self.at += 1
            return Piece("text", "$", is_quoted)
        self.at = found.end()
        # The shell reads `$12` as `$1` and a 2.
        name = found[1][0] if found[1][0].isdigit() else found[1]
        self.at -= len(found[1]) - len(name)
        return Piece("variable", f"${name}", is_quoted, name)

    def balanced(self, opening: str, closing: str) -> str:
        """Return the text between brackets and move after them."""
        depth, start = 0, self.at + 2
        for at in range(self.at + 1, len(self.text)):
            depth += {opening: 1, closing: -1}.get(self.text[at], 0)
            if depth == 0:
                self.at = at + 1
                return self.text[start:at]
        self.at = len(self.text)
        return self.text[start:]

    def until(self, sign: str, start: int) -> str:
        """Return the text up to a sign and move after it."""
        end = self.text.find(sign, start)
        end = len(self.text) if end < 0 else end
        self.at = end + 1
        return self.text[start:end]
