"""Rules about adapters: each names its flags and a remedy."""

CASES = {
    "lora_covers_the_layers": [
        ("--lora-rank 4 --num-experts 4", "", None, ("--lora-rank 4", "has experts"), ("remove --lora-rank",)),
        ("--lora-rank 4 --lora-target-modules gate_proj", "--swiglu", None, ("gate_proj", "no such layer"), ("--lora-target-modules",)),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)
