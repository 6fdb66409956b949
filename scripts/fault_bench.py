#!/usr/bin/env python3
"""Save, kill, damage and fill: run the fault bench of checkpoints on the CPU, and print one JSON line a case and a table.

    python3 scripts/fault_bench.py                                      all classes in full
    python3 scripts/fault_bench.py --classes E C --count 200 --seed 1   200 cases each of two classes
    python3 scripts/fault_bench.py --output faults.jsonl                append to a file; again: resume after an interruption
    python3 scripts/fault_bench.py --mutants                            faulty copies of the program: each must be caught

The exit code is 1 if a case fails, or a mutant is not caught. docs/reliability.md describes the classes. Volumes that fill up need the right
to mount file systems; without it their cases are skipped, and counted as such. With `--output`, cases that have passed with this code and
seed do not run again, except in K, E and C, whose cases are drawn at random.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Task = tuple[str, int, dict[str, Any]]
"""Class, number of cases, and options of the function that makes them."""
Line = dict[str, Any]
"""A case with the seed and the code that it belongs to, as in the JSON lines."""
SECONDS_OF_PROGRESS = 60.0
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main() -> int:
    """Run the bench; return the exit code."""
    arguments = parsed_arguments()
    memory = Path("/dev/shm")
    parent = arguments.folder or (memory if memory.is_dir() else None)
    with tempfile.TemporaryDirectory(prefix="fault-bench-", dir=parent) as name:
        folder = Path(name)
        folder.chmod(0o755)  # some cases read as another user
        run = run_mutants if arguments.mutants else run_classes
        return run(arguments, folder)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classes", nargs="+", default=list("KRECSTXJ"), choices=list("KRECSTXJ"))
    parser.add_argument("--count", type=int, help="cases of each class, or number of mutants; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of random choices, default 0")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes, default: all cores")
    parser.add_argument(
        "--output", type=Path, help="file to which JSON lines are appended, default: standard output"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder of the checkpoints, default: in memory (/dev/shm)"
    )
    parser.add_argument("--mutants", action="store_true", help="check the bench instead of the program")
    return parser.parse_args()


def run_classes(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the classes in forked processes, and print the table."""
    from faults.case import PASSED, Case
    from faults.classes import CLASSES

    from megatrain.training.launch.agreement import identity

    start = time.monotonic()
    run = {"seed": arguments.seed, "by": identity()}
    lines = arguments.output or folder / "cases.jsonl"
    for line in _kept_lines(lines, arguments.classes, run):
        if line["kind"] in arguments.classes:
            PASSED[line["kind"], line["name"]] = Case(**{name: line[name] for name in Case.__annotations__})
    print(f"{len(PASSED)} cases have passed before", file=sys.stderr)
    tasks = [
        task
        for kind in CLASSES
        if kind in arguments.classes
        for task in _tasks_of(kind, arguments.count, arguments.seed, arguments.jobs)
    ]
    num_failed = _run_tasks(tasks, arguments, folder, lines, run)
    cases = [case for case in _read_lines(lines) if case["kind"] in arguments.classes]
    if arguments.output is None:
        sys.stdout.write(lines.read_text())
    print(f"\n{table(cases)}\n{time.monotonic() - start:.0f} s with {arguments.jobs} processes")
    for case in (case for case in cases if case["problem"]):
        print(f"FAILED {case['kind']} {case['name']}: {case['problem']}")
    if num_failed:
        print(f"{num_failed} processes of the bench ended before their last case")
    return 1 if num_failed or any(case["problem"] for case in cases) else 0


def _kept_lines(path: Path, classes: Sequence[str], run: Line) -> list[Line]:
    """Remove the lines of `classes` whose cases must run again from a file; return the others."""
    from faults.classes import RANDOM

    def is_kept(line: Line) -> bool:
        is_same = line["kind"] not in RANDOM and {name: line[name] for name in run} == run
        has_passed = line["problem"] is None and not line["outcome"].startswith("skipped")
        return line["kind"] not in classes or (is_same and has_passed)

    kept = list(filter(is_kept, _read_lines(path)))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text("".join(json.dumps(line) + "\n" for line in kept))
    new.replace(path)
    return kept


