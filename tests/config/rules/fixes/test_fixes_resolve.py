"""Every fix that names a flag with a value ends: applied as written, it leads to a run that resolves, in at most three rounds.

problem ─> its first alternative that names flags and values ─> edits of the command line ─> resolve again
"""

import dataclasses
import random
import re
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from everyday import nightly, one_in

from megatrain.config import ConfigError, Facts, Problem, parse, resolve
from megatrain.config.cli.parse_value import BadValueError, load_value
from megatrain.config.schema.tree import Setting, settings

RULES = Path(__file__).parents[1]
MAX_ROUNDS = 3
NEED_A_USER = frozenset(
    {
        "data_has_one_source", "blends_have_positive_weights", "validation_sets_are_separate", "vocabulary_is_known",
        "cublas_is_deterministic", "load_balancing_is_valid", "layer_sizes_are_valid",
        "query_groups_fit_the_heads_of_layers", "stages_are_not_empty", "spec_names_a_function", "batch_sizes_are_valid",
        "teacher_is_a_gpt", "teacher_has_the_vocabulary", "cached_outputs_are_of_this_run", "vocabulary_is_in_the_folder",
    }
)  # fmt: skip
"""Rules with a case whose remedy no flag with a value can express: a file, a path, a weight, an environment variable."""

SETTINGS = {setting.flag: setting for setting in settings()}
OPPOSITES = {setting.opposite_flag: setting for setting in settings() if setting.kind is bool}
SET = frozenset("use add give set with put".split())
REMOVE = frozenset("remove without leave place".split())
ONE_OF_THEM = re.compile(r"(remove|give|keep|leave) one of them\b(?!, such as)")
PROSE = frozenset("in and or to for of from is as instead together out which on N FILE the a".split())

TRIED = {
    "pipeline size 6 at world size 8": ("--pipeline-model-parallel-size 6 --num-layers 12", Facts(world_size=8)),
    "a hidden size with odd head channels": ("--hidden-size 102 --num-attention-heads 6", None),
    "a hidden size between heads and RoPE": ("--hidden-size 101 --num-attention-heads 6", None),
    "an old name of recomputation": ("--activations-checkpoint-method uniform", None),
    "a method without a granularity": ("--recompute-method block", None),
    "a number of layers without a method": ("--recompute-num-layers 2", None),
    "bf16 without a GPU": ("--bf16 --attention-backend flash4", None),
    "formats that contradict": ("--bf16 --params-dtype float32", None),
    "too many stages and ranks": ("--pipeline-model-parallel-size 8 --tensor-model-parallel-size 3", Facts(world_size=24)),
    "experts over too many ranks": ("--num-experts 6 --expert-model-parallel-size 4", Facts(world_size=4)),
    "groups, heads and ranks": (
        "--group-query-attention --num-query-groups 3 --tensor-model-parallel-size 4 --num-attention-heads 6",
        Facts(world_size=8),
    ),
    "a batch for odd ranks": ("--global-batch-size 7 --tensor-model-parallel-size 2", Facts(world_size=6)),
    "an old name of warm-up": ("--warmup 0.01", None),
    "an old name of tensor parallelism": ("--model-parallel-size 2", Facts(world_size=2)),
    "an old name of the batch": ("--batch-size 4", None),
    "a tool's name of the learning rate": ("--learning-rate 1e-3", None),
    "a batch that ramps up from no multiple of the micro-batch": (
        "--rampup-batch-size 3 2 100 --global-batch-size 8 --micro-batch-size 2 --train-samples 1000", None,
    ),
    "a length of all positions that context ranks do not divide": (
        "--context-parallel-size 3 --max-position-embeddings 128", Facts(world_size=3),
    ),
    "sparse attention": ("--experimental-attention-variant dsa", None),
    "a typo": ("--num-layer 4", None),
    "heads, groups and ranks": (
        "--num-attention-heads 6 --hidden-size 96 --group-query-attention --num-query-groups 3 --tensor-model-parallel-size 2",
        Facts(world_size=2),
    ),
    "experts that are narrower than ranks": ("--num-experts 4 --moe-ffn-hidden-size 6 --expert-tensor-parallel-size 4", Facts(world_size=4)),
    "micro-batches for fewer ranks": ("--micro-batch-size 8 --global-batch-size 8", Facts(world_size=4)),
    "micro-batches for fewer ranks, in steps": ("--micro-batch-size 8 --step-batch-size-schedule 0:8", Facts(world_size=4)),
    "latents with groups": ("--multi-latent-attention --group-query-attention --num-query-groups 2", None),
    "instances without a sharded state": ("--num-distributed-optimizer-instances 2 --no-use-distributed-optimizer", Facts(world_size=2)),
    "more stages than layers": ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3", Facts(world_size=4)),
}  # fmt: skip

