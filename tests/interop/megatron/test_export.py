"""Checkpoints of Megatron-LM pass through megatrain: what is written for Megatron-LM equals what it wrote, to the last bit."""

import dataclasses
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from everyday import nightly
from megatron_torch_files import write_torch_files
from torch.distributed.checkpoint import FileSystemReader

from megatrain.checkpoint.manifest import MANIFEST_NAME, encode
from megatrain.checkpoint.parts import read_manifest
from megatrain.interop.megatron.checkpoint import MegatronCheckpoint
from megatrain.interop.megatron.inert_pickle import Record, path_of
from megatrain.interop.megatron.torch_dist import TorchDistFolder
from megatrain.parallel.layout import whole_box
from megatrain.tools.main import main

ALWAYS = ("dsv3", "llama")
CASES = [
    case if case in ALWAYS else pytest.param(case, marks=pytest.mark.nightly)
    for case in ("dsv3", "gpt2", "llama", "mixtral", "mtp", "qwen3moe")
]
NOT_WRITTEN = {"rng_state", "rerun_state_machine_state"}
DIFFERENT = {
    "kv_channels",  # of latent attention: Megatron-LM stores a value that it does not use
    "add_qkv_bias",  # likewise, next to biases of all products
    "vocab_size",  # the rows of padding are kept, as tokens
    "yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int", "tiktoken_pattern",  # defaults, unused
}  # fmt: skip
"""Arguments whose value differs where it has no effect."""
LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size", "world_size",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_exported_checkpoint_equals_the_original(case: str, golden_text: Path, tmp_path: Path) -> None:
    source = golden_text.parent / "training" / f"{case}.ckpt"
    assert_same_after_both_conversions(source, tmp_path, "--vocab-size", "3072")


@pytest.mark.parametrize(
    ("folder", "case"),
    [
        nightly("bert", "bert"),
        ("t5", "t5"),
        nightly("gdn", "qwen3next"),
        ("gdn", "gdn"),
        nightly("hybrid", "mamba"),
        ("hybrid", "nemotron"),
    ],
)
def test_exported_families_equal_the_original(folder: str, case: str, families: Path, tmp_path: Path) -> None:
    with tarfile.open(families / folder / f"{case}.ckpt.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    words = () if case in ("bert", "t5") else ("--vocab-size", "256")
    assert_same_after_both_conversions(tmp_path / f"{case}.ckpt", tmp_path, *words)


def assert_same_after_both_conversions(source: Path, tmp_path: Path, *flags: str) -> None:
    """Convert a recorded checkpoint and back, and compare all tensors, objects and settings."""
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert main(["convert", "megatron-to-megatrain", str(source), str(ours), *flags]) == 0
    back.mkdir()
    (back / "latest_checkpointed_iteration.txt").write_text("4")  # of an earlier conversion
    assert main(["convert", "megatrain-to-megatron", str(ours), str(back)]) == 0
    assert sorted(path.name for path in back.iterdir()) == sorted(path.name for path in source.iterdir())
    for name in ("latest_checkpointed_iteration.txt", "iter_0000008/metadata.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()
    expected, found = (TorchDistFolder(folder / "iter_0000008") for folder in (source, back))
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        same = found.tensors[name]
        assert (same.shape, same.dtype, set(same.chunks)) == (
            tensor.shape,
            tensor.dtype,
            set(tensor.chunks),
        ), name
        assert torch.equal(
            found.read(name, whole_box(same.shape)), expected.read(name, whole_box(same.shape))
        ), name
    of_torch = [FileSystemReader(folder / "iter_0000008").read_metadata() for folder in (back, source)]
    for name, entry in of_torch[0].state_dict_metadata.items():
        same = of_torch[1].state_dict_metadata[name]
        assert getattr(entry, "properties", None) == getattr(same, "properties", None), name
    keys = {key for key in expected.object_names if key.split("/")[0] not in NOT_WRITTEN}
    assert set(found.object_names) == keys
    compare_common_state(*(folder.object("common_state")[0] for folder in (found, expected)))
    assert MegatronCheckpoint(back / "iter_0000008").manifest.state["has_optimizer"]


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        nightly("llama", {"tp": 2}),
        nightly("gpt2", {"tp": 2, "pp": 3}),
        ("mixtral", {"tp": 2, "ep": 2}),
        nightly("qwen3moe", {"pp": 3, "ep": 2}),
    ],
)
def test_a_recorded_run_over_ranks_keeps_its_layout(
    case: str, sizes: dict[str, int], golden_text: Path, tmp_path: Path
) -> None:
    recorded = golden_text.parent / "training" / f"{case}.ckpt"
    theirs = write_torch_files(recorded, tmp_path / "theirs", **sizes)
    ours, back = tmp_path / "ours", tmp_path / "back"
    convert = ["convert", "megatron-to-megatrain"]
    assert main([*convert, str(theirs), str(ours), "--vocab-size", "3072", "--allow-pickle"]) == 0
    assert main(["convert", "megatrain-to-megatron", str(ours), str(back)]) == 0
    assert main([*convert, str(back), str(tmp_path / "again")]) == 0
    first, last = (TorchDistFolder(folder / "iter_0000008") for folder in (recorded, back))
    for name, tensor in first.tensors.items():
        box = whole_box(tensor.shape)
        assert torch.equal(last.read(name, box), first.read(name, box)), name
    arguments = last.object("common_state")[0]["args"].state
    expected = torch.load(next(theirs.rglob("*.pt")), weights_only=False)["args"]
    for name in LAYOUT:
        assert arguments[name] == getattr(expected, name), name
    assert arguments["data_parallel_size"] == sizes.get("ep", 1)
    manifests = [read_manifest(folder / "iter_0000008") for folder in (ours, tmp_path / "again")]
    assert manifests[1].state == manifests[0].state
    for section in ("model", "experts", "optimizer", "schedule", "parallel"):
        assert manifests[1].config[section] == manifests[0].config[section], section


