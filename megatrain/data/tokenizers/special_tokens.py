"""Special tokens that the files next to a tokenizer.json name, interpreted as by transformers' AutoTokenizer.

    tokenizer_config.json    roles, lists of special tokens, added_tokens_decoder ─┐
    special_tokens_map.json  the same roles and lists                              ├─> NamedTokens ──> use_named
    added_tokens.json        tokens with their ids                                 ─┘

The last two files are read only if tokenizer_config.json has no added_tokens_decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megatrain.config.errors import InputError
from megatrain.data.tokenizers.files import GET_AGAIN, read_json

if TYPE_CHECKING:
    import tokenizers

_CONFIG, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized")
"""Flags for matching a token in text. The flag `special` does not affect ids."""
_LISTS: Final = ("extra_special_tokens", "additional_special_tokens")
"""The new and the old name of a list of tokens without a role."""


@dataclass(frozen=True)
class NamedToken:
    """A token, its matching flags, and the file that names it."""

    text: str
    flags: Mapping[str, bool]
    file: Path


@dataclass(frozen=True)
class NamedTokens:
    """The tokens that the files next to a tokenizer name."""

    roles: Mapping[str, str]
    """Text of tokens by role, such as `eos_token`."""
    registered: tuple[NamedToken, ...]
    """Tokens with their own entry, whose flags override those of tokenizer.json."""
    mentioned: tuple[NamedToken, ...]
    """Tokens with a role or in a list, whose flags apply only if tokenizer.json has none."""
    splits_special: bool = False
    """The text of a special token is encoded as text."""


def named_tokens(folder: Path, *, taken: Collection[int] = ()) -> NamedTokens:
    """Read the files next to a tokenizer; missing files name no tokens.

    Args:
        taken: ids of the added tokens of tokenizer.json, which override those of added_tokens.json.

    Raises:
        InputError: a file is damaged.
    """
    config = _object(folder / _CONFIG)
    values = {name: (value, folder / _CONFIG) for name, value in config.items()}
    lists = [(value, folder / _CONFIG) for value in _first_list(config)]
    if "added_tokens_decoder" in config:
        entries = _entries(config["added_tokens_decoder"], folder / _CONFIG)
        added = {number: _entry(value, folder / _CONFIG) for number, value in entries.items()}
    else:
        special_map = _object(folder / _MAP)
        values |= {name: (value, folder / _MAP) for name, value in special_map.items()}
        if special_map.get(_LISTS[0]) or not lists:
            lists += [(value, folder / _MAP) for value in _first_list(special_map)]
        special = {_text(value) for name, (value, _) in values.items() if name.endswith("_token")}
        added = _added_tokens(folder / _ADDED, special | {_text(value) for value, _ in lists}, taken)
    # A model may have further roles, such as image_token; add_bos_token is a boolean, not text.
    with_role = {name: value for name, value in values.items() if name.endswith("_token") and _text(value[0])}
    return NamedTokens(
        roles={name: _text(value) for name, (value, _) in with_role.items()},
        registered=tuple(added[number] for number in sorted(added) if added[number].text),
        mentioned=tuple(
            NamedToken(_text(value), _flags(value, is_special=True), file)
            for value, file in [*with_role.values(), *lists]
            if _text(value)
        ),
        splits_special=config.get("split_special_tokens") is True,
    )


def listed_end_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids that config.json and generation_config.json of a folder list as ends of a text, if it has them.

    Raises:
        InputError: a file is damaged.
    """
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        value = _object(folder / name).get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        wrong = next((one for one in values if type(one) is not int or one < 0), None)
        if wrong is not None:
            raise InputError(
                f"{folder / name}: eos_token_id has {str(wrong)[:80]!r}, which is not a token id",
                fix="restore the file from the model's source",
            )
        found += values
    return tuple(dict.fromkeys(found))