ONE_STEP = {
    "a batch that ramps up from no multiple of the micro-batch": "--train-iters",
    "a length of all positions that context ranks do not divide": "",
    "sparse attention": "",
}
"""Those of them whose fix needs no second one, and the flags left out."""


@dataclasses.dataclass(frozen=True)
class Edit:
    """A flag to set with its words, or to remove (None); or the number of ranks to start."""

    flag: str
    words: tuple[str, ...] | None


def cases() -> Iterator[tuple[str, str, str, Facts | None]]:
    """Yield name, flags, flags left out, and facts of every broken command line of the tables of rules."""
    for path in sorted(RULES.rglob("test_rules_*.py")):
        table = runpy.run_path(str(path)).get("CASES", {})
        for rule, entries in table.items():
            for number, entry in enumerate(entries if isinstance(entries, list) else []):
                flags, without, facts, _, _ = entry
                yield f"{rule} {number}", flags, without, facts
    for name, (flags, facts) in TRIED.items():
        yield name, flags, "", facts


def alternatives(fix: str) -> list[str]:
    """Split a fix where it offers a choice; the verb of an alternative holds for the next one without a verb."""
    parts = re.split(
        r"(?:, or |; or |; | or (?=remove|use|add|give|--)|, which |, as )",
        re.sub(r"`|\(Megatron.*?\)", "", fix),
    )
    verb = ""
    for number, part in enumerate(parts):
        found = [word.lower() for word in part.split() if word.lower() in SET | REMOVE]
        if not found:
            parts[number] = f"{verb} {part}".strip()
        verb = found[0] if found else verb
    return parts


def edits(problem: Problem, given: Sequence[str]) -> list[Edit] | None:
    """Return the edits of the first alternative that can be applied as written; None: there is none."""
    if ONE_OF_THEM.match(problem.fix):
        named = [flag for flag in flags_in(problem.text) if flag in given]
        return [Edit(named[-1], None)] if named else None
    ranks = re.search(r"start (\d+) ranks|--nproc-per-node (\d+)|--world-size (\d+)", problem.fix)
    if ranks:
        return [Edit("ranks", (ranks[1] or ranks[2] or ranks[3],))]
    meant = re.fullmatch(r"did you mean (--[\w-]+)\?|use (--[\w-]+)", problem.fix)
    unknown = [word for word in flags_in(problem.text)[:1] if word not in SETTINGS and word not in OPPOSITES]
    if meant and unknown:
        return [Edit(unknown[0], None), Edit(meant[1] or meant[2], words_after(given, unknown[0]))]
    for alternative in alternatives(problem.fix):
        found = edits_of(alternative)
        if found:
            return found
    return None


def edits_of(text: str) -> list[Edit]:
    """Return the edits that a sentence names; none if a flag lacks its value."""
    found: list[Edit] = []
    verb = SET
    words = [
        word.strip("(),:;.'\"")
        if word.startswith(("-", "(-")) or not word[-1:].isdigit()
        else word.strip("(),:;'\"")
        for word in text.split()
    ]
    for number, word in enumerate(words):
        if word.lower() in SET | REMOVE:
            verb = SET if word.lower() in SET else REMOVE
        setting = SETTINGS.get(word) or OPPOSITES.get(word)
        if setting is None:
            continue
        if verb is REMOVE:
            found.append(Edit(word, None))
        elif setting.kind is bool:
            found.append(Edit(word, ()))
        else:
            values = values_of(setting, words[number + 1 :])
            if not values:
                return []
            found.append(Edit(word, values))
    return found


