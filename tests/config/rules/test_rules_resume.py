"""Rules about checkpoints: changes of settings, data, tokenizer and schedules on resume."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.config import ConfigError, Facts, StoredRun
from megatrain.config.facts import DatasetFacts
from megatrain.config.schema.resume_class import SAFE, SCHEDULE
from megatrain.config.schema.tree import settings
from megatrain.config.subjects.data_plans import Evaluations

GOLDEN = Path(__file__).parents[2] / "golden"
REQUESTED = json.loads((GOLDEN / "expected.json").read_text())["requested_sizes"]

BASE = "--global-batch-size 8 --train-iters 10"
OWN = "--override-opt-param-scheduler"


@pytest.fixture
def stored(plan_of):
    """Return facts with a checkpoint of the working run, after a round trip through JSON."""
    plan = plan_of(BASE)
    run = StoredRun(
        path="c",
        iteration=1,
        consumed_train_samples=8,
        config=json.loads(json.dumps(plan.config.to_dict())),
        tokenizer_fingerprint="abc",
        schedule=json.loads(json.dumps(plan.derived.schedule.to_dict())),
    )
    return Facts(checkpoint=run, tokenizer_fingerprint="abc")


def test_custom_layers_of_the_checkpoint_are_named_again(assert_refused, plan_of, stored):
    config = dict(stored.checkpoint.config)
    config["model"] = {**config["model"], "spec": ["mine.py:layers"], "spec_digest": "1"}
    facts = dataclasses.replace(stored, checkpoint=dataclasses.replace(stored.checkpoint, config=config))
    named = ("custom layers of mine.py:layers", "no code is run that only a checkpoint names")
    assert_refused(BASE, named, ("add --spec mine.py:layers", "--finetune"), facts=facts)
    weights = dataclasses.replace(facts.checkpoint, is_start=True)
    plan_of(f"{BASE} --finetune --load c", facts=dataclasses.replace(facts, checkpoint=weights))


def test_an_unchanged_run_resumes_without_notes(plan_of, stored):
    assert plan_of(BASE, facts=stored).notes == ()


SCRATCH = ("from scratch", "without --load", "--save")


@pytest.mark.parametrize(
    ("flags", "named", "remedy"),
    [
        ("--num-layers 2", ("--num-layers", "weights", "has 4, this run 2"), ("--num-layers 4", *SCRATCH)),
        ("--untie-embeddings-and-output-weights", ("has off, this run on",), ("without --untie-embeddings-and-output-weights",)),
        ("--seq-length 64", ("--seq-length", "order of samples", "has 128 tokens, this run 64 tokens"),
         ("--seq-length 128", "--seq-length-schedule 0:64", "--finetune")),
        ("--seed 1", ("--seed", "has 1234, this run 1"), ("--seed 1234", "--finetune", "--save")),
        ("--optimizer sgd", ("--optimizer", "optimizer state"), ("--optimizer adam", "--no-load-optim")),
        ("--rotary-base 500000", ("--rotary-base", "has 10000.0, this run 500000.0"), ("--rotary-base 10000", "--finetune")),
        ("--vocab-size 101", ("--vocab-size", "has 100, this run 101"), ("--vocab-size 100",)),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_change_is_named_with_its_values(assert_refused, stored, flags, named, remedy):
    assert_refused(f"{BASE} {flags}", ("cannot change on resume", *named), remedy, facts=stored)


LORA = "--lora-rank 4 --lora-target-modules q_proj v_proj"


@pytest.mark.parametrize(
    ("flags", "named", "remedy"),
    [
        (
            LORA.replace("4", "8"),
            ("--lora-rank", "has 4, this run 8"),
            ("--lora-rank 4", "merge-lora c TARGET"),
        ),
        (
            "",
            ("--lora-rank", "has 4, this run none"),
            ("merge-lora c TARGET", "--pretrained-checkpoint TARGET"),
        ),
        (
            LORA.replace(" v_proj", ""),
            ("--lora-target-modules q_proj leaves out", "attention.v"),
            ("q_proj v_proj",),
        ),
    ],
)
@pytest.mark.parametrize("start", ["--finetune --load c", "--pretrained-checkpoint c"])
def test_a_new_run_has_the_adapters_of_its_weights_or_merges_them(
    assert_refused, plan_of, stored, flags, named, remedy, start
):
    config = json.loads(json.dumps(plan_of(f"{BASE} {LORA}").config.to_dict()))
    run = dataclasses.replace(stored.checkpoint, config=config, is_start=True)
    facts = dataclasses.replace(stored, checkpoint=run)
    assert_refused(f"{BASE} {flags} {start}", named, remedy, facts=facts)
    plan_of(f"{BASE} {LORA} k_proj {start}", facts=facts)  # more adapters are drawn
    without = dataclasses.replace(stored.checkpoint, is_start=True)
    plan_of(f"{BASE} {LORA} {start}", facts=dataclasses.replace(stored, checkpoint=without))


@pytest.mark.parametrize(
    ("start", "flag"),
    [("--pretrained-checkpoint c", "--pretrained-checkpoint"), ("--finetune --load c", "--load"), ("--load hf:c", "--load")],
)  # fmt: skip
def test_a_run_that_cannot_take_the_weights_leaves_out_the_flag_that_names_them(
    assert_refused, stored, start, flag
):
    facts = dataclasses.replace(stored, checkpoint=dataclasses.replace(stored.checkpoint, is_start=True))
    named = ("--num-layers cannot differ from that of the weights", "has 4, this run 2")
    assert_refused(
        f"{BASE} --num-layers 2 {start}", named, (f"from scratch without {flag} and",), facts=facts
    )


def dense_start(**values):
    """Return facts of a run that upcycles a dense model of width 64."""
    config = {"model": {"ffn_hidden_size": 64}}
    run = StoredRun(path="d/iter_0000003", iteration=0, consumed_train_samples=0, config=config, is_start=True,
                    is_upcycled=True)  # fmt: skip
    return Facts(checkpoint=dataclasses.replace(run, **values))


UPCYCLED = "--num-experts 4 --moe-use-upcycling --moe-ffn-hidden-size"


@pytest.mark.parametrize(
    ("flags", "facts", "named", "remedy"),
    [
        (f"{UPCYCLED} 64", Facts(), ("--moe-use-upcycling requires",), ("--pretrained-checkpoint",)),
        (f"{UPCYCLED} 32 --pretrained-checkpoint d", dense_start(),
         ("--moe-upcycling-granularity 1", "--moe-ffn-hidden-size 32", "64"), ("--moe-ffn-hidden-size 64",)),
        (f"{UPCYCLED} 32 --moe-upcycling-granularity 3 --pretrained-checkpoint d",
         dense_start(config={"model": {"ffn_hidden_size": 96}}),
         ("--num-experts 4", "--moe-upcycling-granularity 3"), ("--num-experts 6",)),
        (f"{UPCYCLED} 64 --moe-layer-freq 2 --ffn-hidden-size 96 --pretrained-checkpoint d", dense_start(),
         ("--ffn-hidden-size 96", "64"), ("--ffn-hidden-size 64",)),
        (f"{UPCYCLED} 64 --moe-latent-size 8 --pretrained-checkpoint d", dense_start(),
         ("--moe-use-upcycling", "--moe-latent-size"), ("remove --moe-latent-size",)),
        (f"{UPCYCLED} 64 --save d --load d", dense_start(), ("--save d", "dense model"), ("another folder",)),
    ],
)  # fmt: skip
def test_upcycling_fits_the_dense_model(assert_refused, flags, facts, named, remedy):
    assert_refused(flags, named, remedy, facts=facts)


@pytest.mark.parametrize("name", ["quantile_balancing", "sinkhorn"])
def test_balancing_by_other_scores_cannot_start_or_end_on_resume(plan_of, problems_of, assert_refused, name):
    flags = f"{BASE} --num-experts 4 --moe-router-load-balancing-type"
    for before, now in ((name, "none"), ("none", name)):
        config = json.loads(json.dumps(plan_of(f"{flags} {before}").config.to_dict()))
        run = StoredRun(path="c", iteration=1, consumed_train_samples=8, config=config)
        assert_refused(
            f"{flags} {now}",
            ("--moe-router-load-balancing-type", f"the checkpoint has {before}", f"this run {now}"),
            (f"--moe-router-load-balancing-type {before}",),
            facts=Facts(checkpoint=run),
        )
        start = Facts(checkpoint=run.weights_only)
        is_refused = bool(problems_of(f"{flags} {now} --load c --finetune", facts=start))
        assert is_refused == (name != "sinkhorn")


def test_an_evaluation_may_mask_the_loss(plan_of, stored):
    notes = plan_of(f"{BASE} --load c --skip-train --eod-mask-loss", facts=stored).notes
    assert "changed since the checkpoint, allowed by --skip-train: --eod-mask-loss off -> on" in notes


NULL = "--tokenizer-type NullTokenizer --split 9,1,1"


def dataset(prefix, digest, *, weight=None, split="all", from_iteration=0):
    return DatasetFacts(
        split=split,
        prefix=prefix,
        weight=weight,
        num_sequences=900,
        num_tokens=9000,
        digest=digest,
        from_iteration=from_iteration,
    )


@pytest.fixture
def data_problems(plan_of, problems_of):
    """Return the problems of a run with the datasets `now` that resumes one with the datasets `before`."""

    def collect(before, now):
        flags = f"{NULL} --data-path a"
        config = plan_of(flags, without="--mock-data", facts=Facts(datasets=before)).config.to_dict()
        stored = StoredRun(path="c", iteration=5, consumed_train_samples=40, config=config, datasets=before)
        return problems_of(flags, without="--mock-data", facts=Facts(checkpoint=stored, datasets=now))

    return collect


def test_data_may_move_but_not_change(data_problems):
    a, b = dataset("a", "1", weight=1.0), dataset("b", "2", weight=2.0)
    assert data_problems((a, b), (dataset("x/a", "1", weight=1.0), b)) == []
    (problem,) = data_problems((a, b), (dataset("a", "3", weight=1.0), b))
    assert problem.startswith("a is not the dataset that the checkpoint read (a)")
    assert "add --finetune and another --save" in problem
    assert all(
        words in problem for words in ("contents differ", "900 sequences", "9000 tokens", "--finetune")
    )
    (problem,) = data_problems((a, b), (a, dataset("b", "2", weight=3.0)))
    assert all(words in problem for words in (": b 2.0 -> 3.0\n", "--data-schedule", "--finetune"))
    many = [dataset(str(n), str(n), weight=1.0) for n in range(20)]
    (problem,) = data_problems(many, [dataclasses.replace(one, weight=2.0) for one in many])
    assert "7 1.0 -> 2.0, and 12 more" in problem
    (problem,) = data_problems((a, b), (a,))
    assert all(words in problem for words in ("2 datasets (2 for all)", "1 (1 for all)", "--finetune"))


def test_data_of_a_past_phase_is_kept_and_that_of_a_future_one_may_change(data_problems):
    """The checkpoint is at iteration 5."""
    a, b, c = (dataset(name, name, from_iteration=start) for name, start in (("a", 0), ("b", 4), ("c", 5)))
    assert data_problems((a, b, c), (a, b)) == []
    assert data_problems((a, b, c), (a, b, dataset("d", "d", from_iteration=5))) == []
    for now, at in (((a, c), "none"), ((a, dataset("b", "b", from_iteration=3), c), "3")):
        (problem,) = data_problems((a, b, c), now)
        assert f"its data changed at iterations 4, that of this run at {at}" in problem
        assert "keep the entries before iteration 5" in problem
    (problem,) = data_problems((a, b, c), (a, dataset("d", "d", from_iteration=4), c))
    assert problem.startswith("d is not the dataset that the checkpoint read (b)")


def with_plans(stored, **plans):
    run = dataclasses.replace(stored.checkpoint, data_plans=plans)
    return dataclasses.replace(stored, checkpoint=run)


def test_a_longer_run_appends_a_plan(plan_of, stored):
    facts = with_plans(stored, train=[80], valid=[800], test=[800])
    derived = plan_of(f"{BASE} {OWN} --train-iters 25", facts=facts).derived
    assert derived.train_plan == (80, 120)
    assert (derived.valid_plan, derived.test_plan) == ((800,), (800,))
    again = with_plans(stored, train=[80, 120])
    assert plan_of(f"{BASE} {OWN} --train-iters 26", facts=again).derived.train_plan == (80, 120, 8)
    assert plan_of(BASE, facts=again).derived.train_plan == (80, 120)
    assert plan_of(BASE, facts=facts).derived.train_plan == (80,)


def test_a_cyclic_run_keeps_its_plan(plan_of, stored):
    cyclic = f"{BASE} --dataloader-type cyclic"
    config = json.loads(json.dumps(plan_of(cyclic).config.to_dict()))
    facts = with_plans(stored, train=[80])
    facts = dataclasses.replace(facts, checkpoint=dataclasses.replace(facts.checkpoint, config=config))
    assert plan_of(f"{cyclic} {OWN} --train-iters 25", facts=facts).derived.train_plan == (80,)


def test_more_frequent_evaluations_before_the_checkpoint_are_planned_for(plan_of, stored):
    run = dataclasses.replace(
        stored.checkpoint, iteration=9, consumed_valid_samples=9 * 16, data_plans={"valid": [160]}
    )
    facts = dataclasses.replace(stored, checkpoint=run)
    flags = f"{BASE} {OWN} --train-iters 30 --eval-interval 5 --eval-iters 2"
    derived = plan_of(flags, facts=facts).derived
    assert derived.requested_valid_samples == 9 * 16 + 5 * 16, "after 10, 15, 20, 25 and 30"
    assert derived.valid_plan == (160, 9 * 16 + 5 * 16 - 160)
    left = dataclasses.replace(facts, checkpoint=dataclasses.replace(run, is_evaluation_left=True))
    assert plan_of(flags, facts=left).derived.requested_valid_samples == 15 * 16
    skip = dataclasses.replace(facts, checkpoint=dataclasses.replace(run, iteration=30))
    assert plan_of(f"{flags} --skip-train", facts=skip).derived.requested_valid_samples == 10 * 16
    none = plan_of(f"{flags} --eval-iters 0", facts=facts).derived
    assert (none.requested_valid_samples, none.valid_plan) == (0, (160,))


@given(
    train_iters=st.integers(1, 60),
    interval=st.none() | st.integers(1, 70),
    start=st.none() | st.integers(0, 80),
    iteration=st.integers(0, 60),
)
def test_remaining_evaluations_are_counted_exactly(train_iters, interval, start, iteration):
    of_run = Evaluations(
        train_iters=train_iters, eval_interval=interval, eval_iters=1, batch_size=1, start_eval_at_iter=start
    )
    found = sum(of_run.is_due(later) for later in range(iteration + 1, train_iters + 1))
    assert of_run.remaining(iteration) == found


def test_a_cyclic_run_keeps_its_pass_size(assert_refused, plan_of, stored):
    cyclic = f"{BASE} --dataloader-type cyclic"
    config = json.loads(json.dumps(plan_of(cyclic).config.to_dict()))
    run = dataclasses.replace(stored.checkpoint, config=config, pass_size=2)
    facts = dataclasses.replace(stored, checkpoint=run)
    assert plan_of(cyclic, facts=facts)
    named = ("--dataloader-type cyclic", "4 here", "2 in the checkpoint")
    remedy = ("--micro-batch-size", "= 2", "--dataloader-type single")
    assert_refused(f"{cyclic} --micro-batch-size 4", named, remedy, facts=facts)


@pytest.mark.parametrize("case", REQUESTED, ids=lambda case: str(case["train_valid_test"]))
def test_numbers_of_samples_match_the_recording(plan_of, case):
    arguments = dict(case["arguments"])
    if "train_samples" in arguments:
        del arguments["train_iters"]
    switches = [name for name, value in arguments.items() if value is True]
    flags = [f"--{name.replace('_', '-')}" for name in switches]
    flags += [
        f"--{name.replace('_', '-')} {value}" for name, value in arguments.items() if name not in switches
    ]
    derived = plan_of(f"--micro-batch-size 1 {' '.join(flags)}", without="--train-iters").derived
    found = [
        derived.requested_train_samples,
        derived.requested_valid_samples,
        derived.requested_test_samples,
    ]
    assert found == case["train_valid_test"]


def test_another_tokenizer_is_refused(assert_refused, stored):
    facts = dataclasses.replace(stored, tokenizer_fingerprint="xyz")
    named = ("--tokenizer-model cannot change on resume", "fingerprint abc", "xyz")
    assert_refused(BASE, named, ("tokenizer", *SCRATCH), facts=facts)


def test_a_tokenizer_with_the_same_ids_or_the_same_file_is_the_same(plan_of, stored):
    for fingerprint in ("abc:xyz", "xyz:abc"):
        plan_of(
            f"{BASE} {OWN} --load c", facts=dataclasses.replace(stored, tokenizer_fingerprint=fingerprint)
        )


def test_layout_learning_rate_and_intervals_may_change(plan_of, stored):
    facts = dataclasses.replace(stored, world_size=4)
    plan = plan_of(
        f"{BASE} {OWN} --tensor-model-parallel-size 2 --lr 2e-3 --log-interval 5 --load c", facts=facts
    )
    assert [note for note in plan.notes if note.startswith("changed since")] == [
        "changed since the checkpoint, safe: --tensor-model-parallel-size 1 -> 2, --log-interval 100 -> 5 iterations",
        "changed since the checkpoint, allowed by --override-opt-param-scheduler: --lr 0.001 -> 0.002",
    ]


HYBRID = "--model-family hybrid --mamba-num-heads 8 --mamba-head-dim 16 --hybrid-layer-pattern"


@pytest.mark.parametrize(
    ("before", "now", "is_same"),
    [
        ("--num-experts 4", "--num-experts 4 --moe-layer-freq ([1]*4)", True),
        ("--num-experts 4", "--num-experts 4 --moe-layer-freq 2", False),
        ("--no-rope-freq 2", "--no-rope-freq [0,1]*2", True),
        ("--no-bias-gelu-fusion", "", True),  # of another activation
        ("--moe-ffn-hidden-size 32 --moe-router-topk 4", "", True),  # without experts
        ("--group-query-attention --num-query-groups 4", "", True),
        ("--group-query-attention --num-query-groups 2", "", False),
        (f"{HYBRID} M*-M", f"{HYBRID} M*|-M --pipeline-model-parallel-size 2", True),
        (f"{HYBRID} M*-M", f"{HYBRID} M*M-", False),
        ("--rotary-base 5e5 --num-experts 4", "--num-experts 4 --moe-layer-freq [1]*4", False),
    ],
)
def test_another_spelling_of_the_same_model_is_safe(plan_of, problems_of, before, now, is_same):
    config = json.loads(json.dumps(plan_of(f"{BASE} {before}").config.to_dict()))
    stored = StoredRun(path="c", iteration=1, consumed_train_samples=8, config=config)
    facts = Facts(checkpoint=stored, world_size=2)
    assert (problems_of(f"{BASE} {now}", facts=facts) == []) == is_same
    if is_same:
        notes = [
            one for one in plan_of(f"{BASE} {now}", facts=facts).notes if one.startswith("changed since")
        ]
        assert len(notes) == 1
        assert notes[0].startswith("changed since the checkpoint, safe: ")


LOSS = "cannot change on resume, since the loss that is trained depends on it"


@pytest.mark.parametrize(
    ("before", "now", "report"),
    [
        ("--reset-attention-mask", "", f"--reset-attention-mask {LOSS}"),
        ("", "--eod-mask-loss", f"--eod-mask-loss {LOSS}"),
        ("--loss a.py:f", "", f"--loss {LOSS}"),
        ("--loss a.py:f", "--loss b.py:f", "so that later steps may compute something else: --loss a.py:f -> b.py:f"),
        ("--clip-grad 0.5", "", "so that later steps may compute something else: --clip-grad 0.5 -> 1.0"),
        ("--reset-position-ids", "", "safe: --reset-position-ids on -> off"),  # without effect with RoPE
        ("--fim-rate 0.2", "", "safe: --fim-rate 0.2 -> 0.5"),
        ("--dataset a.py:f", "--dataset b.py:f", "so that later steps may compute something else: --dataset a.py:f -> b.py:f"),
        ("--model-family t5 --decoder-seq-length 8", "--model-family t5 --decoder-seq-length 16",
         "so that later steps may compute something else: --decoder-seq-length 8 -> 16"),  # samples are the same
        ("--tensor-model-parallel-size 2", "", "safe: --tensor-model-parallel-size 2 -> 1"),
    ],
)  # fmt: skip
def test_what_changes_the_loss_is_not_called_safe(plan_of, problems_of, before, now, report):
    files = dict.fromkeys(("training.loss", "data.dataset"), "1")
    facts, own_data = Facts(digests=files, world_size=2), "--mock-data" if "--dataset" in before else ""
    config = json.loads(
        json.dumps(plan_of(f"{BASE} {before}", without=own_data, facts=facts).config.to_dict())
    )
    stored = StoredRun(path="c", iteration=1, consumed_train_samples=8, config=config)
    facts = dataclasses.replace(facts, checkpoint=stored)
    problems = problems_of(f"{BASE} {now}", without=own_data, facts=facts)
    found = problems or plan_of(f"{BASE} {now}", without=own_data, facts=facts).notes
    assert any(report in one for one in found), found


def test_a_resume_class_says_why_and_names_the_flag():
    for resume_class in {setting.on_resume for setting in settings()}:
        assert bool(resume_class.reason) == (resume_class.kind in ("consent", "refused"))
        assert bool(resume_class.consent) == (resume_class.kind == "consent")


def has_effect(setting, plan):
    def value_of(path):
        section, name = path.split(".")
        return getattr(plan.derived if section == "derived" else getattr(plan.config, section), name)

    return all(need.holds(value_of) for need in setting.needs)


@pytest.mark.parametrize(
    "setting", [one for one in settings() if one.on_resume.kind != "silent"], ids=lambda setting: setting.path
)
def test_a_change_is_reported_by_its_class(setting, plan_of, monkeypatch):
    """The checkpoint differs in this setting; any other value is reported, of any type."""
    monkeypatch.setattr(sys.modules["megatrain.config.resolve"], "_is_same_model", lambda *_: False)
    plan = plan_of(BASE)
    resume_class = setting.on_resume
    may_differ = resume_class.kind == "consent" or setting.path == "adapters.lora_target_modules"
    if may_differ and not has_effect(setting, plan):
        resume_class = SAFE
    config = json.loads(json.dumps(plan.config.to_dict()))
    is_number = setting.path in (
        "data.seq_length",
        "model.mtp_num_layers",
        "tokenizer.vocab_size",
    )  # judged by their values
    config[setting.section][setting.name] = 0 if is_number else "other"
    schedule = {"lr": 9.0} if resume_class is SCHEDULE else None
    stored = StoredRun(path="c", iteration=1, consumed_train_samples=8, config=config, schedule=schedule)
    flags = f"{BASE} {OWN if resume_class is SCHEDULE else ''}"
    try:
        notes = plan_of(flags, facts=Facts(checkpoint=stored)).notes
        reports = [note for note in notes if note.startswith("changed since")]
    except ConfigError as error:
        reports = [str(problem) for problem in error.problems if "cannot change" in problem.text]
    (report,) = reports
    assert f"{setting.flag} " in report
    assert report.startswith({
        "safe": "changed since the checkpoint, safe:",
        "noted": "changed since the checkpoint, so that later steps may compute something else:",
        "consent": "changed since the checkpoint, allowed by --override" if resume_class is SCHEDULE else setting.flag,
        "refused": setting.flag,
    }[resume_class.kind])  # fmt: skip
    assert resume_class.consent in report


def test_a_flag_allows_a_change_and_the_note_names_it(plan_of, stored):
    start = Facts(checkpoint=stored.checkpoint.weights_only)
    notes = plan_of(f"{BASE} --load c --finetune --rotary-base 500000", facts=start).notes
    assert "changed since the checkpoint, allowed by --finetune: --rotary-base 10000.0 -> 500000.0" in notes
    notes = plan_of(f"{BASE} --load c --pretrained-checkpoint d --rotary-base 500000", facts=start).notes
    assert any("allowed by --pretrained-checkpoint: --rotary-base" in note for note in notes)
    notes = plan_of(f"{BASE} --load c --no-load-optim --optimizer sgd", facts=stored).notes
    assert "changed since the checkpoint, allowed by --no-load-optim: --optimizer adam -> sgd" in notes
    notes = plan_of(
        "--train-samples 80 --lr-warmup-samples 0 --global-batch-size 8",
        without="--train-iters",
        facts=stored,
    ).notes
    assert any(note.startswith("changed since the checkpoint, safe: ") for note in notes)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--lr 2e-3", "--lr: the checkpoint has 0.001, this run 0.002"),
        ("--lr-decay-style cosine", "--lr-decay-style: the checkpoint has linear, this run cosine"),
        ("--train-iters 20", "the checkpoint has 80, this run 160"),
        ("--lr-warmup-iters 2", "the checkpoint has 0, this run 16"),
        ("--weight-decay 0.1", "--end-weight-decay: the checkpoint has 0.01, this run 0.1"),
    ],
)  # fmt: skip
def test_another_schedule_requires_a_flag(plan_of, problems_of, stored, flags, words):
    (problem,) = problems_of(f"{BASE} {flags}", facts=stored)
    assert words in problem
    assert "--override-opt-param-scheduler" in problem
    assert "--use-checkpoint-opt-param-scheduler" in problem
    own = plan_of(f"{BASE} {flags}").derived.schedule
    assert plan_of(f"{BASE} {OWN} {flags}", facts=stored).derived.schedule == own
    kept = plan_of(f"{BASE} --use-checkpoint-opt-param-scheduler {flags}", facts=stored).derived.schedule
    assert kept == plan_of(BASE).derived.schedule
    restarted = plan_of(f"{BASE} --load c --no-load-optim {flags}", facts=stored)
    assert restarted.derived.schedule == own
    assert any(note.startswith("--no-load-optim: ") for note in restarted.notes)


def test_a_longer_run_shows_both_schedules(assert_refused, stored):
    assert_refused(
        f"{BASE} --train-iters 20",
        (
            "of the checkpoint: linear, lr 0.001 to 0 at sample 80",
            "of this run: linear, lr 0.001 to 0 at sample 160",
        ),
        ("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"),
        facts=stored,
    )


def test_the_function_of_a_checkpoint_s_schedule_is_not_run(problems_of, plan_of, stored):
    mine, facts = f"{BASE} --lr-decay-style my.py:decay", Facts(digests={"schedule.lr_decay_style": "1"})
    run = plan_of(mine, facts=facts)
    assert run.derived.schedule.lr_decay_digest == "1"
    schedule, config = run.derived.schedule.to_dict(), run.config.to_dict()
    checkpoint = dataclasses.replace(stored.checkpoint, schedule=schedule, config=config)
    same = dataclasses.replace(stored, checkpoint=checkpoint, digests=facts.digests)
    (problem,) = problems_of(f"{BASE} --use-checkpoint-opt-param-scheduler", facts=same)
    assert "no code is run that only a checkpoint names" in problem


def test_a_schedule_that_an_older_version_stored_is_equal(plan_of, stored):
    added = {"lr_decay_digest"}
    before = {name: value for name, value in stored.checkpoint.schedule.items() if name not in added}
    old = dataclasses.replace(stored, checkpoint=dataclasses.replace(stored.checkpoint, schedule=before))
    for flags in ("", "--use-checkpoint-opt-param-scheduler"):
        assert plan_of(f"{BASE} {flags}", facts=old).derived.schedule == plan_of(BASE).derived.schedule


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--lr-decay-iters 20", ("at sample 80", "at sample 160", "--min-lr 0")),
        ("--lr-decay-iters 11 --lr-decay-style cosine --min-lr 1e-4", ("at sample 80", "at sample 88", "--min-lr 0.0001")),
    ],
)  # fmt: skip
def test_a_run_that_ends_before_its_decay_is_noted(plan_of, flags, named):
    (note,) = (note for note in plan_of(f"{BASE} {flags}").notes if "before the decay" in note)
    assert all(words in note for words in named), note


@pytest.mark.parametrize("flags", ["", "--lr-decay-iters 5", "--lr-decay-iters 20 --lr-decay-style constant"])
def test_a_run_that_reaches_the_end_of_its_decay_is_not_noted(plan_of, flags):
    assert not any("before the decay" in note for note in plan_of(f"{BASE} {flags}").notes)


def test_the_plan_says_where_the_decay_ends_after_a_change_of_the_batch(plan_of, stored):
    """Samples: 40 of the checkpoint, then 5 iterations of 16; this run's schedule counts 10 iterations of 16."""
    half = dataclasses.replace(stored.checkpoint, iteration=5, consumed_train_samples=40)
    stored = dataclasses.replace(stored, checkpoint=half)
    changed = f"{BASE} --global-batch-size 16"
    own = plan_of(f"{changed} {OWN}", facts=stored)
    assert own.derived.lr_decay_samples == 160
    assert "training ends at sample 120" in own.origins["derived.lr_decay_samples"].detail
    kept = plan_of(f"{changed} --use-checkpoint-opt-param-scheduler", facts=stored)
    assert kept.derived.lr_decay_samples == kept.derived.schedule.lr_decay_samples == 80
    assert kept.origins["derived.lr_decay_samples"].detail == "the checkpoint's"
    assert any("ends at sample 120, before the decay" in note for note in own.notes)
    assert not any("before the decay" in note for note in kept.notes)


