"""The optimizer on one rank: norm, clipping, parameter groups, and weights cast from master weights."""

import pytest
import torch
from optimizer_helpers import ADAMW, optimizer_of_modules, weights
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatrain.optim.averaged_weights import averaged_weights
from megatrain.optim.lr_schedule import Hyperparams
from megatrain.optim.sharded import ShardedOptimizer, _group_ranges
from megatrain.optim.update_rules import SgdRule, UpdateRule
from megatrain.parallel.buckets import cut_buckets, local_shard
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.layout import Init, ParamLayout, Piece, ShardedModule
from megatrain.parallel.rank_lists import GridShape

HYPERPARAMS = Hyperparams(lr=0.01, weight_decay=0.1, lr_by_kind={"embedding": 0.03})


def _optimizer(
    dtype: torch.dtype, *, clip_grad: float = 1.0, rule: UpdateRule = ADAMW, ema_decay: float = 0.0
) -> ShardedOptimizer:
    """Return an optimizer of a matrix of two pieces, a vector that does not decay, and an embedding."""
    module = ShardedModule()
    for name, shape in (("a", (5, 3)), ("b", (7,)), ("e", (11, 3))):
        pieces = (Piece(name, shape, tuple((0, size) for size in shape)),)
        if name == "a":
            pieces = (Piece("a0", (2, 3), ((0, 2), (0, 3))), Piece("a1", (3, 3), ((0, 3), (0, 3)), row=2))
        layout = ParamLayout(
            shape=shape,
            pieces=pieces,
            init=Init(std=1.0),
            decays=len(shape) > 1,
            kind="embedding" if name == "e" else "matrix",
        )
        module.add_weight(name, layout, dtype)
    return optimizer_of_modules(
        [module], rule, dtype, clip_grad=clip_grad, ema_decay=ema_decay, master_dtype=torch.float32
    )


def test_master_weights_keep_the_precision_that_bf16_lacks() -> None:
    fp32, bf16 = _optimizer(torch.float32), _optimizer(torch.bfloat16)
    assert torch.equal(fp32.state("weight")[0], bf16.state("weight")[0])
    assert torch.equal(weights(bf16)["a"], weights(fp32)["a"].bfloat16())


@pytest.mark.parametrize("rule", [ADAMW, SgdRule(momentum=0.9)], ids=["adam", "sgd"])
@pytest.mark.parametrize("clip_grad", [0.0, 0.5, 1e9])
@pytest.mark.parametrize("gradient_scale", [1.0, 2.0**16])
def test_a_step_is_torchs_clip_and_update_group_by_group(
    clip_grad: float, rule: UpdateRule, gradient_scale: float
) -> None:
    optimizer = _optimizer(torch.float32, clip_grad=clip_grad, rule=rule)
    theirs = {name: torch.nn.Parameter(view.clone()) for name, view in weights(optimizer).items()}
    groups = [
        {"params": [theirs["a"]], "weight_decay": 0.1, "lr": 0.01},
        {"params": [theirs["b"]], "weight_decay": 0.0, "lr": 0.01},
        {"params": [theirs["e"]], "weight_decay": 0.1, "lr": 0.03},
    ]
    expected: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
        if rule is ADAMW
        else torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    )
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for param in optimizer.buffers.buckets[0].params:
            entry = param.entry
            gradient = torch.randn(entry.layout.shape, generator=generator)
            entry.module.weight_grads[entry.attribute].copy_(gradient * gradient_scale)
            theirs[entry.attribute].grad = gradient.clone()
        norm = optimizer.gradient_norm() / gradient_scale
        total = torch.nn.utils.clip_grad_norm_(list(theirs.values()), clip_grad or float("inf"))
        assert norm.item() == pytest.approx(total.item(), rel=1e-6)
        expected.step()
        optimizer.step(HYPERPARAMS, norm=norm, gradient_scale=gradient_scale)
    for name, view in weights(optimizer).items():
        torch.testing.assert_close(view, theirs[name].data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_torchs_and_changes_places_with_the_weights(dtype: torch.dtype) -> None:
    optimizer, without = _optimizer(dtype, ema_decay=0.75), _optimizer(dtype)
    (master,) = optimizer.state("weight")
    model = torch.nn.Module()
    model.register_parameter("master", torch.nn.Parameter(master))
    expected = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    for step, is_finite in enumerate((True, True, False, True)):
        for one in (optimizer, without):
            one.buffers.gradients.shards[0].copy_(
                torch.randn(master.shape, generator=torch.Generator().manual_seed(step))
            )
            one.step(HYPERPARAMS, norm=torch.tensor(1.0), is_finite=torch.tensor(is_finite))
        if is_finite:
            expected.update_parameters(model)
    assert torch.equal(master, without.state("weight")[0])
    (average,) = optimizer.state("ema")
    assert torch.equal(average, expected.module.master)
    before = {name: view.clone() for name, view in weights(optimizer).items()}
    with averaged_weights(optimizer):
        assert torch.equal(optimizer.buffers.weights.full[0], expected.module.master.to(dtype))
    assert all(torch.equal(view, before[name]) for name, view in weights(optimizer).items())
    assert torch.equal(average, expected.module.master)


def test_each_element_of_every_shard_is_updated_once_by_its_group() -> None:
    """The ranges of the groups cover each shard, with any number of shards."""
    whole = _optimizer(torch.float32).buffers
    for num_shards in (2, 3, 7):
        for rank in range(num_shards):
            grid = build_grid(GridShape(dp=num_shards), rank)
            for shard in (local_shard(bucket, grid.dp) for bucket in cut_buckets(whole.registry, grid)):
                ranges = list(_group_ranges(shard))
                assert [part.start for _, part in ranges] == [
                    0,
                    *(part.stop for _, part in ranges[:-1]),
                ]
                assert ranges[-1][1].stop == shard.numel
                for param, _, elements in shard.owned():
                    (group,) = {g for g, part in ranges if part.start <= elements.start < part.stop}
                    assert group == param.entry.layout.group


def test_the_norm_counts_each_element_once_and_no_padding() -> None:
    optimizer = _optimizer(torch.float32)
    (bucket,) = optimizer.buffers.buckets
    (gradients,) = optimizer.buffers.gradients.shards
    gradients.fill_(torch.nan)
    values = torch.randn(bucket.size, generator=torch.Generator().manual_seed(1))
    for param in bucket.params:
        gradients[param.start : param.stop] = values[param.start : param.stop]
    counted = torch.cat([values[param.start : param.stop] for param in bucket.params])
    assert optimizer.gradient_norm().item() == pytest.approx(counted.norm().item(), rel=1e-6)
    assert len(optimizer.counted([gradients])) == len(bucket.params)  # adjacent pieces are one view
