"""The tables of Megatron-LM's flags are consistent, and complete where the recording of its flags is given."""

import csv
import re
from collections import Counter

import pytest

from megatrain.config import parse
from megatrain.config.cli.parse_value import load_value
from megatrain.config.megatron.differences import DIFFERENT_DEFAULTS
from megatrain.config.megatron.flag_table import ALIASES, ANSWERS, REPLACED_CHOICES, UNSUPPORTED_CHOICES
from megatrain.config.megatron.flags import aliases, megatron_flags
from megatrain.config.megatron.other_programs import OTHER_PROGRAMS
from megatrain.config.megatron.other_tools import OTHER_TOOLS
from megatrain.config.megatron.removed_flags import REMOVED_FLAGS
from megatrain.config.schema.tree import flag_of, settings
from megatrain.config.schema.values import AUTO, REQUIRED

TABLE = [word.partition("=")[0] for answer in ANSWERS for word in answer.flags.split()]
SETTINGS = {setting.flag: setting for setting in settings()}
SWITCHES_OFF = {setting.opposite_flag: setting for setting in settings() if setting.kind is bool}
REMOVED = {word.partition("=")[0] for answer in REMOVED_FLAGS for word in answer.flags.split()}
OTHERS = {word.partition("=")[0] for answer in OTHER_PROGRAMS for word in answer.flags.split()}


@pytest.fixture(scope="session")
def megatron(pytestconfig):
    """Return the rows of Megatron-LM's flags, by flag; skip the test if the recording is not given."""
    golden = pytestconfig.getoption("golden")
    path = golden and golden.parent / "megatron-flag-frequency.tsv"
    if not path or not path.is_file():
        pytest.skip("needs the list of flags: run with --golden DIR")
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["parser"] == "core"]
    return {row["flag"].replace("_", "-"): row for row in rows if row["flag"] not in ("-h", "--help")}


def test_no_flag_is_in_the_tables_twice():
    assert [flag for flag, count in Counter([*TABLE, *ALIASES]).items() if count > 1] == []


def test_names_of_other_tools_are_answered_with_flags_that_exist():
    known = {*SETTINGS, *SWITCHES_OFF, *TABLE, *ALIASES}
    assert sorted(known & OTHER_TOOLS.keys()) == []
    for fix in OTHER_TOOLS.values():
        named = re.findall(r"--[a-z][a-z0-9-]+", fix)
        assert [flag for flag in named if flag not in SETTINGS and flag != "--nproc-per-node"] == []


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--learning-rate", "--lr"), ("--epochs", "--train-iters"), ("--num-train-epochs", "--train-samples"),
        ("--tp", "--tensor-model-parallel-size"), ("--pp", "--pipeline-model-parallel-size"),
        ("--cp", "--context-parallel-size"), ("--ep", "--expert-model-parallel-size"), ("--dp", "torchrun"),
        ("--save-total-limit", "--keep-last"), ("--gradient-checkpointing", "--recompute-activations"),
        ("--gradient-accumulation-steps", "--global-batch-size"), ("--max-steps", "--train-iters"),
        ("--per-device-train-batch-size", "--micro-batch-size"), ("--warmup-steps", "--lr-warmup-iters"),
        ("--batch-size", "--micro-batch-size"), ("--context-length", "--seq-length"), ("--max_seq_len", "--seq-length"),
        ("--n-layers", "--num-layers"), ("--d-model", "--hidden-size"), ("--Warmup_Ratio", "--lr-warmup-fraction"),
    ],
)  # fmt: skip
def test_a_name_of_another_tool_is_answered_with_the_flag_here(flag, meant):
    (problem,) = parse([flag, "3"]).problems
    assert flag in problem.text
    assert meant in problem.fix
    assert "did you mean" not in problem.fix


def test_a_name_of_another_tool_in_yaml_is_answered_too(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("optimizer:\n  learning_rate: 1\n")
    (problem,) = parse(["--config", str(file)]).problems
    assert problem.fix == "use --lr"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--export-quant-cfg fp8", "remove the flag"), ("--export-qk-l2-norm", "remove the flag"),
        ("--enable-gpt-oss", "--softmax-type learnable"), ("--nproc_per_node 8", "before pretrain.py"),
        ("--append-eod", "preprocess_data.py"), ("--top_k 4", "megatrain generate"), ("--use-tile-tags", "remove the flag"),
    ],
)  # fmt: skip
def test_a_flag_of_another_program_is_refused_by_name(words, remedy):
    (problem,) = parse(words.split()).problems
    assert words in problem.text.replace("_", "-") or words.replace("_", "-") in problem.text
    assert "is not a flag" not in problem.text
    assert remedy in problem.fix


