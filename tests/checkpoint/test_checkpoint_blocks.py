"""Ranges of a chunk are verified by the checksums of their blocks, also of checkpoints with one checksum for a chunk."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import assert_same, load, one_rank, save, write_tensors

from megatrain.checkpoint.errors import DamagedError
from megatrain.checkpoint.manifest import StoredFile
from megatrain.checkpoint.reader import verify
from megatrain.checkpoint.shard_file import BLOCK_BYTES
from megatrain.checkpoint.tensor_file import TensorFile

torch.set_num_threads(1)

NUM_IN_BLOCK = BLOCK_BYTES // 4
SIZE = 3 * NUM_IN_BLOCK + 5


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(1))


def opened(path: Path, values: torch.Tensor) -> tuple[TensorFile, str]:
    written = write_tensors(path, [("pad", torch.ones(3)), ("key", values)])
    return TensorFile(path, StoredFile(written.num_bytes, written.header_crc32)), written.crc32s[1]


@pytest.mark.parametrize(
    "part",
    [
        slice(0, SIZE),
        slice(0, 1),
        slice(SIZE - 1, SIZE),
        slice(NUM_IN_BLOCK, 2 * NUM_IN_BLOCK),
        slice(NUM_IN_BLOCK - 1, NUM_IN_BLOCK + 1),
        slice(2 * NUM_IN_BLOCK + 7, SIZE - 2),
    ],
)
def test_a_range_equals_that_of_the_chunk(tmp_path: Path, values: torch.Tensor, part: slice) -> None:
    file, crc32s = opened(tmp_path / "a.safetensors", values)
    with file:
        found = file.read(
            "key", dtype="F32", shape=(SIZE,), crc32s=crc32s, block_bytes=BLOCK_BYTES, part=part
        )
    assert torch.equal(found, values[part])


def test_damage_is_found_in_the_block_that_is_read(tmp_path: Path, values: torch.Tensor) -> None:
    path = tmp_path / "a.safetensors"
    file, crc32s = opened(path, values)
    content = bytearray(path.read_bytes())
    content[-5 * 4 - NUM_IN_BLOCK * 4 + 3] ^= 16  # in the third block
    path.write_bytes(content)

    def read(start: int, stop: int) -> torch.Tensor:
        part = slice(start, stop)
        return file.read("key", dtype="F32", shape=(SIZE,), crc32s=crc32s, block_bytes=BLOCK_BYTES, part=part)

    with file:
        assert torch.equal(read(0, 2 * NUM_IN_BLOCK), values[: 2 * NUM_IN_BLOCK])
        assert torch.equal(read(3 * NUM_IN_BLOCK, SIZE), values[3 * NUM_IN_BLOCK :])
        for start, stop in ((0, SIZE), (2 * NUM_IN_BLOCK + 9, 2 * NUM_IN_BLOCK + 10)):
            with pytest.raises(DamagedError, match="key does not match its checksum"):
                read(start, stop)


def test_checkpoints_of_version_1_are_read(tmp_path: Path) -> None:
    """They have one checksum per chunk and no `block_bytes`."""
    rank = one_rank(seed=3)
    path = save(tmp_path, rank, 10)
    expected = rank.values()
    content = json.loads((path / "manifest.json").read_text())
    del content["checksum"], content["block_bytes"]
    content["version"] = 1
    for tensor in content["tensors"].values():
        for stored in tensor["kinds"].values():
            for chunk in stored["chunks"]:
                chunk["crc32"] = int(chunk.pop("crc32s"), 16)  # chunks of this model are single blocks
    content["checksum"] = zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    (path / "manifest.json").write_text(json.dumps(content))
    assert verify(path) == []
    rank.clear()
    load(tmp_path, rank)
    assert_same(rank.values(), expected)
