"""JSON messages between all ranks, through rank 0 and the rendezvous store.

    gather   rank 1 ─┐                         broadcast   rank 0 ─> store ─┬─> rank 1
             rank 2 ─┼─> store ─> rank 0                                    ├─> rank 2
             rank 3 ─┘                                                      └─> rank 3

A rank needs one connection, independent of the number of ranks, and a rank that waits here for a slow disk delays no collective.
Among many ranks, every `FAN_IN`th collects the values of those that follow it, so that rank 0 reads few, large entries.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # the process that writes checkpoints has no torch
    from torch.distributed import Store

FAN_IN: Final = 128
"""Ranks whose values another one collects."""


class Messages:
    """Messages between all ranks. Every rank makes the same calls in the same order.

    Args:
        rank: this rank.
        size: number of ranks.
        store: shared by all ranks, with a timeout of its own, used by nothing else; None: there is one rank, or no
            message is sent.
        part_bytes: largest entry of the store; its servers refuse large ones.
    """

    def __init__(self, rank: int, size: int, store: Store | None, *, part_bytes: int = 2**20) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._part_bytes = part_bytes
        self.count = 0
        """Calls so far, the same on every rank."""
        self.on_progress: Callable[[], None] = lambda: None
        """Called by a rank that waits longer than the store's timeout, because another one has announced progress."""
        self._sent: list[str] = []
        self._progress = 0

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on rank 0, in rank order; the others return an empty list, and wait only for values that they collect."""
        self.count += 1
        texts, step = [json.dumps(value)], 1
        while step < self.size and self.rank % (step * FAN_IN) == 0:
            senders = range(self.rank + step, min(self.rank + step * FAN_IN, self.size), step)
            texts += self._take([f"{self.count}/{rank}" for rank in senders])
            step *= FAN_IN
        if self.rank != 0:
            self._put(f"{self.count}/{self.rank}", ",".join(texts))
            return []
        self._take(self._sent)  # a rank that has sent this value has read all earlier broadcasts
        self._sent.clear()
        found: list[Any] = json.loads(f"[{','.join(texts)}]")
        return found

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank; the other ranks' values are ignored."""
        self.count += 1
        text, key = json.dumps(value), f"{self.count}"
        if self.size == 1:
            return json.loads(text)
        if self.rank != 0:
            return json.loads(self._read([key])[0])
        self._put(key, text)
        self._sent.append(key)
        return json.loads(text)

    def gather_and_broadcast(self, value: Any, conclude: Callable[[list[Any]], Any]) -> Any:
        """Return on every rank the result of `conclude`, which rank 0 calls with every rank's value."""
        found = self.gather(value)
        return self.broadcast(conclude(found) if self.rank == 0 else None)

    def announce_progress(self) -> None:
        """Extend the wait of the ranks that wait for this one by the store's timeout; any thread may call it."""
        assert self._store is not None, "messages need a store"
        self._store.add("progress", 1)

    def _wait(self, keys: list[str]) -> list[bytes]:
        """Wait for entries as long as a rank announces progress. Raises DistStoreError."""
        from torch.distributed import DistStoreError  # noqa: PLC0415 (a writer of checkpoints imports no torch)

        assert self._store is not None, "messages need a store"
        while True:
            try:
                return self._store.multi_get(keys)
            except DistStoreError:
                progress = self._store.add("progress", 0)
                if progress == self._progress:
                    raise
                self._progress = progress
                self.on_progress()

    def _put(self, key: str, text: str) -> None:
        """Write an entry in parts, the first one last, with their number: readers wait for it."""
        assert self._store is not None, "messages need a store"
        size = self._part_bytes
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        for number, part in enumerate(parts[1:], start=1):
            self._store.set(f"{key}.{number}", part)
        self._store.set(key, f"{len(parts)} {parts[0]}")

    def _read(self, keys: list[str]) -> list[str]:
        """Wait for entries; return their texts."""
        assert self._store is not None, "messages need a store"
        texts = []
        for key, entry in zip(keys, self._wait(keys), strict=True):
            num_parts, first = entry.decode().split(" ", 1)
            others = [f"{key}.{number}" for number in range(1, int(num_parts))]
            texts.append(first + b"".join(self._store.multi_get(others) if others else []).decode())
        return texts

    def _take(self, keys: list[str]) -> list[str]:
        """Wait for entries, and remove them; return their texts."""
        if not keys:
            return []
        assert self._store is not None, "messages need a store"
        texts = self._read(keys)
        for key, text in zip(keys, texts, strict=True):
            for number in range(1, len(range(0, len(text), self._part_bytes))):
                self._store.delete_key(f"{key}.{number}")
            self._store.delete_key(key)
        return texts
