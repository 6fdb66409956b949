"""Steps that are not finite or spike: what a run does about them, and the record of their samples.

--on-nan, --on-spike    stop: the run ends    skip: the step updates nothing    rewind N: back to a checkpoint, without these samples
<save>/bad_steps.jsonl  one line per such step: iteration, losses, rank and layer if known, samples, files and documents
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatrain.config.errors import MegatrainError
from megatrain.data.pieces import Batches
from megatrain.storage.files import describe_write_error, open_regular

FILE_NAME: Final = "bad_steps.jsonl"
MOST_REWINDS: Final = 10
"""Rewinds of one run; a run that needs more has another problem than single samples."""
_MAX_SAMPLES: Final = 64


class NotFiniteError(MegatrainError):
    """An infinite or NaN loss or gradient norm, on all ranks."""


class SpikeError(NotFiniteError):
    """A spike of the loss or the gradient norm ends the run, on all ranks."""


class RewindError(NotFiniteError):
    """The run returns to a checkpoint, on all ranks.

    Args:
        cause: the error that ends the run if there is no such checkpoint.
        iteration: the bad iteration, whose samples will be skipped.
        distance: least number of iterations to go back.
    """

    def __init__(self, cause: NotFiniteError, *, iteration: int, distance: int) -> None:
        super().__init__(cause.problems[0].text, fix=cause.problems[0].fix)
        self.cause, self.iteration, self.distance = cause, iteration, distance


@dataclass(frozen=True)
class BadStep:
    """A step that is not finite or a spike."""

    kind: str
    """nan or spike."""
    iteration: int
    lm_loss: float
    grad_norm: float
    where: str
    """The first value that was not finite, with its rank and layer, or the size of the spike."""
    first_sample: int
    num_samples: int


def record_bad_step(folder: Path, step: BadStep, action: str, batches: Batches) -> str | None:
    """Append a line to the file in the `--save` folder; return a warning if that fails. `batches` know the documents of a sample."""
    path, count = folder / FILE_NAME, min(step.num_samples, _MAX_SAMPLES)
    documents = [
        {"sample": sample, "file": span.source, "document": span.document}
        for sample in range(step.first_sample, step.first_sample + count)
        for span in batches.spans(sample)
    ]
    line = json.dumps(vars(step) | {"action": action, "documents": documents}) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a") as file:
            file.write(line)
    except OSError as error:
        return f"> WARNING: {describe_write_error(error, path, needed_bytes=len(line))}"
    return None
