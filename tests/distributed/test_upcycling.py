"""Runs that start from a dense model: every expert is a copy of its MLP, or a part of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from metrics_files import logged_losses
from run_here import folder_flags, train_here
from torch import Tensor

from megatrain.checkpoint.reader import CheckpointSource
from megatrain.checkpoint.upcycling import UpcycledSource, Upcycling
from megatrain.parallel.initialize import InitialWeights
from megatrain.parallel.layout import Box, BoxRange, Init, ParamLayout, Piece
from megatrain.tools.worker_pool import WorkerPool

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-layer-freq [0,1]*2 --moe-use-upcycling".split()
CUBIC = "--no-swiglu --squared-relu".split()
"""With a squared activation the parts of a copy sum to the MLP exactly; a gate makes that an approximation."""
PARTS = "--moe-ffn-hidden-size 24 --moe-upcycling-granularity 2".split()
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall".split()


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        pytest.param([], ["--moe-ffn-hidden-size", "48", *EP2], marks=pytest.mark.nightly),
        (CUBIC, [*PARTS, *EP2]),
        pytest.param(CUBIC, [*PARTS, "--expert-tensor-parallel-size", "2"], marks=pytest.mark.nightly),
    ],
)
def test_an_upcycled_model_starts_with_the_loss_of_the_dense_one(
    pool: WorkerPool, tmp_path: Path, model: list[str], flags: list[str]
) -> None:
    def train(name: str, world_size: int, *own: str) -> set[int]:
        return set(pool.run(world_size, train_here, [*model, *own, *folder_flags(tmp_path / name)]))

    stop = ["--exit-interval", "3"]
    start = ["--pretrained-checkpoint", str(tmp_path / "dense"), *stop]
    assert train("dense", 1, *stop) == {75}
    assert train("finetuned", 1, *start) == {75}
    assert train("upcycled", 2, *start, *EXPERTS, *flags) == {75}
    dense, finetuned, upcycled = (
        logged_losses(tmp_path / name) for name in ("dense", "finetuned", "upcycled")
    )
    assert upcycled[0] == pytest.approx(finetuned[0], rel=1e-6)
    assert upcycled[0] < 0.99 * dense[0]
    assert upcycled[2] != finetuned[2]  # experts get different gradients
    assert train("upcycled", 2, *start, *EXPERTS, *flags, "--exit-interval", "5") == {75}
    assert len(logged_losses(tmp_path / "upcycled")) == 5  # the same flags resume the run


class Numbers:
    """A reader of tensors whose values count their elements."""

    def begin_box(self, out: Tensor, *, shape: tuple[int, ...], box: Box, **_: Any) -> None:
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        out.copy_(whole[tuple(slice(*edge) for edge in box)])

    def finish(self) -> None: ...


def filled(name: str, *shape: int, granularity: int = 2) -> Tensor:
    """Return a tensor of the upcycled model, with dense tensors from `Numbers`."""
    box = tuple((0, size) for size in shape)
    layout = ParamLayout(shape=shape, pieces=(), init=Init(std=1.0))
    out = torch.empty(shape)
    reader = Numbers()
    source = UpcycledSource(CheckpointSource(reader, "weight"), reader, Upcycling(granularity, 10.0, seed=7))
    source.fill(out, layout, BoxRange(Piece(name, shape, box), box, 0))
    return out


def test_experts_are_consecutive_parts_of_copies() -> None:
    dense = torch.arange(12.0).view(6, 2)
    for expert in range(4):
        part = slice(expert % 2 * 3, expert % 2 * 3 + 3)
        name = f"decoder.layers.1.mlp.experts.{expert}"
        assert torch.equal(filled(f"{name}.up.weight", 3, 2), 10 * dense[part])
        assert torch.equal(filled(f"{name}.down.weight", 2, 3), 10 * torch.arange(12.0).view(2, 6)[:, part])
        assert torch.equal(filled(f"{name}.up.bias", 3), 10 * torch.arange(6.0)[part])
        assert torch.equal(filled(f"{name}.down.bias", 2), torch.arange(2.0))
    assert torch.equal(filled("decoder.layers.1.mlp.norm.weight", 4), torch.arange(4.0))


def test_a_router_has_each_initial_row_once_per_part() -> None:
    name, initial = "decoder.layers.1.mlp.router.weight", torch.empty(4, 3)
    box = ((0, 4), (0, 3))
    layout = ParamLayout(shape=(4, 3), pieces=(), init=Init(std=1.0))
    InitialWeights(7).fill(initial, layout, BoxRange(Piece(name, (4, 3), box), box, 0))
    assert torch.equal(filled(name, 4, 3), initial[[0, 0, 1, 1]])
    assert torch.equal(filled(name, 4, 3, granularity=1), initial)
