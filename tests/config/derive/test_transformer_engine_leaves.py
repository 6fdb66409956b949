"""Transformer Engine supplies what it can; the plan names the leaves of `local` and the reasons."""

import pytest

from megatrain.config import Facts

ENGINE = "--transformer-impl transformer_engine"
LIBRARY = {"transformer_engine": "2.20.2"}


def facts(world_size=1, **values):
    return Facts(**{"device": "cuda", "libraries": LIBRARY, "world_size": world_size, **values})


@pytest.mark.parametrize(
    ("flags", "found", "reason"),
    [
        ("--bf16", facts(device="cpu"), "needs a GPU"),
        ("--bf16", facts(libraries={}), "not installed"),
        ("--bf16", facts(libraries={"transformer_engine": "2.9.0"}), "2.9.0 is older than 2.20"),
        ("", facts(), "--params-dtype is float32"),
        ("--bf16 --fp8-format hybrid --no-fp8-wgrad", facts(), "no FP8 with --no-fp8-wgrad"),
    ],
)
def test_local_supplies_all_layers_where_the_library_cannot_run(plan_of, flags, found, reason):
    plan = plan_of(f"{ENGINE} {flags}", facts=found)
    assert plan.derived.transformer_impl == "local"
    (note,) = [note for note in plan.notes if ENGINE in note]
    assert "local supplies all layers" in note
    assert reason in note


@pytest.mark.parametrize(
    ("flags", "without", "leaf", "reason"),
    [
        ("--attention-dropout 0.1", "--attention-dropout", "core attention", "--attention-dropout 0.1"),
        ("--attn-logit-softcapping 30", "", "core attention", "--attn-logit-softcapping 30"),
        ("--softmax-type learnable", "", "core attention", "sinks"),
        ("--attention-backend flash", "", "core attention", "--attention-backend flash"),
        ("--attention-backend unfused", "", "core attention", "--attention-backend unfused"),
        ("--deterministic-mode", "", "core attention", "--deterministic-mode"),
        ("--multi-latent-attention --reset-attention-mask", "", "core attention", "--multi-latent-attention with documents"),
        ("", "--swiglu", "activations", "exact GELU"),
        ("--quick-geglu --activation-func-clamp-value 7", "--swiglu", "activations", "--activation-func-clamp-value"),
        ("--quick-geglu --glu-linear-offset 1", "--swiglu", "activations", "--glu-linear-offset 1"),
        ("--fp32-residual-connection", "", "norms", "--fp32-residual-connection"),
        ("--recompute-norms", "", "norms", "--recompute-norms"),
        ("--recompute-granularity selective --recompute-modules layernorm", "", "norms", "--recompute-modules layernorm"),
        ("--qk-layernorm --qk-layernorm-width all_heads", "", "norms of queries and keys", "all_heads"),
        ("--num-experts 4 --moe-aux-loss-coeff 0.1", "", "experts", "grouped"),
        ("--experimental-attention-variant gdn --linear-attention-freq 2", "", "gated delta rule", "has none"),
    ],
)  # fmt: skip
def test_the_plan_names_a_leaf_of_local_and_the_reason(plan_of, flags, without, leaf, reason):
    plan = plan_of(f"{ENGINE} --bf16 {flags}", without=without, facts=facts())
    assert plan.derived.transformer_impl == "transformer_engine"
    assert (plan.derived.attention_backend == "transformer_engine") == (leaf != "core attention")
    (note,) = [note for note in plan.notes if note.startswith(f"{ENGINE}: local supplies ")]
    assert f"{leaf} (" in note
    assert reason in note


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--context-parallel-size 2 --reset-attention-mask", 2),
        ("--context-parallel-size 2 --cp-comm-type a2a --group-query-attention --num-query-groups 1", 2),
        (
            "--context-parallel-size 4 --cp-comm-type a2a+all_gather --hierarchical-context-parallel-sizes 2 2",
            4,
        ),
    ],
)
def test_context_parallel_attention_that_the_library_lacks_is_that_of_local(plan_of, flags, ranks):
    plan = plan_of(f"{ENGINE} --bf16 {flags}", facts=facts(ranks))
    assert plan.derived.attention_backend != "transformer_engine"
    assert any("local supplies core attention" in note for note in plan.notes)


def test_all_leaves_may_be_the_library_s(plan_of):
    plan = plan_of(f"{ENGINE} --bf16", facts=facts())
    assert plan.derived.attention_backend == "transformer_engine"
    assert not any("local supplies" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--fp8-recipe delayed", "--fp8-recipe delayed: Transformer Engine computes the linear layers of layers 0-3 in FP8;"),
        ("--fp8-recipe blockwise", "--fp8-recipe blockwise: Transformer Engine computes"),
        ("--fp8-recipe tensorwise --first-last-layers-bf16", "layers of layers 1-2 in FP8"),
        ("--fp8-recipe tensorwise --recompute-norms", "in FP8, but local those after norms (--recompute-norms)"),
    ],
)  # fmt: skip
def test_the_plan_says_who_computes_which_layers_in_fp8(plan_of, flags, words):
    plan = plan_of(f"{ENGINE} --bf16 --num-layers 4 --fp8-format hybrid {flags}", facts=facts())
    assert plan.derived.transformer_impl == "transformer_engine"
    assert any(words in note for note in plan.notes), plan.notes
