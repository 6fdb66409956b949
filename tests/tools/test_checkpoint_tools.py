"""`megatrain checkpoint`: each subcommand on a run's folder, on a damaged one, and on folders that are none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from canonical_weights import hash_tensors
from safetensors import safe_open
from safetensors.torch import load_file

import pretrain
from megatrain.checkpoint.reader import CheckpointReader, verify
from megatrain.tools.checkpoint import rewrite
from megatrain.tools.checkpoint.contents import Statistics
from megatrain.tools.main import main

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --normalization RMSNorm --swiglu --seq-length 16"
    " --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --mock-data"
    " --tokenizer-type NullTokenizer --vocab-size 101 --micro-batch-size 1 --train-iters 4 --lr 1e-3 --eval-iters 0"
    " --device cpu --save-interval 1"
).split()
KINDS = ("weight", "exp_avg", "exp_avg_sq")
WEIGHT = "embedding.word_embeddings.weight"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of iterations 1 to 4."""
    folder = tmp_path_factory.mktemp("run")
    assert pretrain.main([*RUN, "--save", str(folder)]) == 0
    return folder


@pytest.fixture
def folder(run_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_marks_committed_partial_and_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "iter_0000002" / "manifest.json").write_text("{}")
    (folder / "iter_0000005.tmp-ab12cd34").mkdir()
    assert main(["checkpoint", "ls", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if "iter_" in line and "manifest" not in line] == [
        ["1", "committed"], ["2", "damaged"], ["3", "committed"], ["4", "committed"], ["partial", "0"],
    ]  # fmt: skip
    assert main(["checkpoint", "ls", str(folder), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["status"] for entry in entries] == [
        "committed",
        "damaged",
        "committed",
        "committed",
        "partial",
    ]
    newest = entries[3]
    assert (newest["iteration"], newest["consumed_train_samples"]) == (4, 4)
    assert newest["num_bytes"] == sum(file.stat().st_size for file in (folder / "iter_0000004").iterdir())
    assert 0 <= newest["age_seconds"] < 600
    assert "manifest.json" in entries[1]["problem"]


def test_files_on_other_nodes_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "iter_0000004" / "node_files.json").write_text("[]")
    for action in ("ls", "verify"):
        assert main(["checkpoint", action, str(folder)]) == 0
        assert capsys.readouterr().out.count("0 of 1 files are on this node, the others on other nodes") == 1


def test_verify_reads_every_byte(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert capsys.readouterr().out.count("intact") == 4
    flip_last_byte(folder / "iter_0000003" / "shard_00000.safetensors")
    assert main(["checkpoint", "verify", str(folder)]) == 3
    printed = capsys.readouterr().out
    assert printed.count("intact,") == 3
    assert "iter_0000003/shard_00000.safetensors" in printed
    assert "fix: " in printed
    assert main(["checkpoint", "verify", f"{folder}/iter_0000004"]) == 0


@pytest.mark.parametrize("action", ["ls", "verify", "inspect", "prune --keep-last 2"])
def test_a_folder_without_checkpoints_is_named(
    tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *flags = action.split()
    folder = tmp_path / "empty"
    assert main(["checkpoint", name, str(folder), *flags]) == 2
    assert f"{folder} does not exist" in capsys.readouterr().err
    folder.mkdir()
    assert main(["checkpoint", name, str(folder), *flags]) == 3
    printed = capsys.readouterr().err
    assert f"{folder} has no valid checkpoint" in printed
    assert "fix: " in printed
    folder.rmdir()
    folder.write_text("")
    assert main(["checkpoint", name, str(folder), *flags]) == 2
    assert f"{folder} is a file, not a folder" in capsys.readouterr().err


def test_inspect_prints_state_settings_and_tensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    for words in (
        "iteration               4",
        "--hidden-size 32",
        "consumed_valid_samples",
        "exp_avg_sq F32",
        WEIGHT,
    ):
        assert words in printed
    assert "--adam-beta1" not in printed, "a default"
    assert "norm " not in printed.partition("tensors\n")[2]
    assert main(["checkpoint", "inspect", str(folder), "--norms"]) == 0
    assert "norm " in capsys.readouterr().out.partition("tensors\n")[2]


def test_inspect_counts_what_is_not_finite(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "iter_0000004"
    words = ["checkpoint", "inspect", str(path), "--norms", "--json", "--tensors", WEIGHT]
    assert main(words) == 0
    (row,) = json.loads(capsys.readouterr().out)["tensors"]
    with CheckpointReader(path) as reader:
        values = reader.values(WEIGHT, (101, 32))
    assert row["shape"] == [101, 32]
    assert row["kinds"]["weight"]["norm"] == pytest.approx(float(values.double().norm()), rel=1e-12)
    assert row["kinds"]["weight"]["largest"] == pytest.approx(float(values.abs().max()))
    assert row["kinds"]["weight"]["not_finite"] == 0
    statistics = Statistics()
    statistics.add(torch.tensor([1.0, float("nan"), -3.0, float("inf")]))
    assert (statistics.num_not_finite, statistics.largest, statistics.sum_of_squares) == (2, 3.0, 10.0)
    assert main(["checkpoint", "inspect", str(path), "--tensors", "nothing*"]) == 2
    assert "--tensors nothing*" in capsys.readouterr().err


def test_diff_names_the_tensors_that_differ(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (str(folder / f"iter_000000{n}") for n in (3, 4))
    assert main(["checkpoint", "diff", one, one, "--all"]) == 0
    assert "equal in every bit" in capsys.readouterr().out
    assert main(["checkpoint", "diff", one, other]) == 1
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if WEIGHT in line)
    with CheckpointReader(Path(one)) as first, CheckpointReader(Path(other)) as second:
        values = [reader.values(WEIGHT, (101, 32)) for reader in (first, second)]
    gap = float((values[0] - values[1]).abs().max())
    assert float(line.split()[2]) == pytest.approx(gap, rel=1e-3)
    assert float(line.split()[3]) == pytest.approx(gap / float(values[0].abs().max()), rel=1e-3)
    assert "exp_avg" not in printed


def test_prune_removes_or_says_what_it_would(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoint", "prune", str(folder), "--keep-last", "2"]
    assert main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("would remove") == 2
    assert len(list(folder.glob("iter_*"))) == 4
    assert main([*words, "--retain-interval", "2"]) == 0
    assert sorted(path.name for path in folder.glob("iter_*")) == [
        "iter_0000002",
        "iter_0000003",
        "iter_0000004",
    ]
    assert main([*words]) == 0
    assert main([*words]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert main(["checkpoint", "prune", str(folder), "--keep-last", "1"]) == 2
    assert "--keep-last 2" in capsys.readouterr().err


def test_prune_counts_only_checkpoints_whose_data_are_intact(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["checkpoint", "prune", str(folder), "--keep-last", "2"]
    for number in (4, 2):
        flip_last_byte(folder / f"iter_000000{number}" / "shard_00000.safetensors")
    assert main(words) == 0  # 3 and 1 are left to keep
    printed = capsys.readouterr().out
    assert f"{folder}/iter_0000004 is damaged, does not count and stays: " in printed
    assert len(list(folder.glob("iter_*"))) == 4
    for number in (3, 1):
        flip_last_byte(folder / f"iter_000000{number}" / "shard_00000.safetensors")
    assert main(words) == 3
    assert "every checkpoint is damaged; nothing is removed" in capsys.readouterr().err
    assert len(list(folder.glob("iter_*"))) == 4


def test_a_run_that_loaded_an_older_checkpoint_keeps_it(folder: Path) -> None:
    for number in (4, 3):
        flip_last_byte(folder / f"iter_000000{number}" / "shard_00000.safetensors")
    flags = ["--save", str(folder), "--load", str(folder), "--keep-last", "2", "--save-interval", "4"]
    assert pretrain.main([*RUN, *flags]) == 0
    assert sorted(path.name for path in folder.glob("iter_*")) == [
        f"iter_000000{number}" for number in (2, 3, 4)
    ]
    assert verify(folder / "iter_0000004") == verify(folder / "iter_0000002") == []


def test_of_two_reshards_to_one_target_one_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, write = tmp_path / "resharded", rewrite._write_files
    words = ["checkpoint", "reshard", str(folder), str(target), "--files", "1"]

    def write_after_another(*arguments: object) -> None:
        monkeypatch.setattr(rewrite, "_write_files", write)
        assert main(words) == 0
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rewrite, "_write_files", write_after_another)
    assert main(words) == 2
    assert f"{target}/iter_0000004: another process has created it" in capsys.readouterr().err
    assert [path.name for path in target.glob("iter_*")] == ["iter_0000004"]
    assert verify(target / "iter_0000004") == []


@pytest.mark.parametrize("num_files", [1, 3])
def test_reshard_keeps_every_bit(
    folder: Path, tmp_path: Path, num_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrite, "CHUNK_BYTES", 4000)
    target = tmp_path / "resharded"
    words = ["checkpoint", "reshard", str(folder), str(target), "--files", str(num_files)]
    assert main(words) == 0
    path = target / "iter_0000004"
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) == num_files
    sizes = [shard.stat().st_size for shard in shards]
    assert max(sizes) < 1.5 * min(sizes)
    assert verify(path) == []
    assert main(["checkpoint", "diff", str(folder), str(target), "--all"]) == 0
    for kind in KINDS:
        assert hash_tensors(path, kind) == hash_tensors(folder / "iter_0000004", kind)
    with CheckpointReader(path) as reader, CheckpointReader(folder / "iter_0000004") as source:
        assert (reader.manifest.state, reader.manifest.config) == (
            source.manifest.state,
            source.manifest.config,
        )
    assert main(words) == 2  # the target exists


def test_a_resharded_checkpoint_resumes(folder: Path, tmp_path: Path) -> None:
    assert (
        main(["checkpoint", "reshard", f"{folder}/iter_0000003", str(tmp_path / "other"), "--files", "2"])
        == 0
    )
    assert pretrain.main([*RUN, "--load", str(tmp_path / "other"), "--save", str(tmp_path / "end")]) == 0
    assert hash_tensors(tmp_path / "end" / "iter_0000004") == hash_tensors(folder / "iter_0000004")


@pytest.mark.parametrize("dtype", ["stored", "bf16"])
def test_exported_weights_are_plain_safetensors(folder: Path, tmp_path: Path, dtype: str) -> None:
    target = tmp_path / "weights"
    words = [
        "checkpoint",
        "export-weights",
        str(folder),
        str(target),
        "--dtype",
        dtype,
        "--max-file-gb",
        "2e-5",
    ]
    assert main(words) == 0
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    assert sorted(path.name for path in target.iterdir()) == [*files, "model.safetensors.index.json"]
    exported = {name: value for file in files for name, value in load_file(target / file).items()}
    with CheckpointReader(folder / "iter_0000004") as reader:
        assert set(exported) == set(index["weight_map"]) == set(reader.manifest.tensors)
        for name, tensor in reader.manifest.tensors.items():
            values = reader.values(name, tensor.shape)
            expected = values.bfloat16() if dtype == "bf16" else values
            assert torch.equal(exported[name], expected)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in exported.values())
    with safe_open(target / index["weight_map"][WEIGHT], "pt") as file:
        assert file.get_slice(WEIGHT).get_shape() == [101, 32]
    assert main(words) == 2  # the target exists


@pytest.mark.parametrize("action", ["reshard", "export-weights"])
def test_a_damaged_source_leaves_no_files(
    folder: Path, tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--files", "2"] if action == "reshard" else []
    first_chunk = folder / "iter_0000004" / "shard_00000.safetensors"
    data = bytearray(first_chunk.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[header : header + 100] = bytes(range(100))
    first_chunk.write_bytes(data)
    assert main(["checkpoint", action, str(folder), str(tmp_path / "target"), *flags]) == 1
    printed = capsys.readouterr().err
    assert "shard_00000.safetensors" in printed
    assert "fix: " in printed
    assert not list(tmp_path.glob("**/*.tmp-*"))
    assert not list((tmp_path / "target").glob("*"))


def test_a_checkpoint_of_megatron_is_recognised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "iter_0000100").mkdir()
    (tmp_path / "iter_0000100" / "common.pt").write_bytes(b"\x80\x04.")
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 3
    assert "megatrain convert megatron-to-megatrain" in capsys.readouterr().err
    (tmp_path / "iter_0000200").mkdir()
    (tmp_path / "iter_0000200" / "manifest.json").write_text("{}")
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 3
    assert "iter_0000200" in capsys.readouterr().err, "the newer one is damaged, and that is the reason"
