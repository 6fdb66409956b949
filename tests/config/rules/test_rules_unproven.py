"""A combination that is right but not proven runs with a line in the plan; --require-parity makes it an error."""

import pytest

from megatrain.config import Facts

GPU = Facts(device="cuda", libraries={"transformer_engine": "2.20.2"})
CASES = {
    "layers_of_transformer_engine": (
        "--transformer-impl transformer_engine --bf16",
        GPU,
        "Transformer Engine",
    ),
    "restarts_on_gpus": (
        "--inprocess-restart --save x --load x",
        Facts(device="cuda"),
        "--inprocess-restart was tested with gloo",
    ),
    "custom_loss": ("--loss a.py:f", Facts(digests={"training.loss": "1"}), "--loss a.py:f has no row"),
    "loss_of_global_loads": (
        "--num-experts 4 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
        None,
        "global_aux_loss",
    ),
    "order_of_cyclic_samples": ("--dataloader-type cyclic", None, "--dataloader-type cyclic"),
    "decreased_batches": (
        "--micro-batch-size 2 --global-batch-size 6 --decrease-batch-size-if-needed",
        Facts(world_size=2),
        "--decrease-batch-size-if-needed rounds the batch down to a multiple of 2 * dp 2",
    ),
    "stream_of_the_shared_expert": (
        "--num-experts 4 --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap --bf16",
        Facts(device="cuda"),
        "--moe-shared-expert-overlap",
    ),
    "graphs_of_passes": (
        "--cuda-graph-impl local --hidden-dropout 0 --attention-dropout 0",
        Facts(device="cuda"),
        "--cuda-graph-impl",
    ),
    "means_of_context_ranks": (
        "--context-parallel-chunk-means --context-parallel-size 2",
        Facts(world_size=2),
        "--context-parallel-chunk-means",
    ),
    "fp8_codes_of_partial_sums": (
        "--fp8-format hybrid --group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4",
        Facts(world_size=4),
        "fewer query groups than --tensor-model-parallel-size",
    ),
    "quantities_of_packs": (
        "--pack-documents --calculate-per-token-loss --micro-batch-size 1 --num-experts 4 --moe-aux-loss-coeff 0.1",
        None,
        "aux_loss with --pack-documents",
    ),
    "fp8_recipes_without_rows": (
        "--fp8-format e4m3 --fp8-recipe mxfp8",
        None,
        "--fp8-recipe mxfp8 has no row",
    ),
    "fp8_blocks_across_ranks": (
        "--fp8-format e4m3 --fp8-recipe blockwise --tensor-model-parallel-size 4",
        Facts(world_size=4),
        "--fp8-recipe blockwise: 16 channels of queries",
    ),
}
FP8 = "--transformer-impl transformer_engine --bf16 --fp8-format hybrid"
WITH_ENGINE = {
    "fp8_of_transformer_engine": (
        (f"{FP8} --fp8-recipe tensorwise", "those of a rank's part"),
        (f"{FP8} --fp8-recipe delayed", "the same scales under every layout"),
    ),
}
TESTED_HERE = tuple(WITH_ENGINE)
TESTED_ELSEWHERE = ("custom_layers",)
"""tests/model/test_custom_layers.py has files of layers."""


@pytest.mark.parametrize(("flags", "facts", "words"), CASES.values(), ids=CASES)
def test_it_runs_with_a_line_in_the_plan(plan_of, problems_of, flags, facts, words):
    (line,) = [note for note in plan_of(flags, facts=facts).notes if note.startswith("not proven equal")]
    assert words in line
    (problem,) = problems_of(f"{flags} --require-parity", facts=facts)
    assert problem.startswith("--require-parity: ")
    assert words in problem


@pytest.mark.parametrize(("flags", "words"), WITH_ENGINE["fp8_of_transformer_engine"])
def test_fp8_of_transformer_engine_has_a_line_of_its_own(plan_of, problems_of, flags, words):
    assert any(words in note for note in plan_of(flags, facts=GPU).notes)
    problems = problems_of(f"{flags} --require-parity", facts=GPU)
    assert any(words in problem and problem.startswith("--require-parity: ") for problem in problems)


def test_a_proven_run_has_no_such_line(plan_of):
    plan = plan_of(
        "--require-parity --tensor-model-parallel-size 2 --sequence-parallel", facts=Facts(world_size=2)
    )
    assert not any("not proven" in note for note in plan.notes)


def test_batches_that_need_no_decrease_are_proven(plan_of):
    flags = "--micro-batch-size 2 --global-batch-size 8 --decrease-batch-size-if-needed --require-parity"
    assert plan_of(flags, facts=Facts(world_size=2)).derived.num_microbatches == 2


FILE = """
configs: {own: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {fp8_quantization_recipe: mxfp8}}}
matchers: {own: {type: glob, enabled: true, pattern: "*", config: own}}
"""


@pytest.mark.parametrize(
    ("flags", "facts", "lines"),
    [
        ("--fp4-format e2m1 --context-parallel-size 2 --seq-length 16", Facts(world_size=2),
         ["--fp4-format e2m1: 8 tokens of a chunk"]),
        ("--fp4-format e2m1 --te-precision-config-file a.yaml", Facts(module_precision=FILE),
         ["--fp4-format e2m1 --te-precision-config-file a.yaml has no row"]),
        ("--fp8-format e4m3 --te-precision-config-file a.yaml --tensor-model-parallel-size 4", Facts(world_size=4, module_precision=FILE),
         ["--fp8-format e4m3 --te-precision-config-file a.yaml has no row",
          "--te-precision-config-file a.yaml: fp8_quantization_recipe mxfp8: 16 channels of queries"]),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", None, ["--fp8-format e4m3 --fp8-recipe mxfp8 has no row"]),
    ],
)  # fmt: skip
def test_a_line_names_the_flags_that_choose_the_recipe(plan_of, flags, facts, lines):
    start = "not proven equal under every layout: "
    notes = [note for note in plan_of(flags, facts=facts).notes if note.startswith(start)]
    pairs = list(zip(notes, lines, strict=True))
    assert all(note.startswith(start + line) for note, line in pairs), pairs
