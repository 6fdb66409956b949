"""Defaults that are traps are told."""

from megatrain.config import Facts, Origin, parse
from megatrain.config.plan import Derived, Draft
from megatrain.config.rules.notes import dropout_by_default
from megatrain.config.schema.tree import settings


def test_float32_on_a_gpu_is_told_unless_it_was_asked_for(plan_of):
    on_gpu = Facts(device="cuda")
    assert any(note.startswith("weights and arithmetic are float32") for note in plan_of(facts=on_gpu).notes)
    for flags in ("--bf16", "--params-dtype float32"):
        [note] = plan_of(flags, facts=on_gpu).notes
        assert note.startswith("--attention-backend auto: ")


def test_dropout_by_default_is_told():
    config = parse(["--attention-dropout", "0.1"]).config
    origins = {setting.path: Origin("default") for setting in settings()}
    draft = Draft(config, Derived(), Facts(), origins | {"model.attention_dropout": Origin("flag")})
    assert list(dropout_by_default(draft)) == [
        "--hidden-dropout 0.1 by default, as in Megatron-LM; most models are trained with 0 today"
    ]


def test_norms_that_do_not_run_again_are_told(plan_of):
    flags = "--recompute-activations --recompute-modules layernorm --normalization RMSNorm"
    told = "--recompute-modules layernorm has no effect with --norm-position post: no norm stands before a linear layer"
    assert told in plan_of(f"{flags} --norm-position post").notes
    assert told not in plan_of(flags).notes


def test_experts_without_their_kernel_are_told(plan_of):
    on_gpu = Facts(device="cuda")
    told = "experts are computed one by one"
    assert any(f"{told} in float32" in note for note in plan_of("--num-experts 4", facts=on_gpu).notes)
    odd = plan_of("--num-experts 4 --moe-ffn-hidden-size 36 --bf16", facts=on_gpu).notes
    assert any(f"{told} with widths that are no multiples of 8" in note for note in odd)
    for flags, facts in (
        ("--num-experts 4 --bf16", on_gpu),
        ("--bf16", on_gpu),
        ("--num-experts 4", Facts()),
    ):
        assert not any(told in note for note in plan_of(flags, facts=facts).notes)


def test_a_gather_of_what_is_whole_is_told(plan_of):
    told = "--overlap-param-gather has no effect without --use-distributed-optimizer"
    for flags, is_told in (
        ("--overlap-param-gather --no-use-distributed-optimizer", True),
        ("--overlap-param-gather --data-parallel-sharding-strategy no_shard", True),
        ("--no-use-distributed-optimizer", False),
        ("--overlap-param-gather", False),
    ):
        assert any(told in note for note in plan_of(flags).notes) == is_told


def test_a_start_that_does_not_go_on_is_told(plan_of):
    (note,) = (n for n in plan_of("--load x --save y --finetune").notes if "--finetune" in n)
    assert "give --pretrained-checkpoint x --load y --save y" in note


def test_a_profile_that_the_run_cuts_short_is_told(plan_of):
    late = plan_of("--profile --train-iters 11").notes
    assert "--profile-step-end 12: the run ends at iteration 11, and so does the profile" in late
    never = plan_of("--profile --train-iters 10").notes
    assert "--profile-step-start 10: the run ends at iteration 10, and nothing is profiled" in never
    assert not any("the run ends" in note for note in plan_of("--profile --train-iters 12").notes)
    assert any("--profile-ranks: without effect" in note for note in plan_of("--profile-ranks 0").notes)
