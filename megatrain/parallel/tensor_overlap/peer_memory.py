"""Sends between the GPUs of one host: copy engines write into the memory of other ranks, and occupy no SMs.

    stream of the model     GEMM             | GEMM of other rows    | wait, use what arrived
    stream of the copies    wait | copy to a peer, set its flag | wait for own flags

All ranks of the group send in the same sequence. A rank's memory has three slots, used in turn, and a flag for each peer,
which holds the number of that peer's last completed send. A peer completes send n after its model's stream reached send n,
so its flag n + 2 says that it no longer reads what it received in send n, and send n + 3 may overwrite that slot.
Streams wait for flags with operations of the CUDA driver, since a kernel that waits needs an SM, which a GEMM may hold.

On CPUs the same sends are messages.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.config.environment import set_unless_given
from megatrain.parallel.collectives import Transfer, all_reduce, begin_receive, begin_send
from megatrain.parallel.grid import RankGroup

_NUM_SLOTS = 3
_ALIGNMENT = 512
"""Slots begin at a multiple of this many bytes."""


class PeerMemory:
    """Memory of this rank that the other ranks of a group write, allocated by the first send."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._num_sends = 0
        self._slots: Slots | None = None

    @property
    def peers(self) -> list[int]:
        """The other ranks, each rank's list in another order. Send in this order; parts arrive in the reverse one."""
        return [(self.group.rank + step) % self.group.size for step in range(1, self.group.size)]

    def send(self, parts: Iterable[tuple[int, Tensor]]) -> ReceivedParts:
        """Send each part to its rank, after the work that its stream has so far; the host does not wait.

        Args:
            parts: ranks and what they receive, equal shapes: one for each peer, and optionally one for this rank.
        Returns:
            What this rank receives; it is overwritten by the second send after this one.
        """
        sends: _Copies | _Messages | None = None
        for to_rank, part in parts:
            if sends is None:
                sends = self._next_sends(part)
            sends.send(part.contiguous(), to_rank)
        assert sends is not None, "there is no rank to send to"
        return sends.received()

    def _next_sends(self, part: Tensor) -> _Copies | _Messages:
        num_bytes = _aligned(part.nbytes * self.group.size)
        if self._slots is None or num_bytes > self._slots.num_bytes or part.device != self._slots.device:
            slots_type = SharedSlots if part.is_cuda and not part.is_meta else Slots
            self._slots = slots_type(self.group, num_bytes, part.device)
        self._num_sends += 1
        slots, index = self._slots, self._num_sends % _NUM_SLOTS
        parts = slots.slot(index).view(part.dtype)[: part.numel() * self.group.size]
        parts = parts.view(self.group.size, *part.shape)
        if isinstance(slots, SharedSlots):
            return _Copies(slots, index, parts, self._num_sends)
        return _Messages(self.group, parts)


class ReceivedParts:
    """Parts from all ranks, [size, n, ...]; each is complete after the wait for its rank."""

    def __init__(self, parts: Tensor, transfers: Sequence[Transfer], sent: Sequence[Tensor] = ()) -> None:
        self.parts = parts
        self._transfers = transfers
        self._sent = sent
        """Memory that is read until the first part has arrived."""

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
        self.memory = self._allocate(self._first_slot + _NUM_SLOTS * num_bytes)

    def _allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    @property
    def _first_slot(self) -> int:
        return _aligned(4 * self.group.size)  # after the flags

    def offset(self, index: int) -> int:
        return self._first_slot + index * self.num_bytes

    def slot(self, index: int) -> Tensor:
        return self.memory[self.offset(index) : self.offset(index + 1)]


class SharedSlots(Slots):
    """Memory of one GPU that other GPUs address, with a stream of copies and its driver."""

    def _allocate(self, num_bytes: int) -> Tensor:
        set_unless_given("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        from torch.distributed import _symmetric_memory  # noqa: PLC0415 (slow to import)

        torch.cuda.synchronize(self.device)  # sends to smaller slots have ended
        memory = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self.device)
        memory[: self._first_slot].zero_()
        self.handle = handle = _symmetric_memory.rendezvous(memory, self.group.handle.group_name)
        all_reduce(torch.zeros(1, device=self.device), self.group)
        torch.cuda.synchronize(self.device)  # no rank sends before all flags are zero
        self.addresses = [
            handle.get_buffer(rank, (num_bytes,), torch.uint8).data_ptr() for rank in range(self.group.size)
        ]
        assert self.addresses[self.group.rank] == memory.data_ptr(), "a handle begins at its tensor"
        self.stream = torch.cuda.Stream(self.device, priority=-1)
        self.driver = _Driver(self.stream)
        return memory


class _Copies:
    """One send of each rank, by copies into a slot of the others."""

    def __init__(self, slots: SharedSlots, index: int, parts: Tensor, number: int) -> None:
        self._slots, self._parts, self._number = slots, parts, number
        self._offset = slots.offset(index) + slots.group.rank * parts[0].nbytes
        self._sent: list[Tensor] = []

    def send(self, part: Tensor, to_rank: int) -> None:
        slots, rank = self._slots, self._slots.group.rank
        slots.stream.wait_stream(torch.cuda.current_stream(slots.device))
        base = slots.addresses[to_rank]
        slots.driver.copy(base + self._offset, part.data_ptr(), part.nbytes)
        if to_rank != rank:
            slots.driver.write(base + 4 * rank, self._number)
        self._sent.append(part)

    def received(self) -> ReceivedParts:
        slots, group = self._slots, self._slots.group
        transfers = [Transfer()] * group.size
        transfers[group.rank] = Transfer(slots.stream.record_event())
        for step in range(1, group.size):
            rank = (group.rank - step) % group.size
            slots.driver.wait(slots.addresses[group.rank] + 4 * rank, self._number)
            transfers[rank] = Transfer(slots.stream.record_event())
        return ReceivedParts(self._parts, transfers, self._sent)


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


class _Driver:
    """Operations of a stream on memory at an address, which PyTorch does not offer."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        address, number, flags = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
        self._stream = ctypes.c_void_p(stream.cuda_stream)
        self._copy, self._write, self._wait = (
            library.cuMemcpyDtoDAsync_v2,
            library.cuStreamWriteValue32_v2,
            library.cuStreamWaitValue32_v2,
        )
        self._copy.argtypes = (address, address, ctypes.c_size_t, ctypes.c_void_p)
        self._write.argtypes = self._wait.argtypes = (ctypes.c_void_p, address, number, flags)

    def copy(self, to_address: int, from_address: int, num_bytes: int) -> None:
        _check(self._copy(to_address, from_address, num_bytes, self._stream), "cuMemcpyDtoDAsync")

    def write(self, address: int, value: int) -> None:
        """Write 32 bits after all earlier writes of the stream are visible, also to other GPUs."""
        _check(self._write(self._stream, address, value % 2**32, 0), "cuStreamWriteValue32")

    def wait(self, address: int, value: int) -> None:
        """Wait until the number at `address` is `value` or later; numbers start again from 0 after 2 ** 32 - 1."""
        _check(self._wait(self._stream, address, value % 2**32, 0), "cuStreamWaitValue32")


def _check(result: Any, name: str) -> None:
    if result:
        raise RuntimeError(f"{name} failed with error {result} of the CUDA driver")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