def values_of(setting: Setting, words: Sequence[str]) -> tuple[str, ...]:
    values: list[str] = []
    for word in words:
        if word.startswith("--") or word in PROSE or (values and not setting.is_list):
            break
        try:
            load_value(setting, word)
        except BadValueError:
            break
        values.append(word)
    return tuple(values)


def flags_in(text: str) -> list[str]:
    return re.findall(r"--[\w-]*\w", text)


def words_after(given: Sequence[str], flag: str) -> tuple[str, ...]:
    """Return the values of a flag on the command line."""
    start = given.index(flag) + 1
    end = next((n for n in range(start, len(given)) if given[n].startswith("--")), len(given))
    return tuple(given[start:end])


def without_flag(given: Sequence[str], flag: str) -> list[str]:
    """Return the command line without a flag and its opposite."""
    setting = SETTINGS.get(flag) or OPPOSITES.get(flag)
    names = (
        {flag}
        if setting is None
        else {setting.flag, setting.opposite_flag}
        if setting.kind is bool
        else {flag}
    )
    kept: list[str] = []
    is_dropped = False
    for word in given:
        is_dropped = word in names if word.startswith("--") else is_dropped
        kept += [] if is_dropped else [word]
    return kept


def edited(given: Sequence[str], facts: Facts, edit: Edit) -> tuple[list[str], Facts]:
    if edit.flag == "ranks":
        assert edit.words is not None
        ranks = int(edit.words[0])
        if "--world-size" in given:
            given = [*without_flag(given, "--world-size"), "--world-size", str(ranks)]
        return list(given), dataclasses.replace(facts, world_size=ranks, ranks_per_node=ranks)
    kept = without_flag(given, edit.flag)
    return [*kept, *(() if edit.words is None else (edit.flag, *edit.words))], facts


def problems_of(given: Sequence[str], facts: Facts) -> tuple[Problem, ...]:
    try:
        resolve(parse(given), facts)
    except ConfigError as error:
        return error.problems
    return ()


def broken_alternatives(given: list[str], facts: Facts) -> Iterator[str]:
    """Apply each alternative of each fix, with the first ones of the other fixes; yield those that lead to no run that resolves."""
    problems = problems_of(given, facts)
    for number, problem in enumerate(problems):
        for alternative in alternatives(problem.fix):
            chosen = edits(Problem(problem.text, alternative), given)
            others = [edits(other, given) for other in problems[:number] + problems[number + 1 :]]
            if chosen is None:
                continue
            changed, ranks = given, facts
            for edit in [*chosen, *(edit for other in others for edit in other or ())]:
                changed, ranks = edited(changed, ranks, edit)
            end, steps = end_of(changed, ranks)
            if end == "does not end":
                yield f"{' '.join(given)}: {problem}\n{alternative} -> {end}: {steps[-1]}"


def end_of(given: list[str], facts: Facts, rounds: int = MAX_ROUNDS) -> tuple[str, list[str]]:
    """Apply fixes until the run resolves; return `resolves`, `needs a user` or `does not end`, and the steps."""
    steps: list[str] = []
    for _ in range(rounds + 1):
        problems = problems_of(given, facts)
        if not problems:
            return "resolves", steps
        found = [edits(problem, given) for problem in problems]
        steps += [f"{' '.join(given)}: {problem}" for problem in problems]
        if any(one is None for one in found):
            return "needs a user", steps
        for edit in (edit for one in found for edit in one or ()):
            given, facts = edited(given, facts, edit)
    return "does not end", steps


@pytest.mark.parametrize("is_everyday", [True, nightly(False)])
def test_every_fix_leads_to_a_run_that_resolves(arguments_of, is_everyday):
    """The fix of each rule's first case is tried every day."""
    ends = {
        name: end_of(arguments_of(flags, without), facts or Facts())
        for name, flags, without, facts in cases()
        if not is_everyday or name in TRIED or name.endswith(" 0")
    }
    endless = {name: steps for name, (end, steps) in ends.items() if end == "does not end"}
    assert not endless, "\n\n".join(f"{name}\n" + "\n".join(steps) for name, steps in endless.items())
    open_ended = {name: steps[-1] for name, (end, steps) in ends.items() if end == "needs a user"}
    unexpected = {name: step for name, step in open_ended.items() if name.split()[0] not in NEED_A_USER}
    assert not unexpected, "name a flag with a value in the fix:\n" + "\n".join(unexpected.values())
    assert len(open_ended) < len(ends) / 5


