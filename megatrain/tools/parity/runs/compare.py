"""Run both runs of a case and judge them.

case ──> refused by `resolve`? ──> dry runs, reference, layout's starts ──> Verdict: equal, refused, differs, crashes or hangs
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from megatrain.config import ConfigError, Problem, parse, resolve
from megatrain.config.environment import LaunchEnvironment
from megatrain.tools.parity.compare import TOLERANCE
from megatrain.tools.parity.measure import chunked_loss
from megatrain.tools.parity.runs.case import Case, Start
from megatrain.tools.parity.runs.outcome import Outcome, differences, dry_run_differences
from megatrain.tools.parity.runs.program import Ended, Patch, run_program
from megatrain.training.launch.facts import gather_facts

Kind = Literal["equal", "refused", "differs", "crashes", "hangs"]
_REFUSED: Final = 2
"""Exit code of a run that was refused before it started."""
_MOST_KEPT: Final = 4
_DRY_RUN: Final = "dry run: "
"""Start of the lines about a dry run."""


@dataclass(frozen=True)
class Verdict:
    """The result of a case."""

    kind: Kind
    lines: tuple[str, ...] = ()
    """The differences, the refusal, or the end of the failed run's output."""

    @property
    def is_finding(self) -> bool:
        return self.kind not in ("equal", "refused")

    @property
    def is_of_dry_run(self) -> bool:
        """True if only a dry run differs from its run."""
        return self.kind == "differs" and all(_DRY_RUN in line for line in self.lines)

    def is_like(self, other: Verdict) -> bool:
        """Return whether both have the same cause, by their kinds and errors."""
        if self.kind == other.kind == "crashes":
            return self.lines[-1].split(":")[0] == other.lines[-1].split(":")[0]
        return self.kind == other.kind and self.is_of_dry_run == other.is_of_dry_run


class _RunError(Exception):
    """A run did not end as expected."""

    def __init__(self, kind: Kind, lines: Sequence[str]) -> None:
        super().__init__(kind)
        self.verdict = Verdict(kind, tuple(lines))


@dataclass
class RunComparer:
    """Compares cases. Keeps the last references, since the steps of a search for the smallest case share them.

    Args:
        folder: folder of the runs; each case replaces the folders of the one before.
        patches: changes of the program in the layout's run.
        timeout_seconds: time after which a run counts as hung.
    """

    folder: Path
    patches: tuple[Patch, ...] = ()
    timeout_seconds: float = 120.0
    _references: dict[tuple[Start, bool], Outcome] = field(default_factory=dict)
    """By start, and whether the loss is computed in chunks."""

    def refusal(self, case: Case) -> tuple[Problem, ...]:
        """Return the problems for which `resolve` refuses one of the starts; nothing is run."""
        for start in (case.reference, *case.starts):
            found = problems_of(start, self.folder / "not-there")
            if found:
                return found
        return ()

    def compare(self, case: Case, *, has_dry_runs: bool = True) -> Verdict:
        """Judge a case; a refused one is not run. Without dry runs it takes less time."""
        problems = self.refusal(case)
        if problems:
            return Verdict("refused", tuple(map(str, problems)))
        try:
            lines = self._compared(case)
            if has_dry_runs and not lines:
                lines = [*self._dry_runs(case)]
        except _RunError as error:
            return error.verdict
        return Verdict("differs" if lines else "equal", tuple(lines))

    def _compared(self, case: Case) -> list[str]:
        expected = self._reference(case)
        save = self.folder / "layout"
        shutil.rmtree(save, ignore_errors=True)
        patches = [*self.patches, *[chunked_loss] * case.has_chunks]
        ended = [self._run(start, save, "layout", patches) for start in case.starts]
        found = Outcome.of(save, ended[-1].outputs[0])
        return differences(expected, found, 0.0 if case.is_exact else TOLERANCE)

    def _reference(self, case: Case) -> Outcome:
        start, has_chunks = key = case.reference, case.is_exact and case.has_chunks
        if key not in self._references:
            save = self.folder / "reference"
            shutil.rmtree(save, ignore_errors=True)
            ended = self._run(start, save, "reference", [chunked_loss] * has_chunks)
            while len(self._references) >= _MOST_KEPT:
                del self._references[next(iter(self._references))]
            self._references[key] = Outcome.of(save, ended.outputs[0])
        return self._references[key]

    def _dry_runs(self, case: Case) -> Iterator[str]:
        """Yield what the dry runs of both runs say and the reference, which equals the layout's run, does not show."""
        unbroken = self._reference(case)
        for name, start in {"reference": case.reference, "layout": case.unbroken}.items():
            for line in dry_run_differences(self._dry_run(start), unbroken):
                yield f"{_DRY_RUN}{name}: {line}"

    def _run(self, start: Start, save: Path, name: str, patches: Sequence[Patch] = ()) -> Ended:
        """Run a start; raise _RunError unless it ends with the expected exit code."""
        ended = run_program(
            start.words(save),
            start.num_ranks,
            self.folder / f"{name}-output",
            patches=patches,
            timeout_seconds=self.timeout_seconds,
        )
        _require(ended, start.exit_code, name)
        return ended

    def _dry_run(self, start: Start) -> dict[str, Any]:
        words = [*start.words(self.folder / "not-there"), "--dry-run", "json"]
        ended = run_program(words, 1, self.folder / "dry-run-output", world_size=start.num_ranks)
        _require(ended, 0, "dry run")
        found: dict[str, Any] = json.loads(ended.outputs[0])
        return found


def problems_of(start: Start, save: Path) -> tuple[Problem, ...]:
    """Return the problems for which a start is refused before any process is started."""
    try:
        request = parse(start.words(save))
        resolve(request, gather_facts(request, LaunchEnvironment(world_size=start.num_ranks)))
    except ConfigError as error:
        return error.problems
    return ()


def _require(ended: Ended, exit_code: int, name: str) -> None:
    if ended.is_late:
        raise _RunError("hangs", [f"{name}: killed at the time limit", *_end_of(ended.outputs[0])])
    if ended.exit_code == exit_code:
        return
    if set(ended.exit_codes) == {_REFUSED}:
        text = ended.outputs[0]
        raise _RunError("refused", [text[text.rfind("error: ") :].removeprefix("error: ").strip()])
    failed = next((text for text in ended.outputs if "Traceback" in text), ended.outputs[0])
    raise _RunError("crashes", [f"{name}: exit codes {list(ended.exit_codes)}", *_end_of(failed)])


def _end_of(text: str) -> list[str]:
    """Return the last lines of an output."""
    return [line for line in text.split("\n") if line.strip()][-6:]
