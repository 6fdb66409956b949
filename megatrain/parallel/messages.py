"""JSON messages between all ranks, through rank 0 and the rendezvous store.

    gather   rank 1 ─┐                         broadcast   rank 0 ─> store ─┬─> rank 1
             rank 2 ─┼─> store ─> rank 0                                    ├─> rank 2
             rank 3 ─┘                                                      └─> rank 3

A rank needs one connection, independent of the number of ranks, and a rank that waits here for a slow disk delays no collective.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol


class Store(Protocol):
    """The methods of torch.distributed's stores that are used here."""

    def set(self, key: str, value: str, /) -> None:
        """Write an entry."""
        ...

    def get(self, key: str, /) -> bytes:
        """Wait for an entry, and read it."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Remove an entry."""
        ...


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
        self._sent: list[str] = []

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on rank 0, in rank order; the others return an empty list and do not wait."""
        self.count += 1
        text = json.dumps(value)
        if self.rank != 0:
            self._put(f"{self.count}/{self.rank}", text)
            return []
        found = [json.loads(text)]
        for rank in range(1, self.size):
            key = f"{self.count}/{rank}"
            found.append(json.loads(self._read(key)))
            self._remove(key)
        while self._sent:  # a rank that has sent this value has read all earlier broadcasts
            self._remove(self._sent.pop())
        return found

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank; the other ranks' values are ignored."""
        self.count += 1
        text, key = json.dumps(value), f"{self.count}"
        if self.size == 1:
            return json.loads(text)
        if self.rank != 0:
            return json.loads(self._read(key))
        self._put(key, text)
        self._sent.append(key)
        return json.loads(text)

    def gather_and_broadcast(self, value: Any, conclude: Callable[[list[Any]], Any]) -> Any:
        """Return on every rank the result of `conclude`, which rank 0 calls with every rank's value."""
        found = self.gather(value)
        return self.broadcast(conclude(found) if self.rank == 0 else None)

    def _put(self, key: str, text: str) -> None:
        """Write an entry in parts, the first one last, with their number: readers wait for it."""
        assert self._store is not None, "messages need a store"
        size = self._part_bytes
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        for number, part in enumerate(parts[1:], start=1):
            self._store.set(f"{key}.{number}", part)
        self._store.set(key, f"{len(parts)} {parts[0]}")

    def _read(self, key: str) -> str:
        assert self._store is not None, "messages need a store"
        num_parts, first = self._store.get(key).decode().split(" ", 1)
        others = (self._store.get(f"{key}.{number}").decode() for number in range(1, int(num_parts)))
        return "".join((first, *others))

    def _remove(self, key: str) -> None:
        assert self._store is not None, "messages need a store"
        num_parts = int(self._store.get(key).split(b" ", 1)[0])
        for number in range(1, num_parts):
            self._store.delete_key(f"{key}.{number}")
        self._store.delete_key(key)
