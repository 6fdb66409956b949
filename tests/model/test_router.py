"""The router of a layer, in one process: losses in the gradients, metrics, random draws."""

import math

import pytest
import torch
from torch import Tensor

from megatrain.config.model_spec.experts import RouterSpec
from megatrain.kernels.moe.routing import Routing, load_quantiles
from megatrain.model.experts.biases import ExpertBiases
from megatrain.model.experts.router import ROUTER_METRICS, Router
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context_parallel import ContextParallel, TokenSplit
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import Init
from megatrain.parallel.tensor_parallel import TensorParallel
from megatrain.tools.parity.measure import engine_of, tiny_plan
from megatrain.tools.parity.rows import Layout

S, B, H, E = 6, 3, 5, 4
ALONE = TokenSplit(
    TensorParallel(RankGroup("tp", (0,), 0), RankGroup("kv", (0,), 0), sequence_parallel=False),
    ContextParallel(RankGroup("cp", (0,), 0)),
)


def router_of(spec: RouterSpec, dtype: torch.dtype = torch.float64, bias: Tensor | None = None) -> Router:
    """Return a router with weights and memory for their gradients."""
    router = Router(
        spec, 3, "router", hidden_size=H, init=Init(std=1), dtype=dtype, split=ALONE,
        dp=RankGroup("dp", (0,), 0),
    )  # fmt: skip
    weight = torch.randn(spec.num_experts, H, generator=torch.Generator().manual_seed(1), dtype=dtype)
    router.bias = bias
    router.weight = torch.nn.Parameter(weight)
    router.weight_grads["weight"] = torch.zeros_like(weight)
    return router


