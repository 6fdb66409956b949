"""Rules about data and tokenizers: each fires, names its flags and a remedy."""

import dataclasses

from megatrain.config import Facts, StoredRun
from megatrain.config.facts import DatasetFacts

NULL = "--tokenizer-type NullTokenizer"


def dataset(prefix, num_sequences, *, split="all", weight=None):
    return DatasetFacts(
        split=split, prefix=prefix, weight=weight, num_sequences=num_sequences, num_tokens=9, digest=prefix
    )


PHASES = "--phase-transition-iterations"


def stored(iteration, *, consumed=None, datasets=(), start=0):
    run = StoredRun(
        path="c",
        iteration=iteration,
        consumed_train_samples=8 * iteration if consumed is None else consumed,
        config={},
        data_plans={"start": start},
        datasets=datasets,
    )
    return Facts(checkpoint=run)


CASES = {
    "data_has_one_source": [
        (NULL, "--mock-data", None, ("--data-path", "--mock-data"), ("--data-path", "--mock-data")),
        ("--data-path a", "", None,
         ("--data-path", "--mock-data"), ("--train-data-path", "--valid-data-path", "--test-data-path")),
        (f"{NULL} --data-path a --train-data-path b", "--mock-data", None,
         ("--data-path", "--train-data-path"), ("--train-data-path", "--valid-data-path", "--test-data-path")),
        (f"{NULL} --valid-data-path a", "--mock-data", None, ("--train-data-path",), ("--train-data-path",)),
    ],
    "blends_have_positive_weights": [
        (f"{NULL} --data-path 1 a 0 b", "--mock-data", None, ("--data-path", "b is 0"), ("weight above 0",)),
        (f"{NULL} --train-data-path 1 a -2 b", "--mock-data", None,
         ("--train-data-path", "b is -2"), ("weight above 0",)),
        (f"{NULL} --data-path nan a 1 b", "--mock-data", None, ("--data-path", "nan"), ("weight above 0",)),
        (f"{NULL} --data-path 1e308 a 1e308 b", "--mock-data", None,
         ("--data-path", "infinity"), ("divide all weights",)),
    ],
    "split_is_valid": [
        (f"{NULL} --data-path a --split 1,2,3,4", "--mock-data", None, ("--split '1,2,3,4'",), ("969,30,1",)),
        ("--split 1,2,3,4", "", None, ("--split '1,2,3,4'",), ("969,30,1",)),
        ("--split 9 a", "", None, ("--split '9 a'",), ("969,30,1",)),
        (f"{NULL} --data-path a --split 1,-2", "--mock-data", None, ("--split '1,-2'",), ("--split 969,30,1",)),
        (f"{NULL} --data-path a --split 0,0", "--mock-data", None, ("--split '0,0'",), ("969,30,1",)),
    ],
    "splits_hold_sequences": [
        (f"{NULL} --data-path d", "--mock-data", Facts(datasets=(dataset("d", 300),)),
         ("--split", "train 291", "valid 9", "test 0"), ("--split 290,9,1", "--eval-iters")),
        (f"{NULL} --data-path 1 d 1 e --split 0,1,1", "--mock-data", Facts(datasets=(dataset("d", 300), dataset("e", 400))),
         ("--split", "train 0", "1 other"), ("--split 1,149,150", "--eval-iters")),
    ],
    "phase_transitions": [
        (f"{NULL} --data-path d {PHASES} {value}", "--mock-data", None, (f"{PHASES} '{value}'",), (f"use {PHASES} {remedy}",))
        for value, remedy in (("5,x", "5"), ("0", "20000,30000"), ("5,2,5", "2,5"), (",", "20000,30000"))
    ],
    "current_phase_is_kept": [
        (f"{NULL} --data-path d {PHASES} 4,9 --global-batch-size 8", "--mock-data", stored(5, start=24),
         (PHASES, "iteration 5", "after iteration 3", "run after 4"), (f"use {PHASES} 3,9", "--finetune")),
        (f"{NULL} --data-path d --global-batch-size 8", "--mock-data", stored(5, start=32),
         (PHASES, "after iteration 4", "run after 0"), (f"use {PHASES} 4",)),
    ],
    "phases_start_at_whole_batches": [
        (f"{NULL} --data-path d {PHASES} 5 --global-batch-size 8", "--mock-data", stored(5, consumed=20),
         (PHASES, "--global-batch-size 8", "20 samples"), ("use --global-batch-size 4",)),
        (f"{NULL} --data-path d {PHASES} 5 --global-batch-size 8", "--mock-data", stored(5, consumed=21),
         (PHASES, "21 samples"), (f"remove {PHASES}", "--data-schedule")),
    ],
    "each_phase_has_other_data": [
        (f"{NULL} --data-path d {PHASES} 5 --global-batch-size 8", "--mock-data",
         dataclasses.replace(stored(5, datasets=(dataset("d", 9999),)), datasets=(dataset("d", 9999),)),
         (PHASES, "iteration 5", "phase before"), ("--data-path", f"remove 5 from {PHASES}")),
    ],
    "full_validation_excludes_weights": [
        (f"{NULL} --data-path 1 d --full-validation", "--mock-data", Facts(datasets=(dataset("d", 9999, weight=1.0),)),
         ("--full-validation",), ("--full-validation", "--multiple-validation-sets")),
    ],
    "validation_sets_are_separate": [
        (f"{NULL} --data-path d --full-validation --multiple-validation-sets", "--mock-data", Facts(datasets=(dataset("d", 9999),)),
         ("--multiple-validation-sets",), ("--valid-data-path", "--per-split-data-args-path")),
        (f"{NULL} --train-data-path d --valid-data-path e --multiple-validation-sets", "--mock-data", Facts(datasets=(dataset("d", 9, split="train"), dataset("e", 9, split="valid"))),
         ("--multiple-validation-sets", "--full-validation"), ("--full-validation",)),
        (f"{NULL} --train-data-path d --valid-data-path e --full-validation --multiple-validation-sets --validation-set-names a b", "--mock-data",
         Facts(datasets=(dataset("d", 9, split="train"), dataset("e", 9, split="valid"))),
         ("--validation-set-names a b", "the 1 validation sets"), ("--validation-set-names",)),
    ],
    "seed_is_in_range": [
        (f"--seed {2**32}", "", None, ("--seed 4294967296",), ("4294967295",)),
    ],
    "vocabulary_is_known": [
        ("--tokenizer-type HuggingFaceTokenizer", "", None,
         ("--tokenizer-type HuggingFaceTokenizer", "--tokenizer-model"), ("--tokenizer-model",)),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model x", "--vocab-size", None,
         ("--tokenizer-type HuggingFaceTokenizer", "vocabulary"), ("files can be read",)),
        ("--tokenizer-model x", "", None,
         ("--tokenizer-model x", "--tokenizer-type"), ("--tokenizer-type HuggingFaceTokenizer",)),
        ("--vocab-file v --tokenizer-hf-no-include-special-tokens", "", None,
         ("--vocab-file v", "--tokenizer-type"), ("--tokenizer-type GPT2BPETokenizer",)),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file v", "", None,
         ("--tokenizer-type GPT2BPETokenizer", "--merge-file"), ("--merge-file",)),
        (f"{NULL} --merge-file m", "", None,
         ("--merge-file m", "--tokenizer-type NullTokenizer"), ("--tokenizer-type GPT2BPETokenizer",)),
        ("--tokenizer-type SFTTokenizer --tokenizer-model x", "", None,
         ("--tokenizer-type SFTTokenizer",), ("--tokenizer-type HuggingFaceTokenizer",)),
        (NULL, "--vocab-size", None, ("--tokenizer-type NullTokenizer", "--vocab-size"), ("--vocab-size",)),
        ("", "--vocab-size", None,
         ("--tokenizer-type",),
         ("--tokenizer-type HuggingFaceTokenizer", "--tokenizer-model", "--tokenizer-type NullTokenizer", "--vocab-size", "--mock-data")),
        ("--data-path a", "--mock-data", None,
         ("--tokenizer-type",),
         ("--tokenizer-type HuggingFaceTokenizer", "--tokenizer-model", "--tokenizer-type NullTokenizer", "--vocab-size", "--mock-data")),
    ],
    "end_of_document_is_known": [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model x --data-path a --eod-mask-loss", "--mock-data", Facts(vocab_size=100),
         ("--eod-mask-loss", "end-of-document"), ("eos_token", "--eod-mask-loss")),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model x", "", Facts(vocab_size=100),
         ("--mock-data", "end-of-document"), ("--eos_id", "--mock-data")),
    ],
    "vocabulary_is_the_tokenizers": [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model x --vocab-size 129", "--vocab-size", Facts(vocab_size=100, eod_id=7),
         ("--vocab-size 129", "the tokenizer, 100"), ("leave --vocab-size out", "--vocab-size 128", "--padded-vocab-size")),
    ],
    "padded_vocabulary_holds_all_tokens": [
        ("--padded-vocab-size 99", "", None, ("--padded-vocab-size 99",), ("--padded-vocab-size",)),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)
