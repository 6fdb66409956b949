"""Rules about Transformer Engine: each fires, names its flags and a remedy."""

import pytest

from megatrain.config import Facts
from megatrain.config.rules.transformer_engine import TRANSFORMER_ENGINE_RULES

CUDA = Facts(device="cuda")
ENGINE = "--transformer-impl transformer_engine"
WITH_ENGINE = Facts(device="cuda", libraries={"transformer_engine": "2.20.2"})
TWO_WITH_ENGINE = Facts(device="cuda", world_size=2, libraries={"transformer_engine": "2.20.2"})

CASES = {
    "transformer_engine_is_installed": [
        (f"{ENGINE} --bf16", "", CUDA,
         ("--transformer-impl transformer_engine", "not installed"), ("pip install", "--transformer-impl local")),
        (f"{ENGINE} --bf16", "", Facts(device="cuda", libraries={"transformer_engine": "2.9.0"}),
         ("--transformer-impl transformer_engine", "2.20", "2.9.0"), ("--transformer-impl local",)),
    ],
    "transformer_engine_supports_this": [
        (f"{ENGINE} --bf16 --context-parallel-size 2 --reset-attention-mask", "", TWO_WITH_ENGINE,
         ("--transformer-impl transformer_engine", "--context-parallel-size 2", "document"),
         ("--context-parallel-size", "--transformer-impl local")),
        (f"{ENGINE} --bf16 --context-parallel-size 2 --cp-comm-type a2a --group-query-attention --num-query-groups 1", "", TWO_WITH_ENGINE,
         ("--transformer-impl transformer_engine", "--cp-comm-type a2a", "layer 0"),
         ("--cp-comm-type p2p", "--transformer-impl local")),
        (f"{ENGINE} --bf16 --context-parallel-size 4 --cp-comm-type a2a+all_gather --hierarchical-context-parallel-sizes 2 2", "", Facts(device="cuda", world_size=4, libraries={"transformer_engine": "2.20.2"}),
         ("--transformer-impl transformer_engine", "--cp-comm-type a2a+all_gather"),
         ("--cp-comm-type all_gather", "--transformer-impl local")),
        (f"{ENGINE} --bf16", "", Facts(libraries={"transformer_engine": "2.20.2"}),
         ("--transformer-impl transformer_engine", "--device cuda", "cpu"), ("--transformer-impl local",)),
        (ENGINE, "", WITH_ENGINE,
         ("--transformer-impl transformer_engine", "--params-dtype", "float32"),
         ("--bf16", "--transformer-impl local")),
        (f"{ENGINE} --bf16 --attention-dropout 0.1", "--attention-dropout", WITH_ENGINE,
         ("--transformer-impl transformer_engine", "--attention-dropout 0.1"),
         ("--attention-dropout 0", "--transformer-impl local")),
        (f"{ENGINE} --bf16 --attn-logit-softcapping 30", "", WITH_ENGINE,
         ("--transformer-impl transformer_engine", "--attn-logit-softcapping 30.0"),
         ("--attn-logit-softcapping", "--transformer-impl local")),
        (f"{ENGINE} --bf16 --softmax-type learnable", "", WITH_ENGINE,
         ("--transformer-impl transformer_engine", "--softmax-type learnable"),
         ("--softmax-type vanilla", "--transformer-impl local")),
        (f"{ENGINE} --bf16", "--swiglu", WITH_ENGINE,
         ("--transformer-impl transformer_engine", "GELU"),
         ("--swiglu", "--disable-bias-linear", "--no-bias-gelu-fusion", "--transformer-impl local")),
        (f"{ENGINE} --bf16 --quick-geglu --activation-func-clamp-value 7", "--swiglu", WITH_ENGINE,
         ("--transformer-impl transformer_engine", "--activation-func-clamp-value 7.0"),
         ("--activation-func-clamp-value", "--transformer-impl local")),
        (f"{ENGINE} --bf16 --quick-geglu --glu-linear-offset 1", "--swiglu", WITH_ENGINE,
         ("--transformer-impl transformer_engine", "--glu-linear-offset 1.0"),
         ("--glu-linear-offset", "--transformer-impl local")),
        (f"{ENGINE} --bf16 --qk-layernorm --qk-layernorm-width all_heads", "", WITH_ENGINE,
         ("--transformer-impl transformer_engine", "--qk-layernorm-width all_heads"),
         ("--qk-layernorm-width head", "--transformer-impl local")),
        (f"{ENGINE} --bf16 --fp32-residual-connection", "", WITH_ENGINE,
         ("--transformer-impl transformer_engine", "--fp32-residual-connection"),
         ("--fp32-residual-connection", "--transformer-impl local")),
        (f"{ENGINE} --bf16 --recompute-norms", "", WITH_ENGINE,
         ("--transformer-impl transformer_engine", "--recompute-norms"),
         ("--recompute-norms", "--transformer-impl local")),
        (f"{ENGINE} --bf16 --recompute-granularity selective --recompute-modules layernorm", "", WITH_ENGINE,
         ("--transformer-impl transformer_engine", "--recompute-modules layernorm"),
         ("--recompute-modules core_attn mlp", "--transformer-impl local")),
        (f"{ENGINE} --bf16 --attention-backend flash", "", WITH_ENGINE,
         ("--transformer-impl transformer_engine", "--attention-backend flash"),
         ("--attention-backend auto", "--transformer-impl local")),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "without", "facts", "named", "remedy"), [case for cases in CASES.values() for case in cases]
)
def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


def test_every_rule_has_a_case():
    assert set(CASES) == {rule.__name__ for rule in TRANSFORMER_ENGINE_RULES}


@pytest.mark.parametrize(
    ("flags", "named", "remedy"),
    [
        ("--num-experts 4 --moe-router-load-balancing-type none", "--num-experts 4", "remove --num-experts"),
        ("--spec no.where:layers", "--spec no.where:layers", "remove --spec"),
    ],
)
def test_experts_and_custom_layers_are_refused(problems_of, flags, named, remedy):
    """Other rules refuse these flags too."""
    found = [problem.split("fix:") for problem in problems_of(f"{ENGINE} --bf16 {flags}", facts=WITH_ENGINE)]
    assert any(ENGINE in text and named in text and remedy in fix for text, fix in found)
