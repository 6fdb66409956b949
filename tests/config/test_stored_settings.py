"""Settings that a run takes from a checkpoint, or from the configuration that another run has saved: code is none of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.config import Facts, parse, resolve, to_yaml
from megatrain.config.facts import StoredRun
from megatrain.config.stored_settings import stored_settings
from megatrain.tools.parity.measure import teacher_of, tiny_plan
from megatrain.tools.parity.models import MODELS
from megatrain.tools.parity.rows import Layout

FACTS = Facts(world_size=1, vocab_size=101, eod_id=100)
ROUTERS = ("sinkhorn", "quantiles", "dropping", "dropspadded", "severallosses", "biasedexperts")
WORDS = [*(word for word in MODELS if word != "own"), *(f"mixtral {word}" for word in ROUTERS)]
"""Models of parity without code of the user."""


def test_a_function_that_a_checkpoint_names_is_not_taken():
    request = parse(["--load", "c", "--eval-only"])
    for style, expected in (("cosine", "cosine"), ("theirs.py:decay", None)):
        stored = {"schedule": {"lr_decay_style": style}, "data": {"dataset": "theirs.py:data"}}
        taken = stored_settings(stored, request, with_layout=True, with_training=True)
        assert taken.get("schedule.lr_decay_style") == expected
        assert "data.dataset" not in taken


@pytest.mark.parametrize("words", WORDS)
def test_an_evaluation_computes_the_model_of_its_checkpoint(words: str):
    plan = tiny_plan(Layout.of(words), 1)
    request, config = parse(["--load", "c", "--eval-only", "--device", "cpu"]), plan.config.to_dict()
    taken = stored_settings(config, request, with_layout=False, with_training=True)
    stored = StoredRun(path="c", iteration=2, consumed_train_samples=16, config=config, settings=taken)
    again = resolve(request, replace(FACTS, checkpoint=stored))
    drawn = dict.fromkeys(("init_std", "output_init_std", "embedding_init_std", "head_init_std"), 0)
    found, expected = (replace(one.derived.model_spec, **drawn) for one in (again, plan))
    assert found == expected


@pytest.mark.parametrize("words", [*WORDS, "teacher", "tokens fixedpacks"])
def test_a_saved_configuration_resolves_to_itself(words: str, tmp_path: Path):
    layout = Layout.of(words)
    plan = tiny_plan(layout, 1)
    teacher = teacher_of(layout, vocab_size=101, seq_length=24) if layout.has("teacher") else None
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(plan.config, plan.origins))
    assert resolve(parse(["--config", str(file)]), replace(FACTS, teacher=teacher)).config == plan.config
