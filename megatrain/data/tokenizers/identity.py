"""Identity of a tokenizer: what it does, and what its files say.

    ids of its vocabulary and of sample texts ──> digest ─┐
    definition, as its files have it ────────────> digest ─┴─> fingerprint, "digest:digest"

Either digest identifies a tokenizer (`is_same_tokenizer`): that of ids is the same when transformers has saved a tokenizer
again, that of the definition is the same when another version of a library gives other ids. Fingerprints of older data and
checkpoints have the latter alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

TEXTS: Final = (
    "The quick brown fox jumps over the lazy dog. It's 12,345.67 km; we'll, I'D, you're, they've!",
    "  two spaces,   three,\ttab,\t\ttabs \n newline\n\n\n newlines\r\n  \n\n    indented = [x for x in (1, 2)]  ",
    " leading", "trailing ", " ", "  ", "\n", "\n\n", "\t", "a", "",
    "".join(map(chr, range(128))),
    " ".join(map(chr, range(0x80, 0x100))),
    "".join(map(chr, range(0x100, 0x800, 0x40))),  # all first bytes of two, of three and of four
    "".join(chr(lead << 12 | 0xABC) for lead in range(16) if lead != 0xD),
    "\U00010abc\U00040abc\U00080abc\U000c0abc\U0010abcd",
    "ÉCOLE école e\u0301cole ﬁancé ½ ² Å \uff21\uff22\uff23 \uff11\uff12\uff13 ǅ ß İı \u017f",
    "Привет, мир! Γειά σου. שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก 你好，世界。こんにちは 안녕하세요",  # noqa: RUF001
    "zero\u200bwidth\u200djoiner \u00a0nbsp\u2028line\u2029paragraph\u0085next\u3000ideographic\ufeffbom \ufffd",
    "👩\u200d👩\u200d👧\u200d👦🏳\ufe0f\u200d🌈🤷🏽\u200d♀\ufe0f😀😀 🇺🇸",
    "def f(self, *args: int) -> None:\n\treturn {'a': [1, 0x1F, 1e-9]}  # CamelCase snake_case HTTPServer //\n",
    "https://example.com/a?b=c&d=%20#e user@example.org <b>bold</b> &amp; $x^2$ \\frac{1}{2} aaaaaaaaaaaaaaaaa",
    "1234567890 3.14159 1,000,000 2026-01-31 ¼ ٣٤ \uff10 ----======____....!!!!",
)  # fmt: skip
"""Every byte of valid UTF-8, whitespace of all kinds, and several scripts."""
_TOKENS_PER_TEXT: Final = 128
_MOST_TOKENS: Final = 1 << 15
"""Tokens of a vocabulary that occur in texts: those of a larger one at equal distances."""


def fingerprint_of(definition: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a definition as canonical JSON: sorted keys, no spaces."""
    canonical = json.dumps(definition, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def full_fingerprint(
    vocabulary: Mapping[str, int],
    encode: Callable[[str], list[int]],
    digest_of_definition: str,
    *,
    special: Collection[str] = (),
) -> str:
    """Return the fingerprint of a tokenizer.

    Args:
        vocabulary: ids by token, as its library writes tokens.
        encode: the tokenizer.
        digest_of_definition: `fingerprint_of` everything that determines its ids, as its files have it.
        special: tokens that are matched in text before it is split into words.
    """
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    texts = [*sample_texts(special), *_vocabulary_texts(tokens)]
    digest = hashlib.sha256("\n".join(f"{vocabulary[token]} {token}" for token in tokens).encode())
    for text in texts:
        digest.update(" ".join(map(str, encode(text))).encode() + b"\n")
    return f"{digest.hexdigest()}:{digest_of_definition}"


def sample_texts(special: Collection[str]) -> Iterator[str]:
    """Yield texts that show what a tokenizer does, with each special token alone, inside text and between spaces."""
    yield from TEXTS
    for token in sorted(special):
        yield token
        yield f"a{token}b {token} c\n{token}\n{token}{token}  {token}"


def characters_of_bytes() -> dict[int, str]:
    """Return the character by which a byte-level vocabulary, as GPT-2's, writes each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }


def _vocabulary_texts(tokens: Sequence[str]) -> Iterator[str]:
    """Yield texts with tokens of a vocabulary, in the order of ids, so that another merge or score gives other ids."""
    written = {ord(character): byte for byte, character in characters_of_bytes().items()}
    is_byte_level = {chr(number) for number in written} <= set(tokens)
    chosen = tokens[:: -(-len(tokens) // _MOST_TOKENS) or 1]
    for start in range(0, len(chosen), _TOKENS_PER_TEXT):
        part = chosen[start : start + _TOKENS_PER_TEXT]
        if is_byte_level:
            yield "\n".join(part).translate(written).encode("latin-1", "replace").decode("utf-8", "replace")
        else:
            yield "\n".join(token.replace("▁", " ").removeprefix("##") for token in part)
