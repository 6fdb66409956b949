"""What may change between a checkpoint and the run that continues it."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.config import ConfigError, Facts, StoredRun
from megatrain.config.derive.data_plans import Evaluations
from megatrain.config.facts import DatasetFacts
from megatrain.config.rules.resume_classes import RESUME_CLASSES, SCHEDULE, classes_by_path, paths_of
from megatrain.config.schema.tree import flag_of, settings

GOLDEN = Path(__file__).parents[1] / "golden"
REQUESTED = json.loads((GOLDEN / "expected.json").read_text())["requested_sizes"]

BASE = "--global-batch-size 8 --train-iters 10"
OWN = "--override-opt-param-scheduler"


@pytest.fixture
def stored(plan_of):
    """Facts with the checkpoint of the working run, through JSON as a manifest has it."""
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


def test_an_unchanged_run_resumes_without_a_word(plan_of, stored):
    assert plan_of(BASE, facts=stored).notes == ()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num-layers 2", ("--num-layers cannot change on resume, the shape or the meaning of the weights depends on it: the checkpoint"
         " has 4, this run 2\n  fix: keep the stored value (--num-layers 4), or start a fresh run without --load and with"
         " another --save")),
        ("--untie-embeddings-and-output-weights", ("the checkpoint has off, this run on\n"
         "  fix: keep the stored value (without --untie-embeddings-and-output-weights)")),
        ("--seq-length 64", "--seq-length cannot change on resume, the order of samples depends on it"),
        ("--seed 1", "the checkpoint has 1234, this run 1\n  fix: keep the stored value (--seed 1234)"),
        ("--optimizer sgd", "--optimizer cannot change on resume, the optimizer's state depends on it"),
        ("--vocab-size 101", "--vocab-size cannot change on resume, the meaning of token numbers depends on it"),
    ],
)  # fmt: skip
def test_what_shapes_the_run_stays(problems_of, stored, flags, words):
    (problem,) = problems_of(f"{BASE} {flags}", facts=stored)
    assert words in problem


NULL = "--tokenizer-type NullTokenizer --split 9,1,1"


def dataset(prefix, digest, *, weight=None, split="all"):
    return DatasetFacts(
        split=split, prefix=prefix, weight=weight, num_sequences=900, num_tokens=9000, digest=digest
    )


@pytest.fixture
def data_problems(plan_of, problems_of):
    """The problems of a run with these datasets that continues one with those."""

    def collect(before, now):
        flags = f"{NULL} --data-path a"
        config = plan_of(flags, without="--mock-data", facts=Facts(datasets=before)).config.to_dict()
        stored = StoredRun(path="c", iteration=1, consumed_train_samples=8, config=config, datasets=before)
        return problems_of(flags, without="--mock-data", facts=Facts(checkpoint=stored, datasets=now))

    return collect


def test_data_may_move_but_not_change(data_problems):
    a, b = dataset("a", "1", weight=1.0), dataset("b", "2", weight=2.0)
    assert data_problems((a, b), (dataset("x/a", "1", weight=1.0), b)) == []
    (problem,) = data_problems((a, b), (dataset("a", "3", weight=1.0), b))
    assert "a is not the dataset that the checkpoint read (a): it has 900 sequences of 9000 tokens" in problem
    (problem,) = data_problems((a, b), (a, dataset("b", "2", weight=3.0)))
    assert "the weight of b cannot change on resume" in problem
    assert "the checkpoint has 2.0, this run 3.0\n  fix: give the data of the first run" in problem
    (problem,) = data_problems((a, b), (a,))
    assert "the checkpoint read 2 datasets (2 for all), this run names 1 (1 for all)" in problem


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


def test_a_cyclic_run_goes_on_in_its_plan(plan_of, stored):
    cyclic = f"{BASE} --dataloader-type cyclic"
    config = json.loads(json.dumps(plan_of(cyclic).config.to_dict()))
    facts = with_plans(stored, train=[80])
    facts = dataclasses.replace(facts, checkpoint=dataclasses.replace(facts.checkpoint, config=config))
    assert plan_of(f"{cyclic} {OWN} --train-iters 25", facts=facts).derived.train_plan == (80,)


def test_evaluations_that_came_more_often_before_are_planned_for(plan_of, stored):
    run = dataclasses.replace(
        stored.checkpoint, iteration=9, consumed_valid_samples=9 * 16, data_plans={"valid": [160]}
    )
    facts = dataclasses.replace(stored, checkpoint=run)
    flags = f"{BASE} {OWN} --train-iters 30 --eval-interval 5 --eval-iters 2"
    derived = plan_of(flags, facts=facts).derived
    assert derived.requested_valid_samples == 9 * 16 + 5 * 16, "behind 10, 15, 20, 25 and 30"
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
def test_evaluations_to_come_are_counted_as_they_come(train_iters, interval, start, iteration):
    of_run = Evaluations(
        train_iters=train_iters, eval_interval=interval, eval_iters=1, batch_size=1, start_eval_at_iter=start
    )
    found = sum(of_run.is_due(later) for later in range(iteration + 1, train_iters + 1))
    assert of_run.remaining(iteration) == found


def test_a_cyclic_run_keeps_its_passes(plan_of, problems_of, stored):
    cyclic = f"{BASE} --dataloader-type cyclic"
    config = json.loads(json.dumps(plan_of(cyclic).config.to_dict()))
    run = dataclasses.replace(stored.checkpoint, config=config, pass_size=2)
    facts = dataclasses.replace(stored, checkpoint=run)
    assert problems_of(cyclic, facts=facts) == []
    (problem,) = problems_of(f"{cyclic} --micro-batch-size 4", facts=facts)
    assert (
        "micro-batch size * data-parallel size, which is 4 and was 2 in the checkpoint\n  fix: keep"
        in problem
    )


@pytest.mark.parametrize("case", REQUESTED, ids=lambda case: str(case["train_valid_test"]))
def test_recorded_numbers_of_samples(plan_of, case):
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


def test_another_tokenizer_is_refused(problems_of, stored):
    facts = dataclasses.replace(stored, tokenizer_fingerprint="xyz")
    (problem,) = problems_of(BASE, facts=facts)
    assert "token numbers would mean other texts: the checkpoint has fingerprint abc, this run xyz" in problem


def test_layout_learning_rate_and_intervals_may_change(plan_of, stored):
    facts = dataclasses.replace(stored, world_size=4)
    plan = plan_of(
        f"{BASE} {OWN} --tensor-model-parallel-size 2 --lr 2e-3 --log-interval 5 --load c", facts=facts
    )
    assert [note for note in plan.notes if note.startswith("changed since")] == [
        "changed since the checkpoint, safe: --tensor-model-parallel-size 1 -> 2, --log-interval 100 -> 5 iterations",
        "changed since the checkpoint, with consent (--override-opt-param-scheduler): --lr 0.001 -> 0.002",
    ]


def test_every_setting_has_one_class():
    """A new setting is put into `resume_classes.py`: what is to happen when it changes in the middle of a run?"""
    classed = [path for of in RESUME_CLASSES for path in paths_of(of)]
    assert sorted(classed) == sorted(setting.path for setting in settings())
    for of in RESUME_CLASSES:
        assert bool(of.reason) == (of.kind in ("consent", "refused"))
        assert bool(of.consent) == (of.kind == "consent")


@pytest.mark.parametrize(
    "path", [path for of in RESUME_CLASSES for path in paths_of(of) if of.kind != "silent"]
)
def test_a_change_is_told_by_its_class(path, plan_of):
    """From a run that had another value in each setting in turn, whatever that value is."""
    of = classes_by_path()[path]
    plan = plan_of(BASE)
    section, name = path.split(".")
    config = json.loads(json.dumps(plan.config.to_dict()))
    config[section][name] = "other"
    schedule = {"lr": 9.0} if of is SCHEDULE else None
    stored = StoredRun(path="c", iteration=1, consumed_train_samples=8, config=config, schedule=schedule)
    flags = f"{BASE} {OWN if of is SCHEDULE else ''}"
    try:
        notes = plan_of(flags, facts=Facts(checkpoint=stored)).notes
        told = [note for note in notes if note.startswith("changed since")]
    except ConfigError as error:
        told = [str(problem) for problem in error.problems if "cannot change" in problem.text]
    (line,) = told
    assert f"{flag_of(path)} " in line
    assert line.startswith({
        "safe": "changed since the checkpoint, safe:",
        "consent": "changed since the checkpoint, with consent (--override" if of is SCHEDULE else flag_of(path),
        "refused": flag_of(path),
    }[of.kind])  # fmt: skip
    assert of.consent in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--seq-length 64", "the checkpoint has 128 tokens, this run 64 tokens\n  fix: keep the stored value (--seq-length 128)"),
        ("--rotary-base 500000", "what the model computes depends on it: the checkpoint has 10000.0, this run 500000.0"),
        ("--optimizer sgd", "or add --no-load-optim to go on without the optimizer's state"),
        ("--seed 1", "or add --finetune and another --save to begin a new run with these weights"),
        ("--hidden-size 32", "or start a fresh run without --load and with another --save"),
    ],
)  # fmt: skip
def test_a_refusal_names_values_with_units_and_the_way_out(problems_of, stored, flags, words):
    assert any(words in problem for problem in problems_of(f"{BASE} {flags}", facts=stored))


def test_consent_lets_a_change_pass_and_names_it(plan_of, stored):
    begun = Facts(checkpoint=stored.checkpoint.weights_only)
    notes = plan_of(f"{BASE} --load c --finetune --rotary-base 500000", facts=begun).notes
    assert (
        "changed since the checkpoint, with consent (--finetune): --rotary-base 10000.0 -> 500000.0" in notes
    )
    notes = plan_of(f"{BASE} --load c --pretrained-checkpoint d --rotary-base 500000", facts=begun).notes
    assert any("with consent (--pretrained-checkpoint): --rotary-base" in note for note in notes)
    notes = plan_of(f"{BASE} --load c --no-load-optim --optimizer sgd", facts=stored).notes
    assert "changed since the checkpoint, with consent (--no-load-optim): --optimizer adam -> sgd" in notes
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
        ("--train-iters 20", "(--lr-decay-iters, --lr-decay-samples, the end of training): the checkpoint has 80, this run 160"),
        ("--lr-warmup-iters 2", "the checkpoint has 0, this run 16"),
        ("--weight-decay 0.1", "--end-weight-decay: the checkpoint has 0.01, this run 0.1"),
    ],
)  # fmt: skip
def test_another_schedule_needs_consent(plan_of, problems_of, stored, flags, words):
    (problem,) = problems_of(f"{BASE} {flags}", facts=stored)
    assert words in problem
    assert "add --override-opt-param-scheduler" in problem
    assert "or --use-checkpoint-opt-param-scheduler" in problem
    own = plan_of(f"{BASE} {flags}").derived.schedule
    assert plan_of(f"{BASE} {OWN} {flags}", facts=stored).derived.schedule == own
    kept = plan_of(f"{BASE} --use-checkpoint-opt-param-scheduler {flags}", facts=stored).derived.schedule
    assert kept == plan_of(BASE).derived.schedule
    anew = plan_of(f"{BASE} --load c --no-load-optim {flags}", facts=stored)
    assert anew.derived.schedule == own
    assert any("start anew" in note for note in anew.notes)


def test_the_checkpoints_schedule_is_told(plan_of, stored):
    plan = plan_of(f"{BASE} --use-checkpoint-opt-param-scheduler --lr 2e-3", facts=stored)
    assert any("schedules are the checkpoint's (--lr 0.001, not 0.002)" in note for note in plan.notes)


def test_the_batch_may_change_where_the_order_does_not_depend_on_it(plan_of, problems_of, stored):
    facts = with_plans(stored, train=[80])
    plan = plan_of(f"{BASE} {OWN} --global-batch-size 16", facts=facts)
    assert plan.derived.train_samples == 8 + 9 * 16
    assert plan.derived.train_plan == (80, 8 + 9 * 16 - 80)
    assert any("--global-batch-size 8 -> 16: the order of samples stays" in note for note in plan.notes)
    (problem,) = problems_of(f"{BASE} --global-batch-size 16", facts=facts)
    assert "the checkpoint has 80, this run 160" in problem
    smaller = plan_of(f"{BASE} {OWN} --global-batch-size 4", facts=facts).derived
    assert (smaller.train_samples, smaller.train_plan) == (8 + 9 * 4, (80,))
    plan = plan_of(f"--global-batch-size 16 {OWN} --train-samples 88", without="--train-iters", facts=facts)
    assert (plan.derived.train_iters, plan.derived.train_samples) == (1 + 80 // 16, 88)


RAMP = "--global-batch-size 16 --rampup-batch-size 4 4 60 --train-samples 200 --eval-iters 0"


def test_a_ramp_goes_on_where_it_was(plan_of):
    whole = plan_of(RAMP, without="--train-iters")
    assert whole.derived.train_iters == 5 + 3 + 2 + 8  # in batches of 4, 8 and 12, and of 16 behind sample 60
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


def test_weights_that_were_saved_alone_are_a_start(plan_of, problems_of, stored):
    run = dataclasses.replace(stored.checkpoint, has_optimizer=False)
    facts = dataclasses.replace(stored, checkpoint=run)
    (problem,) = problems_of(BASE, facts=facts)
    assert "c was saved with --no-save-optim: it holds the weights alone\n  fix: add --finetune" in problem
    assert plan_of(f"{BASE} --load c --no-load-optim", facts=facts)


def test_finetuning_begins_anew(plan_of, problems_of, stored):
    facts = dataclasses.replace(stored, checkpoint=stored.checkpoint.weights_only)
    flags = f"{BASE} --load c --finetune --lr 5e-3 --seed 3 --global-batch-size 4 --seq-length 64"
    plan = plan_of(flags, facts=facts)
    assert (plan.derived.start_iteration, plan.derived.start_consumed_samples) == (0, 0)
    assert plan.derived.schedule.lr == 5e-3
    (problem,) = problems_of(f"{flags} --num-layers 2", facts=facts)
    assert "--num-layers cannot change" in problem


def test_settings_that_the_checkpoint_does_not_know_are_passed_over(plan_of):
    stored = StoredRun(path="c", iteration=1, consumed_train_samples=8, config={"model": {"num_layers": 4}})
    assert plan_of(facts=Facts(checkpoint=stored)).notes == ()
