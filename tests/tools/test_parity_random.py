"""`megatrain parity --runs` and `--random`: whole runs are compared, and what differs is shrunk to a minimal pair of commands."""

from __future__ import annotations

import shlex
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from everyday import nightly
from parity_faults import FAULTS

from megatrain.config import ConfigError, Problem
from megatrain.tools.main import main
from megatrain.tools.parity.runs import table as table_module
from megatrain.tools.parity.runs.case import STOPPED, Case, Start, flags_of, merged
from megatrain.tools.parity.runs.compare import RunComparer, Verdict
from megatrain.tools.parity.runs.draw import drawn_words
from megatrain.tools.parity.runs.fixes import fixed_start
from megatrain.tools.parity.runs.options import OPTION_OF, OPTIONS
from megatrain.tools.parity.runs.outcome import Outcome, differences, dry_run_differences
from megatrain.tools.parity.runs.shrink import shrunk, shrunk_words, smallest
from megatrain.tools.parity.runs.table import RUN_ROWS, RunTable, write_corpus
from megatrain.training.trainer import Trainer

FAULT = FAULTS["vocabulary shifted on later tensor ranks"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    write_corpus(made / "data")
    return made


def test_a_word_belongs_to_one_option() -> None:
    assert len(OPTION_OF) == sum(map(len, OPTIONS.values()))


def test_drawn_words_depend_on_the_seed_and_the_number_alone() -> None:
    draws = [drawn_words(3, number) for number in range(20)]
    assert draws == [drawn_words(3, number) for number in range(20)]
    assert len(set(draws)) == 20
    assert draws != [drawn_words(4, number) for number in range(20)]
    assert all(
        {"tp2", "maskends"} <= set(drawn_words(3, number, ("tp2", "maskends"))) for number in range(20)
    )


def test_most_options_are_drawn_and_accepted(folder: Path) -> None:
    comparer = RunComparer(folder / "unused")
    draws = [drawn_words(5, number) for number in range(80)]
    accepted = [words for words in draws if not comparer.refusal(Case.of(words, folder / "data"))]
    assert len(accepted) > 20
    assert len({OPTION_OF[word] for words in accepted for word in words}) > 30
    assert all(1 <= Case.of(words, folder).num_ranks <= 4 for words in accepted)


def test_resolve_accepts_the_fixed_rows(folder: Path) -> None:
    comparer = RunComparer(folder / "unused")
    assert {
        row: comparer.refusal(Case.of(row.split(), folder / "data")) for row in RUN_ROWS
    } == dict.fromkeys(RUN_ROWS, ())


def test_a_case_has_one_process_as_its_reference_and_stops_as_its_words_say(folder: Path) -> None:
    case = Case.of("tp2 dp2 mixtral toone".split(), folder)
    assert (case.reference.num_ranks, case.num_ranks) == (1, 4)
    assert "--tensor-model-parallel-size" not in dict.fromkeys(flag[0] for flag in case.reference.flags)
    first, second = case.starts
    assert (first.num_ranks, first.exit_code) == (4, STOPPED)
    assert (second.num_ranks, second.exit_code) == (1, 0)
    in_bits = Case.of(["dp2", "bf16", "toone"], folder)
    assert in_bits.is_exact
    assert in_bits.reference == in_bits.unbroken
    assert [start.num_ranks for start in in_bits.starts] == [2, 2]


def test_the_last_of_two_equal_flags_counts() -> None:
    assert merged(flags_of("--a 1 --b --a 2")) == (("--a", "2"), ("--b",))


def test_an_unknown_word_prints_the_words(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"tp99: no such word\n  fix: the words are .*maskends"):
        Case.of(["tp99"], folder)


@pytest.mark.parametrize(("culprits", "count"), [({3}, 20), ({3, 11}, 20), (set(range(5)), 5), (set(), 4)])
def test_the_smallest_failing_items_are_the_culprits(culprits: set[int], count: int) -> None:
    assert set(smallest(range(count), lambda items: culprits <= set(items))) == culprits


def test_words_and_flags_shrink_to_what_fails(folder: Path) -> None:
    """The invented fault needs two tensor ranks or more, and a WSD schedule; it does not need its settings."""

    def fails(case: Case) -> bool:
        names = {" ".join(flag) for flag in case.unbroken.flags}
        return case.num_ranks > 1 and {"--lr-decay-style WSD"} <= names

    words = ("qwen", "tp4", "sp", "wsd", "mixtral", "evaluates", "resumes", "zero2")
    few = shrunk_words(words, folder, fails)
    assert set(few) == {"tp2", "wsd"}
    case = shrunk(Case.of(few, folder), fails)
    assert case.shared == (("--lr-decay-style", "WSD"),)
    assert case.layout == ()


FIXES = [
    ("use --seq-length 21, or remove --sequence-parallel", "--seq-length 21 --sequence-parallel"),
    ("remove --sequence-parallel; it needs ranks", "--seq-length 20"),
    ("add --swiglu and --num-layers 2", "--seq-length 20 --sequence-parallel --swiglu --num-layers 2"),
    (
        "use --moe-router-load-balancing-type aux_loss, seq_aux_loss or none",
        "--seq-length 20 --sequence-parallel --moe-router-load-balancing-type aux_loss",
    ),
    ("use --window-size 9,0, --swiglu", "--seq-length 20 --sequence-parallel --window-size 9,0 --swiglu"),
    ("use --moe-layer-freq to choose the layers", None),
    ("give one of them", None),
    ("add --num-experts, or remove --expert-model-parallel-size", None),
]


@pytest.mark.parametrize(("fix", "expected"), FIXES)
def test_a_fix_changes_the_flags_that_it_names(fix: str, expected: str | None) -> None:
    start = Start(flags_of("--seq-length 20 --sequence-parallel"), 1)
    fixed = fixed_start(start, [Problem("wrong", fix)])
    assert (fixed and fixed.flags) == (expected and flags_of(expected))


def test_a_fix_that_is_refused_in_turn_is_a_finding(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = RunTable(folder)
    assert [*table.accepted([("tp3", "sp", "odd")])] == []
    assert table.kinds == {"refused": 1}
    assert table.refused_fixes == {}
    assert table.print_summary()
    with mock.patch.object(table_module, "fixed_start", lambda start, _: start):  # a fix that changes nothing
        assert [*table.accepted([("tp3", "sp", "odd")])] == []
    assert not table.print_summary()
    out = capsys.readouterr().out
    assert "a fix is refused in turn: --sequence-parallel requires --seq-length 20" in out
    assert "torchrun --nproc-per-node 3 pretrain.py" in out
    assert "0 equal, 2 refused, 0 differs, 0 crashes, 0 hangs, 1 fixes refused" in out


OUTCOME = Outcome(
    metrics=[
        {"iteration": 1, "lm_loss": 4.0, "consumed_samples": 8, "global_batch_size": 8, "learning_rate": 0.1},
        {"iteration": 1, "validation": "valid", "loss": 3.0},
    ],
    kinds={"weight": {"w": np.ones(3), "b": np.zeros(2)}, "exp_avg": {"w": np.ones(3), "b": np.zeros(2)}},
    counters={"iteration": 1},
    num_checkpoints=1,
    parameters=(5, 5),
)
DRY_RUN = {
    "model": {"parameters": 5, "active_parameters": 5},
    "timeline": {
        "train_iters": 1, "train_samples": 8, "evaluations": {"count": 1}, "checkpoints": {"count": 1},
        "landmarks": [{"iteration": 1, "lr": 0.1, "global_batch_size": 8, "consumed_samples": 0}],
    },
}  # fmt: skip


def test_equal_outcomes_differ_by_rounding_at_most() -> None:
    noisy = replace(
        OUTCOME,
        metrics=[{**line, "lm_loss": 4.0 + 1e-13} for line in OUTCOME.metrics[:1]] + OUTCOME.metrics[1:],
    )
    assert differences(OUTCOME, noisy, 1e-10) == []
    assert len(differences(OUTCOME, noisy, 0.0)) == 1
    assert list(dry_run_differences(DRY_RUN, OUTCOME)) == []


@pytest.mark.parametrize(("noise", "num_zeros"), [(0.0, 2), (1e-20, 2), (1e-20, 3)])
def test_zeros_are_counted_up_to_gradients_that_are_rounding_errors(noise: float, num_zeros: int) -> None:
    """The moments of `b` say that at most one of its gradients may be zero in one of the runs alone."""

    def outcome(num_zeros: int, noise: float) -> Outcome:
        metrics = [{**OUTCOME.metrics[0], "num_zeros": num_zeros}, *OUTCOME.metrics[1:]]
        moments = OUTCOME.kinds["exp_avg"] | {"b": np.array([noise, 0.0])}
        return replace(OUTCOME, metrics=metrics, kinds=OUTCOME.kinds | {"exp_avg": moments})

    expected = outcome(1, 0.0)
    is_equal = abs(num_zeros - 1) <= (noise > 0)
    assert (differences(expected, outcome(num_zeros, noise), 1e-10) == []) == is_equal
    assert differences(expected, outcome(num_zeros, noise), 0.0)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"metrics": OUTCOME.metrics[:1]}, "1 lines of metrics, not 2"),
        ({"metrics": [OUTCOME.metrics[0], {"iteration": 1, "validation": "valid", "loss": 3.1}]}, "iteration 1 valid: loss 3.1"),
        ({"metrics": [{**OUTCOME.metrics[0], "lm_loss": float("nan")}, OUTCOME.metrics[1]]}, "lm_loss nan, not 4.0"),
        ({"counters": {"iteration": 2}}, "iteration: 2, not 1"),
        ({"parameters": (5, 4)}, "active ones: (5, 4)"),
        ({"kinds": {**OUTCOME.kinds, "weight": {"w": np.ones(3) * 1.1, "b": np.zeros(2)}}}, "weight w: differs by 1.0e-01"),
        ({"kinds": {**OUTCOME.kinds, "exp_avg": {"w": np.ones(3), "b": np.full(2, 1e-3)}}}, "exp_avg b: differs by 1.0e-03"),
        ({"kinds": {**OUTCOME.kinds, "weight": {"w": np.full(3, np.nan), "b": np.zeros(2)}}}, "weight w: differs by nan"),
        ({"kinds": {"weight": OUTCOME.kinds["weight"]}}, "exp_avg: ['b', 'w'] in one of the checkpoints only"),
    ],
)  # fmt: skip
def test_a_difference_is_named(changed: dict[str, object], line: str) -> None:
    assert line in "\n".join(differences(OUTCOME, replace(OUTCOME, **changed), 1e-10))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model", "active_parameters", 4),
        ("timeline", "train_iters", 2),
        ("timeline", "evaluations", {"count": 2}),
        (
            "timeline",
            "landmarks",
            [{"iteration": 1, "lr": 0.2, "global_batch_size": 8, "consumed_samples": 0}],
        ),
    ],
)
def test_a_dry_run_that_does_not_describe_its_run_is_found(part: str, name: str, value: object) -> None:
    dry = {**DRY_RUN, part: {**DRY_RUN[part], name: value}}
    assert len(list(dry_run_differences(dry, OUTCOME))) == 1


