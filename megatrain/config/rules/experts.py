"""Rules about experts: routing, load balancing, capacity, expert parallelism."""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.derive.patterns import PatternError, parse_expert_pattern
from megatrain.config.derive.ranks import experts_are_split
from megatrain.config.errors import Problem
from megatrain.config.fixes import Change, divisors, multiples, use
from megatrain.config.plan import Draft
from megatrain.config.schema.pipeline_schedules import PIPELINE_SCHEDULES, names_of

Problems = Iterator[Problem]

BALANCING: Final = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none")
_LOSSES: Final = BALANCING[:3]


def expert_layers_are_valid(draft: Draft) -> Problems:
    experts, model = draft.config.experts, draft.config.model
    if experts.num_experts is None:
        return
    try:
        found = parse_expert_pattern(experts.moe_layer_freq, model.num_layers)
    except PatternError as error:
        yield Problem(
            f"--moe-layer-freq: {error}",
            "give a number N for every Nth layer, or a list such as"
            f" --moe-layer-freq [0]*1+[1]*{model.num_layers - 1}",
        )
        return
    if not any(found):
        yield Problem(
            f"--moe-layer-freq {experts.moe_layer_freq} gives no layer experts, but --num-experts is"
            f" {experts.num_experts}",
            "set at least one entry of --moe-layer-freq to 1, or remove --num-experts",
        )


def experts_have_a_width(draft: Draft) -> Problems:
    experts = draft.config.experts
    if experts.num_experts is not None and experts.moe_ffn_hidden_size is None:
        yield Problem(
            "--moe-ffn-hidden-size none gives experts no width",
            "remove --moe-ffn-hidden-size, or give a width",
        )


def topk_fits_num_experts(draft: Draft) -> Problems:
    experts = draft.config.experts
    if experts.num_experts is not None and experts.moe_router_topk > experts.num_experts:
        yield Problem(
            f"--moe-router-topk {experts.moe_router_topk} is more than --num-experts {experts.num_experts}",
            use(draft, _routings(experts.num_experts)),
        )


def _routings(num_experts: int) -> Iterator[Change]:
    """Yield numbers of experts per token; one alone needs a softmax over all."""
    path = "experts.moe_router_topk"
    yield from ({path: topk} for topk in (2, *range(num_experts, 0, -1)) if topk <= num_experts)
    yield {path: 1, "experts.moe_router_pre_softmax": True}


def top1_routing_has_a_gradient(draft: Draft) -> Problems:
    experts = draft.config.experts
    if (
        experts.num_experts is not None
        and experts.moe_router_topk == 1
        and experts.moe_router_score_function == "softmax"
        and not experts.moe_router_pre_softmax
        and "sinkhorn" not in experts.moe_router_load_balancing_type
    ):
        yield Problem(
            "--moe-router-topk 1 computes the softmax over a single expert: its probability is always 1, and the router"
            " gets no gradient",
            "add --moe-router-pre-softmax, or use --moe-router-score-function sigmoid",
        )


def expert_groups_are_valid(draft: Draft) -> Problems:
    experts = draft.config.experts
    num, groups, best = experts.num_experts, experts.moe_router_num_groups, experts.moe_router_group_topk
    score = experts.moe_router_group_score_topk
    if num is None or (groups is None and best is None and score is None):
        return
    if score is not None and (groups is None or best is None):
        yield Problem(
            f"--moe-router-group-score-topk {score} requires --moe-router-num-groups and --moe-router-group-topk",
            use(draft, _groups(draft)),
        )
        return
    if groups is None or best is None:
        given, other = "--moe-router-num-groups", "--moe-router-group-topk"
        if groups is None:
            given, other = other, given
        yield Problem(
            f"{given} requires {other}",
            use(draft, _groups(draft)),
        )
        return
    if num % groups:
        yield Problem(
            f"--num-experts {num} is not divisible by --moe-router-num-groups {groups}",
            use(draft, divisors("experts.moe_router_num_groups", num, groups), _groups(draft)),
        )
    elif best > groups:
        yield Problem(
            f"--moe-router-group-topk {best} is more than --moe-router-num-groups {groups}",
            use(draft, divisors("experts.moe_router_group_topk", groups, groups), _groups(draft)),
        )
    elif experts.moe_router_topk % best or experts.moe_router_topk > best * num // groups:
        yield Problem(
            f"--moe-router-topk {experts.moe_router_topk} is not divisible by --moe-router-group-topk {best}, or more than"
            f" its groups of {num // groups} experts have",
            use(draft, multiples("experts.moe_router_topk", best, best), _groups(draft)),
        )
    elif score is not None and score > num // groups:
        yield Problem(
            f"--moe-router-group-score-topk {score} is more than the {num // groups} experts of a group",
            f"use --moe-router-group-score-topk {num // groups} or less",
        )


