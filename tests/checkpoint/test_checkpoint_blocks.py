"""Ranges of a chunk are verified by the checksums of their blocks, also of checkpoints with one checksum for a chunk."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_helpers import assert_same, load, one_rank, save, training_state, write_tensors
from hostile_manifests import signed
from safetensors import safe_open

from megatrain.checkpoint import reader, tensor_file
from megatrain.checkpoint.block_checksums import (
    BLOCKS,
    CRC32_OF_ZEROS,
    NUM_SUMS,
    BlockFormat,
    checksum_of_sums,
    crc32_of_bits,
)
from megatrain.checkpoint.checked_files import read_into
from megatrain.checkpoint.chunks import CHUNK_BYTES
from megatrain.checkpoint.errors import DamagedError
from megatrain.checkpoint.manifest import Chunk, Manifest, StoredFile, StoredKind, StoredTensor, encode
from megatrain.checkpoint.reader import CheckpointReader, checks_on_gpu, verify
from megatrain.checkpoint.tensor_file import BlockCheck, TensorFile, begin_check_on_gpu, finish_checks

torch.set_num_threads(1)

BLOCK_BYTES = BLOCKS.num_bytes
NUM_IN_BLOCK = BLOCK_BYTES // 4
SIZE = 3 * NUM_IN_BLOCK + 5


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(1))


def opened(path: Path, values: torch.Tensor) -> tuple[TensorFile, str]:
    written = write_tensors(path, [("pad", torch.ones(3)), ("key", values)])
    return TensorFile(path, StoredFile(written.num_bytes, written.header_crc32)), written.checksums[1]


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
    file, checksums = opened(tmp_path / "a.safetensors", values)
    with file:
        found = file.read(Chunk("", "key", ((0, SIZE),), checksums), "F32", BLOCKS, part=part)
    assert torch.equal(found, values[part])


def test_damage_is_found_in_the_block_that_is_read(tmp_path: Path, values: torch.Tensor) -> None:
    path = tmp_path / "a.safetensors"
    file, checksums = opened(path, values)
    content = bytearray(path.read_bytes())
    content[-5 * 4 - NUM_IN_BLOCK * 4 + 3] ^= 16  # in the third block
    path.write_bytes(content)

    def read(start: int, stop: int) -> torch.Tensor:
        part = slice(start, stop)
        return file.read(Chunk("", "key", ((0, SIZE),), checksums), "F32", BLOCKS, part=part)

    with file:
        assert torch.equal(read(0, 2 * NUM_IN_BLOCK), values[: 2 * NUM_IN_BLOCK])
        assert torch.equal(read(3 * NUM_IN_BLOCK, SIZE), values[3 * NUM_IN_BLOCK :])
        for start, stop in ((0, SIZE), (2 * NUM_IN_BLOCK + 9, 2 * NUM_IN_BLOCK + 10)):
            with pytest.raises(DamagedError, match="key does not match its checksum"):
                read(start, stop)


def in_old_version(path: Path, version: int) -> None:
    """Rewrite the manifest of a checkpoint as an older version of the program wrote it."""
    content = json.loads((path / "manifest.json").read_text())
    content["version"] = version
    if version == 1:
        del content["block_bytes"]
    for tensor in content["tensors"].values():
        for stored in tensor["kinds"].values():
            for chunk in stored["chunks"]:
                del chunk["checksums"]
                with safe_open(path / chunk["file"], "pt") as file:
                    data = memoryview(file.get_tensor(chunk["key"]).numpy().tobytes())
                crc32s = BlockFormat(BLOCK_BYTES, zlib.crc32).checksums(data)
                chunk |= {"crc32": zlib.crc32(data)} if version == 1 else {"crc32s": crc32s}
    (path / "manifest.json").write_bytes(signed(content))


@pytest.mark.parametrize("version", [1, 2])
def test_checkpoints_of_older_versions_are_read_and_checked(tmp_path: Path, version: int) -> None:
    rank = one_rank(seed=3)
    path = save(tmp_path, rank, 10)
    expected = rank.values()
    in_old_version(path, version)
    assert verify(path) == []
    rank.clear()
    load(tmp_path, rank)
    assert_same(rank.values(), expected)
    content = bytearray((path / "shard_00000.safetensors").read_bytes())
    content[-3] ^= 1
    (path / "shard_00000.safetensors").write_bytes(content)
    assert any("does not match its checksum" in problem for problem in verify(path))


def sums_by_definition(data: bytes) -> int:
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    sums = [sum(words[lane::1023]) % (1 << 64) for lane in range(1023)]
    return zlib.crc32(b"".join(one.to_bytes(8, "little") for one in sums))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 8184, 8185, 8191, 8192, 3 * 8184 - 1, 100_000])
def test_the_checksum_is_that_of_its_definition(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert checksum_of_sums(memoryview(data)) == sums_by_definition(data)
    assert checksum_of_sums(memoryview(b"?" + data)[1:]) == sums_by_definition(data)  # not aligned
    assert checksum_of_sums(memoryview(b"\xff" * size)) == sums_by_definition(b"\xff" * size)


def damaged_blocks(block: bytes, chance: random.Random) -> Iterator[bytes]:
    """Yield what disks, networks and memory make of a block."""
    for _ in range(200):  # one bit
        at = chance.randrange(len(block))
        yield block[:at] + bytes([block[at] ^ 1 << chance.randrange(8)]) + block[at + 1 :]
    for size in (512, 4096, 65536):
        for _ in range(20):
            one, other = (size * place for place in chance.sample(range(len(block) // size), 2))
            pages = bytearray(block)
            pages[one : one + size] = bytes(size)  # zeroed
            yield bytes(pages)
            pages[one : one + size] = block[other : other + size]  # repeated
            yield bytes(pages)
            pages[other : other + size] = block[one : one + size]  # exchanged
            yield bytes(pages)
            yield block[:one] + chance.randbytes(size) + block[one + size :]
    for shift in (1, 4, 8, 512, 4096, 8184):
        yield block[shift:] + block[:shift]
    yield bytes(len(block))


def test_damage_of_a_block_changes_its_checksum() -> None:
    chance = random.Random(1)
    block = torch.randn(NUM_IN_BLOCK, generator=torch.Generator().manual_seed(4)).numpy().tobytes()
    intact = checksum_of_sums(memoryview(block))
    assert all(checksum_of_sums(memoryview(data)) != intact for data in damaged_blocks(block, chance))


def begun(name: str, data: bytes, checksums: str) -> BlockCheck:
    """Begin a check as on a GPU: in memory of whole blocks, with the remains of an earlier read after the data."""
    blocks = torch.frombuffer(bytearray(data) + b"\xff" * (-len(data) % BLOCK_BYTES), dtype=torch.uint8)
    words = blocks.view(torch.int64).view(-1, BLOCK_BYTES // 8)
    return begin_check_on_gpu(name, words, len(data), checksums)


def is_intact(data: bytes, checksums: str) -> bool:
    return not finish_checks([begun("a", data, checksums)])


@pytest.mark.parametrize("size", [1, 7, 8184, 8193, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 12345])
def test_sums_on_a_gpu_equal_those_of_the_host(size: int) -> None:
    for data in (random.Random(size).randbytes(size), b"\xff" * size):
        checksums = BLOCKS.checksums(memoryview(data))
        assert is_intact(data, checksums + "00000000")
        for number in range(len(checksums) // 8):
            wrong = f"{int(checksums[8 * number : 8 * number + 8], 16) ^ 1:08x}"
            others = checksums[: 8 * number], checksums[8 * number + 8 :]
            assert not is_intact(data, wrong.join(others))


def test_failed_checks_are_named() -> None:
    checks = []
    for number, size in enumerate((5, 3 * BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES)):
        data = random.Random(size).randbytes(size)
        read = data[:-1] + bytes([data[-1] ^ number % 2])
        checks.append(begun(f"part {number}", read, BLOCKS.checksums(memoryview(data))))
    failed = [error.problems[0].text for error in finish_checks(checks)]
    assert failed == ["part 1 does not match its checksum", "part 3 does not match its checksum"]
    assert finish_checks([]) == []


def test_a_missing_checksum_is_damage() -> None:
    data = bytes(BLOCK_BYTES) * 2
    with pytest.raises(DamagedError, match="a does not match its checksum"):
        begun("a", data, BLOCKS.checksums(memoryview(data))[:8])


def test_the_crc32_of_sums_is_that_of_their_bits() -> None:
    sums = np.random.default_rng(0).integers(0, 2**63, NUM_SUMS, np.uint64) * np.uint64(2) + np.uint64(1)
    is_set = np.bitwise_and(sums >> np.arange(64, dtype=np.uint64)[:, None], np.uint64(1)) == 1
    assert CRC32_OF_ZEROS ^ np.bitwise_xor.reduce(crc32_of_bits()[is_set]) == zlib.crc32(sums)


def test_sums_on_a_gpu_find_the_damage_of_a_block() -> None:
    chance = random.Random(1)
    block = torch.randn(NUM_IN_BLOCK, generator=torch.Generator().manual_seed(4)).numpy().tobytes()
    checksums = BLOCKS.checksums(memoryview(block * 2))
    assert is_intact(block * 2, checksums)
    for data in list(damaged_blocks(block, chance))[::4]:
        assert not is_intact(block + data, checksums)


def test_only_what_a_gpu_gets_in_the_format_that_is_written_is_checked_there() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert checks_on_gpu(gpu, BLOCKS)
    assert not checks_on_gpu(cpu, BLOCKS)
    assert not checks_on_gpu(gpu, BlockFormat(BLOCK_BYTES, zlib.crc32))
    assert not checks_on_gpu(gpu, BlockFormat(2 * BLOCK_BYTES))


@pytest.fixture(params=["cpu", "cpu, checked as on a gpu", "cuda"])
def device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The device that a box is read to; where it is checked is asserted."""
    name, *as_on_gpu = request.param.split(",")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if as_on_gpu:
        monkeypatch.setattr(reader, "checks_on_gpu", lambda _, blocks: blocks == BLOCKS)
    elif name == "cpu":
        monkeypatch.delattr(tensor_file, "begin_check_on_gpu")
    if as_on_gpu or name == "cuda":
        monkeypatch.delattr(BlockFormat, "matches")
    return name


