"""The Kullback-Leibler divergence of two softmaxes over rows of logits, or over the part of each row that this rank holds.

    logits ──> `tempered`: divided by the temperature         ──> maxima           (over ranks: the largest)
           ──> `divergence_sums`: exponentials and difference ──> losses           (over ranks: their sum)
           ──> `divergence_gradient` with respect to the student's logits

All compute in the accumulation dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype

_EXCLUDED = -1e30
"""Logit of padding: far below all others, and finite, so that the difference of two is 0."""


def tempered(logits: Tensor, temperature: float, num_real: int) -> Tensor:
    """Return a copy of logits [t, v] divided by the temperature; columns from `num_real` on are padding."""
    values = logits.to(accumulation_dtype(logits.dtype), copy=True)
    if temperature != 1.0:
        values /= temperature
    values[:, num_real:] = _EXCLUDED
    return values


def divergence_sums(student: Tensor, teacher: Tensor, largest: Tensor, *, is_reversed: bool) -> Tensor:
    """Return sums over the columns of tempered logits [t, v], as [3, t].

    They are the sums of exp(student - largest) and of exp(teacher - largest), and that of the differences of teacher and student,
    weighted by the second exponential (KL(teacher || student)); reversed: of student and teacher, by the first.

    Args:
        largest: the largest logits of the whole rows of both, [2, t].
    """
    of_student = (student - largest[0, :, None]).exp_()
    of_teacher = (teacher - largest[1, :, None]).exp_()
    sums = (of_student.sum(1), of_teacher.sum(1))
    if is_reversed:
        difference = of_student.mul_(student - teacher).sum(1)
    else:
        difference = of_teacher.mul_(teacher - student).sum(1)
    return torch.stack((*sums, difference))


def divergences(sums: Tensor, largest: Tensor, *, is_reversed: bool) -> tuple[Tensor, Tensor]:
    """Return the divergence of each row, [t], and the log-sum-exps of both, [2, t], from sums over whole rows."""
    log_sums = sums[:2].log() + largest
    of_student, of_teacher = log_sums
    if is_reversed:
        return sums[2] / sums[0] - of_student + of_teacher, log_sums
    return sums[2] / sums[1] - of_teacher + of_student, log_sums


def divergence_gradient(
    student: Tensor, teacher: Tensor, log_sums: Tensor, losses: Tensor, scale: Tensor, *, is_reversed: bool
) -> Tensor:
    """Return the gradient of scale * divergence with respect to the tempered logits of the student; overwrites both.

    Args:
        log_sums, losses: of `divergences`.
        scale: [t].
    """
    log_student, log_teacher = student.sub_(log_sums[0, :, None]), teacher.sub_(log_sums[1, :, None])
    if is_reversed:
        difference = log_teacher.neg_().add_(log_student).sub_(losses[:, None])
        return log_student.exp_().mul_(difference).mul_(scale[:, None])
    return log_student.exp_().sub_(log_teacher.exp_()).mul_(scale[:, None])
