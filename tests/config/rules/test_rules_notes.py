"""Notes name the flags of settings without effect and of defaults that surprise."""

import pytest

from megatrain.config import Facts, Origin, StoredRun, parse
from megatrain.config.facts import DatasetFacts
from megatrain.config.plan import Derived, Draft
from megatrain.config.schema.tree import settings
from megatrain.config.subjects.model import dropout_by_default


def test_float32_on_a_gpu_is_noted_unless_it_is_given(plan_of):
    on_gpu = Facts(device="cuda")
    assert any(note.startswith("--params-dtype float32 by default") for note in plan_of(facts=on_gpu).notes)
    for flags in ("--bf16", "--params-dtype float32"):
        [note] = plan_of(flags, facts=on_gpu).notes
        assert note.startswith("--attention-backend auto: ")


def test_one_query_group_by_default_is_noted(plan_of):
    for flags, groups in (
        ("", 4),
        ("--group-query-attention --num-query-groups 2", 2),
        ("--group-query-attention", 1),
    ):
        plan = plan_of(flags)
        assert plan.config.model.num_query_groups == groups
        assert any("multi-query attention" in note for note in plan.notes) == (groups == 1)


def test_dropout_by_default_is_noted():
    config = parse(["--attention-dropout", "0.1"]).config
    origins = {setting.path: Origin("default") for setting in settings()}
    draft = Draft(config, Derived(), Facts(), origins | {"model.attention_dropout": Origin("flag")})
    (note,) = dropout_by_default(draft)
    assert note.startswith("--hidden-dropout 0.1 by default")
    assert "--attention-dropout" not in note


def test_experts_without_grouped_gemm_are_noted(plan_of):
    on_gpu = Facts(device="cuda")
    words = "experts are computed one by one"
    assert any(f"{words} in float32" in note for note in plan_of("--num-experts 4", facts=on_gpu).notes)
    odd = plan_of("--num-experts 4 --moe-ffn-hidden-size 36 --bf16", facts=on_gpu).notes
    assert any(f"{words} with widths that are not multiples of 8" in note for note in odd)
    for flags, facts in (
        ("--num-experts 4 --bf16", on_gpu),
        ("--bf16", on_gpu),
        ("--num-experts 4", Facts()),
    ):
        assert not any(words in note for note in plan_of(flags, facts=facts).notes)


def test_a_dispatch_in_fp8_that_sends_no_codes_is_noted(plan_of):
    flags = "--num-experts 4 --moe-fp8-dispatch --fp8-format e4m3"
    ranks = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    for more, words in (
        ("", "experts on one rank"),
        (f"{ranks} --moe-alltoall-as-allgather", "an all-gather of tokens"),
        (f"{ranks} --no-moe-alltoall-as-allgather", None),
    ):
        notes = plan_of(f"{flags} {more}", facts=Facts(world_size=2)).notes
        found = [note for note in notes if note.startswith("--moe-fp8-dispatch only rounds")]
        assert len(found) == (words is not None)
        assert all(words in note for note in found)
    (note,) = [one for one in plan_of("--num-experts 4 --moe-fp8-dispatch").notes if "fp8" in one]
    assert note == "--moe-fp8-dispatch has no effect without --fp8-format"


def test_scans_without_kernels_are_noted(plan_of):
    on_gpu, hybrid = (
        Facts(device="cuda"),
        "--bf16 --model-family hybrid --mamba-num-heads 8 --mamba-num-groups 2",
    )
    for flags, words in (
        ("--hybrid-layer-pattern M --mamba-head-dim 128 --mamba-state-dim 256", "--mamba-state-dim is 32768"),
        ("--hybrid-layer-pattern G --linear-key-head-dim 256", "--linear-value-head-dim is 32768"),
        ("--hybrid-layer-pattern G --experimental-attention-variant gdn2", "gdn2 has no kernels"),
    ):
        assert any(words in note for note in plan_of(f"{hybrid} {flags}", facts=on_gpu).notes)
        assert not any(words in note for note in plan_of(f"{hybrid} {flags}").notes)
    plain = plan_of(f"{hybrid} --hybrid-layer-pattern MG", facts=on_gpu).notes
    assert not any("no kernels" in note for note in plain)


def test_an_overlap_without_all_gather_is_noted(plan_of):
    words = "--overlap-param-gather has no effect without --use-distributed-optimizer"
    for flags, is_noted in (
        ("--overlap-param-gather --no-use-distributed-optimizer", True),
        ("--overlap-param-gather --data-parallel-sharding-strategy no_shard", True),
        ("--no-use-distributed-optimizer", False),
        ("--overlap-param-gather", False),
    ):
        assert any(words in note for note in plan_of(flags).notes) == is_noted


def test_a_finetuning_run_that_does_not_resume_is_noted(plan_of):
    (note,) = (n for n in plan_of("--load x --save y --finetune").notes if "--finetune" in n)
    assert "--pretrained-checkpoint x --load y --save y" in note
    (note,) = (n for n in plan_of("--save y --finetune").notes if "does not resume" in n)
    assert note.endswith("use --load y --save y")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--exit-interval 5", "--exit-interval"),
        ("--exit-interval 10", None),
        ("--exit-interval 10 --exit-duration-in-mins 60", "--exit-duration-in-mins"),
        ("--exit-interval 5 --exit-duration-in-mins 60", "--exit-interval, --exit-duration-in-mins"),
        ("--exit-interval 5 --save a", None),
    ],
)
def test_a_stop_without_a_checkpoint_is_noted(plan_of, flags, named):
    notes = [note for note in plan_of(f"--train-iters 10 {flags}").notes if "leaves no checkpoint" in note]
    assert notes == ([f"a stop by {named} leaves no checkpoint, since --save is not given"] if named else [])