def test_a_model_that_megatron_cannot_compute_is_refused(
    golden_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = golden_text.parent / "training" / "llama.ckpt"
    assert main(["convert", "megatron-to-megatrain", str(source), str(tmp_path / "ours")]) == 0
    path = tmp_path / "ours" / "iter_0000008"
    manifest = read_manifest(path)
    cases: dict[str, dict[str, dict[str, Any]]] = {
        "use_parallel_residual True": {"model": {"use_parallel_residual": True}},
        "softmax_scale 0.3": {"model": {"softmax_scale": 0.3}},
        "norm_position both": {"model": {"norm_position": "both"}},
        "mamba_without_rmsnorm True": {"model": {"mamba_without_rmsnorm": True}},
        "a t5 with experts (--num-experts 4), whose layers are dense there,": {
            "model": {"model_family": "t5"},
            "experts": {"num_experts": 4},
        },
    }
    for words, changes in cases.items():
        config = manifest.config | {
            section: {**manifest.config[section], **values} for section, values in changes.items()
        }
        (path / MANIFEST_NAME).write_bytes(encode(dataclasses.replace(manifest, config=config)))
        capsys.readouterr()
        assert main(["convert", "megatrain-to-megatron", str(tmp_path / "ours"), str(tmp_path / "back")]) == 2
        assert f"{words} cannot be written for Megatron-LM" in capsys.readouterr().err
        assert not (tmp_path / "back").exists()


def compare_common_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    left_out = {"args", "rerun_state_machine", "num_floating_point_operations_so_far"}
    assert {key: value for key, value in found.items() if key != "args"} == {
        key: value for key, value in expected.items() if key not in left_out
    }
    ours, theirs = (plain(state["args"].state) for state in (found, expected))
    differences = {
        name: (value, theirs[name])
        for name, value in ours.items()
        if name in theirs and value != theirs[name]
    }
    assert differences.keys() <= DIFFERENT, {n: d for n, d in differences.items() if n not in DIFFERENT}
    assert len(ours.keys() & theirs.keys()) > 200


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return values in which records are their paths."""
    return {
        name: path_of(value) if isinstance(value, Record) or path_of(value) else value
        for name, value in values.items()
    }
