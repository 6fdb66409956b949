"""Experts: layers, routing, load balancing, capacity, expert parallelism, upcycling."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Final

from megatrain.config.derive.patterns import PatternError, parse_expert_pattern
from megatrain.config.errors import Problem
from megatrain.config.fixes import Change, divisors, multiples, use
from megatrain.config.model_spec.experts import RouterSpec
from megatrain.config.plan import DerivedValue, Draft, Plan
from megatrain.config.registry import Notes, Problems, derives, note, overrides, rule, unproven
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.pipeline_schedules import PIPELINE_SCHEDULES, names_of

_LOSSES: Final = ("aux_loss", "seq_aux_loss", "global_aux_loss")
GPUS_PER_HOST: Final = 8
"""Assumed where it is not known."""
_MIN_SENT: Final = {True: 0.5, False: 0.9}
"""Smallest part of the tokens that an all-to-all sends to each rank, if all-gathering them all is to be faster: among GPUs of one host, and elsewhere."""
_FORWARDED: Final = 3
"""Rows that the ranks of a host forward in less time than the network needs for one row."""
_MAX_ROWS: Final = 2
"""Largest number of rows of experts that an all-gather reserves, relative to an even load, for every possible assignment."""
_CAPACITY: Final = 1.25
"""Rows that it reserves on GPUs where these would be more."""


@rule
def expert_layers_are_valid(draft: Draft) -> Problems:
    experts, model = draft.config.experts, draft.config.model
    if experts.num_experts is None or model.model_family == "hybrid":
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


@derives("experts.moe_ffn_hidden_size")
def moe_ffn_hidden_size(draft: Draft) -> DerivedValue:
    if draft.config.experts.num_experts is None:
        return DerivedValue(None, "--num-experts is not given")
    return DerivedValue(draft.config.model.ffn_hidden_size, "equals --ffn-hidden-size")


@rule
def experts_have_a_width(draft: Draft) -> Problems:
    experts = draft.config.experts
    if experts.num_experts is not None and experts.moe_ffn_hidden_size is None:
        yield Problem(
            "--moe-ffn-hidden-size none gives experts no width",
            "remove --moe-ffn-hidden-size, or give a width",
        )


@note("cost")
def expert_gemms_are_not_grouped(draft: Draft) -> Notes:
    """The grouped GEMM (`kernels/moe/grouped_gemm.py`) has limits on dtype and widths."""
    if draft.config.training.device != "cuda":
        return
    widths = {
        layer.experts.ffn_hidden_size // draft.derived.expert_tensor_parallel_size
        for layer in draft.derived.model_spec.layers
        if layer.experts is not None
    }
    dtype = draft.config.precision.params_dtype
    widths |= {draft.config.model.hidden_size} if widths else set()
    if widths and (dtype != "bfloat16" or any(width % 8 for width in widths)):
        reason = f"in {dtype}" if dtype != "bfloat16" else "with widths that are not multiples of 8"
        yield (
            f"experts are computed one by one {reason}, which is slow since the host waits for the tokens per expert in"
            " every layer; the grouped GEMM requires --bf16 and widths that are multiples of 8"
        )


@rule
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


@rule
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


@rule
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
        yield Problem(f"{given} requires {other}", use(draft, _groups(draft)))
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


@rule
def load_balancing_is_valid(draft: Draft) -> Problems:
    experts = draft.config.experts
    kinds, factors = experts.moe_router_load_balancing_type, experts.moe_aux_loss_coeff
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


@note("result")
def loads_are_forced(draft: Draft) -> Notes:
    experts = draft.config.experts
    if experts.num_experts is not None and experts.moe_router_force_load_balancing:
        yield "--moe-router-force-load-balancing is for benchmarks only: tokens go to random experts, and the router learns nothing"


@unproven("result")
def loss_of_global_loads(draft: Draft) -> Notes:
    experts = draft.config.experts
    if experts.num_experts is not None and "global_aux_loss" in experts.moe_router_load_balancing_type:
        yield (
            "--moe-router-load-balancing-type global_aux_loss depends on the number of replicas, as in Megatron-LM: it"
            " uses the loads of the micro-batches so far"
        )


@rule
def quantile_balancing_is_possible(draft: Draft) -> Problems:
    experts = draft.config.experts
    if experts.num_experts is None or "quantile_balancing" not in experts.moe_router_load_balancing_type:
        return
    if experts.moe_router_topk == experts.num_experts:
        yield Problem(
            "--moe-router-load-balancing-type quantile_balancing requires more experts than --moe-router-topk"
            f" {experts.moe_router_topk}: all experts get all tokens",
            "use --moe-router-load-balancing-type none",
        )


@unproven("nothing")
def stream_of_the_shared_expert(draft: Draft) -> Notes:
    experts = draft.config.experts
    has_shared = any(
        layer.experts is not None and layer.experts.shared_ffn_hidden_size
        for layer in draft.derived.model_spec.layers
    )
    if experts.moe_shared_expert_overlap and has_shared and draft.config.training.device == "cuda":
        yield "--moe-shared-expert-overlap is the same computation on another stream, compared on GPUs only (tests/gpu)"


@rule
def overlapped_passes_are_combined(draft: Draft) -> Problems:
    parallel, pp = draft.config.parallel, draft.config.parallel.pipeline_model_parallel_size
    schedule = parallel.pipeline_schedule
    overlaps = draft.config.experts.overlap_moe_expert_parallel_comm and experts_are_split(draft)
    if overlaps and pp > 1 and not PIPELINE_SCHEDULES[schedule].overlaps_passes:
        yield Problem(
            f"--overlap-moe-expert-parallel-comm with --pipeline-model-parallel-size {pp} requires --pipeline-schedule"
            f" {names_of(lambda one: one.overlaps_passes)}: {schedule} combines no passes",
            use(
                draft,
                [{"parallel.pipeline_schedule": "dualpipe-v"}],
                [{"experts.overlap_moe_expert_parallel_comm": False}],
            ),
        )


def experts_are_split(plan: Draft | Plan) -> bool:
    """Return whether experts are on several ranks, which communicate."""
    ranks = plan.config.parallel.expert_model_parallel_size * plan.derived.expert_tensor_parallel_size
    return plan.config.experts.num_experts is not None and ranks > 1


@derives("derived.expert_tensor_parallel_size")
def expert_tensor_parallel_size(draft: Draft) -> DerivedValue:
    given = draft.config.parallel.expert_tensor_parallel_size
    if given is not None and draft.config.experts.num_experts is not None:
        return DerivedValue(given, "--expert-tensor-parallel-size")
    return DerivedValue(draft.config.parallel.tensor_model_parallel_size, "--tensor-model-parallel-size")


@rule
def expert_ranks_have_experts(draft: Draft) -> Problems:
    size = draft.config.parallel.expert_model_parallel_size
    if draft.config.experts.num_experts is None and size > 1:
        yield Problem(
            f"--expert-model-parallel-size {size} requires --num-experts",
            "add --num-experts, or remove --expert-model-parallel-size",
        )


@overrides("experts.moe_token_dispatcher_type")
def flex_is_alltoall(draft: Draft) -> DerivedValue | None:
    """Override the dispatcher that needs DeepEP or HybridEP by the one that sends the same tokens over the same links."""
    if draft.config.experts.moe_token_dispatcher_type != "flex":  # noqa: S105 (no password)
        return None
    return DerivedValue(
        "alltoall",
        "--moe-token-dispatcher-type flex runs as alltoall, with the same result: DeepEP and HybridEP are not used",
    )


@derives("experts.moe_alltoall_as_allgather")
def moe_alltoall_as_allgather(draft: Draft) -> DerivedValue:
    ep = draft.config.parallel.expert_model_parallel_size
    known = draft.facts.ranks_per_node or 1
    per_node = known if known > 1 else GPUS_PER_HOST  # 1: perhaps of ranks that see one GPU each
    is_one_host = (
        draft.facts.world_size <= per_node or per_node % (ep * draft.derived.expert_tensor_parallel_size) == 0
    )
    return all_gather_of_tokens(
        draft.config.experts, ep, on_gpus_of_host=is_one_host and draft.config.training.device == "cuda"
    )


@derives("experts.moe_expert_rank_capacity_factor")
def moe_expert_rank_capacity_factor(draft: Draft) -> DerivedValue:
    experts, ep = draft.config.experts, draft.config.parallel.expert_model_parallel_size
    if experts.num_experts is None or ep == 1 or experts.sends_by_alltoall:
        return DerivedValue(None, "without an all-gather of tokens to the ranks of experts")
    if experts.moe_pad_expert_input_to_capacity:
        return DerivedValue(
            None, "--moe-pad-expert-input-to-capacity: all experts have the same number of rows"
        )
    rows = possible_rows(experts, ep)
    reason = f"memory for every possible assignment is {rows:.3g} times that of an even load"
    if draft.config.training.device != "cuda":
        return DerivedValue(None, reason)
    return DerivedValue(capacity_on_gpus(experts, ep), reason)


def capacity_on_gpus(experts: ExpertsConfig, ep: int) -> float | None:
    """Return the rows of a rank's experts after an all-gather, relative to an even load; None: those of every possible assignment."""
    return None if possible_rows(experts, ep) <= _MAX_ROWS else _CAPACITY


