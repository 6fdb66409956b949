"""Rules about distillation: each fires before a model is loaded, names its flags and a remedy."""

import dataclasses
import runpy
from pathlib import Path

import pytest

from megatrain.config import Facts, parse, resolve
from megatrain.config.facts import TeacherFacts
from megatrain.config.subjects.post_training.distillation import samples_digest

arguments = runpy.run_path(str(Path(__file__).parents[2] / "conftest.py"))["arguments"]
MODEL = (
    "--num-layers 3 --hidden-size 96 --num-attention-heads 6 --group-query-attention --num-query-groups 6 --seq-length 128 --lr 1e-3"
    " --micro-batch-size 2 --train-iters 10 --mock-data --vocab-size 100 --swiglu --position-embedding-type rope"
)


def teacher(
    flags: str = "", *, world_size: int = 1, fingerprint: str | None = None, **changed: object
) -> Facts:
    config = resolve(parse(f"{MODEL} {flags}".split()), Facts()).config.to_dict()
    facts = TeacherFacts(
        path="t", iteration=5, config={name: config[name] for name in ("model", "experts")}, num_rows=100, is_ours=True,
        tokenizer_fingerprint="a", checksum=0,
    )  # fmt: skip
    facts = dataclasses.replace(facts, **changed)
    return Facts(world_size=world_size, teacher=facts, tokenizer_fingerprint=fingerprint)


def with_custom_layers() -> Facts:
    facts = teacher()
    assert facts.teacher is not None
    model = {**facts.teacher.config["model"], "spec": ["a.py:f"]}
    return teacher(config={**facts.teacher.config, "model": model})


def cached(fingerprint: str | None = None, **changed: object) -> Facts:
    """Return facts with outputs for the samples of the working run with 128 tokens."""
    plan = resolve(parse(arguments("", "")), Facts())
    stored = {
        "seq_length": 128, "vocab_size": 100, "num_samples": 20, "tokenizer_fingerprint": "a",
        "data_digest": samples_digest(plan.config, plan.derived, Facts()),
    }  # fmt: skip
    return Facts(cached_logits=stored | changed, tokenizer_fingerprint=fingerprint)


