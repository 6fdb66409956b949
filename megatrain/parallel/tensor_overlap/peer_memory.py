"""Sends between the ranks of a group: each part is written into the memory of its rank (GPUs), or is a message (CPUs).

All ranks of the group send in the same sequence. A rank's memory has four slots, used in turn, and for each slot a flag of each
peer, which is set when that peer's part has arrived, and cleared when it has been waited for. A peer completes send n after its
model's stream reached send n, so its flag of send n + 3 says that it no longer reads what it received in send n, and send
n + 4 may overwrite that slot. Nothing in a send but its slot differs from the send before: a CUDA graph repeats sends, if
their number is a multiple of the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatrain.parallel.collectives import Transfer, begin_receive, begin_send
from megatrain.parallel.grid import RankGroup

NUM_SLOTS = 4
_ALIGNMENT = 512
"""Slots begin at a multiple of this many bytes."""
_NUM_KEPT = 256
"""Most views of slots that are kept; packs of documents have any shapes."""


class PeerMemory:
    """Memory of this rank that the other ranks of a group write, allocated by the first send.

    Args:
        slots_type: of its slots, those of messages or of copies (`copies.py`).
    """

    def __init__(self, group: RankGroup, slots_type: type[Slots] | None = None) -> None:
        self.group, self._slots_type = group, slots_type or Slots
        self._num_sends = 0
        self.slots: Slots | None = None
        """The memory; a graph that repeats sends keeps it."""
        self.late: list[Callable[[], None]] = []
        """Work that the next gather overlaps; it reads what was received in the send before the last one."""

    @property
    def peers(self) -> list[int]:
        """The other ranks, each rank's list in another order. Send in this order; parts arrive in the reverse one."""
        return [(self.group.rank + step) % self.group.size for step in range(1, self.group.size)]

    def send(self, parts: Iterable[tuple[int, Tensor]]) -> ReceivedParts:
        """Send each part to its rank, after the work that its stream has so far; the host does not wait.

        Args:
            parts: ranks and what they receive, equal shapes: one for each peer, and optionally one for this rank.
        Returns:
            What this rank receives; it is overwritten by the third send after this one.
        """
        sends: Sends | None = None
        for to_rank, part in parts:
            if sends is None:
                sends = self._next_sends(part)
            sends.send(part.contiguous(), to_rank)
        assert sends is not None, "there is no rank to send to"
        return sends.received()

    def align(self) -> None:
        """Complete sends without content up to the first slot. The sends between two such calls can be repeated."""
        while self.slots is not None and self._num_sends % NUM_SLOTS:
            nothing = self.slots.memory[:1]
            self.send((rank, nothing) for rank in self.peers).wait()

    def _next_sends(self, part: Tensor) -> Sends:
        num_bytes = aligned(part.nbytes * self.group.size)
        if self.slots is None or num_bytes > self.slots.num_bytes or part.device != self.slots.device:
            self.slots = self._slots_type(self.group, num_bytes, part.device)
        self._num_sends += 1
        slots, index = self.slots, self._num_sends % NUM_SLOTS
        return slots.sends(index, slots.parts(index, part.dtype, part.shape))


class Sends(Protocol):
    """One send of each rank."""

    def send(self, part: Tensor, to_rank: int) -> None:
        """Begin to send a part to a rank."""

    def received(self) -> ReceivedParts:
        """Return what the others send."""


class ReceivedParts:
    """Parts from all ranks, [size, n, ...]; each is complete after the wait for its rank."""

    def __init__(self, parts: Tensor, transfers: Sequence[Transfer], sent: Sequence[Tensor] = ()) -> None:
        self.parts = parts
        self._transfers = transfers
        self._sent = sent
        """Memory that is read until the last part has arrived."""

    def from_rank(self, rank: int) -> Tensor:
        """Return the part that `rank` sent; the work that follows on this stream is ordered after its arrival."""
        self._transfers[rank].wait()
        return self.parts[rank]

    def wait(self) -> None:
        """Wait for all parts, as `from_rank` does."""
        for transfer in self._transfers:
            transfer.wait()


class Slots:
    """Memory of one rank, which receives messages."""

    def __init__(self, group: RankGroup, num_bytes: int, device: torch.device) -> None:
        self.group, self.num_bytes, self.device = group, num_bytes, device
        self.memory = self._allocate(self._first_slot + NUM_SLOTS * num_bytes)
        self._parts: dict[tuple[int, torch.dtype, torch.Size], Tensor] = {}

    def _allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    @property
    def _first_slot(self) -> int:
        return aligned(4 * NUM_SLOTS * self.group.size)  # after the flags

    def offset(self, index: int) -> int:
        return self._first_slot + index * self.num_bytes

    def parts(self, index: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """Return a slot as parts [size, *shape]. They are kept: each takes the host five operations."""
        key = index, dtype, shape
        if key not in self._parts:
            if len(self._parts) >= _NUM_KEPT:
                self._parts.clear()
            slot = self.memory[self.offset(index) : self.offset(index + 1)].view(dtype)
            self._parts[key] = slot[: self.group.size * shape.numel()].view(self.group.size, *shape)
        return self._parts[key]

    def sends(self, index: int, parts: Tensor) -> Sends:  # noqa: ARG002 (copies have flags of the slot)
        """Begin a send of each rank into this slot, whose part `parts` [size, n, ...] it fills."""
        return _Messages(self.group, parts)


class _Messages:
    """One send of each rank, by messages."""

    def __init__(self, group: RankGroup, parts: Tensor) -> None:
        self._group, self._parts = group, parts
        self._transfers: dict[int, Transfer] = {}

    def send(self, part: Tensor, to_rank: int) -> None:
        if to_rank == self._group.rank:
            self._parts[to_rank] = part
        else:
            self._transfers[to_rank] = begin_send(part, self._group, to_rank - self._group.rank)

    def received(self) -> ReceivedParts:
        rank, transfers = self._group.rank, [Transfer()] * self._group.size
        for peer, sent in self._transfers.items():
            transfers[peer] = Transfer([sent, begin_receive(self._parts[peer], self._group, peer - rank)])
        return ReceivedParts(self._parts, transfers)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
