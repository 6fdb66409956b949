"""The router of a layer with experts: it selects experts for each token, computes balancing losses and records metrics.

    x ─ jitter ─ logits ─┬─ select experts ─ capacity ──> Routing
                         └─ losses ─> enter the graph through the probabilities; their values go to `info.router_metrics`

Losses are those of a micro-batch, whose tokens may be split over ranks (`TokenSplit`): a rank's part is computed from its
own tokens' scores and the loads of all tokens. Gradients are plain sums over ranks, micro-batches and replicas, so a part
is scaled by `info.router_loss_scale`. The step's loss has, for each layer, the mean over micro-batches of coefficient *
loss; with --calculate-per-token-loss, as in Megatron-LM, the sum over micro-batches of (all their tokens) * coefficient *
loss, divided by the step's tokens that count.

The metrics of a pass are a row of `ROUTER_METRICS`, then the load of each expert, over this rank's tokens, in fp64, in which
sums of loads are exact; then, where the selection bias is not updated from these, the numbers that update it: loads without
dropped assignments, or the load quantiles of the micro-batch. A recomputed forward pass records the same values again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.config.model_spec.experts import RouterSpec, TopKRule
from megatrain.kernels.moe import router_linear
from megatrain.kernels.moe.routing import (
    Routing,
    kept_assignments,
    load_quantiles,
    select_by_biased_logits,
    select_by_sinkhorn,
    select_experts,
    sinkhorn_plan,
    tokens_per_expert,
)
from megatrain.kernels.moe.routing_losses import (
    ScoreSums,
    add_loss,
    load_balancing_loss,
    replace_values,
    score_sums,
)
from megatrain.kernels.random import fill_uniform, stream_key
from megatrain.model.layouts import router_layout, stream_layout
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.context_parallel import TokenSplit
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import Init, ShardedModule
from megatrain.parallel.tensor_parallel import Bias

ROUTER_METRICS = ("dropped", "entropy", "z_loss", "aux_loss", "seq_aux_loss", "global_aux_loss")
"""Metrics of a router: dropped assignments, sum of the tokens' entropies, and this rank's parts of losses without coefficients."""
_LOSSES = slice(ROUTER_METRICS.index("z_loss"), None)
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(ShardedModule):
    """Router of one layer.

    Args:
        layer: number of its layer in the model.
        name: prefix of its canonical names, and the key of its random streams.
        hidden_size, init, dtype: properties of its weight, [E, h].
        split: distribution of the micro-batch's tokens over ranks.
        dp: data-parallel ranks.
        seed: seed of jitter.
    """

    weight: Tensor
    linear_bias: Tensor
    """Added to the logits, [E], if the spec has it."""
    bias: Tensor | None
    """Added to scores in the selection of experts, [E]: a view of the model's `ExpertBiases`."""

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
        self.dtype = dtype if spec.dtype is None else torch.promote_types(dtype, _DTYPES[spec.dtype])
        self.keys = {use: stream_key(seed, f"{name}.{use}") for use in ("jitter", "forced")}
        self.has_bias_updates = spec.has_bias_updates
        self.cumulative_loads: list[Tensor] = []
        """Loads summed over all replicas and the step's micro-batches up to each one: [E] each."""
        self.add_weight(
            "weight", router_layout(f"{name}.weight", spec.num_experts, hidden_size, init, split.tp), dtype
        )
        if spec.has_bias:
            layout = stream_layout(f"{name}.bias", spec.num_experts, Init(), split.tp)
            self.add_weight("linear_bias", layout, dtype)

    def forward(self, x: Tensor, info: PassInfo) -> Routing:
        """Route this rank's tokens: x [s/(cp tp), b, h], flattened to [t, h]."""
        rows, samples = x.shape[:2]
        logits = self._logits(x, info)
        experts, probs = self._select(logits, rows, samples, info)
        kept = self._kept(experts, probs, rows, samples, info)
        if info.is_training:
            probs = self._with_losses(probs, logits, experts, kept, samples, info)
        return Routing(experts, probs if kept is None else probs * kept, kept)

    def _logits(self, x: Tensor, info: PassInfo) -> Tensor:
        """Compute the logits, [t, E], in the router's dtype."""
        if self.spec.jitter and info.is_training:
            x = x * self._uniform(x, info, "jitter", 1 - self.spec.jitter, 1 + self.spec.jitter)
        bias = Bias(self.linear_bias, self.weight_grads.get("linear_bias")) if self.spec.has_bias else None
        logits: Tensor = _Logits.apply(
            x.flatten(0, 1), self.weight, self.weight_grads.get("weight"), bias, self.dtype, info
        )
        if self.spec.is_forced:
            like = logits.detach().unflatten(0, x.shape[:2])
            logits = replace_values(logits, self._uniform(like, info, "forced", 0, 1).flatten(0, 1))
        return logits

    def _uniform(self, like: Tensor, info: PassInfo, use: str, low: float, high: float) -> Tensor:
        """Draw uniform numbers in the shape of `like`, [s/(cp tp), b, n]; a token's numbers do not depend on the layout."""
        rows, samples, columns = like.shape
        indices = self.split.token_indices(rows, samples, info, like.device)
        out = torch.empty(rows * samples, columns, dtype=like.dtype, device=like.device)
        fill_uniform(out, indices.flatten(), key=self.keys[use], low=low, high=high)
        return out.view(like.shape)

    def _select(self, logits: Tensor, rows: int, samples: int, info: PassInfo) -> tuple[Tensor, Tensor]:
        assert (self.spec.has_expert_bias or self.spec.quantile_ema is not None) == (self.bias is not None)
        if self.spec.quantile_ema is not None and self.bias is not None:
            return select_by_biased_logits(logits, self.spec, self.bias)
        if not self.spec.is_sinkhorn:
            return select_experts(logits, self.spec, self.bias)
        if not info.is_training:
            return select_by_sinkhorn(logits, logits, self.spec.top_k)
        order = self.split.flat_positions(rows, samples, logits.device)
        plan = sinkhorn_plan(self.split.gather(logits.detach(), order))
        return select_by_sinkhorn(logits, plan if self.split.num_ranks == 1 else plan[order], self.spec.top_k)

    def _kept(self, experts: Tensor, probs: Tensor, rows: int, samples: int, info: PassInfo) -> Tensor | None:
        """Return the assignments within the experts' capacity, bool [t, k]; None: all.

        The whole micro-batch decides, without its padding samples, which are dropped.
        """
        spec = self.spec
        if spec.capacity_factor is None:
            return None
        if probs.dtype == torch.float64 != self.weight.dtype:
            probs = probs.float()  # have the rounding of the model
        order = self.split.flat_positions(rows, samples, experts.device)
        all_experts, all_probs = (self.split.gather(x.detach(), order) for x in (experts, probs))
        kept = kept_assignments(
            all_experts, all_probs, num_experts=spec.num_experts, capacity_factor=spec.capacity_factor,
            policy="position" if spec.drops_last else "probs", samples=samples, num_samples=info.num_samples,
        )  # fmt: skip
        return kept if self.split.num_ranks == 1 else kept[order]

    def _with_losses(
        self,
        probs: Tensor,
        logits: Tensor,
        experts: Tensor,
        kept: Tensor | None,
        samples: int,
        info: PassInfo,
    ) -> Tensor:
        """Return the probabilities, through which the losses enter the graph; record the metrics."""
        scores = score_sums(logits, self.spec.score_function, samples)
        loads = tokens_per_expert(experts.unflatten(0, (-1, samples)), self.spec.num_experts)  # [b, E]
        metrics = loads.new_zeros(len(ROUTER_METRICS), dtype=torch.float64)
        metrics[ROUTER_METRICS.index("entropy")] = scores.entropy
        if kept is not None:
            metrics[ROUTER_METRICS.index("dropped")] = (~kept).sum()
        of_experts = [loads.sum(0)]  # before `loads` is overwritten
        if self.has_bias_updates:
            of_experts.append(self._bias_updates(logits, experts, kept, samples))
        parts = self._losses(logits, scores, loads, info)
        if parts:
            loss = sum(coeff * part for coeff, part in parts.values())
            assert isinstance(loss, Tensor)
            probs = add_loss(probs, loss, info.router_loss_scale)
        for name, (_, part) in parts.items():
            metrics[ROUTER_METRICS.index(name)] = part.detach()
        info.router_metrics[self.layer] = torch.cat([metrics, *(x.double() for x in of_experts)])
        return probs

    def _bias_updates(self, logits: Tensor, experts: Tensor, kept: Tensor | None, samples: int) -> Tensor:
        """Return this rank's part of the numbers that update the selection bias, [E].

        They are loads without dropped assignments, or the load quantiles of the micro-batch, on the first of its ranks.
        """
        if self.spec.quantile_ema is None or self.bias is None:
            assert kept is not None, "it has a capacity"
            return tokens_per_expert(experts, self.spec.num_experts, kept)
        order = self.split.flat_positions(len(logits) // samples, samples, logits.device)
        whole = self.split.gather(logits.detach(), order)
        quantiles = load_quantiles(whole, self.bias, self.spec.top_k)
        return quantiles if self.split.is_first else torch.zeros_like(quantiles)

    def _losses(
        self, logits: Tensor, scores: ScoreSums, selected: Tensor, info: PassInfo
    ) -> dict[str, tuple[float, Tensor]]:
        """Compute coefficient and this rank's part of each loss. `selected` [b, E], the experts' loads, is overwritten."""
        spec, samples = self.spec, len(selected)
        num_tokens = logits.shape[0] * self.split.num_ranks
        losses: dict[str, tuple[float, Tensor]] = {}
        if spec.z_loss_coeff:
            losses["z_loss"] = (spec.z_loss_coeff, scores.squares / num_tokens)
        if not any(coeff for _, coeff in spec.losses):
            return losses
        by_sequence = self.split.sum(self._top_k_loads(logits, selected))
        loads = by_sequence.sum(0)
        for name, coeff in spec.losses:
            if name == "seq_aux_loss":
                shares, counts, length = scores.probs, by_sequence, num_tokens // samples
            else:
                counts = self._mean_loads(loads, info) if name == "global_aux_loss" else loads
                shares, length = scores.probs.sum(0), num_tokens
            loss = load_balancing_loss(shares, counts, top_k=spec.top_k, num_tokens=length)
            if coeff:
                losses[name] = (coeff, loss)
        return losses

    def _top_k_loads(self, logits: Tensor, selected: Tensor) -> Tensor:
        """Return the loads that losses use, [b, E]: those of the top k scores, without bias and groups."""
        if self.spec.selects_top_logits and not self.spec.is_sinkhorn:
            return selected
        best, _ = select_experts(logits.detach(), TopKRule(top_k=self.spec.top_k))
        return tokens_per_expert(best.unflatten(0, (-1, len(selected))), self.spec.num_experts)

    def _mean_loads(self, loads: Tensor, info: PassInfo) -> Tensor:
        """Return the mean loads of the step's micro-batches of all replicas up to this one, fp64 [E]."""
        number = info.microbatch
        if self.layer not in info.router_metrics:  # not a recomputed forward pass
            if number == 0:
                self.cumulative_loads = []
            assert len(self.cumulative_loads) == number, "micro-batches run in order"
            total = all_reduce(loads.clone(), self.dp)
            self.cumulative_loads.append(total + self.cumulative_loads[-1] if number else total)
        return self.cumulative_loads[number].double() / (self.dp.size * (number + 1))


def mean_losses(metrics: Tensor, num_uses: int) -> Tensor:
    """Return the sum of the metrics of a router over its uses in a pass with the means of its losses."""
    metrics[: len(ROUTER_METRICS)][_LOSSES] /= num_uses
    return metrics


class _Logits(Function):
    """x [t, h], weight [E, h], bias [E] -> x W^T + bias [t, E], computed and returned in `dtype`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_grad: Tensor | None,
        bias: Bias | None,
        dtype: torch.dtype,
        info: PassInfo,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight_grad, ctx.bias, ctx.info = weight_grad, bias, info
        logits = router_linear.linear(x, weight, dtype)
        return logits if bias is None else logits.add_(bias.value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        x, weight = ctx.saved_tensors
        dy, weight_grad = grads[0], ctx.weight_grad
        dx, accumulate = router_linear.linear_backward(dy, x, weight)
        ctx.info.compute_weight_gradient(lambda: accumulate(weight_grad))
        if ctx.bias is not None:
            ctx.bias.grad.add_(dy.sum(0))
        return dx, None, None, None, None, None