def _groups(draft: Draft) -> Iterator[Change]:
    """Yield groups of experts, few first, and how many of them a token may use."""
    num = draft.config.experts.num_experts or 1
    for groups in (2, *(size for size in range(3, min(num, 64)) if num % size == 0), 1):
        for best in (1, 2, groups):
            if num % groups == 0 and best <= groups:
                yield {"experts.moe_router_num_groups": groups, "experts.moe_router_group_topk": best}


def load_balancing_is_valid(draft: Draft) -> Problems:
    experts = draft.config.experts
    kinds, factors = experts.moe_router_load_balancing_type, experts.moe_aux_loss_coeff
    unknown = [kind for kind in kinds if kind not in BALANCING]
    if unknown or not kinds:
        yield Problem(
            f"--moe-router-load-balancing-type {' '.join(unknown) or 'without a value'} is not supported",
            "use --moe-router-load-balancing-type sinkhorn, quantile_balancing or none, or one or more of"
            f" {' '.join(_LOSSES)}",
        )
        return
    if len(kinds) > 1 and (len(set(kinds)) < len(kinds) or set(kinds) - set(_LOSSES)):
        yield Problem(
            f"--moe-router-load-balancing-type {' '.join(kinds)} is not supported: these values exclude one another",
            f"use one of them, or distinct values of {' '.join(_LOSSES)}",
        )
    if len(kinds) != len(factors):
        yield Problem(
            f"--moe-router-load-balancing-type has {len(kinds)} values and --moe-aux-loss-coeff has {len(factors)}",
            f"give one coefficient per loss, such as --moe-aux-loss-coeff {' '.join(['1e-2'] * len(kinds))}",
        )
    if any(factor < 0 for factor in factors):
        yield Problem(
            f"--moe-aux-loss-coeff {' '.join(map(str, factors))} is negative and would reward an uneven load",
            "use a coefficient of 0 or more, such as --moe-aux-loss-coeff 1e-2",
        )


def expert_bias_requires_sigmoid(draft: Draft) -> Problems:
    experts = draft.config.experts
    if experts.moe_router_enable_expert_bias and experts.moe_router_score_function == "softmax":
        yield Problem(
            "--moe-router-enable-expert-bias is not supported together with --moe-router-score-function softmax, as in"
            " Megatron-LM",
            "use --moe-router-score-function sigmoid, or remove --moe-router-enable-expert-bias",
        )


def sinkhorn_and_quantiles_exclude_expert_bias(draft: Draft) -> Problems:
    experts = draft.config.experts
    for kind in ("sinkhorn", "quantile_balancing"):
        if kind in experts.moe_router_load_balancing_type and experts.moe_router_enable_expert_bias:
            yield Problem(
                f"--moe-router-load-balancing-type {kind} is not supported together with --moe-router-enable-expert-bias:"
                " both balance the routing",
                "remove one of them",
            )


def quantile_balancing_is_possible(draft: Draft) -> Problems:
    experts = draft.config.experts
    if experts.num_experts is None or "quantile_balancing" not in experts.moe_router_load_balancing_type:
        return
    if experts.moe_router_num_groups is not None:
        yield Problem(
            "--moe-router-load-balancing-type quantile_balancing is not supported together with --moe-router-num-groups, as"
            " in Megatron-LM: its quantiles are over all experts",
            "remove --moe-router-num-groups and --moe-router-group-topk, or use --moe-router-load-balancing-type aux_loss",
        )
    if experts.moe_router_topk == experts.num_experts:
        yield Problem(
            "--moe-router-load-balancing-type quantile_balancing requires more experts than --moe-router-topk"
            f" {experts.moe_router_topk}: all experts get all tokens",
            "use --moe-router-load-balancing-type none",
        )


