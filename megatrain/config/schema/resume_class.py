"""The class of a setting: the effect of a change between a checkpoint and the run that resumes it.

    safe      a note                   a step computes the same: the parallel layout, intervals, ...
    noted     a note                   later steps may compute something else, as intended: clipping, dropout, batch size, ...
    silent    nothing                  where to start from and where files are, not what is trained
    consent   a problem, unless a flag allows the change
    refused   a problem                such a run cannot use these weights

Files are compared by contents, not by paths (`subjects/resume.py`).
"""

from dataclasses import dataclass
from typing import Any, Final, Literal


@dataclass(frozen=True)
class ResumeClass:
    """Settings whose changes on resume have the same effect."""

    kind: Literal["safe", "noted", "silent", "consent", "refused"]
    reason: str = ""
    """The reason why a change is not safe; follows `cannot change on resume, since `."""
    consent: str = ""
    """The flag that allows a change."""


SHAPE: Final = ResumeClass("refused", "the shape or the meaning of the weights depends on it")
VOCABULARY: Final = ResumeClass("refused", "the meaning of token ids depends on it")
FUNCTION: Final = ResumeClass("consent", "the function that the model computes depends on it", "--finetune")
LOSS: Final = ResumeClass("consent", "the loss that is trained depends on it", "--finetune")
ORDER: Final = ResumeClass("consent", "the order of samples depends on it", "--finetune")
OPTIMIZER_STATE: Final = ResumeClass("consent", "the optimizer state depends on it", "--no-load-optim")
SCHEDULE: Final = ResumeClass(
    "consent", "learning rate and weight decay depend on it", "--override-opt-param-scheduler"
)
STEPS: Final = ResumeClass("noted")
SAFE: Final = ResumeClass("safe")
SILENT: Final = ResumeClass("silent")


# Tests of the stored and the new value of a setting of SHAPE: the weights of one model give those of the other.


def is_turned_on(_: Any, now: Any) -> bool:
    """An untied head is a copy of the embedding, and new biases are 0."""
    return bool(now)


def is_turned_off(_: Any, now: Any) -> bool:
    return not now


def is_decreased(stored: Any, now: Any) -> bool:
    """Layers of multi-token prediction are dropped."""
    return (stored or 0) > (now or 0)


def has_no_position_weights(stored: Any, now: Any) -> bool:
    """RoPE becomes YaRN: only learned positions and relative ones are weights."""
    return not {"learned_absolute", "relative"} & {stored, now}
