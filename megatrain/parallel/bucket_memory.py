"""One flat tensor a bucket, and this rank's part of it beside it.

    kept whole      whole ▓▓▓▓▓▓▓▓                     the part is a view of it
    kept in parts   whole ░░░░░░░░   part ▓▓           ░ memory only from `bring` to `release`; the part has its own

Views of a whole tensor stay what they are while its memory comes and goes; between, nobody may touch them.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BucketMemory:
    """Weights or gradients of one model chunk.

    Attributes:
        wholes: flat tensors, one a bucket.
        parts: this rank's shards of them.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.wholes: list[Tensor] = []
        self.parts: list[Tensor] = []
        self._is_kept_whole: list[bool] = []
        self._is_whole: list[bool] = []

    def add(self, size: int, part_of: slice, *, is_kept_whole: bool) -> None:
        """Another bucket, zeroed and whole. Call `release` once its views are made."""
        whole = torch.zeros(size, dtype=self.dtype, device=self.device)
        part = whole[part_of]
        self.wholes.append(whole)
        self.parts.append(part if is_kept_whole else torch.zeros_like(part))
        self._is_kept_whole.append(is_kept_whole)
        self._is_whole.append(True)

    def is_kept_whole(self, number: int) -> bool:
        """Whether this bucket's memory never goes."""
        return self._is_kept_whole[number]

    def is_whole(self, number: int) -> bool:
        """Whether this bucket's memory is there."""
        return self._is_whole[number]

    def bring(self, number: int) -> None:
        """Memory for the whole bucket, with whatever was in it, if it is not there."""
        if not self._is_whole[number]:
            whole = self.wholes[number]
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            self._is_whole[number] = True

    def release(self, number: int) -> None:
        """Give the whole bucket's memory back, where it is not kept.

        What a collective reads or writes must have been waited for: what gets the memory next follows on this stream.
        """
        if not self._is_kept_whole[number]:
            self.wholes[number].untyped_storage().resize_(0)
            self._is_whole[number] = False

    @property
    def kept(self) -> list[Tensor]:
        """What is always there: of each bucket the whole, or this rank's part."""
        pairs = zip(self.wholes, self.parts, self._is_kept_whole, strict=True)
        return [whole if is_whole else part for whole, part, is_whole in pairs]

    def clear(self) -> None:
        """Set all that is kept to zero."""
        if self.wholes:
            torch._foreach_zero_(self.kept)