def possible_rows(experts: ExpertsConfig, ep: int) -> float:
    """Return the possible assignments to a rank's experts, relative to an even load."""
    number, top_k = experts.num_experts or 1, experts.moe_router_topk
    return ep * min(top_k, max(number // ep, 1)) / top_k


def all_gather_of_tokens(experts: ExpertsConfig, ep: int, *, on_gpus_of_host: bool) -> DerivedValue:
    """Decide whether all-gathers replace the all-to-all among `ep` expert ranks, which may be GPUs of one host."""
    number, top_k = experts.num_experts, experts.moe_router_topk
    if number is None or experts.moe_token_dispatcher_type == "allgather":  # noqa: S105 (no password)
        return DerivedValue(False, "--moe-token-dispatcher-type alltoall is not given")
    if ep == 1 or number % ep or top_k > number:
        return DerivedValue(False, f"--expert-model-parallel-size {ep}")
    sent = _router(experts).share_of_tokens(ep)
    expected = f"with an even load {100 * sent:.1f} % of the tokens go to each rank"
    if sent < _MIN_SENT[on_gpus_of_host]:
        return DerivedValue(False, expected)
    rows = possible_rows(experts, ep)
    if rows > _MAX_ROWS and not on_gpus_of_host:
        return DerivedValue(False, f"experts would need memory for {rows:.3g} times the rows of an even load")
    return DerivedValue(True, f"{expected}, and the host waits for no counts")


def _router(experts: ExpertsConfig) -> RouterSpec:
    """Return the choice of experts that these settings describe."""
    return RouterSpec(
        num_experts=experts.num_experts or 1,
        top_k=experts.moe_router_topk,
        num_groups=experts.moe_router_num_groups,
        group_top_k=experts.moe_router_group_topk,
    )


@derives("experts.moe_alltoall_ranks_per_host")
def moe_alltoall_ranks_per_host(draft: Draft) -> DerivedValue:
    per_host = draft.facts.ranks_per_node or GPUS_PER_HOST
    if not draft.config.experts.sends_by_alltoall:
        return DerivedValue(1, "--moe-token-dispatcher-type sends no tokens by all-to-all")
    if draft.facts.world_size <= per_host:
        return DerivedValue(1, "all ranks are on one host")
    ep, etp = draft.config.parallel.expert_model_parallel_size, draft.derived.expert_tensor_parallel_size
    return ranks_that_forward(draft.config.experts, ep, etp, per_host)


def ranks_that_forward(experts: ExpertsConfig, ep: int, etp: int, per_host: int) -> DerivedValue:
    """Decide how many ranks of `ep`, those of a host, forward tokens to one another; 1: a token is sent to each rank."""
    host, number = per_host // etp, experts.num_experts or 1
    if ep <= host:
        return DerivedValue(1, "the ranks of experts are on one host")
    if host < 2 or per_host % etp or ep % host or number % ep or experts.moe_router_topk > number:
        return DerivedValue(
            1, f"{ep} * {etp} ranks of experts are not two or more on each host of {per_host}"
        )
    hosts, router = ep // host, _router(experts)
    to_rank, to_host = router.share_of_tokens(ep), router.share_of_tokens(hosts)
    once_per_rank, once_per_host = (ep - host) * to_rank, (hosts - 1) * to_host
    sent = (
        f"with an even load {once_per_host:.3g} copies of a token go to other hosts, not {once_per_rank:.3g}"
    )
    if (once_per_rank - once_per_host) * _FORWARDED < (host - 1) * (hosts - 1) * to_rank:
        return DerivedValue(1, f"{sent}, which saves less than forwarding costs")
    return DerivedValue(host, sent)


@rule
def ranks_of_a_host_divide_expert_ranks(draft: Draft) -> Problems:
    experts, ep = draft.config.experts, draft.config.parallel.expert_model_parallel_size
    host = experts.moe_alltoall_ranks_per_host
    if experts.sends_by_alltoall and ep > 1 and ep % host:
        yield Problem(
            f"--expert-model-parallel-size {ep} does not divide into hosts of --moe-alltoall-ranks-per-host {host}",
            use(draft, divisors("experts.moe_alltoall_ranks_per_host", ep, host)),
        )


@rule
def weight_gradients_read_sent_codes(draft: Draft) -> Problems:
    precision = draft.config.precision
    if draft.config.experts.moe_fp8_dispatch and precision.fp8_format is not None and not precision.fp8_wgrad:
        yield Problem(
            "--moe-fp8-dispatch is not supported together with --no-fp8-wgrad: the weight gradients of experts are computed"
            " from rows that were sent in FP8",
            "remove --no-fp8-wgrad, or --moe-fp8-dispatch",
        )


@note("cost")
def fp8_dispatch_that_only_rounds(draft: Draft) -> Notes:
    experts, has_fp8 = draft.config.experts, draft.config.precision.fp8_format is not None
    sends_codes = experts.sends_by_alltoall and experts_are_split(draft)
    if experts.num_experts is not None and experts.moe_fp8_dispatch and has_fp8 and not sends_codes:
        where = "an all-gather of tokens" if experts_are_split(draft) else "experts on one rank"
        yield f"--moe-fp8-dispatch only rounds with {where}: an all-to-all sends half of the bytes"


@rule
def experts_require_sequence_parallel(draft: Draft) -> Problems:
    parallel = draft.config.parallel
    tp = parallel.tensor_model_parallel_size
    has_experts = any(layer.experts is not None for layer in draft.derived.model_spec.layers)
    if has_experts and tp > 1 and not parallel.sequence_parallel:
        yield Problem(
            f"--tensor-model-parallel-size {tp} with experts requires --sequence-parallel, as in Megatron-LM",
            "add --sequence-parallel",
        )


@rule
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


@rule
def upcycling_fits_the_dense_model(draft: Draft) -> Problems:
    experts, checkpoint, stored = draft.config.experts, draft.config.checkpoint, draft.facts.checkpoint
    if not experts.moe_use_upcycling or experts.num_experts is None:
        return
    if checkpoint.load is None and checkpoint.pretrained_checkpoint is None:
        yield Problem(
            "--moe-use-upcycling requires a dense model",
            "add --pretrained-checkpoint FOLDER with its checkpoint, and --load with the --save folder of this run",
        )
    if stored is None or not stored.is_upcycled:
        return
    load = checkpoint.load
    if load is not None and load == checkpoint.save and PurePath(load) in PurePath(stored.path).parents:
        yield Problem(
            f"--moe-use-upcycling would save into --save {checkpoint.save}, which has the dense model",
            "give --save another folder",
        )
    granularity, width = experts.moe_upcycling_granularity, experts.moe_ffn_hidden_size or 0
    dense = stored.config["model"]["ffn_hidden_size"]
    if dense != width * granularity:
        yield Problem(
            f"--moe-upcycling-granularity {granularity} * --moe-ffn-hidden-size {width} is not the dense model's"
            f" --ffn-hidden-size {dense}",
            f"use --moe-ffn-hidden-size {-(-dense // granularity)}, or --moe-ffn-hidden-size {dense}"
            " --moe-upcycling-granularity 1",
        )
    if experts.num_experts % granularity:
        yield Problem(
            f"--num-experts {experts.num_experts} is not divisible by --moe-upcycling-granularity {granularity}",
            use(draft, multiples("experts.num_experts", experts.num_experts, granularity)),
        )
    has_dense = any(layer.dense for layer in draft.derived.model_spec.layers)
    if has_dense and dense != draft.config.model.ffn_hidden_size:
        yield Problem(
            f"--ffn-hidden-size {draft.config.model.ffn_hidden_size} of layers without experts is not the dense model's"
            f" {dense}",
            f"use --ffn-hidden-size {dense}",
        )
