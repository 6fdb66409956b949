"""Rules about adapters: each names its flags and a remedy."""

import pytest

CASES = {
    "lora_covers_the_layers": [
        ("--lora-rank 4 --num-experts 4", "", None, ("--lora-rank 4", "ExpertsSpec"), ("remove --lora-rank",)),
        ("--lora-rank 4 --lora-target-modules gate_proj", "--swiglu", None, ("gate_proj", "no such layer"), ("--lora-target-modules",)),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "without", "facts", "named", "remedy"), [case for cases in CASES.values() for case in cases]
)
def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


@pytest.mark.parametrize(
    "flags",
    [
        "--fp8-format hybrid",
        "--optimizer muon",
        "--optimizer soap",
        "--optimizer-cpu-offload",
        "--tp-comm-overlap",
        "--qat int8",
    ],
)
def test_what_needs_whole_weights_is_refused(problems_of, flags):
    assert any(
        "--lora-rank" in one and flags.split()[0] in one for one in problems_of(f"--lora-rank 4 {flags}")
    )