@pytest.mark.parametrize(
    "words",
    ["dp2 bf16 llama layers2 chunkedloss", nightly("tp2 sp llama layers2 validsets toone chunkedloss")],
)
def test_equal_runs_and_their_dry_runs_are_equal(folder: Path, words: str) -> None:
    """Whole runs on two ranks that are stopped and resumed: in bf16, to the bit; or in one process, with whole validations."""
    case = Case.of(words.split(), folder / "data")
    assert RunComparer(folder / "equal").compare(case) == Verdict("equal")


def test_a_planted_fault_makes_runs_differ(folder: Path) -> None:
    comparer = RunComparer(folder / "fault", patches=(FAULT.plant,))
    verdict = comparer.compare(Case.of("tp2 llama layers2".split(), folder / "data"), has_dry_runs=False)
    assert verdict.kind == "differs"
    assert verdict.lines[0].startswith("iteration 1: grad_norm")


def test_a_crash_and_a_hang_are_found(folder: Path) -> None:
    def crash() -> AbstractContextManager[object]:
        return mock.patch.object(Trainer, "train", side_effect=RuntimeError("planted"))

    def hang() -> AbstractContextManager[object]:
        return mock.patch.object(Trainer, "train", _sleep)

    case = Case.of("dp2 layers2".split(), folder / "data")
    comparer = RunComparer(folder / "crash", patches=(crash,))
    verdict = comparer.compare(case, has_dry_runs=False)
    assert (verdict.kind, verdict.lines[-1]) == ("crashes", "RuntimeError: planted")
    verdict = replace(comparer, patches=(hang,), timeout_seconds=4.0).compare(case, has_dry_runs=False)
    assert verdict.kind == "hangs"


