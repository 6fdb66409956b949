"""Runs with Transformer Engine's layers, by a stand-in for the library: checkpoints and changes on resume."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from transformer_engine_stand_in import stand_in

import pretrain
from megatrain.config.plan import DerivedValue

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
    derivations = {
        **dict(module.DERIVATIONS),
        path: lambda draft: DerivedValue(draft.config.model.transformer_impl, "as given"),
    }
    with stand_in(), mock.patch.object(module, "DERIVATIONS", tuple(derivations.items())):
        yield


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["lm_loss"] for row in rows if "lm_loss" in row]


def run(folder: Path, *implementations: str) -> list[float]:
    """Run four iterations with each implementation, from one checkpoint to the next; return all losses."""
    for number, implementation in enumerate(implementations, 1):
        flags = [*FLAGS.split(), "--save", str(folder), "--load", str(folder)]
        code = pretrain.main([*flags, "--transformer-impl", implementation])
        assert code == (ENDED if number == len(implementations) else STOPPED)
    return losses(folder)


def test_checkpoints_are_shared_by_both_implementations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = run(tmp_path / "local", "local", "local", "local")
    assert CHANGED not in capsys.readouterr().out
    mixed = run(tmp_path / "mixed", "transformer_engine", "local", "transformer_engine")
    assert CHANGED in capsys.readouterr().out
    assert len(expected) == 12
    assert mixed == pytest.approx(expected, rel=1e-11)
