"""The plan has notes about defaults that differ from Megatron-LM's and about ignored flags."""

from megatrain.config import render_plan
from megatrain.config.megatron.differences import default_differences


def test_the_plan_names_its_defaults_that_differ(plan_of):
    shown = " ".join(render_plan(plan_of("--print-config full")).split())
    assert "changes nothing defaults that differ from Megatron-LM" in shown
    assert "--transformer-impl local (Megatron-LM: transformer_engine)" in shown
    given = "--transformer-impl local --use-distributed-optimizer --distributed-backend gloo"
    assert "defaults that differ" not in render_plan(plan_of(f"{given} --print-config full"))


def test_the_plan_names_the_shift_of_the_first_loss_by_padding(plan_of):
    notes = list(default_differences(plan_of("--vocab-size 50256 --make-vocab-size-divisible-by 512")))
    (note,) = (note for note in notes if note.grade == "result")
    assert "the softmax is over the 50256 tokens: Megatron-LM counts the rows of padding, 432, too" in note
    assert "0.009 higher (--vocab-size 50688 counts them)" in note
    notes = default_differences(plan_of("--vocab-size 50688"))
    assert not [note for note in notes if note.grade == "result"]


def test_the_plan_has_the_notes_of_ignored_flags(plan_of):
    assert any(
        note.startswith("--use-mcore-models is ignored: ") for note in plan_of("--use-mcore-models").notes
    )
