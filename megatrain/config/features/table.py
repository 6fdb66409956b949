"""The features that `megatrain parity` proves against one another, and the pairs of them that are refused.

    OPTIONS ──> the rows of `megatrain parity`: every pair of values in one row at least (tools/parity/rows.py)
       ├──────> a rule of `resolve`: a run uses features of these tables, and no pair that REFUSED names
    NUMBER_FORMATS ──> some rows in fp32, bf16 and fp16 (tools/parity/low_precision.py)

So what is proven and what is allowed are one table. It holds features, never sizes: tensor parallelism is proven for
sizes of 2, 3, 4 and 8, and allowed for any.

A new value of an option is one line here: a `Feature`, with the flags that ask for it and how it is recognised in a
configuration that is filled in. A new option is an `Option` with two features or more; the first one is what a row has
that does not say otherwise. A new model is a line in tools/parity/models.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.features.experts import EXPERT_OPTIONS
from megatrain.config.features.feature import Decided, Feature, Option, Refused, sizes
from megatrain.config.plan import Draft
from megatrain.config.schema.tree import flag_of


def _tp(plan: Decided) -> int:
    return plan.config.parallel.tensor_model_parallel_size


def _overlaps(plan: Decided) -> tuple[bool, bool]:
    return plan.config.parallel.overlap_grad_reduce, plan.config.parallel.overlap_param_gather


def _recomputes(plan: Decided) -> bool:
    training = plan.config.training
    is_asked_for = training.recompute_granularity is not None or training.recompute_activations
    return is_asked_for or training.recompute_norms


def _recomputes_layers(plan: Decided) -> bool:
    return plan.config.training.recompute_granularity == "full"


def _recomputes_experts(plan: Decided) -> bool:
    return bool({"moe", "shared_experts"} & {*plan.config.training.recompute_modules})


def _separates(plan: Decided) -> bool:
    return plan.config.data.reset_attention_mask or plan.config.data.reset_position_ids


def _strategy(plan: Decided) -> str:
    return plan.config.parallel.data_parallel_sharding_strategy


def _instances(plan: Decided) -> int:
    return plan.config.parallel.num_distributed_optimizer_instances


def _cp(plan: Decided) -> int:
    return plan.config.parallel.context_parallel_size


def _communications(plan: Decided) -> set[str]:
    """The ways in which context ranks share keys and values; those of one rank have no effect."""
    return set(plan.derived.context_communication) if _cp(plan) > 1 else {"p2p"}


def _moments(plan: Decided) -> set[str]:
    return {plan.config.optimizer.exp_avg_dtype, plan.config.optimizer.exp_avg_sq_dtype}


_REPLICAS = ("dp", "cp")
_SHARDING, _INSTANCES = "--data-parallel-sharding-strategy", "--num-distributed-optimizer-instances"
_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_CP, _WAY = "--context-parallel-size", "--cp-comm-type"

OPTIONS: Final[tuple[Option, ...]] = (
    Option(
        "tensor parallelism",
        ("parallel.tensor_model_parallel_size",),
        (
            Feature("tp1", "", lambda p: _tp(p) == 1),
            Feature(
                "tp",
                _TP,
                lambda p: _tp(p) > 1,
                rows=sizes(_TP, "tp", 2, 3, 4, 8),
            ),
        ),
        is_layout=True,
    ),
    Option(
        "copies of keys and values",
        ("model.num_query_groups",),
        (
            Feature("nocopies", "", lambda p: p.config.model.num_query_groups >= _tp(p)),
            Feature(
                "copies",
                "less --num-query-groups than tensor ranks",
                lambda p: p.config.model.num_query_groups < _tp(p),
                needs=("tp",),
                rows=sizes("--group-query-attention --num-query-groups", "groups", 1, 2, 4),
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
        "context parallelism",
        ("parallel.context_parallel_size",),
        (
            Feature("cp1", "", lambda p: _cp(p) == 1),
            Feature("cp", _CP, lambda p: _cp(p) > 1, rows=sizes(_CP, "cp", 2, 4)),
        ),
        is_layout=True,
    ),
    Option(
        "context communication",
        ("parallel.cp_comm_type", "parallel.hierarchical_context_parallel_sizes"),
        (
            Feature("ring", f"{_WAY} p2p", lambda p: _communications(p) == {"p2p"}),
            Feature(
                "allgather",
                f"{_WAY} all_gather",
                lambda p: _communications(p) == {"all_gather"},
                needs=("cp",),
            ),
            Feature("heads", f"{_WAY} a2a", lambda p: _communications(p) == {"a2a"}, needs=("cp",)),
            Feature(
                "tworings",
                f"{_WAY} a2a+p2p --hierarchical-context-parallel-sizes 2 2",
                lambda p: _communications(p) == {"a2a+p2p"},
                needs=("cp",),
            ),
            Feature(
                "twogathers",
                f"{_WAY} a2a+all_gather --hierarchical-context-parallel-sizes 2 2",
                lambda p: _communications(p) == {"a2a+all_gather"},
                needs=("cp",),
            ),
            Feature(
                "mixedways",
                f"{_WAY} p2p all_gather a2a p2p",
                lambda p: len(_communications(p)) > 1,
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
                "more ranks than hold the model",
                lambda p: p.derived.data_parallel_size > 1,
                rows=sizes("", "dp", 2, 3, 4, 8),
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
                rows=sizes(_PP, "pp", 2, 4),
            ),
        ),
        is_layout=True,
    ),
    Option(
        "numbering of ranks",
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
                "zero1", "--use-distributed-optimizer", lambda p: _strategy(p) == "optim", needs=_REPLICAS
            ),
            Feature(
                "zero2", f"{_SHARDING} optim_grads", lambda p: _strategy(p) == "optim_grads", needs=_REPLICAS
            ),
            Feature(
                "zero3",
                f"{_SHARDING} optim_grads_params",
                lambda p: _strategy(p) == "optim_grads_params",
                needs=_REPLICAS,
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
                needs=_REPLICAS,
                rows=sizes(_INSTANCES, "instances", 2),
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
                needs=_REPLICAS,
            ),
            Feature(
                "overlapgrads",
                "--overlap-grad-reduce --no-overlap-param-gather",
                lambda p: _overlaps(p) == (True, False),
                needs=_REPLICAS,
            ),
            Feature(
                "overlapweights",
                "--no-overlap-grad-reduce --overlap-param-gather",
                lambda p: _overlaps(p) == (False, True),
                needs=_REPLICAS,
            ),
        ),
        is_layout=True,
    ),
    Option(
        "recomputation",
        (
            "training.recompute_granularity",
            "training.recompute_activations",
            "training.recompute_method",
            "training.recompute_num_layers",
            "training.recompute_modules",
            "training.recompute_norms",
        ),
        (
            Feature("keepall", "", lambda p: not _recomputes(p)),
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
                    "normsagain": "--recompute-granularity selective --recompute-modules core_attn layernorm",
                },
            ),
            Feature(
                "expertsagain",
                "--recompute-granularity selective --recompute-modules moe",
                lambda p: _recomputes(p) and _recomputes_experts(p),
                needs=("experts",),
                rows={
                    "moeagain": "--recompute-granularity selective --recompute-modules moe core_attn",
                    "sharedagain": "--recompute-granularity selective --recompute-modules shared_experts moe_act",
                },
            ),
        ),
        is_layout=True,
    ),
    *EXPERT_OPTIONS,
    Option(
        "embeddings",
        ("model.untie_embeddings_and_output_weights",),
        (
            Feature(
                "untied",
                "--untie-embeddings-and-output-weights",
                lambda p: p.config.model.untie_embeddings_and_output_weights,
            ),
            Feature("tied", "", lambda p: not p.config.model.untie_embeddings_and_output_weights),
        ),
    ),
    Option(
        "documents",
        ("data.reset_attention_mask", "data.reset_position_ids"),
        (
            Feature("whole", "", lambda p: not _separates(p)),
            Feature("documents", "--reset-attention-mask --reset-position-ids", _separates),
        ),
    ),
    Option(
        "loss",
        ("training.calculate_per_token_loss",),
        (
            Feature("means", "", lambda p: not p.config.training.calculate_per_token_loss),
            Feature(
                "tokens",
                "--calculate-per-token-loss",
                lambda p: p.config.training.calculate_per_token_loss,
            ),
        ),
    ),
    Option(
        "z-loss",
        ("model.z_loss_coeff",),
        (
            Feature("nozloss", "", lambda p: p.config.model.z_loss_coeff == 0),
            Feature("zloss", "--z-loss-coeff 0.01", lambda p: p.config.model.z_loss_coeff > 0),
        ),
    ),
    Option(
        "loss scale",
        ("precision.loss_scale",),
        (
            Feature("noscale", "", lambda p: p.config.precision.loss_scale is None),
            Feature("scale", "--loss-scale 30000", lambda p: p.config.precision.loss_scale is not None),
        ),
    ),
    Option(
        "optimizer",
        ("optimizer.optimizer",),
        (
            Feature("adam", "--optimizer adam", lambda p: p.config.optimizer.optimizer == "adam"),
            Feature("sgd", "--optimizer sgd", lambda p: p.config.optimizer.optimizer == "sgd"),
            Feature(
                "muon",
                "--optimizer muon",
                lambda p: p.config.optimizer.optimizer == "muon",
                rows={
                    "muon": "--optimizer muon --muon-nesterov",
                    "muonjoint": "--optimizer muon --muon-no-split-qkv",
                },
            ),
        ),
    ),
    Option(
        "optimizer state",
        ("optimizer.optimizer_cpu_offload",),
        (
            Feature("ondevice", "", lambda p: not p.config.optimizer.optimizer_cpu_offload),
            Feature(
                "offload",
                "--optimizer-cpu-offload",
                lambda p: p.config.optimizer.optimizer_cpu_offload,
                rows={"offload": "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"},
            ),
        ),
        is_layout=True,
    ),
    Option(
        "learning rate",
        ("optimizer.decoupled_lr",),
        (
            Feature("onerate", "", lambda p: p.config.optimizer.decoupled_lr is None),
            Feature("tworates", "--decoupled-lr 3e-3", lambda p: p.config.optimizer.decoupled_lr is not None),
        ),
    ),
    Option(
        "clipping",
        ("optimizer.clip_grad",),
        (
            Feature("clip", "--clip-grad 0.5", lambda p: p.config.optimizer.clip_grad > 0),
            Feature("noclip", "--clip-grad 0", lambda p: p.config.optimizer.clip_grad == 0),
        ),
    ),
)

NUMBER_FORMATS: Final[tuple[Option, ...]] = (
    Option(
        "sums over replicas",
        ("precision.grad_reduce_in_bf16",),
        (
            Feature("sumsfp32", "", lambda p: not p.config.precision.grad_reduce_in_bf16),
            Feature(
                "sumsbf16",
                "--grad-reduce-in-bf16",
                lambda p: p.config.precision.grad_reduce_in_bf16,
                needs=_REPLICAS,
            ),
        ),
    ),
    Option(
        "moments",
        ("optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype"),
        (
            Feature("momentsfp32", "", lambda p: _moments(p) == {"fp32"}),
            Feature(
                "momentsbf16",
                "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
                lambda p: "bf16" in _moments(p),
                needs=("adam", "muon"),
            ),
        ),
    ),
    Option(
        "products of Muon",
        ("optimizer.muon_fp32_matmul_prec",),
        (
            Feature("muonbf16", "", lambda p: p.config.optimizer.muon_fp32_matmul_prec == "medium"),
            Feature(
                "muonfp32",
                "--muon-fp32-matmul-prec highest",
                lambda p: p.config.optimizer.muon_fp32_matmul_prec in ("high", "highest"),
                needs=("muon",),
                rows={
                    "muontf32": "--muon-fp32-matmul-prec high",
                    "muonfp32": "--muon-fp32-matmul-prec highest",
                },
            ),
        ),
    ),
    Option(
        "numbers of routers",
        ("experts.moe_router_dtype",),
        (
            Feature("routersnarrow", "", lambda p: p.config.experts.moe_router_dtype is None),
            Feature(
                "routerswide",
                "--moe-router-dtype fp32",
                lambda p: p.config.experts.moe_router_dtype in ("fp32", "fp64"),
                needs=("experts",),
                rows={
                    "routersfp32": "--moe-router-dtype fp32",
                    "routersfp64": "--moe-router-dtype fp64",
                },
            ),
        ),
    ),
)
"""Formats besides the weights' own, which change results by rounding: rows in fp64 do without them, and others are held
to noise that has them."""

REFUSED: Final[tuple[Refused, ...]] = (
    Refused(
        ("zero0", "instances"),
        "nothing is spread over the ranks of an instance",
        "leave --num-distributed-optimizer-instances out, or use --data-parallel-sharding-strategy optim",
    ),
    Refused(
        ("muon", "offload"),
        "Muon's products of whole matrices are too slow for a CPU",
        "leave --optimizer-cpu-offload out, or use --optimizer adam",
    ),
)
"""Pairs whose other values go together. A row of parity never has one, and `resolve` says why not."""


def features_of(plan: Decided, options: Sequence[Option] = OPTIONS) -> dict[str, Feature]:
    """The features that a plan uses, by name; those without effect are left out."""
    used = {
        feature.name: feature for option in options for feature in option.features if feature.is_used(plan)
    }
    return {
        name: feature
        for name, feature in used.items()
        if not feature.needs or any(need in used for need in feature.needs)
    }


def features_are_proven(
    draft: Draft,
    options: Sequence[Option] = (*OPTIONS, *NUMBER_FORMATS),
    refused: Sequence[Refused] = REFUSED,
) -> Iterator[Problem]:
    """A rule: each option is used in a way that is in the table, and no two features are that do not go together."""
    for option in options:
        if not any(feature.is_used(draft) for feature in option.features):
            values = " ".join(f"{flag_of(path)} {draft.config.get(path)}" for path in option.settings)
            known = " or ".join(feature.flags for feature in option.features if feature.flags)
            yield Problem(f"{values} is not proven by `megatrain parity`", f"use {known}")
    used = features_of(draft, options)
    for one in refused:
        first, second = (used.get(name) for name in one.pair)
        if first is not None and second is not None:
            yield Problem(f"{first.flags} and {second.flags} do not go together: {one.why}", one.fix)
