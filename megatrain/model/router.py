"""The router of a layer with experts: which experts each token goes to, losses that keep loads even, and what it tells.

    x ─ jitter ─ logits ─┬─ pick experts ─ capacity ──> Routing
                         └─ losses ─> enter the graph through the weights; their values go to `info.router_metrics`

Losses are of the micro-batch, whose tokens may be spread over ranks (`TokenSplit`): a rank's part has the sum over its
own tokens, and everybody's loads. As plain sums over ranks, micro-batches and replicas are what gradients get, a part
enters with the factor `info.loss_scale`: what the micro-batch's mean token loss counts in the step's. So the step's
loss has the mean over micro-batches of coefficient * loss, for each layer; with --calculate-per-token-loss a mean that
is weighed by the tokens that count.

What is told of a pass is a row of `ROUTER_METRICS`, then the loads of the experts, over this rank's tokens; wide enough
that summed loads are exact. A second run of recomputation tells the same again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.moe.routing import (
    Routing,
    TopKRule,
    expert_capacity,
    select_by_sinkhorn,
    select_experts,
    sinkhorn_plan,
    tokens_per_expert,
    within_capacity,
)
from megatrain.kernels.moe.routing_losses import ScoreSums, load_balancing_loss, score_sums
from megatrain.kernels.random import fill_uniform, stream_key
from megatrain.kernels.wgrad import accumulate_weight_gradient
from megatrain.model.layouts import router_layout
from megatrain.model.specs import RouterSpec
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.context_parallel import TokenSplit
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import Init, LaidOutModule

ROUTER_METRICS = ("dropped", "entropy", "z_loss", "aux_loss", "seq_aux_loss", "global_aux_loss")
"""What a router tells: visits that were dropped, the tokens' entropies, and parts of losses without their coefficients."""
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(LaidOutModule):
    """Picks experts for the tokens of one layer.

    Args:
        spec: what it does.
        layer: number of its layer in the model.
        name: begins its canonical names, and by it jitter draws.
        hidden_size, init, dtype: of its weight, [E, h].
        split: how tokens lie on ranks.
        dp: ranks that read other samples.
        seed: of jitter.
    """

    weight: Tensor
    bias: Tensor | None
    """Added to scores to pick, [E]: a part of the model's `ExpertBiases`."""

    def __init__(
        self,
        spec: RouterSpec,
        layer: int,
        name: str,
        *,
        hidden_size: int,
        init: Init,
        dtype: torch.dtype,
        split: TokenSplit,
        dp: RankGroup,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.spec, self.layer, self.split, self.dp, self.bias = spec, layer, split, dp, None
        self.rule = TopKRule(
            top_k=spec.top_k,
            score_function=spec.score_function,
            is_pre_softmax=spec.is_pre_softmax,
            num_groups=spec.num_groups,
            group_top_k=spec.group_top_k,
            scaling_factor=spec.scaling_factor or 1.0,
        )
        self.dtype = dtype if spec.dtype is None else torch.promote_types(dtype, _DTYPES[spec.dtype])
        self.keys = {what: stream_key(seed, f"{name}.{what}") for what in ("jitter", "forced")}
        self.loads_so_far: list[Tensor] = []
        """Loads of the global batch up to each of the step's micro-batches: [E] each, over all replicas."""
        self.add_weight(
            "weight", router_layout(f"{name}.weight", spec.num_experts, hidden_size, init, split.tp), dtype
        )

    def forward(self, x: Tensor, info: PassInfo) -> Routing:
        """Routing of this rank's tokens, x [s/(cp tp), b, h], whose rows follow one another as [t, h]."""
        rows, samples = x.shape[:2]
        logits = self._logits(x, info)
        experts, weights = self._pick(logits, rows, samples, info)
        kept = self._kept(experts, weights, rows, samples)
        if info.is_training:
            weights = self._with_losses(weights, logits, experts, kept, samples, info)
        return Routing(experts, weights if kept is None else weights * kept, kept)

    def _logits(self, x: Tensor, info: PassInfo) -> Tensor:
        """[t, E] in the router's dtype."""
        if self.spec.jitter and info.is_training:
            x = x * self._uniform(x, info, "jitter", 1 - self.spec.jitter, 1 + self.spec.jitter)
        logits: Tensor = _Logits.apply(
            x.flatten(0, 1), self.weight, self.weight_grads.get("weight"), self.dtype, info
        )
        if self.spec.is_forced:
            by_place = logits.detach().unflatten(0, x.shape[:2])
            logits = _Replaced.apply(logits, self._uniform(by_place, info, "forced", 0, 1).flatten(0, 1))
        return logits

    def _uniform(self, like: Tensor, info: PassInfo, what: str, low: float, high: float) -> Tensor:
        """Numbers for each token, the same under every layout, in the shape of `like`, [s/(cp tp), b, n]."""
        rows, samples, columns = like.shape
        numbers = self.split.token_indices(rows, samples, first_sample=info.first_sample, device=like.device)
        out = torch.empty(rows * samples, columns, dtype=like.dtype, device=like.device)
        fill_uniform(out, numbers.flatten(), key=self.keys[what], low=low, high=high)
        return out.view(like.shape)

    def _pick(self, logits: Tensor, rows: int, samples: int, info: PassInfo) -> tuple[Tensor, Tensor]:
        assert self.spec.has_expert_bias == (self.bias is not None)
        if not self.spec.is_sinkhorn:
            return select_experts(logits, self.rule, self.bias)
        if not info.is_training:
            return select_by_sinkhorn(logits, logits, self.spec.top_k)
        order = self.split.flat_positions(rows, samples, logits.device)
        plan = sinkhorn_plan(self.split.gather(logits.detach(), order))
        own = plan if self.split.num_ranks == 1 else plan[order]
        return select_by_sinkhorn(logits, own, self.spec.top_k)

    def _kept(self, experts: Tensor, weights: Tensor, rows: int, samples: int) -> Tensor | None:
        """Which visits experts have room for, [t, k], decided over the whole micro-batch."""
        if self.spec.capacity_factor is None:
            return None
        order = self.split.flat_positions(rows, samples, experts.device)
        whole = self.split.gather(experts, order)
        capacity = expert_capacity(
            self.spec.capacity_factor,
            top_k=self.spec.top_k,
            num_tokens=whole.shape[0],
            num_experts=self.spec.num_experts,
        )
        kept = within_capacity(
            whole,
            self.split.gather(weights.detach(), order),
            capacity,
            "position" if self.spec.drops_last else "probs",
        )
        return kept if self.split.num_ranks == 1 else kept[order]

    def _with_losses(
        self,
        weights: Tensor,
        logits: Tensor,
        experts: Tensor,
        kept: Tensor | None,
        samples: int,
        info: PassInfo,
    ) -> Tensor:
        """The weights, through which the losses enter the graph; tells what they were."""
        scores = score_sums(logits, self.spec.score_function, samples)
        loads = tokens_per_expert(experts.unflatten(0, (-1, samples)), self.spec.num_experts)  # [b, E]
        told = torch.zeros(
            len(ROUTER_METRICS) + self.spec.num_experts, dtype=torch.float64, device=loads.device
        )
        told[len(ROUTER_METRICS) :] = loads.sum(0)
        told[ROUTER_METRICS.index("entropy")] = scores.entropy
        if kept is not None:
            told[ROUTER_METRICS.index("dropped")] = (~kept).sum()
        parts = self._losses(logits, scores, loads, info)
        if parts:
            weights = _WithLoss.apply(
                weights, sum(coeff * part for coeff, part in parts.values()), info.loss_scale
            )
        for name, (_, part) in parts.items():
            told[ROUTER_METRICS.index(name)] = part.detach()
        info.router_metrics[self.layer] = told
        return weights

    def _losses(
        self, logits: Tensor, scores: ScoreSums, picked: Tensor, info: PassInfo
    ) -> dict[str, tuple[float, Tensor]]:
        """Coefficient and this rank's part of each loss, by its name among ROUTER_METRICS.

        Args:
            picked: loads of the experts by what was picked, [b, E]; may change.
        """
        spec, samples = self.spec, len(picked)
        num_tokens = logits.shape[0] * self.split.num_ranks
        found: dict[str, tuple[float, Tensor]] = {}
        if spec.z_loss_coeff:
            found["z_loss"] = (spec.z_loss_coeff, scores.squares / num_tokens)
        if not any(coeff for _, coeff in spec.losses):
            return found
        by_sequence = self.split.sum(self._best_loads(logits, picked))
        loads = by_sequence.sum(0)
        for name, coeff in spec.losses:
            match name:
                case "aux_loss":
                    shares = scores.shares.sum(0)
                    loss = load_balancing_loss(shares, loads, top_k=spec.top_k, num_tokens=num_tokens)
                case "seq_aux_loss":
                    length = num_tokens // samples
                    loss = load_balancing_loss(
                        scores.shares, by_sequence, top_k=spec.top_k, num_tokens=length
                    )
                case "global_aux_loss":
                    mean, shares = self._mean_loads(loads, info), scores.shares.sum(0)
                    loss = load_balancing_loss(shares, mean, top_k=spec.top_k, num_tokens=num_tokens)
            if coeff:
                found[name] = (coeff, loss)
        return found

    def _best_loads(self, logits: Tensor, picked: Tensor) -> Tensor:
        """Loads of the experts as losses count them, [b, E]: of the best by score, whatever bias or groups make of them."""
        if self.rule.picks_best_logits and not self.spec.is_sinkhorn:
            return picked
        best, _ = select_experts(logits.detach(), TopKRule(top_k=self.spec.top_k))
        return tokens_per_expert(best.unflatten(0, (-1, len(picked))), self.spec.num_experts)

    def _mean_loads(self, loads: Tensor, info: PassInfo) -> Tensor:
        """Mean loads of the step's micro-batches of all replicas up to this one, wide [E]."""
        number = info.microbatch
        if self.layer not in info.router_metrics:  # not a second run
            if number == 0:
                self.loads_so_far = []
            assert len(self.loads_so_far) == number, "micro-batches come in their order"
            total = all_reduce(loads.clone(), self.dp)
            self.loads_so_far.append(total + self.loads_so_far[-1] if number else total)
        return self.loads_so_far[number].double() / (self.dp.size * (number + 1))


class _Logits(Function):
    """x [t, h], weight [E, h] -> x W^T [t, E], computed and given in `dtype`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, weight_grad: Tensor | None, dtype: torch.dtype, info: PassInfo
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight_grad, ctx.dtype, ctx.info = weight_grad, dtype, info
        return x.to(dtype) @ weight.to(dtype).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight = ctx.saved_tensors
        dy, weight_grad = grads[0], ctx.weight_grad
        dx = (dy @ weight.to(ctx.dtype)).to(x.dtype)
        factors = dy.dtype if x.dtype == dy.dtype else weight_grad.dtype
        ctx.info.compute_weight_gradient(
            lambda: accumulate_weight_gradient(weight_grad, dy.to(factors), x.to(factors))
        )
        return dx, None, None, None, None


class _Replaced(Function):
    """Other values, with the gradient of those that they replace."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:  # noqa: ARG004 (autograd's signature)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None


class _WithLoss(Function):
    """x as it is; a loss enters the graph behind it, times a scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        ctx.scale, ctx.dtype, ctx.device = scale, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        one = torch.ones((), dtype=ctx.dtype, device=ctx.device)
        return grads[0], (one * ctx.scale).to(ctx.dtype), None