@pytest.fixture(params=[CHUNK_BYTES, BLOCK_BYTES], ids=["whole chunks", "parts of chunks"])
def stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[Path, torch.Tensor]:
    """A checkpoint of one tensor in three chunks of rows and columns, read as they are or in several parts; and the tensor."""
    monkeypatch.setattr("megatrain.checkpoint.reader.CHUNK_BYTES", request.param)
    values = torch.randn(700, 2, 1100, generator=torch.Generator().manual_seed(2))
    boxes = [
        ((0, 400), (0, 2), (0, 1100)),
        ((400, 700), (0, 2), (0, 500)),
        ((400, 700), (0, 2), (500, 1100)),
    ]
    parts = [values[tuple(slice(*pair) for pair in box)].contiguous() for box in boxes]
    written = write_tensors(
        tmp_path / "a.safetensors", [(str(box), x) for box, x in zip(boxes, parts, strict=True)]
    )
    chunks = [
        Chunk("a.safetensors", str(box), box, crc) for box, crc in zip(boxes, written.checksums, strict=True)
    ]
    write_manifest(
        tmp_path, values, {"a.safetensors": StoredFile(written.num_bytes, written.header_crc32)}, chunks
    )
    return tmp_path, values


def write_manifest(
    folder: Path, values: torch.Tensor, files: dict[str, StoredFile], chunks: list[Chunk]
) -> None:
    """Write the manifest of a checkpoint of one tensor."""
    manifest = Manifest(
        iteration=10,
        consumed_train_samples=80,
        optimizer_step_count=10,
        state=training_state(10),
        config={},
        files=files,
        tensors={"t": StoredTensor(tuple(values.shape), {"weight": StoredKind("F32", tuple(chunks))})},
    )
    (folder / "manifest.json").write_bytes(encode(manifest))


