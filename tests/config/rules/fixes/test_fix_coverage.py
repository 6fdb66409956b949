"""Each fix in `megatrain/config` has an example: a broken command line that raises its problem, and the run it leads to.

calls with a fix (AST) ─┐
                        ├─> every call ran for some example, or stands in WITHOUT_A_COMMAND_LINE
examples ─> calls that ran ─> the fix, applied ─> a run that resolves

Mistakes in flags and YAML files are those of tests/config/cli.
"""

from __future__ import annotations

import ast
import dataclasses
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_fixes_resolve import cases, end_of, problems_of

import megatrain.config
from megatrain.config import Facts, Problem, StoredRun, parse, resolve
from megatrain.config.cli.parse_value import BadValueError
from megatrain.config.errors import MegatrainError
from megatrain.config.facts import DatasetFacts
from megatrain.config.model_spec.attention import AttentionSpec

ROOT = Path(megatrain.config.__file__).parent
ERRORS = {"Problem", "PipelineError", "SystemExit"}
"""Calls with a fix as second argument; others name it (`fix=`)."""

Site = tuple[str, str, int]
"""File, function, and number of the call in it."""

WITHOUT_A_COMMAND_LINE = {
    "environment.py": "variables of launchers: tests/config/test_environment.py",
    "errors.py": "the classes themselves",
    "facts.py": "copies of problems between ranks",
    "user_function.py": "the user's files: tests/config/test_user_function.py",
    "module_precision.py": "a file's problems: tests/config/test_module_precision.py",
    "derive/distillation.py": "a file's problems: tests/config/derive/test_distillation_files.py",
}

REACHED_OTHERWISE = {
    ("derive/datasets.py", "split_fractions", 0): "`split_problems` reports it before",
    ("resolve.py", "_checked_values", 1): "the command line checks ranges; a Request may be built in code",
    ("subjects/fp8.py", "fp8_recipe_is_supported", 2): "needs Transformer Engine on a Blackwell GPU",
    ("schema/tokenizer.py", "tokenizer_problems", 1): "the command line checks choices",
    ("subjects/layers.py", "linears_divide_over_ranks", 0): "a part of the user's own: tests/extending",
    ("subjects/layers.py", "custom_layers_go_on", 0): "a function of the user's own: test_rules_resume.py",
}
UPCYCLED = "--num-experts 4 --moe-use-upcycling --moe-ffn-hidden-size"
RUN = "--global-batch-size 8 --train-iters 10 --load c --save c"


def stored(arguments_of: Any, flags: str = RUN, **values: Any) -> Facts:
    """Return facts of a run that resumes a checkpoint of the working run with these flags."""
    plan = resolve(parse(arguments_of(flags, "")), Facts())
    run = StoredRun(path="c/iter_0000005", iteration=5, consumed_train_samples=40, config=plan.config.to_dict(),
                    schedule=plan.derived.schedule.to_dict(), tokenizer_fingerprint="abc")  # fmt: skip
    return Facts(checkpoint=dataclasses.replace(run, **values), tokenizer_fingerprint="abc")


def dense(width: int = 64, path: str = "d/iter_0000003") -> Facts:
    config = {"model": {"ffn_hidden_size": width}}
    return Facts(checkpoint=StoredRun(path=path, iteration=0, consumed_train_samples=0, config=config,
                                      is_start=True, is_upcycled=True))  # fmt: skip


def files(digest: str, **values: Any) -> tuple[DatasetFacts, ...]:
    one = DatasetFacts(
        split="all", prefix="d", weight=None, num_sequences=900, num_tokens=9000, digest=digest
    )
    return (dataclasses.replace(one, **values),)


