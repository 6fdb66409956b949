"""--also-save torch_dist: copies of a run's checkpoints in Megatron-LM's format, as the converter writes them."""

import sys
from pathlib import Path

import pytest
import torch
from run_helpers import command_line

import pretrain
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.config import ConfigError, Facts, parse, resolve
from megatrain.interop.megatron.checkpoint import MegatronCheckpoint
from megatrain.parallel.layout import whole_box
from megatrain.training.megatron_copies import MegatronCopies

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
                values = [torch.empty(stored.shape) for _ in range(2)]
                for reader, out in zip((ours, theirs), values, strict=True):
                    box = whole_box(stored.shape)
                    reader.read_box(out, kind=kind, name=tensor, shape=stored.shape, box=box)
                assert torch.equal(*values), (tensor, kind)
    assert (copies / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert sorted(path.name for path in copies.glob("iter_*")) == ["iter_0000002"]


def test_a_copy_that_fails_is_a_warning_with_its_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho error: $5 does not exist >&2\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    copies = MegatronCopies(tmp_path)
    copies.waiting = tmp_path / "iter_0000003"
    (line,) = copies.advance(waits=True)
    assert line == f"> WARNING: no copy in {tmp_path}/torch_dist: the error stands above (exit code 2)"
    assert capfd.readouterr().err == f"error: {tmp_path}/iter_0000003 does not exist\n"
    assert not [*copies.advance(waits=True)]


def test_the_newest_checkpoint_waits_for_a_copy_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho $5 >> $6/begun; until [ -e $6/end ]; do sleep 0.02; done\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    copies = MegatronCopies(tmp_path)
    copies.folder.mkdir()
    for name in ("first", "second", "third"):
        copies.waiting = tmp_path / name
        assert not [*copies.advance(waits=False)]
    (copies.folder / "end").touch()
    assert not [*copies.advance(waits=True)]
    begun = (copies.folder / "begun").read_text().split()
    assert begun == [str(tmp_path / "first"), str(tmp_path / "third")]
    (copies.folder / "end").unlink()
    copies.waiting = tmp_path / "fourth"
    assert not [*copies.advance(waits=False)]
    copies.abandon()


@pytest.mark.parametrize(
    "flags", [{"--optimizer": "muon"}, {"--geglu": "", "--swiglu": None}, {"--norm-position": "post"}]
)
def test_what_the_format_does_not_hold_is_refused(flags: dict[str, str | None]) -> None:
    words = command_line({**COPIED, "--save": "c", **flags})
    with pytest.raises(ConfigError, match="--also-save torch_dist is not supported together with") as error:
        resolve(parse(words), Facts(vocab_size=101, eod_id=100))
    (problem,) = error.value.problems
    assert next(iter(flags)) in problem.text
    assert "remove --also-save" in problem.fix
