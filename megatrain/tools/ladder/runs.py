"""Finished runs as points of a scaling law.

RUN/metrics.jsonl  tokens, and the loss: of the last evaluation, or else the mean of the last iterations
RUN/config.yaml    settings that must be equal
RUN/iter_NNNNNNN   parameters, and the datasets and tokenizer that were read
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatrain.checkpoint.errors import CheckpointError
from megatrain.checkpoint.find import newest_valid
from megatrain.checkpoint.parts import read_manifest
from megatrain.config.errors import InputError, Problem
from megatrain.tools.ladder.law import MIN_LEVELS, MIN_RUNS, Point
from megatrain.tools.report_data import RunData, read_runs

_EQUAL: Final = ("data.seq_length", "data.split", "training.eval_iters", "optimizer.optimizer")
"""Settings that must be equal, besides datasets and tokenizer: losses do not compare otherwise."""
_SIGNIFICANT: Final = 1.05
"""Ratio from which two sizes or token counts are different levels."""


@dataclass(frozen=True)
class LadderRun:
    """A run, with what its point needs."""

    data: RunData
    parameters: int
    identity: dict[str, Any]
    """Values that must be equal in all runs, by name."""

    @property
    def tokens(self) -> int:
        """Tokens that it was trained on; 0 if they are not known."""
        return int(self.data.summary["tokens"] or 0)

    @property
    def loss(self) -> float | None:
        """Validation loss at the end; the training loss of a run that never evaluates."""
        found = self.data.validations.get("valid")
        loss: float | None = found[-1][1] if found else self.data.summary["loss"]
        return loss

    @property
    def problem(self) -> str | None:
        """The reason why it is no point; None: it is one."""
        done, target = self.data.summary["iterations"], self.data.settings.get("training.train_iters")
        if not isinstance(target, int):
            target = None
        evaluated = self.data.validations.get("valid", [(done, None)])[-1][0]
        if self.data.summary["is_running"]:
            return f"is running, at iteration {done}"
        if target is None or done < target or evaluated < done:
            return f"has not ended: it is at iteration {done} of {target or 'an unknown number'}"
        if self.loss is None or not self.loss > 0 or not self.tokens:
            return "has no finite loss at its end"
        return None

    @property
    def point(self) -> Point:
        """The point of a run without a problem."""
        assert self.loss is not None
        return Point(self.data.name, self.parameters, self.tokens, self.loss)


def read_ladder(folders: Sequence[str]) -> list[LadderRun]:
    """Read runs by their `--save` folders. Raises InputError for one that has no metrics or no checkpoint."""
    return [_run_of(data) for data in read_runs(folders)]


def _run_of(data: RunData) -> LadderRun:
    folder = Path(data.folder)
    try:
        newest = newest_valid(folder)
        manifest = None if newest is None else read_manifest(newest.path)
    except CheckpointError as error:
        raise InputError(error.problems[0].text, fix=f"name other runs than {folder}") from error
    if manifest is None:
        raise InputError(
            f"{folder} has no checkpoint, from which the parameters are counted",
            fix="let the run end with --save, or name other runs",
        )
    datasets = manifest.state.get("datasets", ())
    identity = {
        "the data": [(one["digest"], one["weight"], one["split"]) for one in datasets],
        "the tokenizer": manifest.state.get("tokenizer_fingerprint"),
        "the validation loss": "valid" in data.validations,
    }
    identity |= {path: data.settings.get(path) for path in _EQUAL}
    parameters = sum(math.prod(tensor.shape) for tensor in manifest.model_tensors.values())
    return LadderRun(data, parameters, identity)


def problems(runs: Sequence[LadderRun], *, fits: bool) -> Iterator[Problem]:
    """Yield why the runs do not compare, and with `fits` why they do not determine a law."""
    for run in runs:
        if run.problem is not None:
            yield Problem(
                f"{run.data.name} {run.problem}", f"let it end, or leave out {Path(run.data.folder)}"
            )
    first = runs[0]
    for run in runs[1:]:
        differing = [name for name, value in run.identity.items() if value != first.identity[name]]
        if differing:
            yield Problem(
                f"{run.data.name} and {first.data.name} differ in {' and '.join(differing)}: their losses do not compare",
                "name runs on the same data, with the same tokenizer and the same evaluation",
            )
    if not fits:
        return
    sizes, tokens = (_levels([getattr(run, name) for run in runs]) for name in ("parameters", "tokens"))
    if len(runs) < MIN_RUNS or min(sizes, tokens) < MIN_LEVELS:
        yield Problem(
            f"{len(runs)} runs of {sizes} sizes and {tokens} token counts do not determine E, A, B and two exponents",
            f"name at least {MIN_RUNS} finished runs of {MIN_LEVELS} sizes and {MIN_LEVELS} token counts"
            " (megatrain ladder write makes them), or use megatrain ladder compare",
        )


def _levels(values: Sequence[float]) -> int:
    """Return the number of clearly different values."""
    ascending = sorted(values)
    return 1 + sum(after > _SIGNIFICANT * before for before, after in itertools.pairwise(ascending))
