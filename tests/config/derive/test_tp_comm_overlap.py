"""Tensor ranks overlap communication by default where that was measured; elsewhere the plan has the reason."""

from dataclasses import replace

import pytest

from megatrain.config import Facts

SHAPE = "--hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --max-position-embeddings 8192 --bf16"
TENSOR = f"{SHAPE} --sequence-parallel --tensor-model-parallel-size"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SHARED_EXPERT = "--num-experts 4 --disable-bias-linear --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap"
HOPPER = Facts(
    device="cuda", device_capability=(9, 0), device_name="NVIDIA H200", world_size=8, ranks_per_node=8
)


@pytest.mark.parametrize(
    ("flags", "facts", "reason"),
    [
        (f"{TENSOR} 2", HOPPER, ""),
        (f"{TENSOR} 4", HOPPER, ""),
        (f"{TENSOR} 4", Facts(device="cuda", world_size=4), ""),
        (f"{TENSOR} 8", HOPPER, "2 to 4 tensor ranks"),
        (f"{TENSOR} 4", replace(HOPPER, ranks_per_node=2), "several hosts"),
        (f"{TENSOR} 4", replace(HOPPER, device_name="NVIDIA H100 PCIe"), "NVLink"),
        (f"{TENSOR} 4", replace(HOPPER, device_capability=(8, 9)), "NVLink"),
        (f"{TENSOR} 4", replace(HOPPER, device="cpu"), "CPU"),
        (f"{TENSOR} 4 --seq-length 256 --micro-batch-size 1", HOPPER, "messages of 64 rows are too small"),
        (f"{TENSOR} 4 --fp8-format hybrid --fp8-recipe tensorwise", HOPPER, "FP8"),
        (f"{TENSOR} 4 --no-sequence-parallel", HOPPER, "--no-sequence-parallel"),
        (SHAPE, HOPPER, "--tensor-model-parallel-size 1"),
        (f"{TENSOR} 2 {SHARED_EXPERT}", HOPPER, "two streams"),
        (f"{TENSOR} 2 --lora-rank 8 --disable-bias-linear", HOPPER, "--lora-rank"),
        (f"{TENSOR} 2 --mlp-chunks-for-training 2 {RECOMPUTED}", HOPPER, "--mlp-chunks-for-training"),
        (f"{TENSOR} 2 --transformer-impl transformer_engine", replace(HOPPER, libraries={"transformer_engine": "2.20.2"}), ""),
    ],
)  # fmt: skip
def test_where_it_was_measured_it_is_on(plan_of, flags, facts, reason):
    plan = plan_of(flags, facts=facts)
    assert plan.config.parallel.tp_comm_overlap == (not reason)
    assert reason in plan.origins["parallel.tp_comm_overlap"].detail


@pytest.mark.parametrize(
    ("flags", "facts", "reason"),
    [
        ("", HOPPER, "the same result"),
        ("--context-parallel-size 2", HOPPER, "the same result"),
        ("--seq-length 8190", HOPPER, "8190 is no multiple of 4"),
        ("--seq-length 8184 --context-parallel-size 2", HOPPER, "8184 is no multiple of 16"),
        ("--lora-rank 8 --disable-bias-linear", HOPPER, "--lora-rank"),
        ("--no-tp-comm-overlap", HOPPER, "--no-tp-comm-overlap"),
        ("--seq-length 256 --micro-batch-size 1", HOPPER, "too small"),
        ("--seq-length 256 --micro-batch-size 1 --tp-comm-overlap", HOPPER, "the same result"),
        ("", replace(HOPPER, device="cpu"), "CPU"),
    ],
)
def test_the_sequence_is_split_where_products_overlap(plan_of, flags, facts, reason):
    plan = plan_of(f"{SHAPE} --tensor-model-parallel-size 4 {flags}", facts=facts)
    is_split = reason == "the same result"
    assert plan.config.parallel.sequence_parallel == is_split
    assert plan.config.parallel.tp_comm_overlap == is_split
    assert reason in plan.origins["parallel.sequence_parallel"].detail


def test_a_flag_turns_it_off(plan_of):
    assert not plan_of(f"{TENSOR} 4 --no-tp-comm-overlap", facts=HOPPER).config.parallel.tp_comm_overlap


def test_local_overlaps_products_in_bf16_under_transformer_engine(plan_of):
    engine = "--transformer-impl transformer_engine"
    facts = replace(HOPPER, libraries={"transformer_engine": "2.20.2"})
    plans = [
        plan_of(f"{TENSOR} 4 {flags} {engine}", facts=facts)
        for flags in (
            "",
            "--no-tp-comm-overlap",
            "--tp-comm-overlap --fp8-format hybrid --fp8-recipe tensorwise",
        )
    ]
    assert {plan.derived.transformer_impl for plan in plans} == {"transformer_engine"}
    words = "linear layers in bfloat16 (--tp-comm-overlap)"
    assert [any(words in note for note in plan.notes) for plan in plans] == [True, False, False]
    assert not any("--tp-comm-overlap has no effect" in note for note in plans[0].notes)
