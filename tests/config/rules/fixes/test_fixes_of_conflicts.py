"""Each conflict that a setting declares is reported in its words and alone, and its fix leads to a run.

conflict ─> a flag for each of its settings ─> a run with what they need ─> one problem ─> each alternative of its fix ─> a run
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from test_fixes_of_pairs import flags_of
from test_fixes_resolve import alternatives, edited, edits, end_of, problems_of

from megatrain.config import Facts, Problem, parse, resolve
from megatrain.config.facts import TeacherFacts
from megatrain.config.schema.needs import Conflict
from megatrain.config.schema.tree import Setting, settings, settings_by_path

CONFLICTS = [(setting, one) for setting in settings() for one in setting.conflicts]
_LINEAR = '{"attention":{},"mlp":{"replace_with_linear":true}}'
_BLOCKS = f'{{"block_configs":[{",".join([_LINEAR] * 4)}]}}'
_HYBRID = "--mamba-num-heads 8 --mamba-head-dim 16"
_STEPS = "--train-samples 200 --train-iters none --global-batch-size 16"
_FILES = "--no-mock-data --data-path d"
VALUES = {
    "model.window_size": "5,0", "model.no_rope_freq": "2", "model.window_attn_skip_freq": "2", "model.spec": "a.py:f",
    "model.heterogeneous_layers_config_path": "l.json", "model.heterogeneous_layers_config_encoded_json": _BLOCKS,
    "model.hybrid_layer_pattern": "P-", "model.experimental_attention_variant": "gdn", "experts.num_experts": "4", "data.dataset": "a.py:f", "data.phase_transition_iterations": "5",
    "training.loss": "a.py:f", "training.eval_micro_batch_size": "2", "training.rampup_batch_size": "8 8 100",
    "distillation.export_kd_teacher_load": "t",
}  # fmt: skip
"""Values of settings that take a text, or not any number."""
NEEDED = {
    "--model-family t5": "--decoder-seq-length 64",
    "--model-family hybrid": _HYBRID,
    "--model-family vlm": "--vision-model-type clip --vision-hidden-size 64 --vision-num-attention-heads 4",
    "--hybrid-layer-pattern": f"--model-family hybrid {_HYBRID}",
    "--vision-model-type": "--model-family vlm",
    "--experimental-attention-variant dsa": "--multi-latent-attention",
    "--experimental-attention-variant": "--linear-attention-freq 2",
    "--qk-layernorm-width": "--qk-layernorm",
    "--apply-wd-to-qk-layernorm": "--qk-layernorm",
    "--geglu": "--no-swiglu",
    "--mtp-num-layers": "--max-position-embeddings 128",
    "--mtp-use-repeated-layer": "--mtp-num-layers 2 --num-experts 4",
    "--moe-router-enable-expert-bias": "--num-experts 4 --moe-router-score-function sigmoid",
    "--moe": "--num-experts 4",
    "--tp-comm-overlap": "--tensor-model-parallel-size 2 --sequence-parallel",
    "--qat": "--qat-group-size 32",
    "--dataset": "--no-mock-data",
    "--image-data-path": "--no-mock-data --model-family vlm --tokenizer-type NullTokenizer",
    "--fim-data": f"{_FILES} --tokenizer-type HuggingFaceTokenizer --tokenizer-model m",
    "--tokenizer-type": _FILES,
    **dict.fromkeys(
        ("--sft", "--data-schedule", "--phase-transition-iterations"), f"{_FILES} --tokenizer-type NullTokenizer"
    ),
    "--pack-documents": "--micro-batch-size 1 --calculate-per-token-loss",
    "--multiple-validation-sets": "--full-validation",
    "--step-batch-size-schedule": _STEPS,
    "--rampup-batch-size": _STEPS,
    "--eval-micro-batch-size": "--micro-batch-size 1 --global-batch-size 8",
    "--eval-only": "--load c",
    "--recompute-granularity full": "--recompute-method uniform --recompute-num-layers 1",
    "--fine-grained-activation-offloading": "--offload-modules core_attn",
}  # fmt: skip
"""Flags with which a setting has an effect, and no other problem, by the start of its flag."""


@dataclass(frozen=True)
class Refused:
    """A run that has no other problem than a conflict."""

    given: list[str]
    facts: Facts
    problem: Problem


def facts_of(arguments_of: Any, *flags: str) -> Facts:
    """Return facts with all that the flags name: functions, layers, a teacher, a GPU."""
    config = resolve(parse(arguments_of("", "")), Facts()).config.to_dict()
    sections = {name: config[name] for name in ("model", "experts")}
    return Facts(
        world_size=4,
        device="cuda" if "--device cuda" in flags else "cpu",
        vocab_size=100,
        eod_id=0,
        teacher=TeacherFacts(path="t", iteration=5, config=sections, num_rows=100, is_ours=True, tokenizer_fingerprint=None, checksum=0),
        layers_config=_BLOCKS,
        digests=dict.fromkeys(("model.spec", "training.loss", "data.dataset"), "1"),
        custom_layers=(lambda _, layers: layers) if "--spec a.py:f" in flags else None,
    )  # fmt: skip


def needed(flag: str) -> str:
    return next((words for start, words in NEEDED.items() if flag.startswith(start)), "")


def flags_with(setting: Setting, values: Sequence[str]) -> list[str]:
    """Return the setting with each of these values; without any, with its choices or a value."""
    if setting.kind is bool:
        return [setting.opposite_flag if setting.default is True else setting.flag]
    if values or setting.path in VALUES:
        return [f"{setting.flag} {value}" for value in values or [VALUES[setting.path]]]
    return list(flags_of(setting))[: None if setting.choices else 1]


def refused(arguments_of: Any, setting: Setting, one: Conflict) -> Iterator[Refused]:
    """Yield a run for each pair of values. Fails if one has other problems, or none though the conflict has no condition."""
    other = settings_by_path()[one.path]
    for flags in itertools.product(flags_with(setting, one.of), flags_with(other, one.values)):
        facts, words = facts_of(arguments_of, *flags), [needed(flag) for flag in flags]
        text = (
            " is not supported together with ".join(textwrap.shorten(flag, 100) for flag in flags) + one.why
        )
        tried = []
        for more in dict.fromkeys((" ".join(words), *words, "")):
            given = arguments_of(f"{more} {' '.join(flags)}", "")
            tried.append(problems_of(given, facts))
            if [problem.text for problem in tried[-1]] == [text]:
                yield Refused(given, facts, *tried[-1])
                break
        else:
            shown = "\n".join((text, *map(str, tried[0])))
            assert one.when is not None, shown
            assert () in tried, shown


def name_of(conflict: tuple[Setting, Conflict]) -> str:
    setting, one = conflict
    sides = (setting.flag, *one.of, "and", settings_by_path()[one.path].flag, *one.values)
    return " ".join(sides)


@pytest.mark.parametrize(("setting", "one"), CONFLICTS, ids=map(name_of, CONFLICTS))
def test_a_conflict_is_reported_alone_and_its_fix_leads_to_a_run(
    arguments_of: Any, setting: Setting, one: Conflict
) -> None:
    found = list(refused(arguments_of, setting, one))
    assert found, "the conflict is never reported: name what its settings need in NEEDED"
    for run in found:
        assert edits(run.problem, run.given) is not None, f"name the flags of the fix: {run.problem}"
        for alternative in alternatives(run.problem.fix):
            given, facts = run.given, run.facts
            for edit in edits(Problem(run.problem.text, alternative), given) or ():
                given, facts = edited(given, facts, edit)
            end, steps = end_of(given, facts) if given != run.given else ("", [])
            shown = "\n".join((str(run.problem), alternative, *steps))
            assert end != "does not end", shown
            assert not any(run.problem.text in step for step in steps), shown