def damage_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_any_box_equals_that_of_the_tensor(stored: tuple[Path, torch.Tensor], device: str) -> None:
    path, values = stored
    chance = random.Random(1)
    boxes = [tuple((0, size) for size in values.shape), ((699, 700), (1, 2), (1099, 1100))]
    boxes += [
        tuple(tuple(sorted(chance.sample(range(size + 1), 2))) for size in values.shape) for _ in range(20)
    ]
    with CheckpointReader(path) as checkpoint:
        for box in boxes:
            wanted = values[tuple(slice(*pair) for pair in box)]
            out = torch.empty(wanted.shape, dtype=torch.float64, device=device)
            checkpoint.read_box(out, kind="weight", name="t", shape=tuple(values.shape), box=box)
            assert torch.equal(out.cpu(), wanted.double()), box


@pytest.mark.parametrize("version", [1, 2])
def test_boxes_of_older_versions(stored: tuple[Path, torch.Tensor], version: int) -> None:
    path, values = stored
    in_old_version(path, version)
    shape, box = tuple(values.shape), ((390, 410), (0, 2), (400, 600))
    wanted = values[tuple(slice(*pair) for pair in box)]
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        out = torch.empty(wanted.shape, device=device)
        with CheckpointReader(path) as checkpoint:
            checkpoint.read_box(out, kind="weight", name="t", shape=shape, box=box)
        assert torch.equal(out.cpu(), wanted)


