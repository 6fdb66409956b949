"""flash-attn-4 is imported during start-up and caches compiled kernels if possible; Triton needs a cache."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import ROOT

from megatrain.config import ConfigError, Facts, parse, resolve
from megatrain.config.environment import triton_cache
from megatrain.config.errors import describe
from megatrain.kernels.attention.flash4 import flash4
from megatrain.training.launch.early_imports import check_triton_cache, start_imports

CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE"
FLAGS = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 8 --mock-data --tokenizer-type NullTokenizer"
    " --vocab-size 99 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --position-embedding-type rope --bf16 --attention-dropout 0"
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
    """Install a fake library of this name that records how it is imported."""
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


def test_it_is_imported_in_a_thread_and_caches_its_kernels(tmp_path: Path) -> None:
    said: list[str] = []
    thread = start_imports(PLANS["cuda"], said.append)
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
    assert start_imports(PLANS["cpu"], print) is None
    assert f"{CACHE}_ENABLED" not in os.environ


def test_an_unusable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    (tmp_path / "file").touch()
    monkeypatch.setenv(f"{CACHE}_DIR", str(tmp_path / "file" / "cache"))
    start_imports(PLANS["cuda"], said.append).join()
    assert f"{CACHE}_ENABLED" not in os.environ
    assert f"it cannot cache them in '{tmp_path / 'file' / 'cache'}': " in said[0]


def test_without_a_home_nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    start_imports(PLANS["cuda"], said.append).join()
    assert f"{CACHE}_ENABLED" not in os.environ
    assert "neither XDG_CACHE_HOME nor HOME is set" in said[0]


def test_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{CACHE}_ENABLED", "0")
    start_imports(PLANS["cuda"], print).join()
    assert os.environ[f"{CACHE}_ENABLED"] == "0"


@pytest.fixture
def no_triton_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_triton_variables")
def test_tritons_folder_is_created_and_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    check_triton_cache(PLANS["cpu"])
    assert not (tmp_path / "home").exists()
    check_triton_cache(PLANS["cuda"])
    assert list((tmp_path / "home" / ".triton" / "cache").iterdir()) == []
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "other"))
    assert triton_cache() == str(tmp_path / "other" / ".triton" / "cache")


@pytest.mark.usefixtures("no_triton_variables")
@pytest.mark.parametrize("folder", ["cache/file", "cache/file/triton", ""])
def test_an_unusable_folder_for_triton_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder) if folder else "")
    with pytest.raises(ConfigError, match="Triton cannot cache compiled kernels in") as caught:
        check_triton_cache(PLANS["cuda"])
    assert folder in str(caught.value) if folder else "its name is empty" in str(caught.value)
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "cluster.cache:Manager")
    check_triton_cache(PLANS["cuda"])


@pytest.mark.usefixtures("no_triton_variables")
def test_the_error_names_the_variable_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setenv("TRITON_CACHE_DIR", "/scratch/triton")
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError) as caught:
        check_triton_cache(PLANS["cuda"])
    problem, fix = describe(caught.value).splitlines()
    assert (
        problem
        == "error: Triton cannot cache compiled kernels in '/scratch/triton' (TRITON_CACHE_DIR, or else .triton/cache in TRITON_HOME or HOME): [Errno 13] Permission denied: '/scratch/triton'"
    )
    assert fix == "  fix: set TRITON_CACHE_DIR to a writable folder, such as one on each host's own disk"


def test_an_import_that_fails_is_reported_where_the_library_is_needed(tmp_path: Path) -> None:
    (tmp_path / "site" / "flash_attn" / "cute" / "interface.py").write_text(
        "raise OSError('no libcuda here')\n"
    )
    start_imports(PLANS["cuda"], print).join()
    with pytest.raises(OSError, match="no libcuda here"):
        flash4()


def test_a_step_imports_no_compiler() -> None:
    """torch.autograd.backward imports sympy, which takes seconds and is not needed here, if it gets gradients."""
    code = (
        "import sys, pretrain; code = pretrain.main(sys.argv[1:]); "
        "sys.exit(code or ', '.join({'sympy', 'torch._dynamo'} & set(sys.modules)) or 0)"
    )
    command = [sys.executable, "-c", code, *FLAGS.split(), "--device", "cpu"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
