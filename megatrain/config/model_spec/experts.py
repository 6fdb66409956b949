"""Routed experts in place of an MLP, with a shared expert and latents of their inputs and outputs where a model has them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from megatrain.config.model_spec.linear import Linear, Piece
from megatrain.config.model_spec.mlp import MlpSpec, mlp_linears
from megatrain.config.model_spec.part import Part, Role

BalancingLoss = Literal["aux_loss", "seq_aux_loss", "global_aux_loss"]
"""Load balancing loss over the tokens of a micro-batch, of a sequence, or of a global batch."""


ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]


@dataclass(frozen=True, kw_only=True)
class TopKRule:
    """Rule for the selection of experts by their logits."""

    top_k: int
    score_function: ScoreFunction = "softmax"
    is_pre_softmax: bool = False
    """The softmax is over all experts, not over the selected ones."""
    num_groups: int | None = None
    """Groups of consecutive experts, `group_top_k` of them per token, by the sums of their `group_score_top_k` largest scores."""
    group_top_k: int | None = None
    group_score_top_k: int | None = None
    scaling_factor: float = 1.0
    """Factor of the probabilities."""

    @property
    def selects_top_logits(self) -> bool:
        """True if the selected experts are those with the largest logits."""
        return self.score_function == "softmax" and not self.is_pre_softmax and self.num_groups is None


@dataclass(frozen=True, kw_only=True)
class RouterSpec(TopKRule):
    """Router: selects the experts of each token and computes their probabilities."""

    num_experts: int
    dtype: Literal["fp32", "fp64"] | None = None
    """Dtype of logits and scores; None: logits in the model's dtype."""
    losses: tuple[tuple[BalancingLoss, float], ...] = ()
    """Load balancing losses with their coefficients."""
    is_sinkhorn: bool = False
    """Experts are selected by a Sinkhorn plan of the scores."""
    quantile_ema: float | None = None
    """Experts are selected by logits with a bias per expert, which each step replaces by negative load quantiles; the share of
    the bias before it in the new one. None: they are not."""
    z_loss_coeff: float = 0.0
    has_bias: bool = False
    """The logits have a bias."""
    has_expert_bias: bool = False
    """The selection adds a bias per expert to the scores."""
    bias_update_rate: float = 1e-3
    """Change of that bias per step; 0 with `is_padded`: padded loads are equal."""
    jitter: float = 0.0
    capacity_factor: float | None = None
    """Maximum load of an expert relative to the mean load; None: no assignment is dropped."""
    drops_last: bool = False
    """Drop the last tokens, not those with the lowest probabilities."""
    is_padded: bool = False
    """Pad every expert's rows to its capacity."""
    is_forced: bool = False
    """Select experts at random, for speed measurements with even loads."""

    def share_of_tokens(self, parts: int) -> float:
        """Return the share of the tokens that have experts in one of `parts` equal parts of all experts, if loads are equal.

        A router of groups selects experts of `group_top_k` groups only (node-limited routing, arXiv:2412.19437, section 2.1.2).
        """
        groups, kept = self.num_groups or 1, self.group_top_k or 1
        part, group = self.num_experts // parts, max(self.num_experts // groups, 1)
        if part >= group:  # of whole groups: it has tokens if one of these is kept
            return _chosen(groups, part // group, kept)
        return kept / groups * _chosen(kept * group, part, self.top_k)

    @property
    def has_selection_bias(self) -> bool:
        """The model has a bias per expert for the selection, which is no parameter."""
        return self.has_expert_bias or self.quantile_ema is not None

    @property
    def has_bias_updates(self) -> bool:
        """That bias is updated from other numbers than the loads: load quantiles, or loads without dropped assignments."""
        return self.quantile_ema is not None or (self.has_expert_bias and self.capacity_factor is not None)


def _chosen(number: int, part: int, top_k: int) -> float:
    """Return the probability that one of `top_k` random choices of `number` is in a part of them."""
    return 1 - math.comb(number - part, top_k) / max(math.comb(number, top_k), 1)


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec(Part):
    """Experts in place of an MLP, some of them per token."""

    name: ClassVar[str] = "mlp"
    role: ClassVar[Role] = "mlp"

    router: RouterSpec
    expert: MlpSpec
    """Each routed expert."""
    shared: MlpSpec | None = None
    """Shared expert, which computes all tokens; None: none."""
    has_shared_gate: bool = False
    """The shared expert's output is multiplied by a sigmoid gate of the token."""
    latent_size: int | None = None
    """Width of the routed experts' inputs and outputs, projected from and to the hidden size; None: the hidden size."""

    @property
    def num_experts(self) -> int:
        return self.router.num_experts

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.router.top_k

    @property
    def ffn_hidden_size(self) -> int:
        """Width of each routed expert."""
        return self.expert.ffn_hidden_size

    @property
    def shared_ffn_hidden_size(self) -> int:
        """Width of the shared expert; 0: none."""
        return 0 if self.shared is None else self.shared.ffn_hidden_size

    @property
    def is_gated(self) -> bool:
        return self.expert.is_gated

    def linears_of(self, part: str, hidden_size: int) -> list[Linear]:
        """Return the GEMMs of `mlp.experts`, `mlp.shared`, or `mlp`: the latents."""
        return [one for one in self.linears(hidden_size) if one.part == part]

    def linears(self, hidden_size: int) -> Iterator[Linear]:
        """Yield the GEMMs of routed experts, of the shared expert and of the latents; the router's is none of them."""
        latent = self.latent_size
        yield from mlp_linears(
            latent or hidden_size, self.ffn_hidden_size, is_gated=self.is_gated, part="mlp.experts", module="mlp.experts",
            names="a routed expert", flags="--moe-ffn-hidden-size, --expert-tensor-parallel-size",
            path="experts.moe_ffn_hidden_size", num_experts=self.num_experts, top_k=self.top_k,
        )  # fmt: skip
        if self.shared is not None:
            yield from mlp_linears(
                hidden_size, self.shared.ffn_hidden_size, is_gated=self.shared.is_gated, part="mlp.shared",
                module="mlp.shared_experts", names="the shared expert",
                flags="--moe-shared-expert-intermediate-size, --tensor-model-parallel-size and the width of the MLP",
                path="experts.moe_shared_expert_intermediate_size",
            )  # fmt: skip
        if latent is not None:
            for name, module, inputs, outputs in (
                ("latent_down", "fc1_latent_proj", hidden_size, latent),
                ("latent_up", "fc2_latent_proj", latent, hidden_size),
            ):
                yield Linear(
                    part="mlp", pieces=(Piece(name, outputs),), inputs=inputs, split="none", reads="experts",
                    writes="experts", flags="--moe-latent-size", modules=(f"mlp.{module}",),
                )  # fmt: skip
