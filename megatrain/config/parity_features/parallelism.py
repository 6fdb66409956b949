"""Parity features of the layout: parallelism, sharding, overlap, recomputation."""

from __future__ import annotations

from typing import Final

from megatrain.config.parity_features.feature import REPLICAS, Feature, Option, PlanOrDraft, option_sizes
from megatrain.config.schema.pipeline_schedules import (
    ONE_CHUNK,
    PIPELINE_SCHEDULES,
    flags_of_schedule,
    word_of_schedule,
)

_SHARDING, _INSTANCES = "--data-parallel-sharding-strategy", "--num-distributed-optimizer-instances"
_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_LAYOUT = "--pipeline-model-parallel-layout"
_CP, _COMM = "--context-parallel-size", "--cp-comm-type"


def _tp(plan: PlanOrDraft) -> int:
    return plan.config.parallel.tensor_model_parallel_size


def _overlaps(plan: PlanOrDraft) -> tuple[bool, bool]:
    return plan.config.parallel.overlap_grad_reduce, plan.config.parallel.overlap_param_gather


def _recomputes(plan: PlanOrDraft) -> bool:
    training = plan.config.training
    recomputes_modules = training.recompute_granularity is not None or training.recompute_activations
    return recomputes_modules or training.recompute_norms


def _recomputes_layers(plan: PlanOrDraft) -> bool:
    return plan.config.training.recompute_granularity == "full"


def _recomputes_experts(plan: PlanOrDraft) -> bool:
    return bool({"moe", "shared_experts"} & {*plan.config.training.recompute_modules})


def _strategy(plan: PlanOrDraft) -> str:
    return plan.config.parallel.data_parallel_sharding_strategy


def _instances(plan: PlanOrDraft) -> int:
    return plan.config.parallel.num_distributed_optimizer_instances


def _cp(plan: PlanOrDraft) -> int:
    return plan.config.parallel.context_parallel_size


def _cp_comm_types(plan: PlanOrDraft) -> set[str]:
    """Return the types of context-parallel communication; with one rank the type has no effect."""
    return set(plan.derived.cp_comm_types) if _cp(plan) > 1 else {"p2p"}


