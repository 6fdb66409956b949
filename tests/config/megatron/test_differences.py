"""The plan has notes about defaults that differ from Megatron-LM's and about ignored flags."""

from megatrain.config import render_plan


def test_the_plan_names_its_defaults_that_differ(plan_of):
    shown = " ".join(render_plan(plan_of()).split())
    assert "note: defaults that differ from Megatron-LM" in shown
    assert "--transformer-impl local (Megatron-LM: transformer_engine)" in shown
    given = "--transformer-impl local --use-distributed-optimizer --distributed-backend gloo"
    assert "defaults that differ" not in render_plan(plan_of(given))


def test_the_plan_has_the_notes_of_ignored_flags(plan_of):
    assert any(
        note.startswith("--use-mcore-models is ignored: ") for note in plan_of("--use-mcore-models").notes
    )
