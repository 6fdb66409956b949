"""Files of the format `torch` that are missing, damaged or hostile: one clear sentence, exit code 2, and no code runs."""

import functools
import shutil
import tarfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from canonical_weights import check_damage, stored_values
from everyday import nightly
from megatron_torch_files import KINDS, write_torch_files

from megatrain.checkpoint.errors import CheckpointError
from megatrain.config.derive.vision import is_frozen
from megatrain.interop.megatron.checkpoint import MegatronCheckpoint
from megatrain.interop.megatron.torch_files import TorchFiles
from megatrain.parallel.layout import whole_box
from megatrain.tools.main import main

FILE = "mp_rank_01/model_optim_rng.pt"


@pytest.fixture(scope="module")
def stored(golden_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two tensor ranks."""
    source = golden_text.parent / "training" / "llama.ckpt"
    return write_torch_files(source, tmp_path_factory.mktemp("torch"), tp=2) / "iter_0000008"


class Attack:
    """Creates a file when a pickle of it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def changed(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        state = torch.load(file, weights_only=False)
        change(state)
        torch.save(state, file)

    return apply


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def transposed(state: dict[str, Any]) -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    state["model"][name] = state["model"][name].t().clone()


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing rank": (lambda file: shutil.rmtree(file.parent), "has no file of tensor rank 1"),
    "missing file": (Path.unlink, "No such file"),
    "truncated": (cut, "no archive of torch.save"),
    "other shape": (changed(transposed), "linear_fc1.weight has size"),
    "attack": (changed(lambda state: state.update(model=Attack(Path("attacked")))), "where names and values"),
    "moments": (
        changed(lambda state: state["optimizer"]["state"].update({0: {"exp_avg": torch.zeros(3)}})),
        "has size",
    ),
    "no layers": (changed(lambda state: state["model"].clear()), "chunks have"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_files_are_refused(
    fault: str,
    stored: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "run" / stored.name
    shutil.copytree(stored, copy)
    change, words = FAULTS[fault]
    change(copy / FILE)
    command = ["convert", "megatron-to-megatrain", str(copy), str(tmp_path / "ours"), "--allow-pickle"]
    assert main(command) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "attacked").exists()
    assert not (tmp_path / "ours").exists()


def test_the_flag_is_needed(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "megatron-to-megatrain", str(stored), str(tmp_path / "ours")]) == 2
    assert "add --allow-pickle" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "layout"),
    [nightly("bert", {"tp": 2}), ("bert", {"pp": 3}), ("t5", {"tp": 2}), nightly("t5", {"tp": 4})],
    ids=str,
)
def test_other_families_have_the_tensors_of_torch_dist(
    family: str, layout: dict[str, int], families: Path, tmp_path: Path
) -> None:
    with tarfile.open(families / family / f"{family}.ckpt.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"{family}.ckpt"
    found = whole(write_torch_files(source, tmp_path / "torch", **layout) / "iter_0000008")
    expected = whole(source / "iter_0000008")
    assert found.keys() == expected.keys()
    assert {name.split("/")[0] for name in found} == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "frozen", [("freeze_LM",), ("freeze_ViT",), ("freeze_LM", "freeze_ViT")], ids=" and ".join
)
def test_the_optimizer_has_nothing_of_frozen_parts(
    frozen: tuple[str, ...], families: Path, tmp_path: Path
) -> None:
    with tarfile.open(families / "vlm/llava.ckpt.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / "llava.ckpt/iter_0000008"
    prefixes = tuple({"freeze_LM": "language_model.", "freeze_ViT": "vision_model."}[one] for one in frozen)
    found = whole(write_frozen(source, tmp_path / "frozen", dict.fromkeys(frozen, True), prefixes))
    expected = whole(source)
    assert found.keys() < expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    missing = {name.partition("/")[2] for name in expected.keys() - found.keys()}
    trained = {name.partition("/")[2] for name in found if name.startswith("exp_avg/")}
    is_tower, is_language = (name in frozen for name in ("freeze_ViT", "freeze_LM"))
    assert all(is_frozen(name, tower=is_tower, language=is_language) for name in missing)
    assert not any(is_frozen(name, tower=is_tower, language=is_language) for name in trained)


def write_frozen(source: Path, target: Path, arguments: dict[str, Any], frozen: tuple[str, ...]) -> Path:
    """Write a checkpoint of one rank again as a run with frozen parts writes it."""
    files = TorchFiles(source)
    tensors = {name: files.read(name, whole_box(tensor.shape)) for name, tensor in files.tensors.items()}
    model = {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}
    groups: list[list[str]] = [[], []]
    for name, tensor in model.items():
        if not name.startswith(frozen):
            groups[tensor.dim() == 1 or name.endswith(".bias")].append(name)
    numbers = {name: number for number, name in enumerate([*groups[0], *groups[1]])}
    optimizer = {
        "state": {
            number: {kind: tensors[f"optimizer.state.{kind}.{name}"] for kind in KINDS}
            for name, number in numbers.items()
        },
        "param_groups": [
            {"wd_mult": factor, "step": 8, "params": [numbers[name] for name in group]}
            for factor, group in zip((1.0, 0.0), groups, strict=True)
        ],
    }
    common = files.object("common_state")
    plain = {
        name: value
        for name, value in common["args"].state.items()
        if isinstance(value, bool | int | float | str | None)
    }
    state = {
        "args": Namespace(**plain | arguments), "checkpoint_version": 3.0, "iteration": 8, "model": model,
        "optimizer": optimizer, "opt_param_scheduler": common["opt_param_scheduler"],
    }  # fmt: skip
    (target / "mp_rank_00").mkdir(parents=True)
    torch.save(state, target / "mp_rank_00/model_optim_rng.pt")
    return target


@pytest.mark.nightly
def test_damage_is_found_or_harmless(stored: Path, tmp_path: Path) -> None:
    read = functools.partial(MegatronCheckpoint, allows_format_torch=True)
    check_damage(stored, tmp_path / "copy", read, [FILE], CheckpointError, num_faults=200)


def whole(path: Path) -> dict[str, torch.Tensor]:
    return stored_values(MegatronCheckpoint(path, allows_format_torch=True))