def hidden(samples: int = B) -> Tensor:
    return torch.randn(S, samples, H, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def metrics_of(info: PassInfo) -> dict[str, float]:
    return dict(zip(ROUTER_METRICS, info.router_metrics[3].tolist(), strict=False))


def reference_losses(
    x: Tensor, weight: Tensor, top_k: int, mean_loads: Tensor | None = None
) -> dict[str, Tensor]:
    """Compute each loss from its definition, with a loop over tokens for the loads."""
    logits = x @ weight.t()
    shares = logits.softmax(-1)
    loads = torch.zeros(B, E, dtype=torch.float64)
    for s in range(S):
        for b in range(B):
            for e in logits[s, b].argsort(descending=True)[:top_k]:
                loads[b, e] += 1
    by_micro_batch = loads.sum(0)
    fractions = by_micro_batch / (S * B * top_k)
    sequences = [E * (loads[b] / (S * top_k) * shares[:, b].mean(0)).sum() for b in range(B)]
    mean = by_micro_batch if mean_loads is None else mean_loads
    return {
        "z_loss": logits.logsumexp(-1).square().mean(),
        "aux_loss": E * (fractions * shares.mean((0, 1))).sum(),
        "seq_aux_loss": sum(sequences, torch.zeros(())) / B,
        "global_aux_loss": E * (mean / (S * B * top_k) * shares.mean((0, 1))).sum(),
    }


LOSSES = RouterSpec(
    num_experts=E,
    top_k=2,
    losses=(("aux_loss", 0.3), ("seq_aux_loss", 0.5), ("global_aux_loss", 0.7)),
    z_loss_coeff=0.2,
)
COEFFICIENTS = {"z_loss": 0.2, "aux_loss": 0.3, "seq_aux_loss": 0.5, "global_aux_loss": 0.7}


@pytest.mark.parametrize("scale", [3.0, torch.tensor(3.0, dtype=torch.float64)])
def test_losses_reach_the_gradients_with_the_pass_share(scale: float | Tensor) -> None:
    router, x = router_of(LOSSES), hidden().requires_grad_()
    info = PassInfo(loss_scale=7.0, router_loss_scale=scale)
    torch.zeros(()).mul((0 * router(x, info).probs).sum()).backward()
    again, weight = hidden().requires_grad_(), router.weight.detach().clone().requires_grad_()
    expected = reference_losses(again, weight, 2)
    (3 * sum(COEFFICIENTS[name] * loss for name, loss in expected.items())).backward()
    torch.testing.assert_close(x.grad, again.grad)
    torch.testing.assert_close(router.weight_grads["weight"], weight.grad)
    for name, loss in expected.items():
        assert metrics_of(info)[name] == pytest.approx(loss.item(), rel=1e-12)


def test_the_global_loss_uses_mean_loads_of_the_step_so_far_also_when_recomputed() -> None:
    router = router_of(LOSSES)
    first, second = hidden(), hidden().flip(0) * 2
    infos = [PassInfo(microbatch=0), PassInfo(microbatch=1)]
    for x, info in zip((first, second), infos, strict=True):
        router(x, info)
    loads = torch.stack([info.router_metrics[3][len(ROUTER_METRICS) :] for info in infos])
    expected = reference_losses(second, router.weight, 2, loads.mean(0))["global_aux_loss"].item()
    assert metrics_of(infos[1])["global_aux_loss"] == pytest.approx(expected, rel=1e-12)
    before = [info.router_metrics[3].clone() for info in infos]
    for x, info in zip((first, second), infos, strict=True):  # as recomputation does
        router(x, info)
    assert all(torch.equal(info.router_metrics[3], row) for info, row in zip(infos, before, strict=True))
    router(second, (step := PassInfo(microbatch=0)))  # the next step starts from no loads
    assert metrics_of(step)["global_aux_loss"] == pytest.approx(metrics_of(step)["aux_loss"], rel=1e-12)


def test_metrics_are_loads_entropy_and_dropped_assignments() -> None:
    spec = RouterSpec(num_experts=E, top_k=2, capacity_factor=0.5, drops_last=True)
    router, info = router_of(spec), PassInfo()
    routing: Routing = router(hidden(), info)
    assert routing.kept is not None
    loads = torch.stack([(routing.experts == e).sum() for e in range(E)])
    assert torch.equal(info.router_metrics[3][len(ROUTER_METRICS) :], loads.double())
    assert metrics_of(info)["dropped"] == (loads - math.ceil(0.5 * 2 * S * B / E)).clamp(min=0).sum()
    shares = (hidden() @ router.weight.t()).softmax(-1)
    assert metrics_of(info)["entropy"] == pytest.approx(-(shares * shares.log()).sum().item())
    assert not routing.probs[~routing.kept].any()


@pytest.mark.parametrize("drops_last", [False, True])
def test_expert_biases_are_updated_from_loads_without_dropped_assignments(drops_last: bool) -> None:
    spec = RouterSpec(
        num_experts=E, top_k=2, score_function="sigmoid", has_expert_bias=True, capacity_factor=0.8,
        drops_last=drops_last,
    )  # fmt: skip
    info = PassInfo()
    routing = router_of(spec, bias=torch.linspace(0, 1, E, dtype=torch.float64))(hidden(), info)
    selected, kept = info.router_metrics[3][len(ROUTER_METRICS) :].view(2, E)
    assert selected.tolist() == [(routing.experts == e).sum() for e in range(E)]
    assert kept.tolist() == [(routing.kept_experts == e).sum() for e in range(E)]
    assert kept.sum() < selected.sum()
    assert (kept.mean() - kept).sign().tolist() != (selected.mean() - selected).sign().tolist()


@pytest.mark.parametrize(("capacity", "rate"), [("dropping", 0.1), ("dropspadded", 0.0), ("dropless", 0.1)])
def test_biases_of_padded_experts_stay_since_padded_loads_are_equal(capacity: str, rate: float) -> None:
    routers = engine_of(tiny_plan(Layout.of(f"deepseek {capacity}"), 1), 0).model.spec.routers
    assert {router.bias_update_rate for router in routers.values()} == {rate}


@pytest.mark.parametrize("drops_last", [False, True])
@pytest.mark.parametrize("num_samples", [1, 2, 3])
def test_padding_samples_have_no_part_in_the_capacity(num_samples: int, drops_last: bool) -> None:
    router = router_of(RouterSpec(num_experts=E, top_k=2, capacity_factor=0.7, drops_last=drops_last))
    x = hidden()
    padded = router(x, PassInfo(is_training=False, num_samples=num_samples))
    alone = router(x[:, :num_samples], PassInfo(is_training=False))
    kept = padded.kept.view(S, B, 2)
    assert torch.equal(kept[:, :num_samples], alone.kept.view(S, num_samples, 2))
    assert not kept[:, num_samples:].any()
    assert not router(x, PassInfo(is_training=False, num_samples=0)).kept.any()


def test_rounding_of_a_model_in_fp32_does_not_decide_drops_of_its_router_in_fp64() -> None:
    spec = RouterSpec(num_experts=E, top_k=2, capacity_factor=0.7, dtype="fp64")
    router = router_of(spec, torch.float32)
    alike = hidden(1).expand(S, B, H).float().contiguous()  # three samples of the same tokens
    noise = torch.rand(S, B, H, generator=torch.Generator().manual_seed(5)) - 0.5
    expected, found = router(alike, PassInfo()), router(alike * (1 + 1e-6 * noise), PassInfo())
    assert not expected.kept.all()
    assert torch.equal(found.kept, expected.kept)


def test_evaluation_has_no_losses_and_no_metrics() -> None:
    info = PassInfo(is_training=False)
    with torch.no_grad():
        router_of(LOSSES)(hidden(), info)
    assert not info.router_metrics


@pytest.mark.parametrize("name", ["jitter", "forced"])
def test_draws_depend_on_the_token_alone(name: str) -> None:
    jitter, is_forced = (0.3, False) if name == "jitter" else (0.0, True)
    spec = RouterSpec(num_experts=E, top_k=2, jitter=jitter, is_forced=is_forced)
    router, x = router_of(spec), hidden()
    # A logit has one term, so nothing is rounded: on some CPUs sums of fewer rows are rounded differently.
    router.weight = torch.nn.Parameter(torch.eye(E, H, dtype=torch.float64))
    whole = router(x, PassInfo(first_sample=10)).probs.view(S, B, 2)
    later = router(x[:, 1:], PassInfo(first_sample=11)).probs.view(S, B - 1, 2)
    assert torch.equal(whole[:, 1:], later)
    others = router(x, PassInfo(first_sample=20)).probs.view(S, B, 2)
    assert not torch.isclose(whole, others).any()


def test_jitter_stays_near_one_and_is_off_in_evaluation() -> None:
    router = router_of(RouterSpec(num_experts=E, top_k=2, jitter=0.1))
    noise = router._uniform(torch.zeros(64, 4, H), PassInfo(), "jitter", 0.9, 1.1)
    assert 0.9 <= noise.min() < 0.91
    assert 1.09 < noise.max() <= 1.1
    assert noise.mean().item() == pytest.approx(1, abs=0.01)
    plain = router_of(RouterSpec(num_experts=E, top_k=2))
    evaluated = router(hidden(), PassInfo(is_training=False)).probs
    assert torch.equal(evaluated, plain(hidden(), PassInfo(is_training=False)).probs)


def test_forced_loads_are_even_for_any_weights() -> None:
    router = router_of(RouterSpec(num_experts=E, top_k=1, is_forced=True))
    info = PassInfo()
    router(hidden(400), info)
    loads = info.router_metrics[3][len(ROUTER_METRICS) :]
    assert (loads / loads.mean() - 1).abs().max() < 0.15


def test_logits_of_an_fp32_router_are_not_rounded() -> None:
    x = hidden().to(torch.bfloat16)
    fp32 = router_of(RouterSpec(num_experts=E, top_k=2, dtype="fp32"), torch.bfloat16)
    logits = fp32._logits(x, PassInfo())
    torch.testing.assert_close(
        logits, x.float().flatten(0, 1) @ fp32.weight.float().t(), rtol=1e-6, atol=1e-6
    )
    assert (
        router_of(RouterSpec(num_experts=E, top_k=2), torch.bfloat16)._logits(x, PassInfo()).dtype == x.dtype
    )


@pytest.mark.parametrize("router_dtype", [None, "fp32", "fp64"])
def test_gradients_of_a_bf16_router_are_accumulated_in_fp32(router_dtype: str | None) -> None:
    router = router_of(RouterSpec(num_experts=E, top_k=2, dtype=router_dtype), torch.bfloat16)  # type: ignore[arg-type]
    router.weight_grads["weight"] = torch.zeros(E, H)
    x = hidden().to(torch.bfloat16).requires_grad_()
    router(x, PassInfo()).probs[:, 0].sum().backward()
    assert x.grad is not None
    again = router.weight.detach().double().requires_grad_()
    logits = x.detach().double().flatten(0, 1) @ again.t()
    logits.topk(2).values.softmax(-1)[:, 0].sum().backward()
    torch.testing.assert_close(router.weight_grads["weight"].double(), again.grad, rtol=0.05, atol=0.05)


def test_biases_are_updated_towards_even_loads_and_only_in_finite_steps() -> None:
    spec = RouterSpec(
        num_experts=3, top_k=1, score_function="sigmoid", has_expert_bias=True, bias_update_rate=0.5
    )
    plain = RouterSpec(num_experts=4, top_k=1)
    biases = ExpertBiases(
        {1: spec, 4: plain},
        ["decoder.layers.1.mlp.router", "decoder.layers.4.mlp.router"],
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    own, yes = biases.of(1), torch.tensor(True)
    assert own is not None
    assert biases.of(4) is None
    loads = torch.tensor([[6.0, 0.0, 3.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    biases.update(loads, yes)
    assert own.tolist() == [-0.5, 0.5, 0]
    assert not biases.values[1].any()
    biases.update(loads, ~yes)
    assert own.tolist() == [-0.5, 0.5, 0]


def test_biases_are_restored_from_a_checkpoint_bit_for_bit() -> None:
    spec = RouterSpec(num_experts=3, top_k=1, score_function="sigmoid", has_expert_bias=True)
    biases, again = (
        ExpertBiases(
            {1: spec}, ["decoder.layers.1.mlp.router"], dtype=torch.float32, device=torch.device("cpu")
        )
        for _ in range(2)
    )
    biases.values.normal_(generator=torch.Generator().manual_seed(0))
    again.restore(biases.state())
    assert torch.equal(again.values, biases.values)
    assert list(biases.state()) == ["decoder.layers.1.mlp.router.expert_bias"]
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.router\.expert_bias: .* no biases, the model 3"):
        again.restore({})


def test_a_router_selects_experts_with_its_updated_bias() -> None:
    spec = RouterSpec(
        num_experts=E, top_k=1, score_function="sigmoid", has_expert_bias=True, bias_update_rate=100
    )
    biases = ExpertBiases(
        {3: spec}, ["decoder.layers.3.mlp.router"], dtype=torch.float64, device=torch.device("cpu")
    )
    router = router_of(spec, bias=biases.of(3))
    biases.update(torch.tensor([[0.0, 9.0, 9.0, 9.0]]), torch.tensor(True))
    assert not router(hidden(), PassInfo()).experts.any()


def test_quantile_balancing_replaces_the_biases_by_mean_quantiles() -> None:
    spec = RouterSpec(num_experts=E, top_k=2, quantile_ema=0.25)
    biases = ExpertBiases(
        {3: spec}, ["decoder.layers.3.mlp.router"], dtype=torch.float64, device=torch.device("cpu")
    )
    biases.values.copy_(torch.tensor([[0.5, -0.5, 0.25, -0.25]]))
    before, quantiles = biases.values.clone(), torch.tensor([[1.0, 2.0, -1.0, 4.0]], dtype=torch.float64)
    biases.update(torch.zeros(1, E), torch.tensor(False), quantiles)
    assert torch.equal(biases.values, before)
    biases.update(torch.zeros(1, E), torch.tensor(True), quantiles)
    expected = 0.25 * before - 0.75 * quantiles
    assert torch.allclose(biases.values, expected - expected.mean())
    assert list(biases.state()) == ["decoder.layers.3.mlp.router.quantile_bias"]


def test_a_router_records_the_quantiles_of_its_logits_and_selects_with_the_bias() -> None:
    bias = torch.tensor([3.0, 0.0, 0.0, -3.0], dtype=torch.float64)
    router = router_of(RouterSpec(num_experts=E, top_k=2, quantile_ema=0.0), bias=bias)
    x, info = hidden(), PassInfo()
    routing = router(x, info)
    logits = x.flatten(0, 1) @ router.weight.detach().t()
    assert torch.equal(routing.experts, (logits + bias).topk(2).indices)
    assert torch.allclose(routing.probs, logits.gather(1, routing.experts).softmax(-1))
    quantiles = info.router_metrics[3][len(ROUTER_METRICS) + E :]
    assert torch.allclose(quantiles, load_quantiles(logits, bias, 2))
