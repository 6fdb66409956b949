"""Files of chunks as tensors: `shard_file.py` writes them, and here ranges of chunks are read and checked.

    to the host:  each block is read and checked while it is in the processor's cache
    to a GPU:     all blocks are read, copied to the GPU, and checked there, which also finds faults of the copy; the host
                  compares the checksums of all reads at once, in `finish_checks`

The safetensors library reads with mmap, where truncation of the file kills the process. Here memory is bounded by one
chunk, and every failure is an exception.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from megatrain.checkpoint.block_checksums import BLOCKS, CRC32_OF_ZEROS, BlockFormat, crc32_of_bits
from megatrain.checkpoint.checked_files import open_regular_file, read_into
from megatrain.checkpoint.errors import DamagedError
from megatrain.checkpoint.manifest import DTYPES, Chunk, StoredFile
from megatrain.kernels.block_checksums import partial_checksums
from megatrain.parallel.layout import box_shape
from megatrain.storage.untrusted_json import parse_json

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES[dtype]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class BlockCheck:
    """Checksums of consecutive blocks of a chunk that a GPU computes; `finish_checks` compares them."""

    name: str
    partial: Tensor
    """`partial_checksums`, int32 [blocks, some numbers]."""
    checksums: str
    """Checksums of the manifest."""


@dataclass
class ReadBuffer:
    """Memory for the blocks of one read after the other, uint8."""

    host: Tensor
    """Pinned, if copies to a GPU follow."""
    gpu: Tensor | None = None
    """Whole blocks on the GPU, where the checksums of `BLOCKS` are computed; None: on the host."""
    copied: torch.cuda.Event | None = None
    """The last copy to the GPU; None: there is none."""
    checks: list[BlockCheck] = field(default_factory=list)
    """Checks of all reads; `finish_checks` ends them."""

    @functools.cached_property
    def words(self) -> Tensor:
        """Blocks on the GPU, int64 [n, words of a block]."""
        assert self.gpu is not None
        return self.gpu.view(torch.int64).view(-1, BLOCKS.num_bytes // 8)


class TensorFile:
    """An open file of chunks. The header is checked on opening, each chunk when it is read."""

    def __init__(self, path: Path, stored: StoredFile) -> None:
        self.path = path
        self._file = open_regular_file(path)
        try:
            check_size(path, os.fstat(self._file.fileno()).st_size, stored.num_bytes)
            self._header, self._data_start = self._read_header(stored)
            self._data_bytes = stored.num_bytes - self._data_start
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def read(
        self,
        chunk: Chunk,
        dtype: str,
        blocks: BlockFormat,
        *,
        part: slice | None = None,
        buffer: ReadBuffer | None = None,
    ) -> Tensor:
        """Return elements of a chunk, flat; only the blocks that hold them are read and checked.

        Args:
            blocks: format of the blocks.
            part: range of elements in row-major order; None: the chunk.
            buffer: memory for the blocks and of the result; None or too small: it is allocated on the host.

        Raises:
            DamagedError: the chunk differs from its entry in the manifest. With a buffer on a GPU, `finish_checks` finds this.
        """
        start, size = self._find(chunk.key, dtype, box_shape(chunk.box))
        itemsize = DTYPES[dtype].itemsize
        part = part or slice(0, size // itemsize)
        first = part.start * itemsize // blocks.num_bytes
        low = first * blocks.num_bytes
        high = min(-(-part.stop * itemsize // blocks.num_bytes) * blocks.num_bytes, size)
        if buffer is None or len(buffer.host) < high - low:
            buffer = ReadBuffer(torch.empty(high - low, dtype=torch.uint8))
        tensor, name = buffer.host[: high - low], f"{self.path}: {chunk.key}"
        at = self._data_start + start + low
        if buffer.gpu is None:
            if not self._read_and_check(bytes_of(tensor), at, blocks, first, chunk.checksums):
                raise _damaged(name)
        else:
            assert blocks == BLOCKS
            if buffer.copied is not None:
                buffer.copied.synchronize()
            read_into(self._file, bytes_of(tensor), at, self.path)
            tensor = buffer.gpu[: high - low].copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                buffer.copied = torch.cuda.Event()
                buffer.copied.record()
            checksums = chunk.checksums[8 * first :]
            buffer.checks.append(begin_check_on_gpu(name, buffer.words, high - low, checksums))
        offset = part.start * itemsize - low
        return tensor[offset : offset + (part.stop - part.start) * itemsize].view(DTYPES[dtype])

    def _read_and_check(
        self, data: memoryview, at: int, blocks: BlockFormat, first: int, checksums: str
    ) -> bool:
        """Fill `data` with the blocks from `first` on; return whether they match their checksums."""
        for number, block in enumerate(blocks.blocks(data), start=first):
            read_into(self._file, block, at, self.path)
            # At once, while the block is in the processor's cache: later it would be read from memory again.
            if not blocks.matches(number, block, checksums):
                return False
            at += len(block)
        return True

    def _find(self, key: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the first byte of a chunk, counted from the header, and its size."""
        entry = self._header.get(key)
        if entry is None:
            raise DamagedError(f"{self.path}: has no {key}")
        size = math.prod(shape) * DTYPES[dtype].itemsize
        try:
            start, stop = entry["data_offsets"]
            is_consistent = entry["dtype"] == dtype and entry["shape"] == list(shape) and stop - start == size
            is_consistent = is_consistent and isinstance(start, int) and 0 <= start <= self._data_bytes - size
        except (KeyError, TypeError, ValueError):
            is_consistent = False
        if not is_consistent:
            raise DamagedError(f"{self.path}: {key} is not {dtype} of shape {shape}")
        return start, size

    def _read_header(self, stored: StoredFile) -> tuple[dict[str, Any], int]:
        length = bytearray(8)
        read_into(self._file, memoryview(length), 0, self.path)
        num_bytes = int.from_bytes(length, "little")
        if num_bytes > min(MAX_HEADER_BYTES, stored.num_bytes):
            raise DamagedError(f"{self.path}: a header of {num_bytes} bytes")
        text = bytearray(num_bytes)
        read_into(self._file, memoryview(text), 8, self.path)
        if zlib.crc32(text, zlib.crc32(length)) != stored.header_crc32:
            raise DamagedError(f"{self.path}: the header does not match its checksum")
        try:
            header = parse_json(bytes(text), max_bytes=MAX_HEADER_BYTES)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{self.path}: the header is not valid: {str(error)[:200]}") from error
        if not isinstance(header, dict):
            raise DamagedError(f"{self.path}: the header is not a JSON object")
        return header, 8 + num_bytes


