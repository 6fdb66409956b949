"""Runs with Transformer Engine's layers, by a stand-in for the library: checkpoints and changes on resume."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from canonical_weights import amaxes
from everyday import one_in
from metrics_files import logged_losses
from transformer_engine_fp8_stand_in import casting_once
from transformer_engine_stand_in import stand_in

import pretrain
from megatrain.config.plan import DerivedValue
from megatrain.config.registry import Derivation
from megatrain.model.implementations.transformer_engine_fp8 import TEFp8Linear
from megatrain.parallel.fp8.amax_history import AmaxHistory

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --normalization RMSNorm --swiglu --qk-layernorm"
    " --position-embedding-type rope --hidden-dropout 0.1 --attention-dropout 0 --seq-length 16 --mock-data"
    " --tokenizer-type NullTokenizer --vocab-size 101 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2"
    " --params-dtype float64 --eval-interval 4 --eval-iters 1 --train-iters 12 --exit-interval 4"
)
CHANGED = "--transformer-impl transformer_engine -> local"
ENDED, STOPPED = 0, 75


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    """Use the stand-in where --transformer-impl names the library, although it needs a GPU and 16 bits."""
    module = importlib.import_module("megatrain.config.resolve")
    path = "derived.transformer_impl"
    given = Derivation(lambda draft: DerivedValue(draft.config.model.transformer_impl, "as given"), path)
    derivations = tuple(given if one.path == path else one for one in module.DERIVATIONS)
    with stand_in(), mock.patch.object(module, "DERIVATIONS", derivations):
        yield


def run(folder: Path, *implementations: str, changes: str = "") -> list[float]:
    """Run four iterations with each implementation, from one checkpoint to the next; return all losses."""
    for number, implementation in enumerate(implementations, 1):
        flags = [*FLAGS.split(), *changes.split(), "--save", str(folder), "--load", str(folder)]
        code = pretrain.main([*flags, "--transformer-impl", implementation])
        assert code == (ENDED if number == len(implementations) else STOPPED)
    return logged_losses(folder)


def test_checkpoints_are_shared_by_both_implementations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = run(tmp_path / "local", "local", "local", "local")
    assert CHANGED not in capsys.readouterr().out
    mixed = run(tmp_path / "mixed", "transformer_engine", "local", "transformer_engine")
    assert CHANGED in capsys.readouterr().out
    assert len(expected) == 12
    assert mixed == pytest.approx(expected, rel=1e-11)


DELAYED = "--fp8-format hybrid --fp8-amax-history-len 3 --fp8-amax-compute-algo max --fp8-margin 1"
ENGINE = "transformer_engine"


def test_both_implementations_continue_the_history_of_delayed_scales(tmp_path: Path) -> None:
    """Names, amaxes of three micro-batches, and scales are the same. Later losses differ, since codes at a boundary may flip."""
    changes = f"{DELAYED} --global-batch-size 6 --train-iters 8 --no-swiglu"
    expected = run(tmp_path / "local", "local", "local", changes=changes)
    mixed = run(tmp_path / "mixed", "local", ENGINE, changes=changes)
    assert mixed[:6] == pytest.approx(expected[:6], rel=1e-8)
    assert mixed == pytest.approx(expected, rel=1e-4)
    found = amaxes(tmp_path / "mixed")
    assert found == pytest.approx(amaxes(tmp_path / "local"), rel=1e-3)
    assert len(found) == 2 * 4 * 3  # layers, linear layers, tensors
    with mock.patch.object(AmaxHistory, "restore"):
        forgetful = run(tmp_path / "forgetful", "local", ENGINE, changes=changes)
    assert forgetful[4:6] != pytest.approx(expected[4:6], rel=1e-6)


@pytest.mark.parametrize("recipe", one_in(2, [DELAYED, "--fp8-format e4m3 --fp8-recipe blockwise"]))
def test_an_fp8_run_resumes_bit_for_bit(tmp_path: Path, recipe: str) -> None:
    changes = f"{recipe} --train-iters 8"
    whole = run(tmp_path / "whole", ENGINE, changes=f"{changes} --exit-interval 8")
    assert run(tmp_path / "parts", ENGINE, ENGINE, changes=changes) == whole
    assert bool(amaxes(tmp_path / "parts")) == (recipe == DELAYED)


def test_casts_of_weights_are_those_of_this_step(tmp_path: Path) -> None:
    """A cast for every micro-batch gives the same losses as the kept ones; one of an earlier step does not."""
    changes = "--fp8-format hybrid --fp8-recipe tensorwise --global-batch-size 6 --train-iters 4"
    kept = run(tmp_path / "kept", ENGINE, changes=changes)
    sharded = f"{changes} --data-parallel-sharding-strategy optim_grads_params"
    assert run(tmp_path / "cast", ENGINE, changes=sharded) == kept
    with mock.patch.object(TEFp8Linear, "casting", casting_once):
        assert run(tmp_path / "stale", ENGINE, changes=changes) != pytest.approx(kept, rel=1e-6)
