"""Sends by copy engines, which write into the memory of other GPUs of a host and occupy no SMs.

    stream of the model     GEMM             | GEMM of other rows    | wait, use what arrived
    stream of the copies    wait | copy to a peer, set its flag | copy to the next peer, set its flag
    stream of arrivals      wait | wait for a peer's flag, clear it | wait for the next peer's flag, clear it

Streams wait for flags with operations of the CUDA driver, since a kernel that waits needs an SM, which a GEMM may hold.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from megatrain.config.environment import set_unless_given
from megatrain.parallel.collectives import Transfer, all_reduce
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_overlap.peer_memory import PeerMemory, ReceivedParts, Sends, Slots

_WAIT, _WRITE = 1, 2
"""Values of the driver's CUstreamBatchMemOpType."""


def peer_memory(group: RankGroup, device: torch.device) -> PeerMemory:
    """Return the memory of sends between the ranks of a group: by copies between GPUs, else by messages."""
    return PeerMemory(group, SharedSlots if device.type == "cuda" else Slots)


class SharedSlots(Slots):
    """Memory of one GPU that other GPUs address, with streams of copies and of arrivals."""

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
        self.copies, self.arrivals = _Driver(self.device), _Driver(self.device)
        return memory

    def sends(self, index: int, parts: Tensor) -> Sends:
        return _Copies(self, index, parts)

    def flag(self, of_rank: int, from_rank: int, index: int) -> int:
        """Return the address of a flag in the memory of `of_rank`."""
        return self.addresses[of_rank] + 4 * (index * self.group.size + from_rank)


class _Copies:
    """One send of each rank, by copies into a slot of the others.

    Copies begin after all arrivals of the send before: their flags say that the slot may be overwritten. Each arrival waits for
    the copy of this rank that is sent at the same time: no device may run the waits of all ranks before their copies, and
    after the wait for all parts what was sent may be overwritten.
    """

    def __init__(self, slots: SharedSlots, index: int, parts: Tensor) -> None:
        self._slots, self._index, self._parts = slots, index, parts
        self._offset = slots.offset(index) + slots.group.rank * (parts.nbytes // slots.group.size)
        self._sent: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []

    def send(self, part: Tensor, to_rank: int) -> None:
        slots, rank = self._slots, self._slots.group.rank
        copies = slots.copies
        copies.stream.wait_stream(torch.cuda.current_stream(slots.device))
        if not self._sent:
            slots.arrivals.stream.wait_stream(copies.stream)
            copies.stream.wait_stream(slots.arrivals.stream)
        copies.copy(slots.addresses[to_rank] + self._offset, part.data_ptr(), part.nbytes)
        if to_rank != rank:
            copies.set(slots.flag(to_rank, rank, self._index))
            self._copied.append(copies.stream.record_event())
        self._sent.append(part)

    def received(self) -> ReceivedParts:
        slots, group = self._slots, self._slots.group
        copies, arrivals = slots.copies, slots.arrivals
        transfers = [Transfer()] * group.size
        transfers[group.rank] = Transfer(copies.stream.record_event())
        for step, copied in enumerate(self._copied, 1):
            rank = (group.rank - step) % group.size
            arrivals.stream.wait_event(copied)
            if step == group.size - 1:
                arrivals.stream.wait_stream(copies.stream)  # a part for this rank itself is the last copy
            arrivals.wait_and_clear(slots.flag(group.rank, rank, self._index))
            transfers[rank] = Transfer(arrivals.stream.record_event())
        return ReceivedParts(self._parts, transfers, self._sent)


class _MemoryOperation(ctypes.Structure):
    """The driver's CUstreamBatchMemOpParams, of the kinds that wait and write."""

    _fields_: ClassVar = [
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    ]


_SIZE: Final = 48
assert ctypes.sizeof(_MemoryOperation) == _SIZE


class _Driver:
    """A stream with operations on memory at an address, which PyTorch does not offer."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        library = ctypes.CDLL("libcuda.so.1")
        address, flags = ctypes.c_uint64, ctypes.c_uint
        self._stream = ctypes.c_void_p(self.stream.cuda_stream)
        self._copy, self._operate = library.cuMemcpyDtoDAsync_v2, library.cuStreamBatchMemOp_v2
        self._copy.argtypes = (address, address, ctypes.c_size_t, ctypes.c_void_p)
        self._operate.argtypes = (ctypes.c_void_p, flags, ctypes.c_void_p, flags)
        self._known: dict[tuple[int, ...], Any] = {}

    def copy(self, to_address: int, from_address: int, num_bytes: int) -> None:
        _check(self._copy(to_address, from_address, num_bytes, self._stream), "cuMemcpyDtoDAsync")

    def set(self, address: int) -> None:
        """Set a flag after all earlier writes of the stream are visible, also to other GPUs."""
        self._run((_WRITE, address, 1))

    def wait_and_clear(self, address: int) -> None:
        """Wait until a flag is set, and clear it."""
        self._run((_WAIT, address, 1, _WRITE, address, 0))

    def _run(self, words: tuple[int, ...]) -> None:
        operations = self._known.get(words)
        if operations is None:
            triples = [words[i : i + 3] for i in range(0, len(words), 3)]
            made = [
                _MemoryOperation(operation=kind, address=where, value=value) for kind, where, value in triples
            ]
            operations = self._known[words] = (_MemoryOperation * len(made))(*made)
        _check(self._operate(self._stream, len(operations), operations, 0), "cuStreamBatchMemOp")


def _check(result: Any, name: str) -> None:
    if result:
        raise RuntimeError(f"{name} failed with error {result} of the CUDA driver")
