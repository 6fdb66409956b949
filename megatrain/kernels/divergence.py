"""The Kullback-Leibler divergence of two softmaxes over rows of logits, or over the part of each row that this rank holds.

    logits ──> `statistics`: maxima, sums of exponentials, weighted difference      (over ranks: the largest, and `rescaled` sums)
           ──> `divergences`: losses and log-sum-exps
           ──> `divergence_gradient` with respect to the student's logits, divided by the temperature

On GPUs logits stay in their own dtype, and the first and the last line are one fused kernel each. The references here compute in the
accumulation dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import cross_entropy as fused
from megatrain.kernels.fused.launching import is_fused

_EXCLUDED = -1e30
"""Logit of padding: far below all others, and finite, so that the difference of two is 0."""


def statistics(
    student: Tensor, teacher: Tensor, temperature: float, num_real: int, *, is_reversed: bool
) -> Tensor:
    """Return the largest logits of both, and three sums over the columns, [5, t]; logits [t, v] are divided by the temperature.

    They are the sums of exp(student - largest) and of exp(teacher - largest), and that of the differences of teacher and student,
    weighted by the second exponential (KL(teacher || student)); reversed: of student and teacher, by the first.

    Args:
        num_real: columns from here on are padding.
    """
    if is_fused(student):
        return fused.divergence_statistics(student, teacher, temperature, num_real, is_reversed=is_reversed)
    student, teacher = (_tempered(x, temperature, num_real) for x in (student, teacher))
    largest = torch.stack((student.amax(1), teacher.amax(1)))
    of_student = (student - largest[0, :, None]).exp_()
    of_teacher = (teacher - largest[1, :, None]).exp_()
    sums = (of_student.sum(1), of_teacher.sum(1))
    if is_reversed:
        difference = of_student.mul_(student - teacher).sum(1)
    else:
        difference = of_teacher.mul_(teacher - student).sum(1)
    return torch.stack((*largest, *sums, difference))


def _tempered(logits: Tensor, temperature: float, num_real: int) -> Tensor:
    """Return a copy of logits divided by the temperature, with padding far below them."""
    values = logits.to(accumulation_dtype(logits.dtype), copy=True)
    if temperature != 1.0:
        values /= temperature
    values[:, num_real:] = _EXCLUDED
    return values


def rescaled(found: Tensor, largest: Tensor, *, is_reversed: bool) -> Tensor:
    """Return the sums [3, t] of `statistics` relative to other maxima [2, t], at least as large as theirs."""
    of_student, of_teacher = (found[:2] - largest).exp()
    return found[2:] * torch.stack((of_student, of_teacher, of_student if is_reversed else of_teacher))


def divergences(sums: Tensor, largest: Tensor, *, is_reversed: bool) -> tuple[Tensor, Tensor]:
    """Return the divergence of each row, [t], and the log-sum-exps of both, [2, t], from sums over whole rows."""
    log_sums = sums[:2].log() + largest
    of_student, of_teacher = log_sums
    if is_reversed:
        return sums[2] / sums[0] - of_student + of_teacher, log_sums
    return sums[2] / sums[1] - of_teacher + of_student, log_sums


def divergence_gradient(
    student: Tensor,
    teacher: Tensor,
    log_sums: Tensor,
    losses: Tensor,
    scale: Tensor,
    temperature: float,
    num_real: int,
    *,
    is_reversed: bool,
) -> Tensor:
    """Return the gradient of scale * divergence with respect to the student's logits over the temperature, in their dtype.

    The memory of the teacher's logits may be overwritten with it.

    Args:
        log_sums, losses: of `divergences`.
        scale: [t].
    """
    if is_fused(student):
        arguments = (student, teacher, log_sums, losses, scale, temperature, num_real)
        fused.write_divergence_gradient(*arguments, is_reversed=is_reversed)
        return teacher
    log_student = _tempered(student, temperature, num_real).sub_(log_sums[0, :, None])
    log_teacher = _tempered(teacher, temperature, num_real).sub_(log_sums[1, :, None])
    if is_reversed:
        difference = log_teacher.neg_().add_(log_student).sub_(losses[:, None])
        found = log_student.exp_().mul_(difference)
    else:
        found = log_student.exp_().sub_(log_teacher.exp_())
    return found.mul_(scale[:, None]).to(student.dtype)
