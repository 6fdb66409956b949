"""Manifests with a valid checksum and wrong content: such a checkpoint counts as damaged, in little time and memory."""

from __future__ import annotations

import json
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import load, one_rank, save, training_state
from hostile_manifests import HostileManifest, changed, hostile_manifests, signed

from megatrain.checkpoint.block_checksums import BLOCKS
from megatrain.checkpoint.errors import DamagedError, MismatchError
from megatrain.checkpoint.manifest import Chunk, StoredFile, tiling_problem
from megatrain.checkpoint.parts import read_manifest
from megatrain.checkpoint.tensor_file import TensorFile
from megatrain.config import Facts, StoredRun, parse, resolve
from megatrain.config.errors import ConfigError, NoCheckpointError
from megatrain.config.schema.tree import Config
from megatrain.storage.untrusted_json import InvalidError, parse_json

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --tokenizer-type NullTokenizer --vocab-size 29"
    " --mock-data --micro-batch-size 1 --global-batch-size 8 --train-iters 40 --lr 1e-3 --device cpu --fp16"
    " --max-position-embeddings 16"
).split()
DATASET = {"split": "all", "prefix": "a", "weight": None, "num_sequences": 3, "num_tokens": 9, "digest": "d"}
STATE = {
    "loss_scale": {"scale": 65536.0, "finite_steps": 3, "patience": -1},
    "expert_biases": {"decoder.layers.0.mlp.router": [0.1, -0.1]},
    "amax_history": {"decoder.layers.0.mlp.down.weight": [[0, 0.5]]},
    "datasets": [DATASET],
}


@pytest.fixture(scope="module")
def request_and_facts() -> tuple[Any, Facts]:
    return parse(FLAGS), Facts(device="cpu", vocab_size=29, eod_id=28)


@pytest.fixture
def folder(tmp_path: Path, request_and_facts: tuple[Any, Facts]) -> Path:
    """Iterations 10 and 20 of a run that stored everything that a run can store."""
    config = resolve(*request_and_facts).config.to_dict()
    for iteration in (10, 20):
        save(tmp_path, one_rank(), iteration, state=STATE, config=config)
    return tmp_path


def newest_manifest(folder: Path) -> Path:
    return folder / "iter_0000020" / "manifest.json"


def assert_printable(message: str) -> None:
    message.encode()
    assert len(message) < 1500


def outcome(file: Path, case: HostileManifest, request_and_facts: tuple[Any, Facts]) -> str:
    """Read the manifest and plan a run that continues from it; any error but those of checkpoints and plans is raised."""
    file.write_bytes(case.text)
    try:
        manifest = read_manifest(file.parent)
    except DamagedError as error:
        assert_printable(str(error))
        return "damaged"
    except MismatchError:
        return "another version"
    request, _ = request_and_facts
    stored = StoredRun.of(manifest, path=str(file.parent))
    known = Facts.from_json(Facts(device="cpu", vocab_size=29, eod_id=28, checkpoint=stored).to_json())
    try:
        resolve(request, known)
    except ConfigError as error:
        str(error).encode()
        return "other settings"
    return "valid"


def check(folder: Path, cases: list[HostileManifest], request_and_facts: tuple[Any, Facts]) -> None:
    file = newest_manifest(folder)
    wrong = []
    for case in cases:
        found = outcome(file, case, request_and_facts)
        if case.is_refused and found not in ("damaged", "another version"):
            wrong.append((case.name, found))
    assert not wrong


def all_cases(folder: Path) -> list[HostileManifest]:
    content = json.loads(newest_manifest(folder).read_text())
    del content["state"]["seen"]  # not a value that any program reads
    return list(hostile_manifests(content))


def test_the_unchanged_manifest_is_valid(folder: Path, request_and_facts: tuple[Any, Facts]) -> None:
    text = newest_manifest(folder).read_bytes()
    assert signed(json.loads(text)) == text
    assert (
        outcome(
            newest_manifest(folder), HostileManifest("", lambda: json.loads(text), False), request_and_facts
        )
        != "damaged"
    )


