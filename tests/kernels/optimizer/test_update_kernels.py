"""AdamW and SGD over flat shards against torch's optimizers, and fused kernels against their references."""

import os
from collections.abc import Callable

import pytest
import torch
from kernel_reference import reference

from megatrain.kernels.fused.adamw import adamw_fused
from megatrain.kernels.fused.sgd import sgd_fused
from megatrain.kernels.optimizer.adamw import AdamwStep, adamw
from megatrain.kernels.optimizer.sgd import sgd
from megatrain.kernels.optimizer.shard_update import FlatUpdate, HyperparamRange

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton: on a GPU, or as an interpreter (TRITON_INTERPRET=1)",
)
SIZE = 5000
RANGES = (
    HyperparamRange(0, 64, 0.01, 0.1),
    HyperparamRange(64, 128, 0.01, 0.0),
    HyperparamRange(128, 4992, 0.03, 0.1, eps_scale=1e7),
    HyperparamRange(4992, SIZE, 0.03, 0.0),
)

Step = Callable[[FlatUpdate, list[torch.Tensor], int], None]


def random(seed: int, *, dtype: torch.dtype = torch.float32, size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def shard(
    *,
    master: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    ranges: tuple[HyperparamRange, ...] = RANGES,
    is_finite: bool = True,
) -> FlatUpdate:
    return FlatUpdate(
        master=master,
        grad=grad,
        weight=weight,
        ranges=ranges,
        grad_scale=torch.tensor(0.5, dtype=master.dtype, device=master.device),
        is_finite=torch.tensor(is_finite, device=master.device),
    )


def test_adamw_is_torchs_over_several_steps_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.kernels.optimizer.adamw._CHUNK", 7)
    start = random(0, dtype=torch.float64, size=50)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    master, weight = start.clone(), start.bfloat16()
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    for step in range(1, 6):
        gradient = random(step, dtype=torch.float64, size=50)
        theirs.grad = gradient * 0.5
        optimizer.step()
        numbers = AdamwStep(beta1=0.9, beta2=0.95, eps=1e-8, step=step)
        ours = shard(master=master, grad=gradient, weight=weight, ranges=(HyperparamRange(0, 50, 0.01, 0.1),))
        adamw(ours, exp_avg, exp_avg_sq, numbers)
    torch.testing.assert_close(master, theirs.detach(), rtol=1e-12, atol=1e-14)
    assert torch.equal(weight, master.bfloat16())


def test_moments_in_bf16_are_fp32_ones_rounded_after_each_step() -> None:
    master, weight = random(0), random(0).bfloat16()
    bf16 = [torch.zeros(SIZE, dtype=torch.bfloat16) for _ in range(2)]
    master_fp32 = master.clone()
    for step in range(1, 4):
        fp32 = [state.float() for state in bf16]
        for values, states in ((master_fp32, fp32), (master, bf16)):
            adamw_step(shard(master=values, grad=random(step), weight=weight), states, step)
        for state, expected in zip(bf16, fp32, strict=True):
            assert torch.equal(state, expected.bfloat16())
        assert torch.equal(master, master_fp32)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    master = random(0)
    states = [random(1), random(2).abs()]
    before = [t.clone() for t in (master, *states)]
    grad = torch.full((SIZE,), float("nan"))
    adamw_step(shard(master=master, grad=grad, weight=master, is_finite=False), states, 1)
    sgd_step(shard(master=master, grad=grad, weight=master, is_finite=False), states, 1)
    for found, expected in zip((master, *states), before, strict=True):
        assert torch.equal(found, expected)


def test_a_shard_without_ranges_is_unchanged_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("adamw", "sgd"):
        monkeypatch.setattr(f"megatrain.kernels.optimizer.{name}.is_fused", lambda _: True)
    master, states = random(0), [random(1), random(2).abs()]
    before = master.clone()
    update = shard(master=master, grad=random(3), weight=master, ranges=())
    adamw(update, states[0], states[1], AdamwStep(beta1=0.9, beta2=0.95, eps=1e-8, step=1))
    sgd(update, states[0], momentum=0.9)
    assert torch.equal(master, before)


def adamw_step(update: FlatUpdate, states: list[torch.Tensor], step: int) -> None:
    reference(adamw)(update, states[0], states[1], AdamwStep(beta1=0.9, beta2=0.95, eps=1e-8, step=step))


def sgd_step(update: FlatUpdate, states: list[torch.Tensor], step: int) -> None:
    reference(sgd)(update, states[0], momentum=0.9)


def adamw_kernel(update: FlatUpdate, states: list[torch.Tensor], step: int) -> None:
    corrections = 1 - 0.9**step, 1 - 0.95**step
    adamw_fused(update, states[0], states[1], betas=(0.9, 0.95), corrections=corrections, eps=1e-8)


def sgd_kernel(update: FlatUpdate, states: list[torch.Tensor], step: int) -> None:
    sgd_fused(update, states[0], momentum=0.9)


@needs_triton
@pytest.mark.parametrize(
    ("kernel", "reference"), [(adamw_kernel, adamw_step), (sgd_kernel, sgd_step)], ids=["adamw", "sgd"]
)
@pytest.mark.parametrize(
    ("grad_dtype", "state_dtype", "weight_dtype", "ranges"),
    [
        (torch.float32, torch.float32, torch.bfloat16, RANGES),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, RANGES[:2]),
        (torch.float32, torch.bfloat16, torch.float32, RANGES[:3]),
        (torch.bfloat16, torch.float32, torch.float32, (HyperparamRange(0, SIZE, 0.01, 0.1),)),
    ],
    ids=["default", "bf16", "bf16 states", "bf16 gradients"],
)
def test_a_kernel_is_its_reference(
    kernel: Step,
    reference: Step,
    grad_dtype: torch.dtype,
    state_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    ranges: tuple[HyperparamRange, ...],
) -> None:
    size = ranges[-1].stop
    found: list[list[torch.Tensor]] = []
    for where, update in ((DEVICE, kernel), ("cpu", reference)):
        master = random(0, size=size).to(where)
        weight = master if weight_dtype == master.dtype else master.to(weight_dtype)
        states = [random(n, dtype=state_dtype, size=size).abs().to(where) for n in (1, 2)]
        grad = random(3, dtype=grad_dtype, size=size).to(where)
        update(shard(master=master, grad=grad, weight=weight, ranges=ranges), states, 3)
        found.append([t.cpu() for t in (master, weight, *states)])
    for ours, theirs in zip(*found, strict=True):
        is_bf16 = ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=2**-7 if is_bf16 else 2e-6, atol=1e-6)
        if is_bf16 and DEVICE == "cuda":  # the interpreter truncates, a GPU rounds to nearest
            assert (ours != theirs).sum() < size / 100  # at rounding boundaries


@needs_triton
@pytest.mark.parametrize("kernel", [adamw_kernel, sgd_kernel])
def test_a_kernel_changes_nothing_if_gradients_are_not_finite(kernel: Step) -> None:
    master = random(0).to(DEVICE)
    weight = torch.full_like(master, 7.0, dtype=torch.bfloat16)
    states = [random(1).to(DEVICE), random(2).to(DEVICE)]
    before = [t.clone() for t in (master, weight, *states)]
    kernel(
        shard(master=master, grad=torch.full_like(master, torch.nan), weight=weight, is_finite=False),
        states,
        1,
    )
    for found, expected in zip((master, weight, *states), before, strict=True):
        assert torch.equal(found, expected)
