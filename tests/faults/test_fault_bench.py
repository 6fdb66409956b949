"""A small part of the fault bench, and checks of the bench itself; `scripts/nightly.sh` runs it in full."""

from __future__ import annotations

import json
import random
import re
import runpy
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from everyday import only

from faults.case import PASSED, WrongError, judge, require
from faults.classes import CLASSES
from faults.kills import kills
from faults.mutants import MUTANTS, ROOT
from faults.power import CONTENT_MODES, Record, Recorder
from faults.restarts import JOBS, fault, run_case

COUNTS = {"K": 1, "E": 6, "C": 10, "S": 6, "X": 8}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may read, as some cases do; pytest's are private."""
    with tempfile.TemporaryDirectory(prefix="fault-bench-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("kind", only(set(COUNTS) - {"E"}, COUNTS))
def test_a_part_of_each_class_has_no_failure(folder: Path, kind: str) -> None:
    cases = list(CLASSES[kind](COUNTS[kind], folder, 1000))
    assert len(cases) >= COUNTS[kind]
    assert [case for case in cases if case.problem] == []


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_run_of_another_family_that_is_killed_continues(folder: Path, family: str) -> None:
    cases = list(kills(1, folder, 1001, [family]))
    assert [case for case in cases if case.problem] == []
    assert any(case.outcome.startswith("resumed to the end") for case in cases)


@pytest.mark.nightly
def test_run_time_faults_have_no_failure(folder: Path) -> None:
    assert [case for case in CLASSES["R"](1 << 30, folder) if case.problem] == []


@pytest.mark.parametrize("number", only({0}, range(len(JOBS))))
def test_ranks_go_on_after_others_are_lost(folder: Path, number: int) -> None:
    """The everyday case has two ranks."""
    job = JOBS[number] if number else replace(JOBS[0], num_ranks=2, faults=(fault(1, at=4),))
    case = judge("J", job.name, lambda: run_case(job, folder / "job"), limit_seconds=500)
    assert case.problem is None


@pytest.mark.parametrize(("count", "expected"), [(None, len(JOBS)), (50, 50)])
@pytest.mark.parametrize("num_jobs", [1, 2, 5])
def test_parts_share_the_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_jobs: int, count: int | None, expected: int
) -> None:
    monkeypatch.setattr("faults.restarts.judge", lambda _kind, name, *_, **__: name)
    tasks = runpy.run_path(str(ROOT / "scripts/fault_bench.py"))["_tasks_of"]("J", count, 0, num_jobs)
    names = [name for kind, share, options in tasks for name in CLASSES[kind](share, tmp_path, **options)]
    assert sorted(names) == sorted(f"{JOBS[n % len(JOBS)].name} ({n})" for n in range(expected))


@pytest.mark.nightly
def test_pairs_of_layouts_have_no_failure(folder: Path) -> None:
    assert [case for case in CLASSES["T"](14, folder, 1000) if case.problem] == []


def fails() -> str:
    require(False, "not so")
    return "good"


def hangs() -> str:
    while True:
        pass


@pytest.mark.parametrize(
    ("work", "problem"),
    [
        (lambda: "good", None),
        (fails, "not so"),
        (lambda: str(1 // 0), r"a traceback: ZeroDivisionError: .* \(test_fault_bench\.py:\d+\)"),
        (hangs, r"a hang: no end within 0\.05 s"),
    ],
)
def test_verdicts(work, problem: str | None) -> None:
    case = judge("E", "name", work, limit_seconds=0.05)
    assert (case.outcome == "good") == (problem is None)
    assert problem is None or re.fullmatch(problem, case.problem or "")


def test_a_file_of_cases_keeps_those_that_have_passed_with_this_code(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "scripts/fault_bench.py"))
    run = {"seed": 0, "by": {"code": "1"}}
    case = {"kind": "S", "name": "a", "outcome": "saved", "problem": None, "seconds": 1.0, **run}
    kept = [case, case | {"name": "b"}, case | {"kind": "T", "problem": "of a class that does not run now"}]
    again = [{"problem": "wrong"}, {"outcome": "skipped: no mount"}, {"seed": 1}, {"by": {}}, {"kind": "K"}]
    file = tmp_path / "cases.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in [*kept, *(case | one for one in again)]))
    with file.open("a") as interrupted:
        interrupted.write('{"kind": "S", "na')
    assert script["_kept_lines"](file, ["S", "K"], run) == kept
    assert [json.loads(line) for line in file.read_text().splitlines()] == kept


def test_a_case_that_has_passed_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = judge("S", "name", lambda: "saved", limit_seconds=1.0)
    monkeypatch.setitem(PASSED, ("S", "name"), passed)
    assert judge("S", "name", fails) is passed


def test_each_mutant_fits_the_code() -> None:
    """A mutant whose text is gone would test nothing."""
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.kind for mutant in MUTANTS} == set(CLASSES) - {"T", "R"}
    for mutant in MUTANTS:
        for file, old, new in mutant.edits:
            assert old in (ROOT / "megatrain" / file).read_text(), (mutant.name, old)
            assert old != new


class TestPowerFailures:
    """States that a disk may have after `a/x` and `y` were written, and `a/x` was synced."""

    @pytest.fixture
    def record(self, tmp_path: Path) -> Record:
        disk = Recorder(tmp_path / "source")
        disk.make_folder(disk.root / "a")
        for name, is_synced in (("a/x", True), ("y", False)):
            with disk.create(disk.root / name) as file:
                disk.write(file, bytes([1]) * 1500)
                if is_synced:
                    disk.sync(file)
        disk.rename(disk.root / "y", disk.root / "z")
        return Record(disk.operations)

    def states(self, record: Record, tmp_path: Path, content: str) -> list[dict[str, bytes]]:
        found = []
        for seed in range(40):
            target = tmp_path / f"{content}-{seed}"
            record.rebuild(len(record.operations), target, content, random.Random(seed))
            files = sorted(path for path in target.rglob("*") if path.is_file())
            found.append({str(path.relative_to(target)): path.read_bytes() for path in files})
        return found

    @pytest.mark.parametrize("content", CONTENT_MODES)
    def test_names_are_lost_in_any_order_and_content_only_if_not_synced(
        self, record: Record, tmp_path: Path, content: str
    ) -> None:
        states = self.states(record, tmp_path, content)
        assert {tuple(state) for state in states} == {
            (),
            ("a/x",),
            ("y",),
            ("z",),
            ("a/x", "y"),
            ("a/x", "z"),
        }
        assert {state["a/x"] for state in states if "a/x" in state} == {bytes([1]) * 1500}
        contents = {state[name] for state in states for name in ("y", "z") if name in state}
        expected = {
            "kept": {bytes([1]) * 1500},
            "lost": {b""},
            "zeros": {bytes(1500)},
            "torn": {bytes([1]) * size for size in (0, 512, 1024)},
            "holes": {bytes(1500), bytes([1]) * 1500},
        }
        assert contents == expected[content]

    def test_synced_names_are_never_lost(self, tmp_path: Path) -> None:
        disk = Recorder(tmp_path / "source")
        for name in ("x", "y"):
            with disk.create(disk.root / name) as file:
                disk.sync(file)
            disk.sync_folder(disk.root) if name == "x" else None
        states = self.states(Record(disk.operations), tmp_path, "kept")
        assert {tuple(state) for state in states} == {("x",), ("x", "y")}


def test_a_wrong_load_is_a_failure() -> None:
    with pytest.raises(WrongError, match="not so"):
        fails()