def test_a_note_names_the_schedule_of_the_checkpoint(plan_of, stored):
    plan = plan_of(f"{BASE} --use-checkpoint-opt-param-scheduler --lr 2e-3", facts=stored)
    assert any("from the checkpoint (--lr 0.001, not 0.002)" in note for note in plan.notes)


def test_the_batch_size_may_change_if_the_order_of_samples_does_not_depend_on_it(
    plan_of, problems_of, stored
):
    facts = with_plans(stored, train=[80])
    plan = plan_of(f"{BASE} {OWN} --global-batch-size 16", facts=facts)
    assert plan.derived.train_samples == 8 + 9 * 16
    assert plan.derived.train_plan == (80, 8 + 9 * 16 - 80)
    assert any(note.startswith("--global-batch-size 8 -> 16: ") for note in plan.notes)
    (problem,) = problems_of(f"{BASE} --global-batch-size 16", facts=facts)
    assert "the checkpoint has 80, this run 160" in problem
    smaller = plan_of(f"{BASE} {OWN} --global-batch-size 4", facts=facts).derived
    assert (smaller.train_samples, smaller.train_plan) == (8 + 9 * 4, (80,))
    plan = plan_of(f"--global-batch-size 16 {OWN} --train-samples 88", without="--train-iters", facts=facts)
    assert (plan.derived.train_iters, plan.derived.train_samples) == (1 + 80 // 16, 88)


RAMP = "--global-batch-size 16 --rampup-batch-size 4 4 60 --train-samples 200 --eval-iters 0"


def test_a_batch_size_ramp_resumes(plan_of):
    whole = plan_of(RAMP, without="--train-iters")
    assert whole.derived.train_iters == 5 + 3 + 2 + 8  # in batches of 4, 8 and 12, and of 16 after sample 60
    assert whole.derived.train_samples == 20 + 24 + 24 + 128
    stored = StoredRun(
        path="c",
        iteration=6,
        consumed_train_samples=28,
        config=json.loads(json.dumps(whole.config.to_dict())),
        schedule=whole.derived.schedule.to_dict(),
    )
    again = plan_of(RAMP, without="--train-iters", facts=Facts(checkpoint=stored))
    assert again.derived.train_iters == whole.derived.train_iters
    assert again.derived.train_samples == whole.derived.train_samples


def test_a_checkpoint_without_optimizer_state_is_a_start(assert_refused, plan_of, stored):
    run = dataclasses.replace(stored.checkpoint, has_optimizer=False)
    facts = dataclasses.replace(stored, checkpoint=run)
    assert_refused(
        BASE, ("c has no optimizer state", "--no-save-optim"), ("--finetune", "--no-load-optim"), facts=facts
    )
    assert plan_of(f"{BASE} --load c --no-load-optim", facts=facts)


def test_finetuning_starts_from_scratch(plan_of, problems_of, stored):
    facts = dataclasses.replace(stored, checkpoint=stored.checkpoint.weights_only)
    flags = f"{BASE} --load c --finetune --lr 5e-3 --seed 3 --global-batch-size 4 --seq-length 64"
    plan = plan_of(flags, facts=facts)
    assert (plan.derived.start_iteration, plan.derived.start_consumed_samples) == (0, 0)
    assert plan.derived.schedule.lr == 5e-3
    (problem,) = problems_of(f"{flags} --num-layers 2", facts=facts)
    assert "--num-layers cannot differ from that of the weights" in problem


def test_settings_that_the_checkpoint_does_not_have_are_skipped(plan_of):
    stored = StoredRun(path="c", iteration=1, consumed_train_samples=2, config={"model": {"num_layers": 4}})
    assert plan_of(facts=Facts(checkpoint=stored)).notes == ()


FOLDER = Facts(
    checkpoint=StoredRun(
        path="hf:f",
        iteration=0,
        consumed_train_samples=0,
        config={"model": {"padded_vocab_size": 300}},
        is_start=True,
    )
)


def test_a_folder_may_have_more_rows_than_the_tokenizer_has_tokens(plan_of):
    assert plan_of("--load hf:f --vocab-size 299", facts=FOLDER).derived.vocab_size == 299


TESTED_HERE = (
    "adapters_of_the_weights_are_kept",
    "settings_match_checkpoint",
    "custom_layers_go_on",
    "balancing_matches_checkpoint",
    "upcycling_fits_the_dense_model",
    "data_matches_checkpoint",
    "data_schedule_matches_checkpoint",
    "cyclic_pass_size_matches_checkpoint",
    "tokenizer_matches_checkpoint",
    "schedules_match_checkpoint",
    "schedule_of_checkpoint_is_available",
    "checkpoint_has_optimizer_state",
)
"""Rules that tests of this file break without CASES."""
CASES = {
    "vocabulary_is_in_the_folder": [
        ("--load hf:f --vocab-size 301", "", FOLDER, ("hf:f", "300 rows", "301 tokens"), ("resize_token_embeddings(301)",)),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "without", "facts", "named", "remedy"), [case for cases in CASES.values() for case in cases]
)
def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ("--position-embedding-type rope", "--position-embedding-type yarn --yarn-original-max-position-embeddings 64", "--position-embedding-type rope -> yarn"),
        ("--mtp-num-layers 2", "--mtp-num-layers 1", "--mtp-num-layers 2 -> 1"),
        ("--mtp-num-layers 2", "", "--mtp-num-layers 2 -> none"),
        ("", "--untie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights off -> on"),
        ("", "--add-qkv-bias", "--add-qkv-bias off -> on"),
        ("--vocab-size 99", "", "--vocab-size 99 -> 100"),
    ],
)  # fmt: skip
def test_a_start_judges_the_pair_of_values(plan_of, problems_of, before, now, named):
    """Weights of one model give those of the other, and not the other way round; a resume allows neither."""

    def facts(flags, *, is_start):
        config = json.loads(json.dumps(plan_of(f"{BASE} {flags}").config.to_dict()))
        run = StoredRun(path="c/iter_0000001", iteration=1, consumed_train_samples=8, config=config)
        return Facts(checkpoint=run.weights_only if is_start else run)

    start = f"{BASE} {now} --load c --finetune"
    assert any(named in note for note in plan_of(start, facts=facts(before, is_start=True)).notes)
    assert any(
        "cannot change on resume" in text
        for text in problems_of(f"{BASE} {now}", facts=facts(before, is_start=False))
    )
    if "yarn" not in now:
        assert problems_of(f"{BASE} {before} --load c --finetune", facts=facts(now, is_start=True))