@pytest.mark.nightly
def test_every_alternative_of_a_fix_ends(arguments_of):
    found = [
        wrong
        for _, flags, without, facts in cases()
        for wrong in broken_alternatives(arguments_of(flags, without), facts or Facts())
    ]
    assert not found, "\n\n".join(found)


SIZES = {
    "--num-attention-heads": (1, 2, 3, 4, 6, 8, 12), "--hidden-size": (48, 60, 64, 72, 96), "--num-layers": (1, 3, 6, 8),
    "--ffn-hidden-size": (96, 100, 102), "--group-query-attention --num-query-groups": (1, 2, 3, 4, 6),
    "--tensor-model-parallel-size": (2, 3, 4, 6, 8), "--pipeline-model-parallel-size": (2, 3, 4, 8),
    "--context-parallel-size": (2, 3, 4), "--micro-batch-size": (1, 3, 8), "--global-batch-size": (1, 4, 6, 8, 12),
    "--seq-length": (30, 32, 100), "--num-experts 6 --sequence-parallel --expert-model-parallel-size": (2, 3, 4),
    "--num-experts 4 --moe-ffn-hidden-size 6 --sequence-parallel --expert-tensor-parallel-size": (2, 3, 4),
    "--num-experts 5 --moe-router-num-groups 2 --moe-router-group-topk": (1, 3), "--num-experts 3 --moe-router-topk": (1, 2, 4),
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank": (2, 3), "--padded-vocab-size": (50, 101),
    "--linear-num-value-heads 6 --experimental-attention-variant gdn --linear-attention-freq 2 --linear-num-key-heads": (2, 3, 4),
    "--num-distributed-optimizer-instances": (2, 3), "--rampup-batch-size 2 2": (20, 100), "--eval-global-batch-size": (3, 8),
}  # fmt: skip


@pytest.mark.parametrize("seed", one_in(4, range(4)))
def test_every_alternative_of_a_fix_ends_for_sizes_drawn_at_random(arguments_of, seed):
    """A fix that follows from the numbers of one rule may break another."""
    draw, found = random.Random(seed), []
    for _ in range(15):
        flags = [
            f"{flag} {draw.choice(SIZES[flag])}" for flag in draw.sample(list(SIZES), draw.randint(1, 3))
        ]
        facts = Facts(world_size=draw.choice((1, 2, 3, 4, 6, 8, 12, 16)))
        given = arguments_of(" ".join(flags), "")
        if len(problems_of(given, facts)) <= 2:  # changes for many problems at once may undo one another
            found += broken_alternatives(given, facts)
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("name", ONE_STEP)
def test_the_first_fix_leads_to_a_run_that_resolves(arguments_of, name):
    flags, facts = TRIED[name]
    end, steps = end_of(arguments_of(flags, ONE_STEP[name]), facts or Facts())
    assert (end, len(steps)) == ("resolves", 1), steps