def _added_tokens(file: Path, special: Collection[str], taken: Collection[int]) -> dict[int, NamedToken]:
    """Read added_tokens.json; ids that are taken are left out."""
    tokens = {}
    for text, number in _object(file).items():
        flags = dict.fromkeys(_FLAGS, False) | {"normalized": text not in special}
        tokens[_id(number, file)] = NamedToken(text, flags, file)
    return {number: token for number, token in tokens.items() if number not in taken}


def require_named(named: NamedTokens, has: Callable[[str], bool], *, file: Path, fix: str) -> None:
    """Check that the vocabulary contains all named tokens.

    Transformers would append missing tokens to it, in an order and with roles that depend on its version.

    Raises:
        InputError: a token is missing.
    """
    lacking: dict[Path, list[str]] = {}
    for token in (*named.registered, *named.mentioned):
        if not has(token.text) and token.text not in lacking.setdefault(token.file, []):
            lacking[token.file].append(token.text)
    found = {path: tokens for path, tokens in lacking.items() if tokens}
    if found:
        text = ", and ".join(f"{path} names {_quoted(tokens)}" for path, tokens in found.items())
        raise InputError(f"{text}, missing in {file}", fix=fix)


def use_named(library: tokenizers.Tokenizer, named: NamedTokens) -> list[dict[str, Any]]:
    """Register named tokens, which are in the vocabulary, to be matched in text before it is split into words.

    Returns:
        Tokens that were not registered with these flags before, for the fingerprint.
    """
    from tokenizers import AddedToken  # noqa: PLC0415 - slow to load

    before = {token.content: token for token in library.get_added_tokens_decoder().values()}
    changed: dict[str, Mapping[str, bool]] = {}
    for token in named.registered:
        known = before.get(token.text)
        if known is None or any(getattr(known, name) != token.flags[name] for name in _FLAGS):
            changed[token.text] = token.flags
    for token in named.mentioned:
        if token.text not in before and token.text not in changed:
            changed[token.text] = token.flags
    library.add_tokens([AddedToken(text, special=True, **flags) for text, flags in changed.items()])
    return [{"text": text, **changed[text]} for text in sorted(changed)]


def _object(path: Path) -> dict[str, Any]:
    content = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise InputError(f"{path}: contains no JSON object", fix=GET_AGAIN)
    return content


def _first_list(content: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the tokens without a role; newer files may have an object with further roles instead of a list."""
    found: Any = next((content[name] for name in _LISTS if content.get(name)), ())
    if isinstance(found, dict):
        yield from found.values()
    elif isinstance(found, list):
        yield from found


def _entries(content: Any, file: Path) -> dict[int, Any]:
    if not isinstance(content, dict):
        raise InputError(f"{file}: added_tokens_decoder is not a JSON object", fix=GET_AGAIN)
    return {_id(number, file): value for number, value in content.items()}


def _entry(value: Any, file: Path) -> NamedToken:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise InputError(
            f"{file}: added_tokens_decoder contains {str(value)[:80]!r}, which is not a token", fix=GET_AGAIN
        )
    return NamedToken(value["content"], _flags(value, is_special=bool(value.get("special"))), file)


def _id(number: Any, file: Path) -> int:
    try:
        return int(number)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{file}: {str(number)[:80]!r} is not a token id", fix=GET_AGAIN) from error


def _text(value: Any) -> str:
    """Return the text of a token, a string or an object with `content`; empty if it is neither."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _flags(value: Any, *, is_special: bool) -> dict[str, bool]:
    given = value if isinstance(value, dict) else {}
    defaults = dict.fromkeys(_FLAGS, False) | {"normalized": not is_special}
    return {name: bool(given.get(name, default)) for name, default in defaults.items()}


def _quoted(tokens: list[str]) -> str:
    shown = " and ".join(map(repr, tokens[:3]))
    return shown if len(tokens) <= 3 else f"{shown} and {len(tokens) - 3} more"