COMMANDS = {
    # name: (broken flags, mended flags or None: the fix names them, flags left out)
    "a word that is not UTF-8": ("--save s\udcff", "--save s", ""),
    "a value of an alias": ("--disable-fp8-wgrad=3", "", ""),
    "an unsupported choice": ("--dataloader-type external", None, ""),
    "steps without a colon": ("--step-batch-size-schedule 8 --train-samples 200", "--step-batch-size-schedule 0:8 --train-samples 200", "--train-iters"),
    "two steps at 0": ("--step-batch-size-schedule 0:8,1:4 --train-samples 200", "--step-batch-size-schedule 0:8 --train-samples 200", "--train-iters"),
    "a step of 0": ("--step-batch-size-schedule 0:0 --train-samples 200", "--step-batch-size-schedule 0:8 --train-samples 200", "--train-iters"),
    "a step of x": ("--step-batch-size-schedule 0:x --train-samples 200", "--step-batch-size-schedule 0:8 --train-samples 200", "--train-iters"),
    "non-persistent without a type": ("--save s --non-persistent-save-interval 2", None, ""),
    "local without a folder": ("--save s --non-persistent-save-interval 2 --non-persistent-ckpt-type local",
                               "--save s --non-persistent-save-interval 2 --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir l", ""),
    "evaluation of nothing": ("--eval-only --load c --eval-iters 0", None, ""),
    "upcycling without a dense model": (f"{UPCYCLED} 64", f"{UPCYCLED} 64 --pretrained-checkpoint d", ""),
    "a flag of Megatron-LM's with a value": ("--use-mcore-models 3", "", ""),
    "a value of Megatron-LM's given twice": ("--output-logit-dtype 3 4", "", ""),
    "a flag of Megatron-LM's without its value": ("--cross-entropy-fusion-impl", "", ""),
    "a choice of Megatron-LM's": ("--optimizer dist_muon", None, ""),
    "an unsupported value of Megatron-LM's": ("--output-logit-dtype bf16", "", ""),
    "a tokenizer's id": ("--tokenizer-type NullTokenizer --null-tokenizer-eod-id 100", None, ""),
    "no parity": ("--require-parity --num-experts 4 --moe-router-load-balancing-type global_aux_loss", None, ""),
    "a huge split": (f"--split {'9' * 400} --data-path d --tokenizer-type NullTokenizer", "--data-path d --tokenizer-type NullTokenizer", "--mock-data"),
    "no file": ("--config /nonexistent/a.yaml", "", ""),
}  # fmt: skip


def mistakes(file: Path) -> Iterator[list[str]]:
    """Yield the command lines that the tests of tests/config/cli break; those of YAML name `file`, with its text."""
    cli = Path(__file__).parents[2] / "cli"
    for argv, _, _ in runpy.run_path(str(cli / "test_command_line.py"))["MISTAKES"]:
        yield argv
    for flag, test in (("--config", "test_yaml_file.py"), ("--yaml-cfg", "test_megatron_yaml.py")):
        for text, _, _ in runpy.run_path(str(cli / test))["MISTAKES"]:
            file.write_text(text)
            yield [flag, str(file)]


def other_facts(arguments_of: Any) -> Iterator[tuple[str, Facts, Facts, str]]:
    """Yield name, facts of a broken run, those after its fix, and the flags that the fix adds."""
    here = stored(arguments_of)
    assert here.checkpoint is not None
    start = Facts(checkpoint=here.checkpoint.weights_only)
    yield "another tokenizer", dataclasses.replace(here, tokenizer_fingerprint="xyz"), here, ""
    yield "no optimizer state", stored(arguments_of, has_optimizer=False), start, "--finetune"
    data = dataclasses.replace(stored(arguments_of, datasets=files("a")), datasets=files("b"))
    for changed in (files("b"), files("a", weight=2.0), (*files("a"), *files("a"))):
        yield "changed data", dataclasses.replace(data, datasets=changed), start, "--finetune"
    later = (*files("a"), *files("c", from_iteration=3))
    yield "a changed schedule of data", dataclasses.replace(data, datasets=later), start, "--finetune"


def of_facts() -> Iterator[tuple[str, str, str | None, str, Facts]]:
    """Yield name, broken flags, mended flags (None: the fix names them), flags left out and facts of other runs."""
    local = "--save s --non-persistent-save-interval 2 --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir l"
    nodes = Facts(world_size=24, ranks_per_node=8)
    copies = f"{local} --global-batch-size 48 --replication"
    yield "no jump", copies, f"{copies} --replication-jump 8 --replication-factor 3", "", nodes
    jump = f"{copies} --replication-factor 3 --replication-jump"
    yield "a jump within a node", f"{jump} 4", None, "", nodes
    fitting = f"{jump} 8"
    yield "a factor of 2", f"{copies} --replication-jump 8", fitting, "", nodes
    layout = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|tt"
    yield "a layout with m", f"{layout}mL", f"{layout}L", "", Facts(world_size=2)
    flags = "--per-split-data-args-path p --tokenizer-type NullTokenizer"
    valid = Facts(datasets=files("a", split="valid"))
    yield "no training data", flags, "--mock-data", "--mock-data", valid
    heads = AttentionSpec(num_heads=6, num_query_groups=6, head_dim=16)
    layers = lambda _, layers: tuple(one.with_part(heads) for one in layers)  # noqa: E731
    custom = Facts(world_size=4, digests={"model.spec": "1"}, custom_layers=layers)
    spec = "--spec my.py:layers --tensor-model-parallel-size"
    yield "heads of custom layers", f"{spec} 4", f"{spec} 2", "", custom


