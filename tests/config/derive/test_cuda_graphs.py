"""CUDA graphs are used where every kernel of a micro-batch has fixed sizes; elsewhere a note has the reason."""

import pytest

from megatrain.config import Facts

DENSE = "--cuda-graph-impl local --hidden-dropout 0 --attention-dropout 0 --bf16"


@pytest.mark.parametrize("flags", ["--cuda-graph-impl local", "--enable-cuda-graph"])
def test_a_dense_model_on_data_parallel_ranks_has_graphs(plan_of, flags):
    plan = plan_of(
        f"{flags} --hidden-dropout 0 --attention-dropout 0", facts=Facts(device="cuda", world_size=4)
    )
    assert plan.derived.cuda_graphs
    assert not any("has no effect" in note for note in plan.notes)


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
        "--context-parallel-size 2",
        "--mtp-num-layers 1",
        "--pipeline-model-parallel-size 2",
        "--fp8-format hybrid --fp8-recipe tensorwise",
        "--hidden-dropout 0.1 --attention-dropout 0.1",
        "--num-experts 8 --moe-router-topk 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    ],
)
def test_what_differs_between_micro_batches_is_read_from_memory(plan_of, flags):
    assert plan_of(
        f"{DENSE} {flags}", facts=Facts(device="cuda", device_capability=(9, 0), world_size=4)
    ).derived.cuda_graphs


@pytest.mark.parametrize(
    ("flags", "facts", "reason"),
    [
        ("", Facts(), "a CPU has none"),
        ("--transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe tensorwise",
         Facts(device="cuda", libraries={"transformer_engine": "2.20.2"}), "FP8 modules of Transformer Engine"),
        ("--data-parallel-sharding-strategy optim_grads", Facts(device="cuda", world_size=2), "ZeRO-2"),
        ("--pack-documents --calculate-per-token-loss --micro-batch-size 1", Facts(device="cuda"), "without --pack-documents"),
        ("--num-experts 4", Facts(device="cuda", device_capability=(8, 0)), "wait for the host on this GPU"),
        ("--num-experts 4 --moe-ffn-hidden-size 300", Facts(device="cuda"), "sizes of experts"),
        ("--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall",
         Facts(device="cuda", world_size=8), "--moe-alltoall-as-allgather"),
        ("--num-experts 4 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01", Facts(device="cuda"), "global_aux_loss"),
        ("--num-experts 4 --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap", Facts(device="cuda"), "two streams"),
        ("--reset-attention-mask --no-create-attention-mask-in-dataloader", Facts(device="cuda"), "documents"),
    ],
)  # fmt: skip
def test_elsewhere_a_note_has_the_reason(plan_of, flags, facts, reason):
    plan = plan_of(f"{DENSE} {flags}", facts=facts)
    assert not plan.derived.cuda_graphs
    (note,) = [note for note in plan.notes if note.startswith("--cuda-graph-impl local has no effect: ")]
    assert reason in note


@pytest.mark.parametrize(
    ("facts", "words"),
    [(Facts(), "has no effect: a CPU has none"), (Facts(device="cuda"), "runs as auto")],
)
def test_graphs_of_modules_are_of_the_whole_micro_batch(plan_of, facts, words):
    plan = plan_of(f"{DENSE} --cuda-graph-impl transformer_engine", facts=facts)
    assert plan.derived.cuda_graphs == (facts.device == "cuda")
    assert any(note.startswith(f"--cuda-graph-impl transformer_engine {words}") for note in plan.notes)


def test_the_first_iteration_compiles_kernels(plan_of):
    notes = plan_of(f"{DENSE} --cuda-graph-warmup-steps 0", facts=Facts(device="cuda")).notes
    assert "--cuda-graph-warmup-steps 0: kernels are compiled in one iteration before the capture" in notes


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("", ""),
        ("--cuda-graph-impl local", "no graphs are tried"),
        ("--overlap-moe-expert-parallel-comm", "a flag decides"),
        ("--no-overlap-moe-expert-parallel-comm", "a flag decides"),
        ("--expert-model-parallel-size 1", "experts are on one rank"),
        ("--transformer-impl transformer_engine", "no graphs are tried"),
        ("--pipeline-model-parallel-size 2", "pipeline stages"),
        ("--global-batch-size 8", "each of 1 micro-batches"),
        ("--global-batch-size 800", "each of 100 micro-batches"),
        ("--moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap", "no graphs are tried"),
    ],
)
def test_graphs_hide_the_sends_of_tokens_by_turns(plan_of, flags, reason):
    experts = "--num-experts 16 --moe-router-topk 4 --expert-model-parallel-size 2 --global-batch-size 64 --micro-batch-size 1"
    facts = Facts(
        device="cuda", device_capability=(9, 0), world_size=8, libraries={"transformer_engine": "2.20.2"}
    )
    dense = DENSE.replace("--cuda-graph-impl local", "")
    plan = plan_of(f"{dense} {experts} --moe-token-dispatcher-type alltoall {flags}", facts=facts)
    assert plan.derived.graphs_in_turn == (not reason)
    assert reason in plan.origins["derived.graphs_in_turn"].detail
    assert not plan.config.experts.overlap_moe_expert_parallel_comm or reason == "a flag decides"


@pytest.mark.parametrize(
    ("flags", "facts", "are_used"),
    [
        ("", Facts(device="cuda"), True),
        ("", Facts(), False),
        ("--deterministic-mode", Facts(device="cuda"), False),
        ("--require-parity", Facts(device="cuda"), False),
        (
            "--transformer-impl transformer_engine",
            Facts(device="cuda", libraries={"transformer_engine": "2.20.2"}),
            False,
        ),
        ("--cuda-graph-impl none", Facts(device="cuda"), False),
    ],
)
def test_graphs_are_a_choice_of_the_run_by_default(plan_of, flags, facts, are_used):
    plan = plan_of(f"--hidden-dropout 0 --attention-dropout 0 --bf16 {flags}", facts=facts)
    assert plan.derived.cuda_graphs == are_used
    assert not any("--cuda-graph-impl" in note for note in plan.notes)
