"""What `megatrain parity` has not proven is refused by name; settings that parity does not vary are known ones."""

import dataclasses

import pytest

from megatrain.config.parity_features.feature import RefusedPair
from megatrain.config.parity_features.number_formats import NUMBER_FORMATS
from megatrain.config.parity_features.table import OPTIONS, features_are_verified, features_of
from megatrain.config.schema.tree import settings

APART = {
    "parallel.distributed_backend": "carries the same sums",
    "optimizer.apply_wd_to_qk_layernorm": "is on in a model of parity",
    "optimizer.muon_nesterov": "a row of muon has it",
    "optimizer.muon_no_split_qkv": "a row of muon has it",
    "optimizer.muon_scale_mode": "a number for each whole matrix",
    "optimizer.muon_coefficient_type": "numbers for each whole matrix",
    "parallel.context_parallel_chunk_means": "makes the loss depend on how samples are split, as in Megatron-LM",
    "experts.moe_router_score_function": "softmax and sigmoid are in rows of experts; others are functions of one number",
    "experts.moe_router_pre_softmax": "a row of experts has it",
    "experts.moe_router_enable_expert_bias": "a row of experts has it",
    "experts.moe_shared_expert_gate": "a row of experts has it",
    "experts.moe_pad_expert_input_to_capacity": "a row of capacity has it",
    "experts.moe_token_drop_policy": "rows of capacity have both",
    "experts.moe_router_force_load_balancing": "for measurements: tests/distributed/test_routers_over_ranks.py holds it to one process",
    "precision.bf16": "a precision of parity",
    "precision.fp16": "a precision of parity",
    "precision.params_dtype": "a precision of parity",
    "training.decrease_batch_size_if_needed": "says how many samples a batch has, before anything is split",
    "training.check_for_nan_in_loss_and_grad": "tells what follows from a norm that parity compares",
    "training.check_for_large_grads": "the same",
    "training.check_for_spiky_loss": "tells what follows from a loss that parity compares",
    "training.skip_train": "leaves training out",
    "training.eval_at_start": "is an evaluation more",
    "training.deterministic_mode": "chooses kernels",
    "training.compile": "chooses kernels",
    "training.manual_gc": "frees memory",
    "training.manual_gc_eval": "frees memory",
    "training.device": "where to compute",
    "training.dry_run": "computes nothing",
}
"""Choices that no option of parity varies, and why they need none."""


@pytest.mark.parametrize("section", ["parallel", "experts", "optimizer", "precision", "training"])
def test_a_choice_is_an_option_of_parity_or_known_to_be_none(section):
    choices = {
        setting.path
        for setting in settings()
        if setting.section == section and (setting.choices or setting.kind is bool)
    }
    varied = {path for option in (*OPTIONS, *NUMBER_FORMATS) for path in option.settings}
    apart = {path for path in APART if path.startswith(f"{section}.")}
    assert choices - varied == apart, "add a Feature to config/parity_features/table.py, or a reason here"


def test_an_option_names_settings_that_are_there():
    known = {setting.path for setting in settings()} | {"derived.data_parallel_size"}
    assert {path for option in (*OPTIONS, *NUMBER_FORMATS) for path in option.settings} <= known


def test_a_refused_pair_is_named_with_its_flags(plan_of):
    refused = (RefusedPair(("zero0", "sgd"), "the reason.", "use --optimizer adam"),)
    plan = plan_of("--optimizer sgd --no-use-distributed-optimizer")
    (problem,) = features_are_verified(plan, refused=refused)
    assert str(problem) == (
        "--no-use-distributed-optimizer and --optimizer sgd do not go together: the reason.\n  fix: use --optimizer adam"
    )
    assert list(features_are_verified(plan_of("--optimizer sgd"), refused=refused)) == []


def test_a_feature_without_effect_is_refused_with_nothing(plan_of):
    refused = (RefusedPair(("sp", "adam"), "the reason", ""),)
    assert "sp" not in features_of(plan_of("--sequence-parallel"))
    assert list(features_are_verified(plan_of("--sequence-parallel"), refused=refused)) == []


def test_a_value_that_is_not_in_the_table_is_not_proven(plan_of):
    options = [
        dataclasses.replace(option, features=option.features[:1]) if option.name == "optimizer" else option
        for option in OPTIONS
    ]
    (problem,) = features_are_verified(plan_of("--optimizer sgd"), options)
    assert str(problem) == (
        "--optimizer sgd is not proven by `megatrain parity`\n  fix: use --optimizer adam"
    )


@pytest.mark.parametrize(
    ("flags", "feature"),
    [
        ("aux_loss --moe-aux-loss-coeff 1e-2", "auxloss"),
        ("aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-3", "severallosses"),
        ("aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 1e-3 1e-3", "severallosses"),
        ("aux_loss seq_aux_loss --moe-aux-loss-coeff 0 1e-3", "seqauxloss"),
    ],
)
def test_several_losses_of_routers_are_a_feature_of_their_own(plan_of, flags, feature):
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
