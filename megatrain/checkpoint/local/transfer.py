"""A file goes from the folder of one rank to the folders of others, or bytes to their memory, piece by piece."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.checkpoint.checked_files import open_regular_file, read_into
from megatrain.checkpoint.errors import CheckpointError
from megatrain.checkpoint.tensor_file import bytes_of
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGroup
from megatrain.storage.disk import Disk

_PIECE_BYTES = 64 << 20
"""Bytes of a file that are sent at once."""


@dataclass(frozen=True)
class Transfer:
    """A file that goes from the folder of one rank to the folders of others."""

    name: str
    num_bytes: int
    source: int
    targets: tuple[int, ...]


def send(
    folder: Path, transfer: Transfer, group: RankGroup, device: torch.device, rank: int, disk: Disk
) -> OSError | CheckpointError | None:
    """Send a file to the ranks that want it; all ranks of the group call it. An error is returned: the other ranks continue."""
    path, error = folder / transfer.name, None
    partial = path.with_name(f"{path.name}.part-{rank}")
    pieces = _pieces(path if rank == transfer.source else None, transfer.num_bytes, group, device)
    try:
        if rank in transfer.targets:
            partial.unlink(missing_ok=True)
            with disk.create(partial) as file:
                for piece in pieces:
                    disk.write(file, piece)
                disk.sync(file)
            disk.rename(partial, path)
    except (OSError, CheckpointError) as found:
        error = found
        with contextlib.suppress(OSError):  # a full disk gets the space back; the error is returned
            partial.unlink(missing_ok=True)
    try:
        for _ in pieces:  # the ranks that want nothing, and those that failed
            pass
    except (OSError, CheckpointError) as found:
        error = error or found
    return error


def send_bytes(
    content: bytes | None, num_bytes: int, group: RankGroup, device: torch.device, *, wants: bool
) -> bytes:
    """Return the bytes of the one rank that has `content`, or nothing on a rank that does not want them; all ranks call it."""
    found = []
    for start in range(0, num_bytes, _PIECE_BYTES):
        piece = torch.zeros(min(_PIECE_BYTES, num_bytes - start), dtype=torch.uint8)
        if content is not None:
            bytes_of(piece)[:] = content[start : start + len(piece)]
        piece = all_reduce(piece.to(device), group, "max")
        if wants:
            found.append(bytes(bytes_of(piece.cpu())))
    return b"".join(found)


def _pieces(
    path: Path | None, num_bytes: int, group: RankGroup, device: torch.device
) -> Iterator[memoryview]:
    """Yield the pieces of a file, from the one rank with a path; that rank raises its error after the last piece."""
    error: OSError | CheckpointError | None = None
    for start in range(0, num_bytes, _PIECE_BYTES):
        piece = torch.zeros(min(_PIECE_BYTES, num_bytes - start), dtype=torch.uint8)
        if path is not None and error is None:
            try:
                with open_regular_file(path) as file:
                    read_into(file, bytes_of(piece), start, path)
            except (OSError, CheckpointError) as found:
                error = found
        yield bytes_of(all_reduce(piece.to(device), group, "max").cpu())
    if error is not None:
        raise error


def raise_first(errors: Sequence[Exception | None]) -> None:
    """Raise the first error, if there is one."""
    for error in filter(None, errors):
        raise error