KD, CACHE = "--export-kd-teacher-load t", "--logits-load-dir c"
TP = "--tensor-model-parallel-size"
LEARNED = "--position-embedding-type learned_absolute --max-position-embeddings 128"
CASES = {
    "teacher_is_a_gpt": [
        (KD, "", teacher("--model-family bert --max-position-embeddings 128"), ("t is a bert",), ("GPT",)),
        (KD, "", with_custom_layers(), ("t has custom layers",), ("flags describe",)),
        (KD, "", teacher(described={"num_layers": 4}), ("num_layers is 4, and 3 in t",), ("remove it",)),
    ],
    "teacher_has_the_vocabulary": [
        (KD, "", teacher(num_rows=101), ("t has 101 tokens", "100"), ("tokenizer",)),
        (KD, "", teacher(num_rows=99, is_ours=False), ("t has 99 tokens", "100"), ("tokenizer",)),
        (KD, "", teacher(fingerprint="b"), ("another tokenizer",), ("tokenizer of the teacher",)),
    ],
    "teacher_divides_over_ranks": [
        (f"{KD} {TP} 4", "", teacher(world_size=4), ("6 heads", f"{TP} 4"), (f"use {TP} 2",)),
        (f"{KD} {TP} 2 --sequence-parallel", "", teacher("--num-query-groups 1", world_size=2),
         ("1 query groups", f"{TP} 2"), (f"use {TP} 1",)),
        (f"{KD} --pipeline-model-parallel-size 4", "", teacher(world_size=4), ("3 layers", "--pipeline-model-parallel-size 4"),
         ("--pipeline-model-parallel-size 3",)),
        (f"{KD} --seq-length 256", "--seq-length", teacher(LEARNED), ("128 learned positions", "--seq-length is 256"),
         ("--seq-length 128",)),
        (f"{KD} {TP} 2", "", teacher("--num-experts 4", world_size=2), ("has experts", f"{TP} 2"), ("add --sequence-parallel",)),
    ],
    "fp8_products_of_the_teacher_can_run": [
        (f"{KD} --kd-teacher-fp8 --fp8-format hybrid --bf16", "",
         dataclasses.replace(teacher("--ffn-hidden-size 1000"), device="cuda", device_name="H100", device_capability=(9, 0)),
         ("--kd-teacher-fp8", "1000", "multiple of 16"), ("remove --kd-teacher-fp8",)),
    ],
    "cached_outputs_are_of_this_run": [
        (CACHE, "", cached(vocab_size=101), ("for 101 tokens", "100"), ("cache-logits",)),
        (CACHE, "", cached(seq_length=64), ("64 tokens", "--seq-length is 128"), ("cache-logits",)),
        (CACHE, "", cached(fingerprint="b"), ("another tokenizer",), ("cache-logits",)),
        (f"{CACHE} --seed 7", "", cached(), ("other samples",), ("cache-logits",)),
        (CACHE, "", cached(num_samples=19), ("19 samples", "reads 20"), ("cache-logits",)),
        (f"{CACHE} --train-samples 32", "--train-iters", cached(), ("20 samples", "reads 32"), ("cache-logits",)),
    ],
    "layer_pairs_exist": [
        (f"{KD} --kd-layer-pairs 4:0:mse", "", teacher(), ("the model has layers 0 to 3",), ("--kd-layer-pairs 3:0:mse",)),
        (f"{KD} --kd-layer-pairs 0:3", "", teacher(), ("the teacher has layers 0 to 2",), ("--kd-layer-pairs 0:2",)),
        (f"{KD} --kd-layer-pairs first:0", "", teacher(), ("first:0 is not of the form",), ("--kd-layer-pairs final:final",)),
        (f"{KD} --kd-layer-pairs 0:0:l1", "", teacher(), ("0:0:l1 is not of the form",), ("--kd-layer-pairs final:final",)),
        (f"{KD} --kd-layer-pairs 0:0 --pipeline-model-parallel-size 2", "", teacher(world_size=2),
         ("0:0", "--pipeline-model-parallel-size 2"), ("--pipeline-model-parallel-size 1", "final:final")),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


@pytest.mark.parametrize(
    "flags",
    [
        "--loss a.py:f", "--cuda-graph-impl local", "--model-family bert",
        "--model-family vlm --img-h 28 --img-w 28 --patch-dim 14",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 2",
    ],
)  # fmt: skip
def test_what_a_teacher_excludes_is_named(problems_of, flags):
    found = problems_of(f"{KD} {flags}", facts=teacher(world_size=2 if "pipeline" in flags else 1))
    assert any(f"{KD} is not supported together with" in problem for problem in found), found


def test_an_evaluation_has_no_teacher(plan_of):
    assert plan_of(f"{KD} --skip-train").derived.distillation is None


def test_a_teacher_is_split_by_its_own_cost(plan_of):
    """Two ranks of four layers for the student, and of three for the teacher, whose head counts."""
    plan = plan_of(f"{KD} --pipeline-model-parallel-size 2", facts=teacher(world_size=2))
    assert plan.derived.pipeline_layers == (2, 2)
    assert plan.derived.distillation.stages == (2, 1)
    own = plan_of(facts=Facts()).derived.flops_per_iteration
    alone = plan.derived.distillation.teacher.training_flops(num_tokens=256, sum_of_squared_lengths=256 * 128)
    assert plan.derived.flops_per_iteration == own + alone // 3


def test_no_graphs_are_tried_where_the_host_has_the_outputs(plan_of):
    dense = "--bf16 --hidden-dropout 0 --attention-dropout 0"
    runs = {"": Facts(), KD: teacher(), CACHE: cached()}
    graphs = {
        flags: plan_of(
            f"{dense} {flags}", facts=dataclasses.replace(facts, device="cuda")
        ).derived.cuda_graphs
        for flags, facts in runs.items()
    }
    assert graphs == {"": True, KD: False, CACHE: False}


def test_cached_outputs_of_this_run_start(plan_of):
    spec = plan_of(f"{CACHE} --logits-load-kd-loss-alpha 0.7", facts=cached()).derived.distillation
    assert (spec.teacher, spec.kd_weight, spec.needs_balance) == (None, 0.7, False)
    assert spec.lm_weight == pytest.approx(0.3)
