"""What may change between a checkpoint and the run that continues it."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.config import Facts, StoredRun
from megatrain.config.data_plans import Evaluations
from megatrain.config.facts import DatasetFacts

GOLDEN = Path(__file__).parents[1] / "golden"
REQUESTED = json.loads((GOLDEN / "expected.json").read_text())["requested_sizes"]

BASE = "--global-batch-size 8 --train-iters 10"


@pytest.fixture
def stored(plan_of):
    """Facts with the checkpoint of the working run, through JSON as a manifest has it."""
    config = json.loads(json.dumps(plan_of(BASE).config.to_dict()))
    run = StoredRun(
        path="c", iteration=1, consumed_train_samples=8, config=config, tokenizer_fingerprint="abc"
    )
    return Facts(checkpoint=run, tokenizer_fingerprint="abc")


def test_an_unchanged_run_resumes_without_a_word(plan_of, stored):
    assert plan_of(BASE, facts=stored).notes == ()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num-layers 2", ("--num-layers cannot change on resume (yet), the shape of the model depends on it: the checkpoint"
         " has 4, this run 2\n  fix: keep the stored value (--num-layers 4), or start a fresh run without --load and with"
         " another --save")),
        ("--untie-embeddings-and-output-weights", ("the checkpoint has off, this run on\n"
         "  fix: keep the stored value (without --untie-embeddings-and-output-weights)")),
        ("--seq-length 64", "--seq-length cannot change on resume (yet), the order of samples depends on it"),
        ("--seed 1", "the checkpoint has 1234, this run 1\n  fix: keep the stored value (--seed 1234)"),
        ("--global-batch-size 16", "--global-batch-size cannot change on resume"),
        ("--vocab-size 101", "--vocab-size cannot change on resume (yet), the meaning of token numbers depends on it"),
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
    derived = plan_of(f"{BASE} --train-iters 25", facts=facts).derived
    assert derived.train_plan == (80, 120)
    assert (derived.valid_plan, derived.test_plan) == ((800,), (800,))
    again = with_plans(stored, train=[80, 120])
    assert plan_of(f"{BASE} --train-iters 26", facts=again).derived.train_plan == (80, 120, 8)
    assert plan_of(BASE, facts=again).derived.train_plan == (80, 120)
    assert plan_of(BASE, facts=facts).derived.train_plan == (80,)


def test_a_cyclic_run_goes_on_in_its_plan(plan_of, stored):
    cyclic = f"{BASE} --dataloader-type cyclic"
    config = json.loads(json.dumps(plan_of(cyclic).config.to_dict()))
    facts = with_plans(stored, train=[80])
    facts = dataclasses.replace(facts, checkpoint=dataclasses.replace(facts.checkpoint, config=config))
    assert plan_of(f"{cyclic} --train-iters 25", facts=facts).derived.train_plan == (80,)


def test_evaluations_that_came_more_often_before_are_planned_for(plan_of, stored):
    run = dataclasses.replace(
        stored.checkpoint, iteration=9, consumed_valid_samples=9 * 16, data_plans={"valid": [160]}
    )
    facts = dataclasses.replace(stored, checkpoint=run)
    flags = f"{BASE} --train-iters 30 --eval-interval 5 --eval-iters 2"
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
    assert of_run.to_come(iteration) == found


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
    plan = plan_of(f"{BASE} --tensor-model-parallel-size 2 --lr 2e-3 --log-interval 5 --load c", facts=facts)
    (note,) = (note for note in plan.notes if note.startswith("changed since"))
    assert note == (
        "changed since the checkpoint: --tensor-model-parallel-size 1 -> 2, --lr 0.001 -> 0.002, --log-interval 100 -> 5"
    )


def test_settings_that_the_checkpoint_does_not_know_are_passed_over(plan_of):
    stored = StoredRun(path="c", iteration=1, consumed_train_samples=8, config={"model": {"num_layers": 4}})
    assert plan_of(facts=Facts(checkpoint=stored)).notes == ()