def test_a_read_to_the_cpu_leaves_cuda_alone(
    stored: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, values = stored

    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA is initialized")  # which a forked process could not do

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("current_device", "_lazy_init", "set_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    shape, out = tuple(values.shape), torch.empty_like(values)
    with CheckpointReader(path) as checkpoint:
        checkpoint.read_box(out, kind="weight", name="t", shape=shape, box=tuple((0, size) for size in shape))
    assert torch.equal(out, values)


READ_TO_THE_SECOND_GPU = """
import sys
import torch
from pathlib import Path
from megatrain.checkpoint.reader import CheckpointReader

torch.cuda.set_device(1)
path, shape = Path(sys.argv[1]), (700, 2, 1100)
out = torch.empty(shape, device="cuda:1")
with CheckpointReader(path) as checkpoint:
    checkpoint.read_box(out, kind="weight", name="t", shape=shape, box=tuple((0, size) for size in shape))
torch.save(out.cpu(), path / "read.pt")
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0)
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_read_to_the_second_gpu_leaves_the_first_alone(stored: tuple[Path, torch.Tensor]) -> None:
    path, values = stored
    subprocess.run(
        [sys.executable, "-c", READ_TO_THE_SECOND_GPU, str(path)], check=True
    )  # in a process without contexts
    assert torch.equal(torch.load(path / "read.pt"), values)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_read_follows_the_work_of_the_callers_stream(stored: tuple[Path, torch.Tensor]) -> None:
    path, values = stored
    shape, out = tuple(values.shape), torch.empty_like(values, device="cuda")
    with CheckpointReader(path) as checkpoint, torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(500_000_000)  # a few tenths of a second
        out.fill_(7)
        checkpoint.read_box(out, kind="weight", name="t", shape=shape, box=tuple((0, size) for size in shape))
        found = out.clone()
    assert torch.equal(found.cpu(), values)


def test_a_box_reads_only_its_blocks(
    stored: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, values = stored
    read: list[int] = []

    def counted(file: FileIO, target: memoryview, offset: int, path: Path) -> None:
        read.append(len(target))
        read_into(file, target, offset, path)

    out = torch.empty(3, 2, 1100)
    with CheckpointReader(path) as checkpoint:
        monkeypatch.setattr(tensor_file, "read_into", counted)
        checkpoint.read_box(
            out, kind="weight", name="t", shape=tuple(values.shape), box=((0, 3), (0, 2), (0, 1100))
        )
    assert max(read) <= BLOCK_BYTES
    assert sum(read) < 1.1 * BLOCK_BYTES
    assert torch.equal(out, values[:3])


def test_damage_in_a_part_is_an_error_of_the_box(stored: tuple[Path, torch.Tensor], device: str) -> None:
    path, values = stored
    damage_last_byte(path / "a.safetensors")
    box = tuple((0, size) for size in values.shape)
    out = torch.empty(values.shape, device=device)
    with (
        CheckpointReader(path) as checkpoint,
        pytest.raises(DamagedError, match="does not match its checksum"),
    ):
        checkpoint.read_box(out, kind="weight", name="t", shape=tuple(values.shape), box=box)


def test_boxes_that_were_begun_end_together(stored: tuple[Path, torch.Tensor], device: str) -> None:
    path, values = stored
    boxes = [((row, row + 50), (0, 2), (0, 1100)) for row in range(0, 700, 50)]
    shape = tuple(values.shape)
    out = torch.empty(shape, device=device)
    with CheckpointReader(path) as checkpoint:
        for box in boxes:
            checkpoint.begin_box(out[slice(*box[0])], kind="weight", name="t", shape=shape, box=box)
        checkpoint.finish()
    assert torch.equal(out.cpu(), values)


def test_damage_in_a_box_that_was_begun_is_an_error_at_the_end(
    stored: tuple[Path, torch.Tensor], device: str
) -> None:
    path, values = stored
    damage_last_byte(path / "a.safetensors")
    shape = tuple(values.shape)
    last, first = (((row, row + 1), (0, 2), (0, 1100)) for row in (699, 0))
    with CheckpointReader(path) as checkpoint:
        for box in (last, first):
            out = torch.empty(1, 2, 1100, device=device)
            checkpoint.begin_box(out, kind="weight", name="t", shape=shape, box=box)
        with pytest.raises(DamagedError, match="does not match its checksum"):
            checkpoint.finish()
        checkpoint.finish()  # an error is raised once


def test_leaving_the_reader_ends_the_boxes(stored: tuple[Path, torch.Tensor], device: str) -> None:
    path, values = stored
    damage_last_byte(path / "a.safetensors")
    shape = tuple(values.shape)
    out, box = torch.empty(shape, device=device), tuple((0, size) for size in shape)
    checkpoint = CheckpointReader(path)
    checkpoint.begin_box(out, kind="weight", name="t", shape=shape, box=box)
    with pytest.raises(DamagedError, match="does not match its checksum"):
        checkpoint.__exit__(None, None, None)


def test_an_error_drops_the_parts_that_have_not_begun(
    stored: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, values = stored
    shape, begun = tuple(values.shape), []

    def fail(file: FileIO, target: memoryview, offset: int, path: Path) -> None:
        begun.append(offset)
        time.sleep(0.05)
        raise DamagedError("cannot be read")

    monkeypatch.setattr(reader, "_MAX_THREADS", 1)
    with CheckpointReader(path) as checkpoint:
        first = torch.empty(1, 2, 1100)
        checkpoint.read_box(first, kind="weight", name="t", shape=shape, box=((0, 1), (0, 2), (0, 1100)))
        monkeypatch.setattr(tensor_file, "read_into", fail)
        for row in range(100):
            out = torch.empty(1, 2, 1100)
            checkpoint.begin_box(
                out, kind="weight", name="t", shape=shape, box=((row, row + 1), (0, 2), (0, 1100))
            )
        with pytest.raises(DamagedError, match="cannot be read"):
            checkpoint.finish()
    assert len(begun) <= 3


def test_few_files_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_OPEN_FILES", 3)
    values = torch.randn(10, 5)
    chunks, files = [], {}
    for row in range(10):
        name = f"{row}.safetensors"
        written = write_tensors(tmp_path / name, [("t", values[row : row + 1])])
        files[name] = StoredFile(written.num_bytes, written.header_crc32)
        chunks.append(Chunk(name, "t", ((row, row + 1), (0, 5)), written.checksums[0]))
    write_manifest(tmp_path, values, files, chunks)
    out, most = torch.empty(10, 5), 0
    with CheckpointReader(tmp_path) as checkpoint:
        for row in range(10):
            checkpoint.begin_box(
                out[row : row + 1], kind="weight", name="t", shape=(10, 5), box=((row, row + 1), (0, 5))
            )
            most = max(most, len(checkpoint._files))
        checkpoint.begin_box(out, kind="weight", name="t", shape=(10, 5), box=((0, 10), (0, 5)))
        most = max(most, len(checkpoint._files))
    assert most == 3
    assert torch.equal(out, values)