def resumed(arguments_of: Any) -> Iterator[tuple[str, str, str | None, Facts]]:
    """Yield name, broken flags, mended flags (None: the fix names them) and facts of runs that start from checkpoints."""
    here = stored(arguments_of)
    yield "a changed seed", f"{RUN} --seed 1", RUN, here
    yield "a changed schedule", f"{RUN} --lr 1", None, here
    mine, use = f"{RUN} --lr-decay-style my.py:decay", "--use-checkpoint-opt-param-scheduler"
    yield "a schedule of another's file", f"{RUN} {use}", None, stored(arguments_of, mine)
    yield "a changed batch", RUN.replace("8", "16"), None, here
    yield (
        "another pass",
        f"{RUN} --dataloader-type cyclic --micro-batch-size 1",
        None,
        stored(arguments_of, pass_size=2),
    )
    yield "fewer experts", f"{UPCYCLED} 32 --pretrained-checkpoint d", None, dense()
    yield (
        "uneven parts",
        f"{UPCYCLED} 32 --moe-upcycling-granularity 3 --pretrained-checkpoint d",
        None,
        dense(96),
    )
    yield (
        "dense layers",
        f"{UPCYCLED} 64 --moe-layer-freq 2 --ffn-hidden-size 96 --pretrained-checkpoint d",
        None,
        dense(),
    )
    yield "latents", f"{UPCYCLED} 64 --moe-latent-size 8 --pretrained-checkpoint d", None, dense()
    yield "one folder", f"{UPCYCLED} 64 --save d --load d", f"{UPCYCLED} 64 --save e --load d", dense()
    balanced = f"{RUN} --num-experts 4 --moe-router-load-balancing-type"
    yield "quantiles", f"{balanced} none", None, stored(arguments_of, f"{balanced} quantile_balancing")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[Site]:
    """The calls with a fix that ran."""
    found: set[Site] = set()
    sites = {(file, line): (file, function, number) for file, line, function, number in static_sites()}
    for kind in (Problem, MegatrainError, BadValueError):

        def record(self: Any, *args: Any, init: Any = kind.__init__, **kwargs: Any) -> None:
            frame = sys._getframe(1)
            while frame is not None:
                path = Path(frame.f_code.co_filename)
                if ROOT in path.parents:
                    key = (str(path.relative_to(ROOT)), frame.f_lineno)
                    found.update({sites[key]} if key in sites else ())
                frame = frame.f_back
            init(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", record)
    return found


def static_sites() -> Iterator[tuple[str, int, str, int]]:
    """Yield file, line, function and number of each call with a fix."""
    for path in sorted(ROOT.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and has_fix(node)]
            for number, call in enumerate(sorted(calls, key=lambda node: node.lineno)):
                yield str(path.relative_to(ROOT)), call.lineno, function.name, number


def has_fix(call: ast.Call) -> bool:
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    return (name in ERRORS and len(call.args) == 2) or any(keyword.arg == "fix" for keyword in call.keywords)


@pytest.mark.nightly
def test_every_fix_has_an_example(arguments_of: Any, seen: set[Site], tmp_path: Path) -> None:
    wrong: list[str] = []

    def mended_line(mended: str | None, without: str) -> list[str] | None:
        return None if mended is None else arguments_of(mended, without)

    for _, flags, without, facts in cases():
        problems_of(arguments_of(flags, without), facts or Facts())
    for name, (broken, mended, without) in COMMANDS.items():
        wrong += failures(name, arguments_of(broken, without), mended_line(mended, without), Facts())
    for given in mistakes(tmp_path / "a.yaml"):
        problems_of(given, Facts())
    for name, broken, mended, facts in resumed(arguments_of):
        wrong += failures(name, arguments_of(broken, ""), mended_line(mended, ""), facts)
    for name, broken, mended, without, facts in of_facts():
        wrong += failures(name, arguments_of(broken, without), mended_line(mended, without), facts)
    problems_of(["word"], Facts())  # before any flag
    for name, before, after, added in other_facts(arguments_of):
        if not problems_of(arguments_of(RUN, ""), before):
            wrong.append(f"{name}: no problem")
        wrong += [f"{name}: {problem}" for problem in problems_of(arguments_of(f"{RUN} {added}", ""), after)]
    assert not wrong, "\n".join(wrong)
    expected = {(file, function, number) for file, _, function, number in static_sites()}
    missing = {
        site for site in expected - seen if site[0] not in WITHOUT_A_COMMAND_LINE
    } - REACHED_OTHERWISE.keys()
    assert not missing, "add an example of these fixes:\n" + "\n".join(map(str, sorted(missing)))


def failures(name: str, broken: list[str], mended: list[str] | None, facts: Facts) -> list[str]:
    """Return what is wrong with an example: it has no problem, or its fix does not lead to a run."""
    if not problems_of(broken, facts):
        return [f"{name}: no problem"]
    if mended is not None:
        return [f"{name}: {problem}" for problem in problems_of(mended, facts)]
    end, steps = end_of(broken, facts)
    return [] if end == "resolves" else [f"{name}: {end}: {steps[-1]}"]
