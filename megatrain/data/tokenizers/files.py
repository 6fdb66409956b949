"""Read tokenizer files, and detect their kind before any library is loaded.

path ──> bytes ──> kind ──> the requested kind: TokenizerFile
                        └─> another kind: InputError with the tokenizer type that reads it
"""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatrain.config.errors import InputError
from megatrain.config.schema.tokenizer import TokenizerConfig

NO_PAD: Final = -1
"""The pad id of a tokenizer, or of data, without padding; no stored token equals it."""
GET_AGAIN: Final = "download or copy the tokenizer again"


def hub_fix(path: Path, *, files: str = "") -> str:
    """Return the end of a fix for a path that does not exist and may be the name of a model on the hub; empty: it is none."""
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path)) and path.suffix not in {".json", ".model"}
    if not is_name or path.exists():
        return ""
    include = f" --include '{files}'" if files else ""
    return f"; to use a model of the hub, download it first (hf download {path}{include} --local-dir {path.name})"


def tokenizer_folder(config: TokenizerConfig) -> Path | None:
    """Return the folder whose files describe the tokenizer, too.

    A cache of transformers has links in this folder to files elsewhere.
    """
    path = Path(config.tokenizer_model) if config.tokenizer_model else None
    return path if path is None or path.is_dir() else path.parent


class Kind(enum.Enum):
    """The kind of a file; the value describes it in messages."""

    TOKENIZER_JSON = "a tokenizer.json of the `tokenizers` library"
    SENTENCEPIECE = "a SentencePiece model"
    TIKTOKEN_JSON = "a JSON list of tokens with their ranks"
    TEKKEN_JSON = "a tekken.json"
    VOCAB_JSON = "a vocab.json"
    MERGES = "a merges.txt"
    RANKS = "a rank file of tiktoken"
    TEXT = "a text file"
    OTHER_JSON = "JSON of another kind"
    EMPTY = "an empty file"
    BINARY = "a file of unknown kind"


@dataclass(frozen=True)
class TokenizerFile:
    """A file of the requested kind."""

    path: Path
    content: bytes
    data: Any
    """Parsed JSON; None for other kinds."""

    def lines(self) -> list[str]:
        """Return the lines without their line ends. Raises InputError if the file is not UTF-8."""
        try:
            text = self.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path}: is not UTF-8 text: {error}", fix=GET_AGAIN) from error
        # Not splitlines(): tokens may contain characters that it treats as line ends.
        return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_file(path: Path, kind: Kind, *, flag: str) -> TokenizerFile:
    """Read a file of this kind.

    Args:
        flag: the flag that named the file, for messages.

    Raises:
        InputError: the file is missing, damaged, or of another kind.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder", fix=f"give {flag} a file: {kind.value}")
    if path.exists() and not path.is_file():  # reading a pipe or a device may never end
        raise InputError(f"{path}: is not a regular file", fix=f"give {flag} a file: {kind.value}")
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(
            f"{path}: there is no such file", fix=f"give {flag} the path of {kind.value}"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}", fix="make the file readable") from error
    data = _json_or_none(path, content, is_wanted=kind in _JSON_KINDS)
    found = kind_of(content, data)
    if found is not kind and not (kind is Kind.MERGES and found is Kind.TEXT):
        raise InputError(f"{path}: is {found.value}, not {kind.value}", fix=_fix(found, path, flag))
    return TokenizerFile(path, content, data)


def read_json(path: Path, content: bytes | None = None) -> Any:
    """Parse a JSON file. Raises InputError if it is damaged."""
    try:
        return json.loads(content if content is not None else path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}", fix=GET_AGAIN) from error


def kind_of(content: bytes, data: Any) -> Kind:
    """Detect the kind of a file from its first bytes or its parsed JSON `data`."""
    if data is not None:
        return _kind_of_json(data)
    if not content.strip():
        return Kind.EMPTY
    # Protobuf: the message begins with a nested message, the first piece with its text.
    if content[:1] == content[2:3] == b"\n":
        return Kind.SENTENCEPIECE
    first_line = content.split(b"\n", 1)[0]
    if re.fullmatch(rb"[A-Za-z0-9+/]+=* [0-9]+\r?", first_line):
        return Kind.RANKS
    if first_line.startswith(b"#version"):
        return Kind.MERGES
    return Kind.BINARY if b"\0" in content else Kind.TEXT


_JSON_KINDS: Final = (Kind.TOKENIZER_JSON, Kind.TIKTOKEN_JSON, Kind.VOCAB_JSON)


def _json_or_none(path: Path, content: bytes, *, is_wanted: bool) -> Any:
    """Parse the content if it is JSON.

    Damaged JSON is an error only if JSON is wanted: a list of words may begin with [PAD].
    """
    if content.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        return read_json(path, content)
    except InputError:
        if is_wanted:
            raise
        return None


def _kind_of_json(data: Any) -> Kind:
    if isinstance(data, list):
        is_ranked = bool(data) and isinstance(data[0], dict) and "token_bytes" in data[0]
        return Kind.TIKTOKEN_JSON if is_ranked else Kind.OTHER_JSON
    if isinstance(data.get("model"), dict):
        return Kind.TOKENIZER_JSON
    if isinstance(data.get("vocab"), list) and "config" in data:
        return Kind.TEKKEN_JSON
    is_vocab = bool(data) and all(type(number) is int for number in data.values())
    return Kind.VOCAB_JSON if is_vocab else Kind.OTHER_JSON


def _fix(found: Kind, path: Path, flag: str) -> str:
    """Return the fix: the tokenizer type that reads a file of this kind."""
    model = f"--tokenizer-model {path}"
    return {
        Kind.TOKENIZER_JSON: f"use --tokenizer-type HuggingFaceTokenizer {model}",
        Kind.SENTENCEPIECE: f"use --tokenizer-type SentencePieceTokenizer {model}",
        Kind.TIKTOKEN_JSON: f"use --tokenizer-type TikTokenizer {model}",
        Kind.TEKKEN_JSON: "save the list under its key `vocab` as a separate file for TikTokenizer, or use the"
        " tokenizer.json of the same model with HuggingFaceTokenizer",
        Kind.VOCAB_JSON: f"use --tokenizer-type GPT2BPETokenizer --vocab-file {path} with --merge-file",
        Kind.MERGES: f"use --tokenizer-type GPT2BPETokenizer --merge-file {path} with --vocab-file",
        Kind.RANKS: "use the tokenizer.json of the same model, with --tokenizer-type HuggingFaceTokenizer",
        Kind.EMPTY: GET_AGAIN,
    }.get(found, f"check the path given to {flag}, or {GET_AGAIN}")
