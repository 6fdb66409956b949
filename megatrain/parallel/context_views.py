"""What a rank's queries see of other ranks' keys: views of blocks that are told by the numbers of their chunks.

a sample in 2 cp chunks; queries of chunks 1 and 6, keys of chunk 0: all, of chunks 1 and 6: causal, of 0 to 6 ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.kernels.attention import Borders, View
from megatrain.parallel.batch import Documents


@dataclass(frozen=True, kw_only=True)
class Views:
    """Of one pass through one layer."""

    chunk: int
    """Rows of a chunk."""
    device: torch.device
    takes_masks: bool
    """Of the kernel."""
    window: int | None = None
    documents: Documents | None = None
    """Of the whole samples."""
    keeps: Callable[[Tensor, Tensor], Tensor] | None = None
    """Which probabilities dropout keeps, by the places of queries and of keys: bool [b, n, sq, sk]."""

    def between(self, queries: Sequence[int], keys: Sequence[int]) -> View:
        """Of queries of some chunks beside keys of the same ones, of earlier ones, or of a run that ends with theirs."""
        is_causal = max(keys) == max(queries)
        assert is_causal or max(keys) < min(queries), f"no block of queries {queries} and keys {keys}"
        kept = None
        if self.keeps is not None:
            kept = self.keeps(self._places(tuple(queries)), self._places(tuple(keys)))
        has_rules = self.window is not None or self.documents is not None
        is_square = tuple(queries) == tuple(keys)
        if self.takes_masks and (has_rules or (is_causal and not is_square)):
            return View(mask=self._mask(tuple(queries), tuple(keys)), kept=kept)
        if not has_rules:
            return View(is_causal=is_causal, kept=kept)
        assert is_causal, "kernels without masks take windows and documents in runs of keys"
        assert len(queries) == 1, f"{queries} are no run"
        return View(is_causal=True, window=self.window, borders=self._borders(queries[0], keys), kept=kept)

    def first_key_chunk(self, chunk: int) -> int:
        """The earliest chunk that queries of a chunk see by the window."""
        return 0 if self.window is None else max(0, (chunk * self.chunk - self.window) // self.chunk)

    def _places(self, chunks: tuple[int, ...]) -> Tensor:
        starts = torch.tensor(chunks, device=self.device).unsqueeze(-1) * self.chunk
        return (starts + torch.arange(self.chunk, device=self.device)).flatten()

    def _mask(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> Tensor:
        """True where a query sees a key, by their places: bool [b or 1, 1, sq, sk]."""
        own, other = self._places(queries).unsqueeze(-1), self._places(keys)
        mask = own >= other
        if self.window is not None:
            mask &= own - other <= self.window
        if self.documents is None:
            return mask[None, None]
        number = self._document_numbers
        is_same = number[:, own.flatten()].unsqueeze(-1) == number[:, other].unsqueeze(-2)
        return (mask & is_same).unsqueeze(1)

    @functools.cached_property
    def _document_numbers(self) -> Tensor:
        """[b, s]."""
        assert self.documents is not None
        b, s = self.documents.num_samples, self.documents.seq_length
        places = torch.arange(b * s, device=self.device)
        return torch.bucketize(places, self.documents.cu_seqlens, right=True).view(b, s)

    def _borders(self, chunk: int, keys: Sequence[int]) -> Borders | None:
        """Of documents as far as they lie in the run of keys, and in the chunk of queries."""
        if self.documents is None:
            return None
        longest, end = self.documents.max_seqlen, chunk + 1
        return Borders(
            self._cut(chunk, end),
            self._cut(keys[0], end),
            min(longest, self.chunk),
            min(longest, len(keys) * self.chunk),
        )

    def _cut(self, first: int, end: int) -> Tensor:
        """The borders, in the samples' rows of chunks `first` to `end` alone."""
        assert self.documents is not None
        borders, s = self.documents.cu_seqlens, self.documents.seq_length
        rows = (end - first) * self.chunk
        sample = borders // s
        return (sample * rows + (borders - sample * s - first * self.chunk).clamp(0, rows)).to(torch.int32)
