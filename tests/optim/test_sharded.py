"""The optimizer on one rank: norm, clipping, and what is derived from what."""

import pytest
import torch

from megatrain.optim.sharded import AdamwConfig, ShardedAdamw
from megatrain.parallel.buffers import FlatBuffers
from megatrain.parallel.data import DataParallel
from megatrain.parallel.grid import GridShape, RankGrid
from megatrain.parallel.initialize import InitialWeights
from megatrain.parallel.layout import Init, LaidOutModule, ParamLayout, ParamRegistry, Piece


def _optimizer(dtype: torch.dtype, *, clip_grad: float = 1.0) -> ShardedAdamw:
    module = LaidOutModule()
    for name, shape, decays in (("a", (5, 3), True), ("b", (7,), False)):
        pieces = (Piece(name, shape, tuple((0, size) for size in shape)),)
        module.add_weight(
            name, ParamLayout(shape=shape, pieces=pieces, init=Init(std=1.0), decays=decays), dtype
        )
    grid = RankGrid.build(GridShape(), 0)
    buffers = FlatBuffers(
        ParamRegistry.of([module]),
        shard_group=grid.dp,
        weight_dtype=dtype,
        grad_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    config = AdamwConfig(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip_grad=clip_grad)
    optimizer = ShardedAdamw(DataParallel(buffers, grid, grid.dp), config, main_dtype=torch.float32)
    optimizer.fill("weight", InitialWeights(1))
    optimizer.publish_weights()
    return optimizer


def _views(optimizer: ShardedAdamw) -> dict[str, torch.Tensor]:
    return {p.entry.attribute: p.entry.parameter.data for b in optimizer.buffers.buckets for p in b.placed}


def test_main_weights_keep_what_bfloat16_cannot() -> None:
    wide, narrow = _optimizer(torch.float32), _optimizer(torch.bfloat16)
    assert torch.equal(wide.state("weight")[0], narrow.state("weight")[0])
    assert torch.equal(_views(narrow)["a"], _views(wide)["a"].bfloat16())


@pytest.mark.parametrize("clip_grad", [0.0, 0.5, 1e9])
def test_a_step_is_torchs_clip_and_adamw_with_decay_for_matrices_only(clip_grad: float) -> None:
    optimizer = _optimizer(torch.float32, clip_grad=clip_grad)
    theirs = {name: torch.nn.Parameter(view.clone()) for name, view in _views(optimizer).items()}
    groups = [{"params": [theirs["a"]], "weight_decay": 0.1}, {"params": [theirs["b"]], "weight_decay": 0.0}]
    expected = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for placed in optimizer.buffers.buckets[0].placed:
            entry = placed.entry
            gradient = torch.randn(entry.layout.shape, generator=generator)
            entry.module.weight_grads[entry.attribute].copy_(gradient)
            theirs[entry.attribute].grad = gradient.clone()
        norm = optimizer.gradient_norm()
        total = torch.nn.utils.clip_grad_norm_(list(theirs.values()), clip_grad or float("inf"))
        assert norm.item() == pytest.approx(total.item(), rel=1e-6)
        expected.step()
        optimizer.step(lr=0.01, norm=norm)
    for name, view in _views(optimizer).items():
        torch.testing.assert_close(view, theirs[name].data, rtol=1e-5, atol=1e-6)