TYPED = [
    ("micro_batch_size: 2, global_batch_size: 4", "--micro-batch-size 8", Facts(world_size=4), "use --micro-batch-size 1"),
    ("micro_batch_size: 8", "--global-batch-size 4", Facts(world_size=4), "use --global-batch-size 32"),
    ("micro_batch_size: 2, global_batch_size: 6", "--micro-batch-size 8", Facts(world_size=4),
     "use --micro-batch-size 2 --global-batch-size 8"),
    ("global_batch_size: 4", "--eval-micro-batch-size 3", None, "use --eval-micro-batch-size 2"),
    ("eval_micro_batch_size: 4", "--global-batch-size 8 --eval-global-batch-size 6", None, "use --eval-global-batch-size 8"),
    ("hidden_size: 96, num_attention_heads: 6", "--global-batch-size 2 --tensor-model-parallel-size 4", Facts(world_size=4),
     "use --tensor-model-parallel-size 2 --micro-batch-size 1"),
    ("tensor_model_parallel_size: 4", "--num-attention-heads 6 --hidden-size 96", Facts(world_size=4),
     "use --num-attention-heads 8"),
    ("hidden_size: 96", "--num-attention-heads 5", None, "use --num-attention-heads 6"),
    ("num_attention_heads: 4", "--hidden-size 98", None, "use --hidden-size 104"),
    ("num_layers: 4", "--pipeline-model-parallel-size 8", Facts(world_size=8), "use --pipeline-model-parallel-size 4"),
    ("pipeline_model_parallel_size: 8", "--num-layers 4", Facts(world_size=8), "use --num-layers 8"),
    ("tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, seq_length: 96", "--context-parallel-size 3", Facts(world_size=8),
     "use --context-parallel-size 2"),
    ("seq_length: 100", "--context-parallel-size 4", Facts(world_size=4), "use --context-parallel-size 2"),
    ("context_parallel_size: 4", "--seq-length 100", Facts(world_size=4), "use --seq-length 104"),
    ("min_lr: 1.0e-4", "--lr 1e-5", None, "use --lr 0.0001"),
    ("lr: 1.0e-4", "--min-lr 1e-3", None, "use --min-lr 0.0001"),
    ("train_iters: 10", "--train-samples 100", None, "remove --train-samples"),
    ("train_samples: 100", "--train-iters 10", None, "remove --train-iters"),
    ("rampup_batch_size: [4, 4, 90], train_samples: 99", "--global-batch-size 10", None, "use --global-batch-size 12"),
    ("global_batch_size: 10, train_samples: 99", "--rampup-batch-size 4 4 90", None, "use --rampup-batch-size 4 2 90"),
]  # fmt: skip
"""Settings of a YAML file, flags that are typed, and the first words of the fix."""


def test_a_fix_says_where_a_yaml_file_has_what_is_to_go(arguments_of, tmp_path):
    (tmp_path / "run.yaml").write_text("training:\n  train_iters: 10\n")
    given = ["--config", str(tmp_path / "run.yaml"), *arguments_of("--train-samples 99", "--train-iters")]
    (fix,) = [problem.fix for problem in problems_of(given, Facts())]
    assert fix == f"remove --train-samples, or --train-iters ({tmp_path}/run.yaml:2)"


@pytest.mark.parametrize(("yaml", "typed", "facts", "first"), TYPED)
def test_a_fix_begins_with_what_the_user_typed(arguments_of, tmp_path, yaml, typed, facts, first):
    names = re.findall(r"(\w+):", yaml)
    without = {f"--{name.replace('_', '-')}" for name in names} | set(re.findall(r"--[\w-]+", typed))
    without |= {"--train-iters"} if "train_samples" in yaml else set()
    (tmp_path / "run.yaml").write_text(f"{{{yaml}}}")
    given = ["--config", str(tmp_path / "run.yaml"), *arguments_of(typed, " ".join(without))]
    fixes = [problem.fix for problem in problems_of(given, facts or Facts())]
    assert fixes
    assert all(re.match(rf"{first}\b", fix) for fix in fixes), fixes


@pytest.mark.parametrize(
    ("fix", "expected"),
    [
        ("use --seq-length 24", [Edit("--seq-length", ("24",))]),
        ("use --tensor-model-parallel-size 4, or --num-attention-heads 8", [Edit("--tensor-model-parallel-size", ("4",))]),
        ("install it, or use --attention-backend auto", [Edit("--attention-backend", ("auto",))]),
        ("add --recompute-method uniform --recompute-num-layers 1, which recomputes every layer",
         [Edit("--recompute-method", ("uniform",)), Edit("--recompute-num-layers", ("1",))]),
        ("remove --bf16, or use another folder", [Edit("--bf16", None)]),
        ("give --num-query-groups, the number of key and value heads", None),
    ],
)  # fmt: skip
def test_edits_are_read_from_a_fix(fix, expected):
    assert edits(Problem("x", fix), []) == expected