def test_a_profile_that_the_run_cuts_short_is_noted(plan_of):
    late = plan_of("--profile --train-iters 11").notes
    assert any("--profile-step-end 12" in note and "iteration 11" in note for note in late)
    never = plan_of("--profile --train-iters 10").notes
    assert any("--profile-step-start 10 has no effect" in note and "iteration 10" in note for note in never)
    assert not any("--profile-step" in note for note in plan_of("--profile --train-iters 12").notes)


def test_gradients_in_another_format_are_noted(plan_of):
    words = "--fp8-format hybrid with --fp8-recipe blockwise: gradients are in E4M3"
    for flags, is_noted in (
        ("--fp8-format hybrid --fp8-recipe blockwise", True),
        ("--fp8-format e4m3 --fp8-recipe blockwise", False),
        ("--fp8-format hybrid --fp8-recipe tensorwise", False),
    ):
        assert any(words in note for note in plan_of(flags).notes) == is_noted


TALK = "--data-path talk --tokenizer-type NullTokenizer --eval-iters 0"


@pytest.mark.parametrize("flags", ["", "--sft"])
def test_conversations_that_are_read_without_sft_are_noted(plan_of, flags):
    data = {"split": "all", "prefix": "talk", "weight": None, "num_sequences": 9, "num_tokens": 9000}
    facts = Facts(datasets=(DatasetFacts(**data, digest="d", has_loss_mask=True),))
    noted = [
        note
        for note in plan_of(f"{TALK} {flags}", without="--mock-data", facts=facts).notes
        if note.startswith("talk: conversations with a loss")
    ]
    assert len(noted) == ("--sft" not in flags)


@pytest.mark.parametrize(("second", "is_noted"), [("{{ a }}", False), ("{{ b }}", True), (None, False)])
def test_conversations_of_different_chat_templates_are_noted(plan_of, second, is_noted):
    data = {
        "split": "all",
        "weight": 0.5,
        "num_sequences": 9,
        "num_tokens": 9000,
        "digest": "d",
        "has_loss_mask": True,
    }
    found = (("talk", "{{ a }}"), ("chat", second))
    facts = Facts(
        datasets=tuple(DatasetFacts(**data, prefix=name, chat_template=text) for name, text in found)
    )
    flags = TALK.replace("talk", "0.5 talk 0.5 chat") + " --sft"
    notes = [
        note for note in plan_of(flags, without="--mock-data", facts=facts).notes if "chat templates" in note
    ]
    assert len(notes) == is_noted
    assert all(note.startswith("talk, chat: ") and note.endswith("have that of talk") for note in notes)


def test_last_iterations_without_a_learning_rate_are_noted(plan_of):
    def notes(flags):
        return [note for note in plan_of(flags).notes if "learning rate of 0" in note]

    assert notes("") == notes("--lr-decay-iters 10") == notes("--lr-decay-iters 7 --min-lr 1e-5") == []
    (note,) = notes("--lr-decay-iters 7 --lr-decay-style cosine")
    assert note.startswith(
        "the last 3 iterations have a learning rate of 0, since the decay ends at sample 14 of 20"
    )
    (note,) = notes("--lr-decay-iters 9")
    assert note.startswith("the last iteration has")
    assert notes("--lr-decay-iters 7 --lr-decay-style constant") == []


def test_a_first_start_that_may_replace_checkpoints_is_noted(plan_of):
    config = plan_of("").config.to_dict()
    run = StoredRun(
        path="r/iter_0000002", iteration=2, consumed_train_samples=4, config=config, is_start=True
    )
    words = "--finetune starts at iteration 0 in the folder of its start, r: a save replaces"
    for flags, is_noted in (("--load r --save r", True), ("--load r --save s", False)):
        notes = plan_of(f"{flags} --finetune", facts=Facts(checkpoint=run)).notes
        assert any(note.startswith(words) for note in notes) == is_noted


def test_a_restart_after_the_first_start_is_noted(plan_of):
    config = plan_of("").config.to_dict()
    run = StoredRun(
        path="r/iter_0000002", iteration=2, consumed_train_samples=4, config=config, started=("finetune",)
    )
    notes = plan_of("--load r --save r --finetune", facts=Facts(checkpoint=run)).notes
    assert any(
        note.startswith("--finetune applied to the first start") and "r/iter_0000002" in note
        for note in notes
    )
    assert not any("does not resume" in note for note in notes)


def test_the_cost_of_attention_logits_is_noted(plan_of):
    """A window of w tokens has at most 2 w of the s pairs per two tokens that causal attention has."""
    for flag, words in (("--qk-clip", "each pass,"), ("--log-max-attention-logit", "each pass,"),
                        ("--qk-clip --recompute-granularity selective", "and again where the backward pass")):  # fmt: skip
        plan = plan_of(flag)
        (note,) = [note for note in plan.notes if "scores of attention once more" in note]
        config, derived = plan.config, plan.derived
        channels = config.model.num_layers * config.model.num_attention_heads * config.model.kv_channels
        share = derived.tokens_per_iteration * channels * config.data.seq_length / derived.flops_per_iteration
        assert note.startswith(flag.split()[0])
        assert words in note
        assert f" {100 * share:.1f} %" in note
    narrow = plan_of("--qk-clip --window-size 4,0").notes
    assert not any(f" {100 * share:.1f} %" in note for note in narrow if "once more" in note)