def test_no_setting_is_in_the_tables():
    taken = [flag for flag in (*TABLE, *ALIASES) if flag in SETTINGS or flag in SWITCHES_OFF]
    assert taken == [], "these are settings now: delete them from the tables"


def test_every_answer_has_a_reason_and_a_remedy():
    assert all(answer.flags.split() for answer in ANSWERS), "delete answers without flags"
    assert all(answer.text and (answer.instead or not answer.is_refusal) for answer in ANSWERS)
    paths = {setting.path: setting for setting in settings()}
    for alias in ALIASES.values():
        assert alias.value is None or load_value(paths[alias.path], alias.value) is not None


def test_remedies_name_flags_that_exist():
    for answer in ANSWERS:
        named = re.findall(r"--[a-z][a-z0-9-]+", f"{answer.text} {answer.instead}")
        known = {*SETTINGS, *SWITCHES_OFF, *TABLE, "--config", "--max-restarts", "--help"}
        assert [flag for flag in named if flag not in known] == []


def test_every_flag_of_megatron_is_answered(megatron):
    known = {*SETTINGS, *SWITCHES_OFF, *aliases(), *megatron_flags(), "--yaml-cfg"}
    assert sorted(set(megatron) - known) == []
    assert sorted(set(megatron_flags()) - set(megatron) - REMOVED - OTHERS) == []


def test_flags_take_as_many_values_as_in_megatron(megatron):
    for flag in set(megatron) & set(megatron_flags()):
        row = megatron[flag]
        takes = "nothing" if row["type"].startswith("flag") else "several" if row["nargs"] else "one"
        assert (flag, megatron_flags()[flag].takes) == (flag, takes)


def test_settings_take_the_values_of_megatron(megatron):
    for flag in set(megatron) & set(SETTINGS):
        row, setting = megatron[flag], SETTINGS[flag]
        assert (flag, setting.kind is bool) == (flag, row["type"].startswith("flag"))
        assert (flag, setting.is_list) == (flag, bool(row["nargs"]))
        choices = filter(None, row["choices"].split("|")) if setting.choices else []
        others = {*UNSUPPORTED_CHOICES.get(flag, ()), *REPLACED_CHOICES.get(flag, ())}
        assert set(choices) <= {*setting.choices, *others}


# Megatron-LM sets these defaults after parsing, or spells them differently.
LATER_DEFAULTS = {
    "--dataloader-type": "single", "--tiktoken-pattern": "v2", "--exit-signal": "SIGTERM",
    "--yarn-beta-fast": "32", "--yarn-beta-slow": "1", "--yarn-correction-range-round-to-int": "True",
    "--cp-comm-type": "p2p", "--mup-width-mult": "None", "--mup-output-mult": "None",  # 1, which Megatron-LM replaces by the ratio of sizes
    "--num-query-groups": "None",  # 1, which Megatron-LM reads with --group-query-attention alone
    # Sizes that Megatron-LM's indexer needs, and a loss that it does not have without a factor.
    "--dsa-indexer-n-heads": "64", "--dsa-indexer-head-dim": "128", "--dsa-indexer-topk": "2048", "--dsa-indexer-loss-coeff": "0",
}  # fmt: skip


def test_every_default_that_differs_is_listed(megatron):
    differing = {}
    for setting in settings():
        row = megatron.get(setting.flag) or megatron.get(setting.opposite_flag)
        if row is None or setting.default is REQUIRED:
            continue
        theirs = LATER_DEFAULTS.get(setting.flag) or row["default"].strip("'")
        is_off_switch = row["type"] == "flag(store_false)" and row["flag"] == setting.flag
        if is_off_switch:
            theirs = str(theirs != "True")
        if not is_same_default(setting.default, theirs):
            differing[setting.path] = theirs
    listed = {
        item.path: {"off": "False", "on": "True"}.get(item.megatron_default, item.megatron_default)
        for item in DIFFERENT_DEFAULTS
    }
    assert differing.items() <= listed.items()
    assert all(SETTINGS[flag_of(path)].default is AUTO for path in listed.keys() - differing.keys())


def is_same_default(ours, theirs):
    ours = None if ours is AUTO or ours is False or ours == () else ours
    ours = ours[0] if isinstance(ours, tuple) and len(ours) == 1 else ours
    theirs = None if theirs in ("None", "False", "[]") else theirs
    try:
        return float(ours) == float(theirs)
    except (TypeError, ValueError):
        return str(ours) == str(theirs)
