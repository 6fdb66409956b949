"""Norms are computed twice where that is nearly free, and a line says what it costs."""

import pytest

from megatrain.config import Facts, parse, resolve
from megatrain.config.derive.model import percent_of_norms

SHAPE = (
    "--num-layers 1 --num-attention-heads 4 --seq-length 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 99"
    " --micro-batch-size 1 --train-iters 1 --lr 1e-3 --position-embedding-type rope --bf16"
)


def plan(flags, device="cuda"):
    return resolve(parse([*SHAPE.split(), *flags.split()]), Facts(device=device, vocab_size=99, eod_id=98))


@pytest.mark.parametrize(
    ("flags", "device", "expected"),
    [
        ("--hidden-size 4096", "cuda", True),
        ("--hidden-size 8192", "cuda", True),
        ("--hidden-size 768", "cuda", False),
        ("--hidden-size 768 --recompute-norms", "cuda", True),
        ("--hidden-size 4096 --no-recompute-norms", "cuda", False),
        ("--hidden-size 4096", "cpu", False),
        ("--hidden-size 4096 --norm-position post", "cuda", False),
        ("--hidden-size 4096 --recompute-activations", "cuda", False),
    ],
)
def test_what_is_left_open_follows_the_cost(flags, device, expected):
    assert plan(flags, device).config.training.recompute_norms is expected


def test_the_cost_is_told_with_the_way_to_keep_norms():
    (line,) = [note for note in plan("--hidden-size 4096").notes if "norms are computed twice" in note]
    assert line == (
        "norms are computed twice: it takes about 0.4 % of a step at --hidden-size 4096, and what two norms a layer give is"
        " not kept (--no-recompute-norms keeps it)"
    )
    assert not [
        note for note in plan("--hidden-size 4096 --recompute-norms").notes if "computed twice" in note
    ]


def test_wider_models_pay_a_smaller_share():
    assert percent_of_norms(4096) == pytest.approx(0.41, abs=0.01)
    assert percent_of_norms(8192) == pytest.approx(percent_of_norms(4096) / 2)
