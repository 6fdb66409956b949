"""Optimizer state in host memory: bit-identical to the device, in whole buckets from the end."""

import pytest
import torch
from optimizer_helpers import ADAMW, optimizer_of_modules

from megatrain.optim.lr_schedule import Hyperparams
from megatrain.optim.offload import num_offloaded
from megatrain.optim.sharded import ShardedOptimizer
from megatrain.optim.update_rules import SgdRule, UpdateRule
from megatrain.parallel.layout import Init, ParamLayout, Piece, ShardedModule

SIZES = [33, 64, 200, 91, 128]


def _optimizer(
    dtype: torch.dtype, rule: UpdateRule, fraction: float, **moment_dtypes: torch.dtype
) -> ShardedOptimizer:
    """Return an optimizer with one bucket for each of `SIZES`."""
    modules = []
    for number, size in enumerate(SIZES):
        module, name = ShardedModule(), f"w{number}"
        layout = ParamLayout(shape=(size,), pieces=(Piece(name, (size,), ((0, size),)),), init=Init(std=1.0))
        module.add_weight(name, layout, dtype)
        modules.append(module)
    return optimizer_of_modules(
        modules,
        rule,
        dtype,
        clip_grad=1.0,
        master_dtype=torch.float32,
        moment_dtypes=moment_dtypes,
        offload_fraction=fraction,
    )


def _everything(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    state = [flat for kind in optimizer.kinds for flat in optimizer.state(kind)]
    return [flat.clone() for flat in (*state, *optimizer.buffers.weights.full)]


def _step(optimizer: ShardedOptimizer, number: int, *, is_finite: bool = True) -> None:
    for bucket, flat in enumerate(optimizer.buffers.gradients.full):
        flat.copy_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(10 * number + bucket)))
    optimizer.step(
        Hyperparams(lr=0.01 * (number + 1), weight_decay=0.1),
        norm=optimizer.gradient_norm(),
        gradient_scale=4.0,
        is_finite=torch.tensor(is_finite),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rule", "moments"),
    [(ADAMW, {}), (ADAMW, {"exp_avg": torch.bfloat16}), (SgdRule(momentum=0.9), {})],
    ids=["adam", "adam with moments in bf16", "sgd"],
)
@pytest.mark.parametrize(("fraction", "num_on_device"), [(0.1, 4), (0.5, 2), (1.0, 0)])
def test_steps_on_the_host_are_the_same_bits(
    dtype: torch.dtype,
    rule: UpdateRule,
    moments: dict[str, torch.dtype],
    fraction: float,
    num_on_device: int,
) -> None:
    on_device, offloaded = (_optimizer(dtype, rule, value, **moments) for value in (0.0, fraction))
    assert (on_device.num_on_device, offloaded.num_on_device) == (len(SIZES), num_on_device)
    initial = _everything(on_device)
    for number in range(3):
        for optimizer in (on_device, offloaded):
            _step(optimizer, number)
    assert not torch.equal(initial[-1], _everything(on_device)[-1])
    for expected, found in zip(_everything(on_device), _everything(offloaded), strict=True):
        assert expected.dtype == found.dtype
        assert torch.equal(expected, found)


def test_a_step_that_is_not_finite_changes_nothing_on_the_host() -> None:
    optimizer = _optimizer(torch.bfloat16, ADAMW, 1.0)
    _step(optimizer, 0)
    before = _everything(optimizer)
    _step(optimizer, 1, is_finite=False)
    for expected, found in zip(before, _everything(optimizer), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize(
    ("fraction", "count"), [(0.0, 0), (0.01, 1), (0.25, 1), (0.26, 2), (0.75, 2), (0.8, 3), (1.0, 3)]
)
def test_the_fewest_buckets_from_the_end_hold_the_fraction(fraction: float, count: int) -> None:
    assert num_offloaded([100, 200, 100], fraction) == count