def test_hostile_manifests_are_damage(folder: Path, request_and_facts: tuple[Any, Facts]) -> None:
    cases = all_cases(folder)
    of_state = [case for case in cases if not case.name.startswith("config") and "huge" not in case.name]
    check(
        folder,
        of_state[::24] + [case for case in cases if case.name.startswith("config")][::240],
        request_and_facts,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
def test_all_hostile_manifests_are_damage(
    folder: Path, request_and_facts: tuple[Any, Facts], part: int
) -> None:
    check(folder, all_cases(folder)[part::8], request_and_facts)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("state", "schedule", "lr"), "1e-3", "state.schedule.lr '1e-3' is not a finite number"),
        (("state", "loss_scale", "scale"), float("nan"), "state.loss_scale.scale nan is not a finite number"),
        (("state", "datasets", 0, "num_tokens"), -1, "state.datasets[0].num_tokens -1 is not at least 0"),
        (("config", "model", "num_layers"), None, "config.model.num_layers None is not an integer"),
        (
            ("config", "model", "normalization"),
            "\x1b[2J",
            "config.model.normalization '\\x1b[2J' is not one of",
        ),
        (("consumed_train_samples",), 10**8, "consumed_train_samples 100000000 at iteration 20"),
    ],
)
def test_a_run_falls_back_and_names_the_value(folder: Path, path: Any, value: Any, reason: str) -> None:
    file = newest_manifest(folder)
    file.write_bytes(signed(changed(json.loads(file.read_text()), path, value)))
    loaded = load(folder, one_rank())
    assert loaded.iteration == 10
    assert reason in loaded.skipped[0]


def test_with_no_older_checkpoint_the_exit_code_is_3(folder: Path) -> None:
    for file in folder.glob("iter_*/manifest.json"):
        file.write_bytes(
            signed(changed(json.loads(file.read_text()), ("state", "datasets"), {"a": "\ud800"}))
        )
    with pytest.raises(NoCheckpointError) as caught:
        load(folder, one_rank())
    assert caught.value.exit_code == 3
    str(caught.value).encode()


def test_a_save_does_not_commit_what_no_run_could_read(tmp_path: Path) -> None:
    save(tmp_path, one_rank(), 10)
    with pytest.raises(Exception, match=r"state\.pass_size 'x'"):
        save(tmp_path, one_rank(), 20, state={"pass_size": "x"})
    assert load(tmp_path, one_rank()).skipped == ()


def test_a_chunk_is_never_larger_than_memory(folder: Path) -> None:
    """A sparse file of a petabyte costs nothing."""
    file = newest_manifest(folder)
    content = json.loads(file.read_text())
    for tensor in content["tensors"].values():
        tensor["shape"] = [1 << 48]
        for kind in tensor["kinds"].values():
            kind["chunks"] = [kind["chunks"][0] | {"box": [[0, 1 << 48]]}]
    file.write_bytes(signed(content))
    with pytest.raises(DamagedError, match="box"):
        read_manifest(file.parent)


@pytest.mark.parametrize("count", [8000, 100_000])
def test_overlapping_chunks_take_linear_time(count: int) -> None:
    boxes = [((0, 2), (number // 2, number // 2 + 1)) for number in range(count)]
    start = time.process_time()
    assert "overlap" in str(tiling_problem((2, count), boxes))
    assert tiling_problem((2, count), [((0, 2), (number, number + 1)) for number in range(count)]) is None
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "header",
    [b"[" + b"{}," * 1_000_000 + b"0]", b"[" * 10_000, b"[]", b'{"k": [1]}', b'{"k": "\\ud800"}', b"\xff"],
)
def test_a_hostile_header_is_damage(tmp_path: Path, header: bytes) -> None:
    content = len(header).to_bytes(8, "little") + header + bytes(16)
    path = tmp_path / "shard.safetensors"
    path.write_bytes(content)
    stored = StoredFile(len(content), zlib.crc32(content[:-16]))
    with pytest.raises(DamagedError, match=r"shard\.safetensors: "), TensorFile(path, stored) as file:
        file.read(Chunk("", "k", ((0, 4),), "00000000"), "F32", BLOCKS)


def test_pairs_of_surrogates_are_characters() -> None:
    assert parse_json(json.dumps("\U0001f600").encode(), max_bytes=100) == "\U0001f600"
    with pytest.raises(InvalidError, match="more than the limit of 3"):
        parse_json(b"[11]", max_bytes=3)


def test_the_default_configuration_of_every_section_is_described() -> None:
    """Each field of the configuration has a type that a check is known for."""
    assert set(Config().to_dict()) >= {"model", "data", "tokenizer"}
    assert training_state(1)["pass_size"] == 8