def begin_check_on_gpu(name: str, words: Tensor, num_bytes: int, checksums: str) -> BlockCheck:
    """Begin to compute the checksums of the blocks in the first bytes of `words`, on its device.

    The bytes after `num_bytes` become zeros, to the end of the last block: zeros change no sum.

    Args:
        name: of the chunk, for errors.
        words: of whole blocks, int64 [n, words of a block].
        checksums: of the blocks, and possibly of more that follow.
    """
    num_blocks = -(-num_bytes // BLOCKS.num_bytes)
    if len(checksums) < 8 * num_blocks:
        raise _damaged(name)
    words = words[:num_blocks]
    if num_bytes % BLOCKS.num_bytes:
        words.view(-1).view(torch.uint8)[num_bytes:].zero_()
    return BlockCheck(name, partial_checksums(words, _bits(words.device)), checksums[: 8 * num_blocks])


def finish_checks(checks: Sequence[BlockCheck]) -> list[DamagedError]:
    """Wait for checks of one device; return an error for each that failed."""
    if not checks:
        return []
    partial = torch.cat([check.partial for check in checks]).cpu().numpy()
    found = np.bitwise_xor.reduce(partial, 1).view(np.uint32) ^ np.uint32(CRC32_OF_ZEROS)
    expected = np.frombuffer(bytes.fromhex("".join(check.checksums for check in checks)), ">u4")
    firsts = np.cumsum([0, *(len(check.partial) for check in checks[:-1])])
    is_damaged = np.logical_or.reduceat(found != expected, firsts)
    return [_damaged(check.name) for check, failed in zip(checks, is_damaged, strict=True) if failed]


def _damaged(name: str) -> DamagedError:
    return DamagedError(f"{name} does not match its checksum")


_BITS = threading.Lock()
"""Held while `_bits` is computed: another thread's copy of it could be freed in use."""


def _bits(device: torch.device) -> Tensor:
    with _BITS:
        return _bits_on(device)


@functools.cache
def _bits_on(device: torch.device) -> Tensor:
    return torch.from_numpy(crc32_of_bits().view("int32")).to(device)


def check_size(path: Path, num_bytes: int, written: int) -> None:
    """Raise DamagedError if a file has another size than was written."""
    if num_bytes != written:
        raise DamagedError(f"{path}: {num_bytes} bytes instead of {written}")
