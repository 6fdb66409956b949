"""Words between all ranks, by way of rank 0: what each of them has to say, and what rank 0 makes of it.

    gather   rank 1 ─┐                         share   rank 0 ─> store ─┬─> rank 1
             rank 2 ─┼─> store ─> rank 0                                ├─> rank 2
             rank 3 ─┘                                                  └─> rank 3

The store is the one by which the ranks have met: a rank needs one connection, whatever the number of ranks, and whoever
waits here for a slow disk holds up no collective. Values are anything that JSON holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

_PART_BYTES = 2**20
"""Of one entry of the store, whose servers refuse large ones."""


class Store(Protocol):
    """What is used of torch.distributed's stores."""

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
    """All ranks' words. Every rank makes the same calls in the same order.

    Args:
        rank: this one.
        size: the number of ranks.
        store: that all of them see, with a waiting limit of its own, used by nothing else; None: there is one rank, or
            nobody will ask.
    """

    def __init__(self, rank: int, size: int, store: Store | None) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._count = 0
        self._shared: list[str] = []

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks, on rank 0; an empty list on the others, which do not wait."""
        self._count += 1
        text = json.dumps(value)
        if self.rank != 0:
            self._put(f"{self._count}/{self.rank}", text)
            return []
        found = [json.loads(text)]
        for rank in range(1, self.size):
            key = f"{self._count}/{rank}"
            found.append(json.loads(self._read(key)))
            self._remove(key)
        while self._shared:  # whoever has sent this has read all that was shared before
            self._remove(self._shared.pop())
        return found

    def share(self, value: Any) -> Any:
        """What rank 0 has, on every rank; the others' values do not matter."""
        self._count += 1
        text, key = json.dumps(value), f"{self._count}"
        if self.size == 1:
            return json.loads(text)
        if self.rank != 0:
            return json.loads(self._read(key))
        self._put(key, text)
        self._shared.append(key)
        return json.loads(text)

    def gather_and_broadcast(self, value: Any, conclude: Callable[[list[Any]], Any]) -> Any:
        """What rank 0 concludes from every rank's value, on every rank."""
        found = self.gather(value)
        return self.share(conclude(found) if self.rank == 0 else None)

    def _put(self, key: str, text: str) -> None:
        """In parts; the first comes last, with their number, as it is what others wait for."""
        assert self._store is not None, "there is nobody to talk to"
        parts = [text[start : start + _PART_BYTES] for start in range(0, len(text), _PART_BYTES)]
        for number, part in enumerate(parts[1:], start=1):
            self._store.set(f"{key}.{number}", part)
        self._store.set(key, f"{len(parts)} {parts[0]}")

    def _read(self, key: str) -> str:
        assert self._store is not None, "there is nobody to talk to"
        num_parts, first = self._store.get(key).decode().split(" ", 1)
        others = (self._store.get(f"{key}.{number}").decode() for number in range(1, int(num_parts)))
        return "".join((first, *others))

    def _remove(self, key: str) -> None:
        assert self._store is not None, "there is nobody to talk to"
        num_parts = int(self._store.get(key).split(b" ", 1)[0])
        for number in range(1, num_parts):
            self._store.delete_key(f"{key}.{number}")
        self._store.delete_key(key)
