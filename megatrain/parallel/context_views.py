"""What a rank's queries see of other ranks' keys: views of blocks that are told by places in the sample.

chunks of 4 rows; queries at 4 to 7 and 24 to 27, keys at 0 to 3: all, at the same places: causal, at 0 to 27: a run
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.kernels.attention.blocks import Borders, View
from megatrain.parallel.batch import Documents


@dataclass(frozen=True, kw_only=True)
class Views:
    """Of one pass through one layer."""

    device: torch.device
    takes_masks: bool
    """Of the kernel."""
    window: int | None = None
    documents: Documents | None = None
    """Of the whole samples."""
    keeps: Callable[[Tensor, Tensor], Tensor] | None = None
    """Which probabilities dropout keeps, by the places of queries and of keys: bool [b, n, sq, sk]."""

    def between(self, queries: Sequence[range], keys: Sequence[range]) -> View:
        """Of queries at some places beside keys at the same ones, at earlier ones, or in a run that ends with theirs."""
        is_causal = keys[-1].stop == queries[-1].stop
        assert is_causal or keys[-1].stop <= queries[0].start, (
            f"no block of queries at {queries}, keys at {keys}"
        )
        kept = None if self.keeps is None else self.keeps(self._places(queries), self._places(keys))
        has_rules = self.window is not None or self.documents is not None
        is_square = tuple(queries) == tuple(keys)
        if self.takes_masks and (has_rules or (is_causal and not is_square)):
            return View(mask=self._mask(self._places(queries), self._places(keys)), kept=kept)
        if not has_rules:
            return View(is_causal=is_causal, kept=kept)
        assert is_causal, "kernels without masks take windows and documents in runs of keys"
        assert len(queries) == len(keys) == 1, f"places {queries} and {keys} are no runs"
        return View(is_causal=True, window=self.window, borders=self._borders(queries[0], keys[0]), kept=kept)

    def _places(self, runs: Sequence[range]) -> Tensor:
        return torch.cat([torch.arange(run.start, run.stop, device=self.device) for run in runs])

    def _mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """True where a query sees a key, by their places: bool [b or 1, 1, sq, sk]."""
        distance = queries.unsqueeze(-1) - keys
        mask = distance >= 0
        if self.window is not None:
            mask &= distance <= self.window
        if self.documents is None:
            return mask[None, None]
        numbers = self.documents.numbers
        is_same = numbers[:, queries].unsqueeze(-1) == numbers[:, keys].unsqueeze(-2)
        return (mask & is_same).unsqueeze(1)

    def _borders(self, queries: range, keys: range) -> Borders | None:
        """Of what documents have at these places."""
        if self.documents is None:
            return None
        longest = [min(self.documents.max_seqlen, len(run)) for run in (queries, keys)]
        return Borders(self.documents.within(queries), self.documents.within(keys), longest[0], longest[1])
