"""Text of a completion while its tokens arrive.

    tokens ─> decoded with the tokens before ─> complete characters ─> text that can no longer be part of a stop word

A character may take several tokens, and a stop word may begin in one token and end in another: text is held back until it is
certain. The stop word that is complete first ends the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.data.tokenizers.build import Tokenizer

_INCOMPLETE = "\ufffd"
_NUM_CONTEXT_TOKENS = 8
"""Tokens of the prompt that are decoded with the first ones of the text, since spaces depend on what precedes them."""
_MOST_INCOMPLETE_TOKENS = 8
"""Tokens after which an incomplete character is not waited for."""


class TextStream:
    """Decodes one completion."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids = list(prompt[-_NUM_CONTEXT_TOKENS:])
        self._first, self._done = 0, len(self._ids)
        self._held = ""
        self.text = ""
        """Text that has been returned."""
        self.is_stopped = False
        """A stop word was found: no further token counts."""

    def add(self, token: int) -> str:
        """Add a token; return the text that is certain now."""
        assert not self.is_stopped
        self._ids.append(token)
        return self._release(self._decoded(is_last=False), is_last=False)

    def finish(self) -> str:
        """Return the text that was held back; there are no more tokens."""
        return "" if self.is_stopped else self._release(self._decoded(is_last=True), is_last=True)

    def _decoded(self, *, is_last: bool) -> str:
        """Return the new text of the tokens so far, up to an incomplete character."""
        before = self._tokenizer.decode(self._ids[self._first : self._done])
        now = self._tokenizer.decode(self._ids[self._first :])
        waits = now.endswith(_INCOMPLETE) and len(self._ids) - self._done < _MOST_INCOMPLETE_TOKENS
        if waits and not is_last:
            return ""
        self._first, self._done = self._done, len(self._ids)
        return now[len(before) :]

    def _release(self, new: str, *, is_last: bool) -> str:
        text = self._held + new
        found = [start for word in self._stop if (start := text.find(word)) >= 0]
        if found:
            self.is_stopped, text, self._held = True, text[: min(found)], ""
        else:
            kept = 0 if is_last else max((_overlap(text, word) for word in self._stop), default=0)
            text, self._held = text[: len(text) - kept], text[len(text) - kept :]
        self.text += text
        return text


def _overlap(text: str, word: str) -> int:
    """Return the length of the longest end of `text` with which `word` begins."""
    longest = min(len(word) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(word[:size])), 0)