def _read_lines(path: Path) -> list[Line]:
    """Return the whole lines of a file; it may be missing, and another process may write its last line."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _tasks_of(kind: str, count: int | None, seed: int, num_jobs: int) -> Iterator[Task]:
    """Yield the tasks that share the cases of a class."""
    from faults.classes import FULL, LISTED, RANDOM

    count = count or FULL[kind]
    parts = num_jobs if kind in RANDOM + LISTED else 1
    for part in range(parts):
        share = count // parts + (part < count % parts)
        if share:
            own = {"seed": seed, "part": (part, parts)} if kind in LISTED else {"seed": seed + part}
            yield kind, share, own


def _run_tasks(tasks: list[Task], arguments: argparse.Namespace, folder: Path, lines: Path, run: Line) -> int:
    """Run tasks, each in a process, and report progress; return how many processes failed."""
    waiting, num_running, num_failed = list(enumerate(tasks)), 0, 0
    reported = time.monotonic()
    while waiting or num_running:
        while waiting and num_running < arguments.jobs:
            number, task = waiting.pop(0)
            if os.fork() == 0:
                _run_task(*task, folder / str(number), lines, run)
            num_running += 1
        process, status = os.waitpid(-1, os.WNOHANG)
        num_running -= process != 0
        num_failed += status != 0
        if process == 0:
            time.sleep(0.2)
        if time.monotonic() - reported > SECONDS_OF_PROGRESS:
            reported = time.monotonic()
            counts = Counter(line["kind"] for line in _read_lines(lines))
            print(time.strftime("%H:%M"), *(f"{kind} {n}" for kind, n in counts.items()), file=sys.stderr)
    return num_failed


def _run_task(kind: str, count: int, options: dict[str, Any], folder: Path, lines: Path, run: Line) -> None:
    """Run the cases of a task in this forked process, and append a line for each."""
    from faults.case import PASSED
    from faults.classes import CLASSES

    code = 1
    try:
        folder.mkdir()
        with lines.open("a", buffering=1) as file, (folder.parent / f"{folder.name}.log").open("w") as log:
            os.dup2(log.fileno(), 1)  # the output of runs
            for case in CLASSES[kind](count, folder, **options):
                if (case.kind, case.name) in PASSED:
                    continue
                file.write(json.dumps(dataclasses.asdict(case) | run) + "\n")
                if case.problem:
                    print(f"FAILED {case.kind} {case.name}: {case.problem}", file=sys.stderr)
        code = 0
    except Exception:  # noqa: BLE001 (the parent counts it)
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def table(cases: list[dict[str, Any]]) -> str:
    """Return the counts of outcomes by class, as a table."""
    from faults.classes import TITLES

    return "\n".join(_rows(cases, TITLES))


def _rows(cases: list[dict[str, Any]], titles: dict[str, str]) -> Iterator[str]:
    yield f"{'class':<20} {'cases':>6} {'failed':>6} {'s each':>7}  outcome"
    for kind, title in titles.items():
        own = [case for case in cases if case["kind"] == kind]
        if not own:
            continue
        failed = sum(case["problem"] is not None for case in own)
        seconds = sum(case["seconds"] for case in own) / len(own)
        yield f"{f'{kind}: {title}':<20} {len(own):>6} {failed:>6} {seconds:>7.3f}"
        for outcome, count in Counter(case["outcome"] or "FAILED" for case in own).most_common():
            yield f"{'':<20} {count:>6} {'':>6} {'':>7}  {outcome}"


def run_mutants(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the bench on faulty copies of the program; return 0 if each is caught and the unchanged copies pass."""
    from faults.mutants import MUTANTS, check_mutants

    chosen = [mutant for mutant in MUTANTS if mutant.kind in arguments.classes][: arguments.count]
    missed = []
    for caught in check_mutants(folder, chosen, arguments.jobs):
        is_missed = not caught.case
        missed += [caught.mutant] * is_missed
        line = dataclasses.asdict(caught) | {"is_caught": not is_missed}
        print(json.dumps(line), flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutants are caught")
    for name in missed:
        print(f"NOT CAUGHT {name}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
