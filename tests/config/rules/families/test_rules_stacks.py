"""Rules about families of models: each fires, names its flags and a remedy."""

import pytest

from megatrain.config import Facts

BERT = "--model-family bert"
T5 = "--model-family t5 --decoder-seq-length 32"
LEARNED = "--position-embedding-type learned_absolute --max-position-embeddings"
RELATIVE = "--position-embedding-type relative"

CASES = {
    "context_ranks_have_one_stack": [
        (f"{T5} --context-parallel-size 2", "", Facts(world_size=2),
         ("--context-parallel-size 2", "--model-family t5"), ("--context-parallel-size 1", "--sequence-parallel")),
    ],
    "decoder_has_a_length": [
        ("--model-family t5", "", None, ("--decoder-seq-length",), ("--decoder-seq-length 32",)),
        ("--model-family t5 --decoder-seq-length 33 --tensor-model-parallel-size 2 --sequence-parallel", "", Facts(world_size=2),
         ("--decoder-seq-length 33", "--tensor-model-parallel-size 2"), ("--decoder-seq-length 34", "--sequence-parallel")),
        (f"--model-family t5 --decoder-seq-length 200 {LEARNED} 128", "position-embedding-type", None,
         ("--decoder-seq-length 200", "--max-position-embeddings 128"), ("--max-position-embeddings 200",)),
    ],
    "cross_attention_has_all_heads": [
        (f"{T5} --group-query-attention --num-query-groups 2", "", None,
         ("--num-query-groups 2", "cross-attention"), ("remove --group-query-attention",)),
    ],
    "relative_positions_are_of_t5": [
        (RELATIVE, "position-embedding-type", None, (RELATIVE, "gpt"), ("rope", "--model-family t5")),
        (f"{T5} {RELATIVE} --relative-attention-max-distance 16", "position-embedding-type", None,
         ("--relative-attention-max-distance 16", "--relative-attention-num-buckets 32"), ("--relative-attention-max-distance 17",)),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


@pytest.mark.parametrize("flags", [BERT, f"{BERT} --bert-no-binary-head", T5, f"{T5} --decoder-num-layers 4"])
def test_families_resolve(problems_of, flags):
    assert problems_of(flags) == []


@pytest.mark.parametrize("family", [BERT, T5])
def test_experts_of_a_family_that_is_dense_in_megatron_have_a_note(plan_of, family):
    (note,) = (note for note in plan_of(f"{family} --num-experts 4").notes if "--num-experts 4 with" in note)
    assert note.grade == "result"
    assert not any("--num-experts 4 with" in note for note in plan_of("--num-experts 4").notes)


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_a_gpt_of_word_pieces_has_a_note_unless_its_family_is_given(plan_of, kind):
    flags = f"--tokenizer-type {kind} --vocab-file vocab.txt"
    facts = Facts(vocab_size=250, eod_id=1)
    (note,) = (note for note in plan_of(flags, facts=facts).notes if "this run trains a GPT" in note)
    assert kind in note
    assert "--model-family bert or t5" in note
    for family in ("gpt", "bert"):
        notes = plan_of(f"{flags} --model-family {family}", facts=facts).notes
        assert not any("this run trains a GPT" in note for note in notes)
