"""Parity features of experts: parallelism, dispatcher, load balancing, capacity."""

from __future__ import annotations

from typing import Final

from megatrain.config.parity_features.feature import Feature, Option, PlanOrDraft, option_sizes

_EP, _ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
_EXPERTS = "--disable-bias-linear --num-experts"
_BALANCING = "--moe-router-load-balancing-type"
_CAPACITY = "--moe-expert-capacity-factor"


def _has_experts(plan: PlanOrDraft) -> bool:
    return plan.config.experts.num_experts is not None


def _ep(plan: PlanOrDraft) -> int:
    return plan.config.parallel.expert_model_parallel_size


def _etp(plan: PlanOrDraft) -> int:
    return plan.derived.expert_tensor_parallel_size if _has_experts(plan) else 1


def _is_alltoall(plan: PlanOrDraft) -> bool:
    return plan.config.experts.sends_by_alltoall


def _balancing(plan: PlanOrDraft) -> set[str]:
    """Return the load-balancing losses with a non-zero coefficient, or the way of balancing without a loss."""
    experts = plan.config.experts
    kinds = experts.moe_router_load_balancing_type
    if without_loss := {"sinkhorn", "quantile_balancing"} & set(kinds):
        return without_loss
    factors = dict(zip(kinds, experts.moe_aux_loss_coeff, strict=False))  # a rule reports different lengths
    return {kind for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss") if factors.get(kind)}


EXPERT_OPTIONS: Final[tuple[Option, ...]] = (
    Option(
        "experts",
        ("experts.num_experts",),
        (
            Feature("dense", "", lambda p: not _has_experts(p)),
            Feature(
                "experts",
                "--num-experts",
                _has_experts,
                rows={
                    "mixtral": f"{_EXPERTS} 8 --moe-ffn-hidden-size 48 --moe-router-topk 2",
                    "deepseek": (
                        f"{_EXPERTS} 8 --moe-ffn-hidden-size 24 --moe-layer-freq [0]+[1]*3 --moe-router-topk 4"
                        " --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-score-function sigmoid"
                        " --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"
                        " --moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 48"
                    ),
                    "qwenmoe": (
                        f"{_EXPERTS} 4 --moe-ffn-hidden-size 48 --moe-layer-freq 2 --moe-router-topk 1"
                        " --moe-router-pre-softmax --moe-input-jitter-eps 0.05"
                        " --moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate"
                    ),
                    "latentexperts": (
                        f"{_EXPERTS} 8 --moe-ffn-hidden-size 24 --moe-layer-freq [0,1]*2 --moe-router-topk 3"
                        " --moe-latent-size 24 --moe-shared-expert-intermediate-size 24"
                    ),
                    "biasedexperts": (
                        "--no-disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2"
                        " --moe-shared-expert-intermediate-size 24"
                    ),
                },
            ),
        ),
    ),
    Option(
        "expert parallelism",
        ("parallel.expert_model_parallel_size",),
        (
            Feature("ep1", "", lambda p: _ep(p) == 1),
            Feature("ep", _EP, lambda p: _ep(p) > 1, needs=("experts",), rows=option_sizes(_EP, "ep", 2, 4)),
        ),
        is_layout=True,
    ),
    Option(
        "expert tensor parallelism",
        ("parallel.expert_tensor_parallel_size",),
        (
            Feature("etp1", f"{_ETP} 1", lambda p: _etp(p) == 1),
            Feature(
                "etp", _ETP, lambda p: _etp(p) > 1, needs=("experts",), rows=option_sizes(_ETP, "etp", 2)
            ),
        ),
        is_layout=True,
    ),
    Option(
        "dispatcher",
        ("experts.moe_token_dispatcher_type", "experts.moe_alltoall_as_allgather"),
        (
            Feature("alltokens", "", lambda p: not _is_alltoall(p)),
            Feature(
                "alltoall",
                "--moe-token-dispatcher-type alltoall --no-moe-alltoall-as-allgather",
                _is_alltoall,
                needs=("ep",),
            ),
        ),
        is_layout=True,
    ),
    Option(
        "expert communication",
        ("experts.overlap_moe_expert_parallel_comm",),
        (
            Feature("moewaits", "", lambda p: not p.config.experts.overlap_moe_expert_parallel_comm),
            Feature(
                "moeoverlap",
                "--overlap-moe-expert-parallel-comm",
                lambda p: p.config.experts.overlap_moe_expert_parallel_comm,
                needs=("ep", "etp"),
            ),
        ),
        is_layout=True,
    ),
    Option(
        "balancing",
        ("experts.moe_router_load_balancing_type", "experts.moe_aux_loss_coeff"),
        (
            Feature("unbalanced", "", lambda p: not _balancing(p)),
            Feature(
                "auxloss",
                f"{_BALANCING} aux_loss --moe-aux-loss-coeff 0.1",
                lambda p: _balancing(p) == {"aux_loss"},
                needs=("experts",),
                rows={"auxloss": f"{_BALANCING} aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"},
            ),
            Feature(
                "seqauxloss",
                f"{_BALANCING} seq_aux_loss --moe-aux-loss-coeff 0.1",
                lambda p: _balancing(p) == {"seq_aux_loss"},
                needs=("experts",),
            ),
            Feature(
                "globalauxloss",
                f"{_BALANCING} global_aux_loss --moe-aux-loss-coeff 0.1",
                lambda p: _balancing(p) == {"global_aux_loss"},
                needs=("experts",),
            ),
            Feature(
                "severallosses",
                f"{_BALANCING} aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.1 0.1",
                lambda p: len(_balancing(p)) > 1,
                needs=("experts",),
                rows={
                    "severallosses": (
                        f"{_BALANCING} aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.2 0.05"
                    )
                },
            ),
            Feature(
                "sinkhorn",
                f"{_BALANCING} sinkhorn",
                lambda p: "sinkhorn" in _balancing(p),
                needs=("experts",),
            ),
            Feature(
                "quantilebalancing",
                f"{_BALANCING} quantile_balancing",
                lambda p: "quantile_balancing" in _balancing(p),
                needs=("experts",),
                rows={
                    "quantiles": f"{_BALANCING} quantile_balancing --moe-router-quantile-balancing-ema 0.3"
                },
            ),
        ),
    ),
    Option(
        "capacity",
        ("experts.moe_expert_capacity_factor",),
        (
            Feature("dropless", "", lambda p: p.config.experts.moe_expert_capacity_factor is None),
            Feature(
                "capacity",
                _CAPACITY,
                lambda p: p.config.experts.moe_expert_capacity_factor is not None,
                needs=("experts",),
                rows={
                    "dropping": f"{_CAPACITY} 0.8",
                    "dropspadded": (
                        f"{_CAPACITY} 1.1 --moe-token-drop-policy position --moe-pad-expert-input-to-capacity"
                    ),
                },
            ),
        ),
    ),
)