def _sleep(_: Trainer) -> int:
    time.sleep(60)
    return 0


@pytest.mark.nightly  # a minute; the test of invented faults runs always
def test_a_planted_fault_is_found_and_shrunk_to_a_pair_of_commands(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = RunTable(folder, patches=(FAULT.plant,))
    given = ("tp2", "llama", "layers2", "noworkers")
    drawn = table.accepted(drawn_words(6, number, given) for number in range(20))
    words = next(words for words in drawn if len(words) > 6)
    assert table.run(1, words).kind == "differs"
    assert table.cases == {("tp2",): "differs"}
    out = capsys.readouterr().out
    alone, layout = (line.split(" pretrain.py ") for line in out.splitlines() if " pretrain.py " in line)
    assert (alone[0].strip(), layout[0].strip()) == ("python", "torchrun --nproc-per-node 2")
    own = [word for word in shlex.split(layout[1]) if word not in shlex.split(alone[1])]
    assert own[:1] == ["--tensor-model-parallel-size"]
    assert not table.print_summary()
    assert table.run(2, words).kind == "differs"
    assert "contains the finding tp2: not shrunk" in capsys.readouterr().out


@pytest.mark.nightly
def test_the_command_runs_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--runs", "--layouts", "pp2", "layers2", "maskends", "--output", str(tmp_path)]
    assert main(["parity", *words]) == 0
    assert "1 equal, 0 refused, 0 differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        "--runs --precision fp32",
        "--random 3 --slice 1/2",
        "--runs --device cuda",
    ],
)
def test_flags_without_effect_are_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert f"{flags.split(' --')[1]} has no effect" in error
    assert "fix: leave --" in error