def test_a_size_that_equals_the_tokenizers_is_no_change(plan_of, problems_of):
    tokenizer = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model x"
    facts = Facts(vocab_size=120, eod_id=7)
    plan = plan_of(f"{BASE} {tokenizer} --vocab-size 120", without="--vocab-size", facts=facts)
    config = json.loads(json.dumps(plan.config.to_dict()))
    run = StoredRun(path="c", iteration=1, consumed_train_samples=8, config=config)
    facts = dataclasses.replace(facts, checkpoint=run)
    assert problems_of(f"{BASE} {tokenizer}", without="--vocab-size", facts=facts) == []
    facts = dataclasses.replace(facts, vocab_size=119)
    (problem,) = problems_of(f"{BASE} {tokenizer}", without="--vocab-size", facts=facts)
    assert "the checkpoint has 120, this run 119" in problem


def test_more_tokens_than_rows_of_padding_are_refused(plan_of, problems_of):
    config = plan_of(f"{BASE} --vocab-size 99").config.to_dict()
    start = Facts(
        checkpoint=StoredRun(path="c", iteration=1, consumed_train_samples=8, config=config).weights_only
    )
    assert plan_of(f"{BASE} --vocab-size 128 --load c --finetune", facts=start).derived.vocab_size == 128
    assert problems_of(f"{BASE} --vocab-size 129 --load c --finetune", facts=start)


