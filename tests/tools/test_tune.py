"""`megatrain tune`: the products of a run, and gains from times."""

import pytest
import torch

from megatrain.config.errors import ConfigError
from megatrain.config.product_algorithms import Product
from megatrain.tools import main
from megatrain.tools.tune import _TORCH, gains_of, products_of

RUN = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32 --lr 1e-3 --micro-batch-size 2"
    " --train-iters 1 --mock-data --vocab-size 256 --swiglu --normalization RMSNorm --position-embedding-type rope"
    " --disable-bias-linear --hidden-dropout 0 --attention-dropout 0"
)


def three(tokens: int, outputs: int, inputs: int) -> set[Product]:
    return {
        Product(tokens, outputs, inputs, False, True, False),
        Product(tokens, inputs, outputs, False, False, False),
        Product(outputs, inputs, tokens, True, False, True),
    }


@pytest.mark.parametrize(
    ("world_size", "flags", "tp"), [(1, "", 1), (2, "--tensor-model-parallel-size 2", 2)]
)
def test_the_products_of_a_run_are_those_of_its_layers_and_its_head(
    world_size: int, flags: str, tp: int
) -> None:
    found = products_of([*RUN.split(), "--bf16", "--world-size", str(world_size), *flags.split()])
    layers = {(192 // tp, 64), (64, 64 // tp), (256 // tp, 64), (64, 128 // tp), (256 // tp, 64)}
    assert set(found) == set.union(*(three(64, *sizes) for sizes in layers))
    assert len(found) == len(set(found))


def test_a_run_in_fp32_has_none() -> None:
    with pytest.raises(ConfigError, match=r"no bf16 products[\s\S]*--bf16"):
        products_of([*RUN.split(), "--world-size", "1"])


def test_gains_compare_times_of_the_same_round() -> None:
    """The clock falls by half after the second of three rounds."""
    assert gains_of({_TORCH: [2.0, 2.0, 4.0], b"a": [1.0, 1.0, 2.0], b"b": [2.0, 4.0, 4.0]}) == {
        b"a": 2,
        b"b": 1,
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_a_host_without_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["tune", "--output", "a.json", *RUN.split()]) == 2
    assert "megatrain tune requires a GPU" in capsys.readouterr().err
