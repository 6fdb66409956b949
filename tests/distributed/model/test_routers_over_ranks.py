"""A router over ranks that share a micro-batch's tokens, and over replicas, against one process, in fp64."""

import pytest
import torch
from everyday import one_in
from torch import Tensor

from megatrain.config.model_spec.experts import RouterSpec
from megatrain.model.experts.router import ROUTER_METRICS, Router
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context_parallel import ContextParallel, TokenSplit
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import Init
from megatrain.parallel.process_groups import make_group
from megatrain.parallel.tensor_parallel import TensorParallel
from megatrain.tools.worker_pool import WorkerPool

S, B, H, E = 16, 2, 5, 8
LOSSES = (("aux_loss", 0.3), ("seq_aux_loss", 0.5), ("global_aux_loss", 0.7))
SPECS = {
    "losses": RouterSpec(num_experts=E, top_k=2, losses=LOSSES, z_loss_coeff=0.2),
    "sigmoid in groups": RouterSpec(
        num_experts=E, top_k=2, score_function="sigmoid", num_groups=4, group_top_k=2, losses=LOSSES
    ),
    "sinkhorn": RouterSpec(num_experts=E, top_k=2, is_sinkhorn=True),
    "drops the least": RouterSpec(num_experts=E, top_k=2, capacity_factor=0.7, losses=LOSSES),
    "drops the last": RouterSpec(num_experts=E, top_k=2, capacity_factor=0.7, drops_last=True),
    "jitter": RouterSpec(num_experts=E, top_k=2, jitter=0.3),
    "quantiles": RouterSpec(num_experts=E, top_k=2, quantile_ema=0.5),
    "forced": RouterSpec(num_experts=E, top_k=2, is_forced=True, losses=LOSSES),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("tp", "cp", "dp"), one_in(4, [(2, 2, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])
)
def test_routing_metrics_and_gradients_are_those_of_one_process(
    pool: WorkerPool, name: str, tp: int, cp: int, dp: int
) -> None:
    """Each replica has a different micro-batch; one process runs them one after the other."""
    found = pool.run(tp * cp * dp, on_a_rank, name, tp, cp, dp)
    gradient = torch.zeros(E, H, dtype=torch.float64)
    for replica in range(dp):
        expected = one_process(SPECS[name], replica, dp)
        gradient += expected["weight"]
        own = found[replica * tp * cp : (replica + 1) * tp * cp]
        metrics = torch.stack([one["metrics"] for one in own]).sum(0)
        torch.testing.assert_close(metrics, expected["metrics"], rtol=1e-12, atol=1e-12)
        for one in own:
            positions = one["positions"]
            assert torch.equal(one["experts"], expected["experts"][positions])
            for what in ("probs", "x"):
                torch.testing.assert_close(one[what], expected[what][positions], rtol=1e-10, atol=1e-13)
    together = torch.stack([one["weight"] for one in found]).sum(0)
    torch.testing.assert_close(together, gradient, rtol=1e-10, atol=1e-12)


def micro_batch(replica: int) -> tuple[Tensor, Tensor]:
    """Return hidden states, whose loads are uneven, and gradients of the probabilities."""
    generator = torch.Generator().manual_seed(replica)
    x = torch.randn(S, B, H, generator=generator, dtype=torch.float64) + 0.5
    return x, torch.randn(S, B, 2, generator=generator, dtype=torch.float64)


def on_a_rank(rank: int, world_size: int, name: str, tp: int, cp: int, dp: int) -> dict[str, Tensor]:
    ranks = torch.arange(world_size).view(dp, cp, tp)
    tp_group = _group("tp", ranks.reshape(-1, tp), rank)
    cp_group = _group("cp", ranks.transpose(1, 2).reshape(-1, cp), rank)
    dp_group = _group("dp", ranks.permute(1, 2, 0).reshape(-1, dp), rank)
    tensor = TensorParallel(tp_group, RankGroup("kv", (rank,), 0), sequence_parallel=tp > 1)
    split = TokenSplit(tensor, ContextParallel(cp_group))
    positions = split.positions(S // (tp * cp), torch.device("cpu"))
    return routed(SPECS[name], split, dp_group, dp_group.rank, positions)


def _group(name: str, lists: Tensor, rank: int) -> RankGroup:
    handle = make_group(name, lists.tolist()) if lists.shape[1] > 1 else None
    own = next(ranks for ranks in lists.tolist() if rank in ranks)
    return RankGroup(name, tuple(own), own.index(rank), handle)


def one_process(spec: RouterSpec, replica: int, dp: int) -> dict[str, Tensor]:
    """Run a replica's micro-batch in one process, with the loads of all replicas patched in where a loss uses them."""
    alone = TokenSplit(
        TensorParallel(RankGroup("tp", (0,), 0), RankGroup("kv", (0,), 0), sequence_parallel=False),
        ContextParallel(RankGroup("cp", (0,), 0)),
    )
    dp_group = RankGroup("dp", (0,), 0)
    positions = torch.arange(S)
    if dp == 1 or "global_aux_loss" not in dict(spec.losses):
        return routed(spec, alone, dp_group, replica, positions)
    loads = [_loads_by_score(spec, other) for other in range(dp)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "_mean_loads", lambda *_: torch.stack(loads).mean(0))
        return routed(spec, alone, dp_group, replica, positions)


def _loads_by_score(spec: RouterSpec, replica: int) -> Tensor:
    """Return the loads that losses use: those of the top k scores, without groups."""
    plain = RouterSpec(num_experts=E, top_k=spec.top_k, is_forced=spec.is_forced)
    alone = TokenSplit(
        TensorParallel(RankGroup("tp", (0,), 0), RankGroup("kv", (0,), 0), sequence_parallel=False),
        ContextParallel(RankGroup("cp", (0,), 0)),
    )
    found = routed(plain, alone, RankGroup("dp", (0,), 0), replica, torch.arange(S))
    return found["metrics"][len(ROUTER_METRICS) :]


def routed(
    spec: RouterSpec, split: TokenSplit, dp: RankGroup, replica: int, positions: Tensor
) -> dict[str, Tensor]:
    """Run the router on these positions of a replica's micro-batch; return routing, gradients and metrics."""
    router = Router(
        spec, 3, "router", hidden_size=H, init=Init(std=1), dtype=torch.float64, split=split, dp=dp
    )
    weight = torch.randn(E, H, generator=torch.Generator().manual_seed(100), dtype=torch.float64)
    router.weight = torch.nn.Parameter(weight)
    router.weight_grads["weight"] = torch.zeros_like(weight)
    if spec.has_selection_bias:
        router.bias = torch.linspace(-0.4, 0.4, E, dtype=torch.float64)
    x, dprobs = micro_batch(replica)
    own = x[positions].requires_grad_()
    info = PassInfo(first_sample=replica * B, router_loss_scale=0.5)
    routing = router(own, info)
    routing.probs.backward(dprobs[positions].flatten(0, 1))
    assert own.grad is not None
    return {
        "positions": positions,
        "experts": routing.experts.view(*own.shape[:2], -1),
        "probs": routing.probs.detach().view(*own.shape[:2], -1),
        "x": own.grad,
        "weight": router.weight_grads["weight"],
        "metrics": info.router_metrics[3],
    }
