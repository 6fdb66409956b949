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


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


def test_a_split_divides_documents(assert_refused):
    facts = Facts(datasets=(dataclasses.replace(dataset("d", 9000), num_documents=300),))
    named, remedy = ("of the 300 documents of d", "test 0"), ("--split 290,9,1", "--eval-iters")
    assert_refused(f"{BERT} {NULL} --data-path d", named, remedy, without="--mock-data", facts=facts)


@pytest.mark.parametrize(
    ("flags", "tokens", "sequences", "is_noted"),
    [
        (T5, 300_000, 300, True),
        (f"{BERT} --bert-no-binary-head", 300_000, 300, True),
        (BERT, 300_000, 300, False),
        (T5, 300_000, 9000, False),
        (T5, 3000, 300, False),
        ("", 300_000, 300, False),
    ],
)
def test_documents_of_one_long_sentence_have_a_note(plan_of, flags, tokens, sequences, is_noted):
    data = dataclasses.replace(dataset("d", sequences), num_documents=300, num_tokens=tokens)
    line = f"{flags} {NULL} --data-path d --seq-length 100 --eval-iters 0"
    notes = plan_of(line, without="--mock-data", facts=Facts(datasets=(data,))).notes
    found = [note for note in notes if "not split into sentences" in note]
    assert len(found) == is_noted
    assert all("90% of the tokens or more" in note and "--split-sentences" in note for note in found)