PARALLEL_OPTIONS: Final[tuple[Option, ...]] = (
    Option(
        "tensor parallelism",
        ("parallel.tensor_model_parallel_size",),
        (
            Feature("tp1", "", lambda p: _tp(p) == 1),
            Feature(
                "tp",
                _TP,
                lambda p: _tp(p) > 1,
                rows=option_sizes(_TP, "tp", 2, 3, 4, 8),
            ),
        ),
        is_layout=True,
    ),
    Option(
        "key-value replication",
        ("model.num_query_groups",),
        (
            Feature("nocopies", "", lambda p: p.config.model.num_query_groups >= _tp(p)),
            Feature(
                "copies",
                "fewer --num-query-groups than tensor-parallel ranks",
                lambda p: p.config.model.num_query_groups < _tp(p),
                needs=("tp",),
                rows=option_sizes("--group-query-attention --num-query-groups", "groups", 1, 2, 4),
            ),
        ),
    ),
    Option(
        "sequence parallelism",
        ("parallel.sequence_parallel",),
        (
            Feature("nosp", "", lambda p: not p.config.parallel.sequence_parallel),
            Feature(
                "sp", "--sequence-parallel", lambda p: p.config.parallel.sequence_parallel, needs=("tp",)
            ),
        ),
        is_layout=True,
    ),
    Option(
        "tensor communication",
        ("parallel.tp_comm_overlap",),
        (
            Feature("tpwaits", "", lambda p: not p.config.parallel.tp_comm_overlap),
            Feature(
                "tpoverlap", "--tp-comm-overlap", lambda p: p.config.parallel.tp_comm_overlap, needs=("sp",)
            ),
        ),
        is_layout=True,
    ),
    Option(
        "context parallelism",
        ("parallel.context_parallel_size",),
        (
            Feature("cp1", "", lambda p: _cp(p) == 1),
            Feature("cp", _CP, lambda p: _cp(p) > 1, rows=option_sizes(_CP, "cp", 2, 4)),
        ),
        is_layout=True,
    ),
    Option(
        "context communication",
        ("parallel.cp_comm_type", "parallel.hierarchical_context_parallel_sizes"),
        (
            Feature("ring", f"{_COMM} p2p", lambda p: _cp_comm_types(p) == {"p2p"}),
            Feature(
                "allgather",
                f"{_COMM} all_gather",
                lambda p: _cp_comm_types(p) == {"all_gather"},
                needs=("cp",),
            ),
            Feature("heads", f"{_COMM} a2a", lambda p: _cp_comm_types(p) == {"a2a"}, needs=("cp",)),
            Feature(
                "a2aring",
                f"{_COMM} a2a+p2p --hierarchical-context-parallel-sizes 2 2",
                lambda p: _cp_comm_types(p) == {"a2a+p2p"},
                needs=("cp",),
            ),
            Feature(
                "a2agather",
                f"{_COMM} a2a+all_gather --hierarchical-context-parallel-sizes 2 2",
                lambda p: _cp_comm_types(p) == {"a2a+all_gather"},
                needs=("cp",),
            ),
            Feature(
                "mixedcomm",
                f"{_COMM} p2p all_gather a2a p2p",
                lambda p: len(_cp_comm_types(p)) > 1,
                needs=("cp",),
            ),
        ),
        is_layout=True,
    ),
    Option(
        "data parallelism",
        ("derived.data_parallel_size",),
        (
            Feature("dp1", "", lambda p: p.derived.data_parallel_size == 1),
            Feature(
                "dp",
                "more ranks than one replica needs",
                lambda p: p.derived.data_parallel_size > 1,
                rows=option_sizes("", "dp", 2, 3, 4, 8),
            ),
        ),
        is_layout=True,
    ),
    Option(
        "pipeline parallelism",
        ("parallel.pipeline_model_parallel_size",),
        (
            Feature("pp1", "", lambda p: p.config.parallel.pipeline_model_parallel_size == 1),
            Feature(
                "pp",
                _PP,
                lambda p: p.config.parallel.pipeline_model_parallel_size > 1,
                rows=option_sizes(_PP, "pp", 2, 4),
            ),
        ),
        is_layout=True,
    ),
    Option(
        "pipeline schedule",
        (
            "parallel.pipeline_schedule",
            "parallel.num_virtual_stages_per_pipeline_rank",
        ),
        (
            *(
                Feature(
                    word_of_schedule(name),
                    "" if name == ONE_CHUNK else flags_of_schedule(name),
                    lambda p, name=name: p.config.parallel.pipeline_schedule == name,  # type: ignore[misc]
                    needs=() if name == ONE_CHUNK else ("pp",),
                )
                for name in PIPELINE_SCHEDULES
            ),
        ),
        is_layout=True,
    ),
    Option(
        "pipeline communication",
        ("parallel.overlap_p2p_communication",),
        (
            Feature("postsreceives", "", lambda p: p.config.parallel.overlap_p2p_communication),
            Feature(
                "noposts",
                "--no-overlap-p2p-communication",
                lambda p: not p.config.parallel.overlap_p2p_communication,
                needs=("pp",),
            ),
        ),
        is_layout=True,
    ),
    Option(
        "pipeline split",
        ("parallel.pipeline_model_parallel_layout",),
        (
            Feature("equalstages", "", lambda p: len(set(p.derived.pipeline_layers)) == 1),
            Feature(
                "unevenstages",
                _LAYOUT,
                lambda p: len(set(p.derived.pipeline_layers)) > 1,
                needs=("pp",),
                rows={
                    "uneven2": f"{_LAYOUT} Ettt|tL",
                    "uneven4": f"{_LAYOUT} E|tt|t|tL",
                    "mtpalone": f"{_LAYOUT} Ett|tt|mm|L",
                },
            ),
        ),
        is_layout=True,
    ),
    Option(
        "rank order",
        ("parallel.use_tp_pp_dp_mapping",),
        (
            Feature("dpfirst", "", lambda p: not p.config.parallel.use_tp_pp_dp_mapping),
            Feature(
                "ppfirst",
                "--use-tp-pp-dp-mapping",
                lambda p: p.config.parallel.use_tp_pp_dp_mapping,
                needs=("pp",),
            ),
        ),
        is_layout=True,
    ),
    Option(
        "sharding over replicas",
        (
            "parallel.data_parallel_sharding_strategy",
            "parallel.use_distributed_optimizer",
            "parallel.use_megatron_fsdp",
        ),
        (
            Feature("zero0", "--no-use-distributed-optimizer", lambda p: _strategy(p) == "no_shard"),
            Feature(
                "zero1", "--use-distributed-optimizer", lambda p: _strategy(p) == "optim", needs=REPLICAS
            ),
            Feature(
                "zero2", f"{_SHARDING} optim_grads", lambda p: _strategy(p) == "optim_grads", needs=REPLICAS
            ),
            Feature(
                "zero3",
                f"{_SHARDING} optim_grads_params",
                lambda p: _strategy(p) == "optim_grads_params",
                needs=REPLICAS,
            ),
        ),
        is_layout=True,
    ),
    Option(
        "optimizer instances",
        ("parallel.num_distributed_optimizer_instances",),
        (
            Feature("oneinstance", "", lambda p: _instances(p) == 1),
            Feature(
                "instances",
                _INSTANCES,
                lambda p: _instances(p) > 1,
                needs=REPLICAS,
                rows=option_sizes(_INSTANCES, "instances", 2),
            ),
        ),
        is_layout=True,
    ),
    Option(
        "overlap",
        ("parallel.overlap_grad_reduce", "parallel.overlap_param_gather"),
        (
            Feature(
                "nooverlap",
                "--no-overlap-grad-reduce --no-overlap-param-gather",
                lambda p: _overlaps(p) == (False, False),
            ),
            Feature(
                "overlap",
                "--overlap-grad-reduce --overlap-param-gather",
                lambda p: _overlaps(p) == (True, True),
                needs=REPLICAS,
            ),
            Feature(
                "overlapgrads",
                "--overlap-grad-reduce --no-overlap-param-gather",
                lambda p: _overlaps(p) == (True, False),
                needs=REPLICAS,
            ),
            Feature(
                "overlapweights",
                "--no-overlap-grad-reduce --overlap-param-gather",
                lambda p: _overlaps(p) == (False, True),
                needs=REPLICAS,
            ),
        ),
        is_layout=True,
    ),
    Option(
        "recomputation",
        (
            "training.recompute_granularity",
            "training.recompute_activations",
            "training.moe_layer_recompute",
            "training.recompute_method",
            "training.recompute_num_layers",
            "training.recompute_modules",
            "training.recompute_norms",
        ),
        (
            Feature("norecompute", "", lambda p: not _recomputes(p)),
            Feature(
                "uniform",
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
                lambda p: _recomputes_layers(p) and p.config.training.recompute_method != "block",
            ),
            Feature(
                "block",
                "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
                lambda p: _recomputes_layers(p) and p.config.training.recompute_method == "block",
            ),
            Feature(
                "selective",
                "--recompute-granularity selective --recompute-modules core_attn mlp",
                lambda p: _recomputes(p) and not (_recomputes_layers(p) or _recomputes_experts(p)),
                rows={
                    "selective": "--recompute-granularity selective --recompute-modules core_attn mlp",
                    "recomputenorms": "--recompute-granularity selective --recompute-modules core_attn layernorm",
                    "recomputelatents": "--recompute-granularity selective --recompute-modules mla_up_proj",
                },
            ),
            Feature(
                "recomputeexperts",
                "--recompute-granularity selective --recompute-modules moe",
                lambda p: _recomputes(p) and _recomputes_experts(p),
                needs=("experts",),
                rows={
                    "recomputemoe": "--recompute-granularity selective --recompute-modules moe core_attn",
                    "recomputeshared": "--recompute-granularity selective --recompute-modules shared_experts moe_act",
                },
            ),
        ),
        is_layout=True,
    ),
)
