"""The table of parity features: unverified values and refused pairs are named, and every choice is in the table or excluded."""

import dataclasses

import pytest

from megatrain.config.parity_features.feature import RefusedPair
from megatrain.config.parity_features.number_formats import NUMBER_FORMATS
from megatrain.config.parity_features.table import (
    OPTIONS,
    features_are_supported_together,
    features_of,
    unlisted_values,
)
from megatrain.config.schema.tree import settings

EXCLUDED = {
    "parallel.distributed_backend": "computes the same sums",
    "parallel.account_for_embedding_in_pipeline_split": "one of the ways to give stages uneven numbers of layers",
    "parallel.account_for_loss_in_pipeline_split": "one of the ways to give stages uneven numbers of layers",
    "optimizer.apply_wd_to_qk_layernorm": "enabled in one of the models of parity",
    "optimizer.muon_nesterov": "a row of muon has it",
    "optimizer.muon_no_split_qkv": "a row of muon has it",
    "optimizer.muon_scale_mode": "scales whole matrices",
    "optimizer.muon_coefficient_type": "coefficients of whole matrices",
    "parallel.context_parallel_chunk_means": "makes the loss depend on how samples are split, as in Megatron-LM",
    "experts.moe_router_score_function": "rows with experts have softmax and sigmoid; other functions are elementwise too",
    "experts.moe_router_pre_softmax": "a row of experts has it",
    "experts.moe_router_enable_expert_bias": "a row of experts has it",
    "experts.moe_shared_expert_gate": "a row of experts has it",
    "experts.moe_pad_expert_input_to_capacity": "a row of capacity has it",
    "experts.moe_token_drop_policy": "rows of capacity have both",
    "experts.moe_shared_expert_overlap": "a stream on GPUs; a line of the plan says so",
    "experts.moe_use_upcycling": "decides the initial weights alone; tests/distributed/test_upcycling.py",
    "experts.moe_router_force_load_balancing": "for benchmarks; tests/distributed/model/test_routers_over_ranks.py compares it with one process",
    "precision.bf16": "a precision of parity",
    "precision.fp16": "a precision of parity",
    "precision.params_dtype": "a precision of parity",
    "precision.fp8_amax_compute_algo": "a row of delayed scaling has max, the other reads one value",
    "precision.fp8_wgrad": "a row of FP8 has it off",
    "precision.fp8_param_gather": "rows of FP8 have it",
    "precision.fp4_recipe": "has one value",
    "precision.first_last_layers_bf16": "a row of FP8 has it",
    "training.decrease_batch_size_if_needed": "determines the batch size before it is split",
    "training.check_for_nan_in_loss_and_grad": "checks a norm that parity compares",
    "training.check_for_large_grads": "the same",
    "training.check_for_spiky_loss": "checks a loss that parity compares",
    "training.skip_train": "skips training",
    "training.eval_only": "skips training",
    "training.eval_at_start": "adds an evaluation",
    "training.deterministic_mode": "selects kernels",
    "training.compile": "selects kernels",
    "training.cuda_graph_impl": "launches the same kernels; a line of the plan says so",
    "training.manual_gc": "frees memory",
    "training.manual_gc_eval": "frees memory",
    "training.device": "selects the device",
    "training.require_parity": "decides between a note and an error",
    "training.dry_run": "computes nothing",
}
"""Choices that no option of parity varies, and the reason."""


@pytest.mark.parametrize("section", ["parallel", "experts", "optimizer", "precision", "training"])
def test_every_choice_is_in_the_table_or_excluded(section):
    choices = {
        setting.path
        for setting in settings()
        if setting.section == section and (setting.choices or setting.kind is bool)
    }
    varied = {path for option in (*OPTIONS, *NUMBER_FORMATS) for path in option.settings}
    excluded = {path for path in EXCLUDED if path.startswith(f"{section}.")}
    assert choices - varied == excluded, "add a Feature to config/parity_features, or a reason here"


def test_options_name_existing_settings():
    known = {setting.path for setting in settings()} | {"derived.data_parallel_size"}
    assert {path for option in (*OPTIONS, *NUMBER_FORMATS) for path in option.settings} <= known


def test_a_refused_pair_is_named_with_its_flags(plan_of):
    refused = (RefusedPair(("zero0", "sgd"), "the reason.", "use --optimizer adam"),)
    plan = plan_of("--optimizer sgd --no-use-distributed-optimizer")
    (problem,) = features_are_supported_together(plan, refused=refused)
    assert all(
        words in problem.text
        for words in ("--no-use-distributed-optimizer", "--optimizer sgd", "the reason.")
    )
    assert problem.fix == "use --optimizer adam"
    assert list(features_are_supported_together(plan_of("--optimizer sgd"), refused=refused)) == []


def test_a_feature_without_effect_is_in_no_refused_pair(plan_of):
    refused = (RefusedPair(("sp", "adam"), "the reason", ""),)
    assert "sp" not in features_of(plan_of("--sequence-parallel"))
    assert list(features_are_supported_together(plan_of("--sequence-parallel"), refused=refused)) == []


def test_a_value_that_is_not_in_the_table_is_found(plan_of):
    options = [
        dataclasses.replace(option, features=option.features[:1]) if option.name == "optimizer" else option
        for option in OPTIONS
    ]
    assert list(unlisted_values(plan_of("--optimizer sgd"), options)) == ["--optimizer sgd"]
    assert list(unlisted_values(plan_of("--optimizer sgd"))) == []


@pytest.mark.parametrize(
    ("flags", "feature"),
    [
        ("aux_loss --moe-aux-loss-coeff 1e-2", "auxloss"),
        ("aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-3", "severallosses"),
        ("aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 1e-3 1e-3", "severallosses"),
        ("aux_loss seq_aux_loss --moe-aux-loss-coeff 0 1e-3", "seqauxloss"),
    ],
)
def test_several_router_losses_are_a_separate_feature(plan_of, flags, feature):
    experts = "--disable-bias-linear --num-experts 4 --moe-router-load-balancing-type"
    (balancing,) = (option for option in OPTIONS if option.name == "balancing")
    used = features_of(plan_of(f"{experts} {flags}"), OPTIONS)
    assert {one.name for one in balancing.features} & set(used) == {feature}


@pytest.mark.parametrize(
    ("flags", "feature"),
    [
        ("--exp-avg-dtype bf16", "momentsbf16"),
        ("--exp-avg-sq-dtype bf16", "momentsbf16"),
        ("--optimizer muon --muon-fp32-matmul-prec high", "muonfp32"),
    ],
)
def test_a_number_format_is_a_feature(plan_of, flags, feature):
    assert feature in features_of(plan_of(flags), (*OPTIONS, *NUMBER_FORMATS))
