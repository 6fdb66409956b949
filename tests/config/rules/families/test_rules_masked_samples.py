"""Rules about the samples of BERT and T5: each fires, names its flags and a remedy."""

import dataclasses

import pytest
from test_rules_data import NULL, dataset

from megatrain.config import Facts

BERT, T5 = "--model-family bert", "--model-family t5 --decoder-seq-length 8"
CASES = {
    "samples_hold_text": [
        (f"{BERT} --seq-length 4", "--seq-length", None, ("--seq-length 4", "bert"), ("--seq-length 5",)),
        (f"{T5} --seq-length 3", "--seq-length", None, ("--seq-length 3", "t5"), ("--seq-length 4",)),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "without", "facts", "named", "remedy"), [case for cases in CASES.values() for case in cases]
)
def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


def test_a_split_divides_documents(assert_refused):
    facts = Facts(datasets=(dataclasses.replace(dataset("d", 9000), num_documents=300),))
    named, remedy = ("of the 300 documents of d", "test 0"), ("--split 290,9,1", "--eval-iters")
    assert_refused(f"{BERT} {NULL} --data-path d", named, remedy, without="--mock-data", facts=facts)
