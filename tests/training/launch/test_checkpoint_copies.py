"""Copies of a run's checkpoints, as the converters write them: --also-save torch_dist, --save-hf-interval."""

import sys
from pathlib import Path

import pytest
import torch
from run_helpers import command_line

import pretrain
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.config import ConfigError, Facts, parse, resolve
from megatrain.interop.megatron.checkpoint import MegatronCheckpoint
from megatrain.training.checkpoint_copies import HfFolders, MegatronCopies

COPIED = {"--also-save": "torch_dist", "--max-position-embeddings": "64"}


def test_each_checkpoint_has_a_copy_with_its_tensors(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copies = tmp_path / "torch_dist"
    (copies / "iter_0000001").mkdir(parents=True)  # its checkpoint is gone
    assert pretrain.main(command_line({**COPIED, "--save": str(tmp_path)})) == 0
    printed = capfd.readouterr()
    assert f"{copies}/iter_0000002: 8 parameters" in printed.out, printed
    with CheckpointReader(tmp_path / "iter_0000002") as ours:
        theirs, tensors = MegatronCheckpoint(copies / "iter_0000002"), ours.manifest.model_tensors
        assert theirs.manifest.iteration == 2
        assert theirs.manifest.tensors.keys() == tensors.keys()
        for tensor, stored in tensors.items():
            for kind in stored.kinds:
                values = [reader.values(tensor, stored.shape, kind=kind) for reader in (ours, theirs)]
                assert torch.equal(*values), (tensor, kind)
    assert (copies / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert sorted(path.name for path in copies.glob("iter_*")) == ["iter_0000002"]


@pytest.mark.nightly
def test_folders_of_transformers_are_written_at_intervals(tmp_path: Path) -> None:
    flags = {"--train-iters": "3", "--save-interval": "1", "--save-hf-interval": "2", "--keep-last": "2"}
    llama = {
        "--swiglu": "",
        "--normalization": "RMSNorm",
        "--disable-bias-linear": "",
        "--position-embedding-type": "rope",
    }
    assert pretrain.main(command_line({**flags, **llama, "--save": str(tmp_path)})) == 0
    found = sorted((tmp_path / "hf").iterdir())
    assert [path.name for path in found] == ["iter_0000002", "iter_0000003"]
    with CheckpointReader(tmp_path / "iter_0000003") as ours:
        name, shape = "decoder.final_norm.weight", ours.manifest.tensors["decoder.final_norm.weight"].shape
        expected = ours.values(name, shape)
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(found[-1])
    assert torch.equal(model.model.norm.weight, expected)


def test_folders_of_transformers_stay_and_are_of_some_iterations(tmp_path: Path) -> None:
    folders = HfFolders(tmp_path, interval=4, last=10)
    assert [number for number in range(1, 11) if folders.takes(number)] == [4, 8, 10]


def test_a_model_that_transformers_lacks_is_refused(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = {
        "--save-interval": "1",
        "--save-hf-interval": "1",
        "--geglu": "",
        "--swiglu": None,
        "--norm-position": "post",
    }
    assert pretrain.main(command_line({**flags, "--save": str(tmp_path)})) == 2
    assert "fix: remove --save-hf-interval" in capfd.readouterr().err


def test_a_copy_that_fails_is_a_warning_with_its_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho error: $5 does not exist >&2\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    copies = MegatronCopies(tmp_path)
    copies.add(tmp_path / "iter_0000003")
    (line,) = copies.advance(waits=True)
    assert line == f"> WARNING: no copy in {tmp_path}/torch_dist: the error stands above (exit code 2)"
    assert capfd.readouterr().err == f"error: {tmp_path}/iter_0000003 does not exist\n"
    assert not [*copies.advance(waits=True)]


@pytest.mark.parametrize("kind", ["copies", "folders"])
def test_the_newest_checkpoint_waits_for_a_copy_that_takes_long_and_each_one_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    program = tmp_path / "python"
    waits = "until [ -e $folder/end ]; do sleep 0.02; done"
    program.write_text(
        f"#!/bin/sh\nfolder={tmp_path}; shift $(($# - 2)); echo $1 >> $folder/begun; {waits}\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    is_folders = kind == "folders"
    copies = HfFolders(tmp_path, interval=1, last=9) if is_folders else MegatronCopies(tmp_path)
    for name in ("first", "second", "third"):
        copies.add(tmp_path / name)
        assert not [*copies.advance(waits=False)]
    (tmp_path / "end").touch()
    assert not [*copies.advance(waits=True)]
    begun = [Path(path).name for path in (tmp_path / "begun").read_text().split()]
    assert begun == ["first", *(["second"] if is_folders else []), "third"]
    (tmp_path / "end").unlink()
    copies.add(tmp_path / "fourth")
    assert not [*copies.advance(waits=False)]
    copies.abandon()


LINEAR = '{"attention":{},"mlp":{"replace_with_linear":true}}'


@pytest.mark.parametrize(
    "flags",
    [
        {"--optimizer": "muon"},
        {"--geglu": "", "--swiglu": None},
        {"--norm-position": "post"},
        {"--heterogeneous-layers-config-encoded-json": f'{{"block_configs":[{",".join([LINEAR] * 4)}]}}'},
    ],
)
def test_what_the_format_does_not_hold_is_refused(flags: dict[str, str | None]) -> None:
    words = command_line({**COPIED, "--save": "c", **flags})
    with pytest.raises(ConfigError, match="--also-save torch_dist is not supported together with") as error:
        resolve(parse(words), Facts(vocab_size=101, eod_id=100))
    (problem,) = error.value.problems
    assert next(iter(flags)) in problem.text
    assert "remove --also-save" in problem.fix
