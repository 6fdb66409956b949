"""The printed plan: given and derived values with their sources, and notes."""

import copy
import re
import textwrap
from pathlib import Path

import pytest

from megatrain.config import Facts, parse, render_plan, resolve, to_yaml
from megatrain.config.facts import DatasetFacts
from megatrain.config.plan_note import GRADES

ROOT = Path(__file__).parents[3]
PLAN = "--save /very/long/folder/name/for/checkpoints --sequence-parallel"


def test_the_short_form_shows_what_was_given_and_what_follows(plan_of):
    lines = render_plan(plan_of(PLAN)).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "given on the command line"
    assert lines[1].startswith("  model         num_layers 4, hidden_size 64,")
    assert any(
        line.split()[:2] == ["num_microbatches", "1"] and "global batch 2 / (" in line for line in lines
    )
    assert not any("adam_beta1" in line for line in lines)
    assert not any("equals --" in line for line in lines)
    assert any(
        line.endswith("--print-config full shows them, as does config.yaml in --save") for line in lines
    )
    assert lines[-1] == "changes nothing: 2 notes, listed by --print-config full"
    assert "changes the result" in lines


def test_the_full_form_shows_every_setting_and_its_source(plan_of):
    lines = render_plan(plan_of(f"{PLAN} --print-config full")).splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.split() == ["num_layers", "4", "--num-layers"] for line in lines)
    assert any(line.split() == ["adam_beta1", "0.9", "default"] for line in lines)
    assert any(line.split()[:2] == ["num_microbatches", "1"] for line in lines)


def test_notes_are_in_the_order_of_their_grades(plan_of):
    """What is lost by a flag without effect is named with a remedy; what changes nothing is counted."""
    flags = "--vocab-size 99 --cuda-graph-scope attn --use-mcore-models --moe-router-force-load-balancing --num-experts 4"
    lines = render_plan(plan_of(f"{flags} --print-config full")).splitlines()
    result, cost, nothing = (lines.index(words) for words in GRADES.values())
    assert "--moe-router-force-load-balancing is for benchmarks only" in "".join(lines[result:cost])
    assert "--cuda-graph-scope attn has no effect so far" in "".join(lines[cost:nothing])
    assert "--use-mcore-models is ignored" in "".join(lines[nothing:])


def test_a_graded_note_is_copied_with_its_grade(plan_of):
    note = plan_of("--use-mcore-models").notes[0]
    assert copy.deepcopy(note).grade == note.grade == "nothing"


def test_each_file_has_its_own_paragraphs(plan_of, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("optimizer:\n  adam_eps: 0.5\n")
    text = render_plan(plan_of(f"--config {file}"))
    given, on_the_command_line = text.split("given on the command line")
    assert given == f"given by {file}\n  optimizer     adam_eps 0.5\n"
    assert "lr 0.001" in on_the_command_line


def test_a_saved_configuration_is_shown_by_what_is_no_default(plan_of, tmp_path):
    plan = plan_of("--seed 7")
    (tmp_path / "config.yaml").write_text(to_yaml(plan.config, plan.origins))
    again = resolve(parse(["--config", str(tmp_path / "config.yaml")]), Facts())
    assert again.config == plan.config
    lines = render_plan(again).splitlines()
    given = lines[: lines.index("derived")]
    assert any("seed 7" in line for line in given)
    assert not any("adam_eps" in line for line in given)
    assert re.match(r"  and \d{3} with", given[-1])
    assert given[-1].endswith(" with their default value")
    assert len(given) < 20


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--wandb-exp-name x", "--wandb-project"),
        ("--log-memory-to-tensorboard", "--tensorboard-dir"),
    ],
)
def test_flags_without_effect_are_noted(plan_of, flags, words):
    assert any(flags.split()[0] in note and words in note for note in plan_of(flags).notes)


def test_keys_never_get_into_the_configuration(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    words = "--wandb-project p --wandb-entity e".split()
    assert "secret" not in str(parse(words).config.to_dict())


def test_curves_need_no_note_of_their_own(plan_of):
    flags = "--wandb-project p --log-memory-to-tensorboard --wandb-exp-name x"
    assert plan_of(flags, facts=Facts(libraries={"wandb": "1"})).notes == ()


def test_what_megatron_fsdp_spreads_is_shown(plan_of):
    shown = render_plan(plan_of("--use-megatron-fsdp"))
    assert "data_parallel_sharding_strategy  optim_grads_params" in " ".join(shown.split("\n")).replace(
        "   ", "  "
    )
    assert "data_parallel_sharding_strategy" not in render_plan(plan_of())


def test_the_plan_on_the_page_is_the_plan_of_its_command():
    page = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
    shown = re.search(r"^    given by .*?(?=\n\n)", page, re.MULTILINE | re.DOTALL)
    config = "configs/quickstart.yaml"
    request = parse(f"--config {ROOT / config} --train-iters 60 --save runs/first --load runs/first".split())
    dataset = DatasetFacts(
        split="all", prefix="runs/quickstart/data/stdlib_text_document", weight=None,
        num_sequences=1000, num_tokens=10**6, digest="",
    )  # fmt: skip
    plan = resolve(request, Facts(device="cpu", vocab_size=4096, datasets=(dataset,)))
    printed = render_plan(plan).replace(str(ROOT / config), config).rstrip("\n")
    printed = re.sub(r"^\d+ settings", "... settings", printed, flags=re.MULTILINE)
    assert shown is not None
    assert textwrap.dedent(shown[0]) == printed, f"show in docs/watching.md:\n{printed}"
