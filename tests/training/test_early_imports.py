"""flash-attn-4 is imported beside the start, and keeps what it compiles where it can."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatrain.config import Facts, parse, resolve
from megatrain.kernels.flash4 import flash4
from megatrain.training.early_imports import begin_imports

ROOT = Path(__file__).parents[2]
CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE"
FLAGS = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --mock-data --tokenizer-type NullTokenizer"
    " --vocab-size 99 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --position-embedding-type rope --bf16"
)
PLANS = {
    device: resolve(
        parse(FLAGS.split()),
        Facts(device=device, libraries={"flash-attn-4": "4.0.0b36"}, vocab_size=99, eod_id=98),
    )
    for device in ("cpu", "cuda")
}


@pytest.fixture(autouse=True)
def _library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of this name, that tells how it was imported."""
    cute = tmp_path / "site" / "flash_attn" / "cute"
    cute.mkdir(parents=True)
    (cute.parent / "__init__.py").touch()
    (cute / "__init__.py").write_text(
        "import torch\nmarked = torch.compiler.disable(len)\n@torch.compiler.disable()\ndef two(): ...\n"
    )
    (cute / "interface.py").write_text("_flash_attn_fwd = _flash_attn_bwd = max\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in (f"{CACHE}_DIR", f"{CACHE}_ENABLED"):
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flash4.cache_clear()
    yield
    flash4.cache_clear()


def test_it_is_imported_in_a_thread_and_keeps_its_kernels(tmp_path: Path) -> None:
    said: list[str] = []
    thread = begin_imports(PLANS["cuda"], said.append)
    assert thread is not None
    thread.join()
    assert "flash_attn.cute.interface" in sys.modules
    assert flash4().forward is max
    assert sys.modules["flash_attn.cute"].marked is len, "marking would import torch's compiler"
    assert torch.compiler.disable.__module__ == "torch.compiler"
    assert os.environ[f"{CACHE}_ENABLED"] == "1"
    assert Path(os.environ[f"{CACHE}_DIR"]) == tmp_path / "cache" / "megatrain" / "flash-attn-4"
    assert said == []


def test_other_runs_import_nothing() -> None:
    assert begin_imports(PLANS["cpu"], print) is None
    assert f"{CACHE}_ENABLED" not in os.environ


def test_a_folder_that_does_not_serve_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    (tmp_path / "file").touch()
    monkeypatch.setenv(f"{CACHE}_DIR", str(tmp_path / "file" / "cache"))
    begin_imports(PLANS["cuda"], said.append).join()
    assert f"{CACHE}_ENABLED" not in os.environ
    assert f"as they cannot be kept in '{tmp_path / 'file' / 'cache'}': " in said[0]


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    begin_imports(PLANS["cuda"], said.append).join()
    assert f"{CACHE}_ENABLED" not in os.environ
    assert "neither XDG_CACHE_HOME nor HOME is set" in said[0]


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{CACHE}_ENABLED", "0")
    begin_imports(PLANS["cuda"], print).join()
    assert os.environ[f"{CACHE}_ENABLED"] == "0"


def test_an_import_that_fails_is_told_where_the_library_is_needed(tmp_path: Path) -> None:
    (tmp_path / "site" / "flash_attn" / "cute" / "interface.py").write_text(
        "raise OSError('no libcuda here')\n"
    )
    begin_imports(PLANS["cuda"], print).join()
    with pytest.raises(OSError, match="no libcuda here"):
        flash4()


def test_a_step_imports_no_compiler() -> None:
    """What takes seconds and nothing here uses: torch.autograd.backward brings sympy where it is given gradients."""
    code = (
        "import sys, pretrain; code = pretrain.main(sys.argv[1:]); "
        "sys.exit(code or ', '.join({'sympy', 'torch._dynamo'} & set(sys.modules)) or 0)"
    )
    command = [sys.executable, "-c", code, *FLAGS.split(), "--device", "cpu"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
