"""What may change between a checkpoint and the run that continues it."""

import dataclasses
import json

import pytest

from megatrain.config import Facts, StoredRun

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
        ("--train-iters 20", "--train-iters cannot change on resume"),
        ("--eval-iters 7", "--eval-iters cannot change on resume"),
        ("--vocab-size 101", "--vocab-size cannot change on resume (yet), the meaning of token numbers depends on it"),
    ],
)  # fmt: skip
def test_what_shapes_the_run_stays(problems_of, stored, flags, words):
    (problem,) = problems_of(f"{BASE} {flags}", facts=stored)
    assert words in problem


def test_another_data_file_is_named(plan_of, problems_of):
    flags = "--tokenizer-type NullTokenizer"
    config = plan_of(f"{flags} --data-path a", without="--mock-data").config.to_dict()
    facts = Facts(checkpoint=StoredRun(path="c", iteration=1, consumed_train_samples=8, config=config))
    (problem,) = problems_of(f"{flags} --data-path b", without="--mock-data", facts=facts)
    assert "the checkpoint has a, this run b\n  fix: keep the stored value (--data-path a)" in problem


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
