"""Experts after an all-gather dispatch: the host waits for nothing, and rows after the last end change nothing."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatrain.kernels.activations import SILU, Activation
from megatrain.kernels.moe.router_linear import linear, linear_backward
from megatrain.kernels.moe.routing import Routing
from megatrain.model.implementations.grouped_mlp import GroupedProducts, GroupedWeight, _GroupedMlp
from megatrain.optim.lr_schedule import Hyperparams
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.expert_parallel import AllGatherDispatcher
from megatrain.parallel.grid import RankGroup
from megatrain.tools.parity.measure import engine_of, local_batches, on_device, tiny_plan, weights_of
from megatrain.tools.parity.rows import Layout
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.launch.ranks import use_deterministic_operations

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),  # Triton's own
]

T, K, E, H, F = 4096, 4, 16, 256, 128
SWIGLU = Activation(fn=SILU, is_gated=True)


class Inputs(NamedTuple):
    """Tokens, probabilities and weights, which get gradients; two thirds of the assignments are dropped."""

    x: Tensor
    probs: Tensor
    fc1: Tensor
    fc2: Tensor
    dy: Tensor


def drawn() -> tuple[Inputs, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(T, H), (T, K), (E, 2 * F, H), (E, H, F), (T, H)]
    parts = [torch.randn(shape, generator=generator) for shape in shapes]
    experts = torch.rand(T, E, generator=generator).topk(K).indices
    kept = torch.rand(T, K, generator=generator) < 1 / 3
    inputs = Inputs(*parts)
    return inputs._replace(fc1=inputs.fc1 / H**0.5, fc2=inputs.fc2 / F**0.5), experts, kept


def one_pass(given: Inputs, experts: Tensor, kept: Tensor) -> list[Tensor]:
    """Return output and gradients of tokens, probabilities and both weights."""
    group = [RankGroup(name, (0,), 0) for name in ("ep", "etp")]
    dispatcher = AllGatherDispatcher(E, *group)
    x, probs = given.x.detach().requires_grad_(), given.probs.detach().requires_grad_()
    grad_dtype = torch.promote_types(x.dtype, torch.float32)
    grads = [torch.zeros_like(weight, dtype=grad_dtype) for weight in (given.fc1, given.fc2)]
    weights = [GroupedWeight(*pair) for pair in zip((given.fc1, given.fc2), grads, strict=True)]
    dispatched = dispatcher.begin_dispatch(x, lambda: Routing(experts, probs * kept, kept))()
    rows, ends, row_probs, _, deferred, _ = dispatched
    out = _GroupedMlp.apply(rows, row_probs, ends, *weights, SWIGLU, GroupedProducts(), PassInfo(), deferred)
    out = dispatcher.begin_combine(out, dispatched)()
    out.backward(given.dy)
    return [out.detach(), x.grad, probs.grad, *grads]


def test_the_host_does_not_wait_and_the_results_are_those_of_the_reference() -> None:
    given, experts, kept = drawn()
    bf16 = Inputs(*(part.bfloat16().cuda() for part in given))._replace(probs=given.probs.cuda())
    on_gpu = (experts.cuda(), kept.cuda())
    one_pass(bf16, *on_gpu)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = one_pass(bf16, *on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = one_pass(Inputs(*(part.double().cpu() for part in bf16)), experts, kept)
    for one, reference in zip(found, expected, strict=True):
        error = (one.double().cpu() - reference).norm() / reference.norm()
        assert error < 0.02


def test_the_products_of_a_router_have_the_precision_of_fp32() -> None:
    """Tensor cores truncate sums to fp32; factors in TF32 or bf16 would give errors above 3e-4."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator).bfloat16().cuda() for shape in ((T, 2048), (64, 2048))
    )
    dy = torch.randn(T, 64, generator=generator).cuda()
    grad = torch.zeros(64, 2048, device="cuda")
    dx, accumulate = linear_backward(dy, x, weight)
    accumulate(grad)
    found = linear(x, weight, torch.float32), grad
    x, weight, dy = x.double(), weight.double(), dy.double()
    for one, reference in zip(found, (x @ weight.t(), dy.t() @ x), strict=True):
        assert one.dtype == torch.float32
        assert (one - reference).norm() / reference.norm() < 3e-5
    assert (dx - (dy @ weight).bfloat16()).double().norm() / (dy @ weight).norm() < 3e-4


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.nightly
def test_dispatchers_and_overflows_change_no_bit_in_deterministic_mode() -> None:
    """Four ranks in bf16 with four experts a token: both dispatchers, and memory for half of an even load, which overflows."""
    layout = Layout.of("dp4 mixtral ep4 batch16")
    with WorkerPool(4, device="cuda", timeout_seconds=300) as pool:
        expected, *others = (
            pool.run(4, deterministic_steps, layout.but(word)) for word in ("alltokens", "alltoall", "scarce")
        )
    assert [found[0] for found in expected] == [0] * 4
    assert others[1][0][0] > 0
    for found in others:
        assert [results for _, *results in found] == [results for _, *results in expected]


def deterministic_steps(rank: int, world_size: int, layout: Layout) -> tuple[Any, ...]:
    """Train two steps; return the number of repeats, losses and norms, and the bits of the weights."""
    use_deterministic_operations()
    flags = "--params-dtype bfloat16 --moe-router-topk 4 --deterministic-mode".split()
    engine = engine_of(tiny_plan(layout, world_size, *flags, device="cuda"), rank)
    found = []
    for step in range(2):
        batches = [on_device(one, engine.device) for one in local_batches(step, layout, engine.grid.dp.rank)]
        report = engine.step(batches, Hyperparams(lr=1e-2, weight_decay=0.01))
        found.append((report.lm_loss, report.grad_norm))
    return len(engine.news), found, [part.values.tobytes() for part in weights_of(engine)]