def test_a_changed_batch_is_named_before_the_schedule(plan_of, problems_of):
    plan = plan_of("", facts=Facts(world_size=4))
    run = StoredRun(path="c", iteration=5, consumed_train_samples=40, config=plan.config.to_dict(),
                    schedule=plan.derived.schedule.to_dict())  # fmt: skip
    for flags, ranks, fix in (
        ("--micro-batch-size 8", 4, "use --micro-batch-size 2, which"),
        ("", 8, "use --micro-batch-size 1 --global-batch-size 8, which"),
        ("--train-iters 20", 4, "use --lr-decay-samples 80, the same lengths in samples"),
    ):
        (problem,) = problems_of(flags, facts=Facts(world_size=ranks, checkpoint=run))
        assert "the schedules differ from the checkpoint c: " in problem
        assert f"fix: {fix}" in problem


def test_samples_of_a_share_are_whole_numbers(plan_of, problems_of):
    plan = plan_of("--lr-warmup-iters 2")
    run = StoredRun(path="c", iteration=5, consumed_train_samples=40, config=plan.config.to_dict(),
                    schedule=plan.derived.schedule.to_dict())  # fmt: skip
    (problem,) = problems_of("--lr-warmup-fraction 0.5", facts=Facts(checkpoint=run))
    assert re.search(r"the checkpoint has \d+, this run \d+\n", problem)


def test_the_lengths_of_a_schedule_are_offered_in_samples(plan_of, problems_of):
    """As the message says, the run then has the schedule of the checkpoint with any batch."""
    iterations = "--lr-warmup-iters 2 --lr-decay-iters 8"
    plan = plan_of(f"--global-batch-size 8 {iterations}")
    run = StoredRun(path="c", iteration=5, consumed_train_samples=40, config=plan.config.to_dict(),
                    schedule=plan.derived.schedule.to_dict())  # fmt: skip
    (problem,) = problems_of(f"--global-batch-size 16 {iterations}", facts=Facts(checkpoint=run))
    lengths = "--lr-warmup-samples 16 --lr-decay-samples 64"
    assert f"use {lengths} in place of --lr-warmup-iters and --lr-decay-iters, the same" in problem
    again = plan_of(f"--global-batch-size 16 {lengths}", facts=Facts(checkpoint=run))
    assert not again.derived.schedule.changes(run.schedule)