def experts_require_uniform_layers(draft: Draft) -> Problems:
    model, experts = draft.config.model, draft.config.experts
    if experts.num_experts is not None and model.heterogeneous_layers_config_encoded_json is not None:
        yield Problem(
            "--num-experts is not supported together with --heterogeneous-layers-config-path, whose file has no experts",
            "use --moe-layer-freq to choose the layers with experts, or --spec for custom layers",
        )


def experts_require_sequence_parallel(draft: Draft) -> Problems:
    parallel = draft.config.parallel
    tp = parallel.tensor_model_parallel_size
    has_experts = any(layer.experts is not None for layer in draft.derived.model_spec.layers)
    if has_experts and tp > 1 and not parallel.sequence_parallel:
        yield Problem(
            f"--tensor-model-parallel-size {tp} with experts requires --sequence-parallel, as in Megatron-LM",
            "add --sequence-parallel",
        )


def custom_experts_are_those_of_flags(draft: Draft) -> Problems:
    """Check the number of experts of --spec, since ranks and logs use --num-experts."""
    if draft.facts.custom_layers is None:
        return
    number = draft.config.experts.num_experts
    for index, layer in enumerate(draft.derived.model_spec.layers):
        if layer.experts is not None and layer.experts.num_experts != number:
            found = layer.experts.num_experts
            yield Problem(
                f"--spec gives layer {index} (from 0) {found} experts, and --num-experts is"
                f" {'not given' if number is None else number}",
                f"use --num-experts {found}, and the same number in every layer with experts",
            )
            return


def experts_overlap_one_way(draft: Draft) -> Problems:
    experts = draft.config.experts
    if experts.overlap_moe_expert_parallel_comm and experts.moe_shared_expert_overlap:
        yield Problem(
            "--overlap-moe-expert-parallel-comm is not supported together with --moe-shared-expert-overlap, as in"
            " Megatron-LM: the layers of another micro-batch run in place of the shared expert",
            "remove --moe-shared-expert-overlap",
        )


def overlapped_passes_are_combined(draft: Draft) -> Problems:
    parallel, pp = draft.config.parallel, draft.config.parallel.pipeline_model_parallel_size
    schedule = parallel.pipeline_schedule
    overlaps = draft.config.experts.overlap_moe_expert_parallel_comm and experts_are_split(draft)
    if overlaps and pp > 1 and not PIPELINE_SCHEDULES[schedule].overlaps_passes:
        yield Problem(
            f"--overlap-moe-expert-parallel-comm with --pipeline-model-parallel-size {pp} requires --pipeline-schedule"
            f" {names_of(lambda one: one.overlaps_passes)}: {schedule} combines no passes",
            "use --pipeline-schedule dualpipe-v, or remove --overlap-moe-expert-parallel-comm",
        )


def expert_ranks_have_experts(draft: Draft) -> Problems:
    size = draft.config.parallel.expert_model_parallel_size
    if draft.config.experts.num_experts is None and size > 1:
        yield Problem(
            f"--expert-model-parallel-size {size} requires --num-experts",
            "add --num-experts, or remove --expert-model-parallel-size",
        )


def experts_divide_over_ep_ranks(draft: Draft) -> Problems:
    number, ep = draft.config.experts.num_experts, draft.config.parallel.expert_model_parallel_size
    if number is not None and number % ep:
        yield Problem(
            f"--num-experts {number} is not divisible by --expert-model-parallel-size {ep}",
            use(
                draft,
                divisors("parallel.expert_model_parallel_size", number, ep),
                multiples("experts.num_experts", number, ep),
            ),
        )


EXPERT_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    expert_layers_are_valid,
    experts_have_a_width,
    topk_fits_num_experts,
    top1_routing_has_a_gradient,
    expert_groups_are_valid,
    load_balancing_is_valid,
    expert_bias_requires_sigmoid,
    sinkhorn_and_quantiles_exclude_expert_bias,
    quantile_balancing_is_possible,
    experts_overlap_one_way,
    overlapped_passes_are_combined,
    expert_ranks_have_experts,
    experts_divide_over_ep_ranks,
    experts_require_uniform_layers,
    experts_require_sequence_parallel,
    custom_experts_are_those_of_flags,
)
