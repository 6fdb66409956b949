"""Tensor and sequence parallelism: linear layers and embeddings split over the tp group, as autograd functions.

                      between the layers           inside attention and MLP
    without sp        x whole on every rank        columns of the first weight, rows of the second, split by tp
    with sp           x split along the sequence   the same; the sequence is gathered before, reduced and split after

The conjugate pairs (forward / backward): gather / reduce-scatter, copy / all-reduce, reduce-scatter / gather,
all-reduce / copy. At tp 1 all of them return their argument. Weight gradients never reach autograd: they are added
to the views of the gradient buffer, at once or when the schedule says (`PassInfo.compute_weight_gradient`).

Backward pass of a column-parallel layer, where two of its three products hide what travels:

    gather x        |--------|
    dx = dy W       |------------|
    reduce dx                    |----------|
    dW += dy^T x                 |------------|

Sources: Shoeybi et al., arXiv:1909.08053 (tensor), Korthikanti et al., arXiv:2205.05198 (sequence).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.activations import Activation, activate, activate_backward
from megatrain.kernels.column_sums import add_column_sums
from megatrain.kernels.cross_entropy import Rows, cross_entropy_backward, logit_statistics
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.wgrad import accumulate_weight_gradient
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import (
    Transfer,
    all_gather,
    all_reduce,
    begin_all_gather_into,
    begin_all_reduce,
    begin_reduce_scatter_into,
    reduce_scatter,
)
from megatrain.parallel.grid import RankGroup


@dataclass(frozen=True)
class TensorParallel:
    """How the layers of a model are split: over which ranks, and whether the sequence is split between them too."""

    group: RankGroup
    kv: RankGroup
    """Ranks of `group` that hold the same keys and values."""
    sequence_parallel: bool

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def norm_grad_sum(self) -> str | None:
        """`grad_sum_group` of weights that work on a sequence split over the ranks."""
        return self.group.name if self.sequence_parallel and self.size > 1 else None

    def sequence_rows(self, seq_length: int) -> int:
        """Length of the sequence between layers on this rank."""
        return seq_length // self.size if self.sequence_parallel else seq_length

    def first_row(self, rows: int) -> int:
        """Place in the sequence of the first of this rank's `rows` between layers."""
        return self.rank * rows if self.sequence_parallel else 0

    def whole_length(self, rows: int) -> int:
        """Length of the sequence of which this rank holds `rows` between layers."""
        return rows * self.size if self.sequence_parallel else rows


def enter_tp_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Bring the hidden states into a part that is split by tp: [s/tp, b, h] with sp, else [s, b, h] -> [s, b, h]."""
    if tp.size == 1:
        return x
    out: Tensor = _Gather.apply(x, tp) if tp.sequence_parallel else _Copy.apply(x, tp)
    return out


def exit_tp_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Sum the ranks' partial results: [s, b, h] -> [s/tp, b, h] with sp, else [s, b, h]."""
    if tp.size == 1:
        return x
    out: Tensor = _ReduceScatter.apply(x, tp) if tp.sequence_parallel else _Reduce.apply(x, tp)
    return out


class Bias(NamedTuple):
    """The bias of a linear layer, and where its gradient goes (None where no gradients are kept)."""

    value: Tensor
    grad: Tensor | None


def column_linear(
    x: Tensor,
    weight: Tensor,
    weight_grad: Tensor | None,
    tp: TensorParallel,
    info: PassInfo,
    bias: Bias | None = None,
    *,
    recompute_fn: Callable[[], Tensor] | None = None,
) -> Tensor:
    """y = x W^T + bias with the rows of W (columns of the output) split over tp.

    With sp the gathered input is not kept: the backward pass gathers it again.

    Args:
        x: [s/tp, b, h] with sp, else [s, b, h].
        weight: this rank's rows, [o/tp, h]; its gradient is added to `weight_grad` (None where no gradients are kept).
        recompute_fn: gives x to the backward pass, which is not kept then.
    Returns:
        [s, b, o/tp].
    """
    out: Tensor = _ColumnLinear.apply(x, weight, weight_grad, bias, tp, info, recompute_fn)
    return out


def row_linear(
    x: Tensor,
    weight: Tensor,
    weight_grad: Tensor | None,
    tp: TensorParallel,
    info: PassInfo,
    bias: Bias | None = None,
) -> Tensor:
    """y = x W^T + bias with the columns of W split over tp, summed over the ranks: [s, b, i/tp] -> `exit_tp_region`'s shape."""
    return _left(_Linear.apply(x, weight, weight_grad, None, bias if tp.size == 1 else None, info), tp, bias)


def activated_row_linear(
    x: Tensor,
    weight: Tensor,
    weight_grad: Tensor | None,
    activation: Activation,
    tp: TensorParallel,
    info: PassInfo,
    bias: Bias | None = None,
) -> Tensor:
    """`row_linear` of the activation of x, [s, b, f/tp] or behind a gate [s, b, 2 f/tp].

    Where the activation is one fused kernel, its result is not kept: the backward pass forms it again on its way.
    """
    alone = bias if tp.size == 1 else None
    return _left(_Linear.apply(x, weight, weight_grad, activation, alone, info), tp, bias)


def _left(y: Tensor, tp: TensorParallel, bias: Bias | None) -> Tensor:
    """The ranks' parts summed; then the bias, which one rank alone has added in its product."""
    out = exit_tp_region(y, tp)
    if bias is not None and tp.size > 1:
        out = _AddBias.apply(out, bias)
    return out


def vocab_parallel_embedding(
    ids: Tensor, weight: Tensor, weight_grad: Tensor | None, tp: TensorParallel, info: PassInfo
) -> Tensor:
    """Rows of a table whose vocabulary is split over tp.

    Args:
        ids: [s, b].
        weight: this rank's rows, [v/tp, h]; rank r holds the ids from r * v/tp on.
    Returns:
        [s/tp, b, h] with sp, else [s, b, h].
    """
    first = tp.rank * weight.shape[0] if tp.size > 1 else None
    local: Tensor = _Embedding.apply(ids, weight, weight_grad, first, info)
    return exit_tp_region(local, tp)


def replicated_embedding(ids: Tensor, weight: Tensor, weight_grad: Tensor | None, info: PassInfo) -> Tensor:
    """Rows of a table that every rank holds whole: ids [...] -> [..., h]."""
    rows: Tensor = _Embedding.apply(ids, weight, weight_grad, None, info)
    return rows


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return all_gather(x, tp.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grads[0], ctx.tp.group), None


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0].clone(), ctx.tp.group), None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return reduce_scatter(x, tp.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.tp.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:  # noqa: ARG004 (autograd's signature)
        return all_reduce(x.clone(), tp.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None


class _ColumnLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_grad: Tensor | None,
        bias: Bias | None,
        tp: TensorParallel,
        info: PassInfo,
        recompute_fn: Callable[[], Tensor] | None,
    ) -> Tensor:
        ctx.save_for_backward(x if recompute_fn is None else None, weight)
        ctx.weight_grad, ctx.bias, ctx.tp, ctx.info, ctx.recompute_fn = (
            weight_grad,
            bias,
            tp,
            info,
            recompute_fn,
        )
        return _product(all_gather(x, tp.group) if tp.sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        x, weight = ctx.saved_tensors
        tp: TensorParallel = ctx.tp
        dy = grads[0]
        if ctx.recompute_fn is not None:
            x, ctx.recompute_fn = ctx.recompute_fn(), None
        whole = _begin_gather(x, tp)
        dx = _begin_reduction(dy @ weight, tp)
        _form_weight_gradient(ctx.weight_grad, dy, whole.arrived(), ctx.info)
        _sum_bias_gradient(ctx.bias, dy)
        return dx.arrived(), None, None, None, None, None, None


@dataclass(frozen=True)
class _Underway:
    """A tensor that a collective is writing."""

    tensor: Tensor
    transfer: Transfer

    def arrived(self) -> Tensor:
        self.transfer.wait()
        return self.tensor


def _begin_gather(x: Tensor, tp: TensorParallel) -> _Underway:
    """The whole sequence of `x`, as `enter_tp_region` gives it."""
    if tp.size == 1 or not tp.sequence_parallel:
        return _Underway(x, Transfer())
    out = x.new_empty((x.shape[0] * tp.size, *x.shape[1:]))
    return _Underway(out, begin_all_gather_into(out, x.contiguous(), tp.group))


def _begin_reduction(x: Tensor, tp: TensorParallel) -> _Underway:
    """The sum of the ranks' `x`, as `exit_tp_region` gives it; `x` is used up."""
    if tp.size == 1 or not tp.sequence_parallel:
        return _Underway(x, begin_all_reduce(x, tp.group))
    out = x.new_empty((x.shape[0] // tp.size, *x.shape[1:]))
    return _Underway(out, begin_reduce_scatter_into(out, x, tp.group))


class _Linear(Function):
    """Behind an activation or none."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_grad: Tensor | None,
        activation: Activation | None,
        bias: Bias | None,
        info: PassInfo,
    ) -> Tensor:
        y = x if activation is None else activate(x, activation)
        ctx.is_formed_again = activation is not None and is_fused(x)
        ctx.save_for_backward(x, weight, None if ctx.is_formed_again else y)
        ctx.weight_grad, ctx.bias, ctx.activation, ctx.info = weight_grad, bias, activation, info
        return _product(y, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        x, weight, y = ctx.saved_tensors
        dx = grads[0] @ weight
        if ctx.is_formed_again:  # in the memory of what nothing else needs: x goes to no other operation
            y = dx
        if ctx.activation is not None:
            is_again = ctx.is_formed_again
            dx = activate_backward(
                dx, x.detach(), ctx.activation, again=y if is_again else None, uses_up=is_again
            )
        _form_weight_gradient(ctx.weight_grad, grads[0], y, ctx.info)
        _sum_bias_gradient(ctx.bias, grads[0])
        return dx, None, None, None, None, None


class _AddBias(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Bias) -> Tensor:
        ctx.bias = bias
        return x + bias.value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _sum_bias_gradient(ctx.bias, grads[0])
        return grads[0], None


def _product(x: Tensor, weight: Tensor, bias: Bias | None) -> Tensor:
    """x W^T + bias, in one matrix product."""
    if bias is None:
        return x @ weight.t()
    return torch.addmm(bias.value, x.flatten(0, -2), weight.t()).view(*x.shape[:-1], -1)


def _sum_bias_gradient(bias: Bias | None, dy: Tensor) -> None:
    if bias is not None:
        assert bias.grad is not None
        add_column_sums(bias.grad, dy.flatten(0, -2))


def _form_weight_gradient(weight_grad: Tensor, dy: Tensor, x: Tensor, info: PassInfo) -> None:
    info.compute_weight_gradient(
        lambda: accumulate_weight_gradient(weight_grad, dy.flatten(0, -2), x.flatten(0, -2))
    )


class _Embedding(Function):
    """Rows of a part of a table that begins with row `first`, and zeros for ids elsewhere; None: of a whole table."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, weight_grad: Tensor | None, first: int | None, info: PassInfo
    ) -> Tensor:
        is_elsewhere = None
        if first is not None:
            ids = ids - first
            is_elsewhere = (ids < 0) | (ids >= weight.shape[0])
            ids = ids.masked_fill(is_elsewhere, 0)
        ctx.save_for_backward(ids, is_elsewhere)
        ctx.weight_grad, ctx.info = weight_grad, info
        rows = torch.nn.functional.embedding(ids, weight)
        return rows if is_elsewhere is None else rows.masked_fill_(is_elsewhere[..., None], 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None, None]:
        ids, is_elsewhere = ctx.saved_tensors
        weight_grad: Tensor = ctx.weight_grad
        dy = grads[0] if is_elsewhere is None else grads[0].masked_fill(is_elsewhere[..., None], 0)
        dy = dy.to(weight_grad.dtype).flatten(0, -2)
        ctx.info.compute_weight_gradient(lambda: weight_grad.index_add_(0, ids.flatten(), dy))
        return None, None, None, None, None


@dataclass(frozen=True)
class VocabShard:
    """Which ids this rank holds: `rows` of them from `first` on, of which those from `vocab_size` on are padding."""

    group: RankGroup
    rows: int
    vocab_size: int

    @property
    def first(self) -> int:
        return self.group.rank * self.rows

    @property
    def num_real(self) -> int:
        """How many of the rows are ids of the tokenizer."""
        return min(max(self.vocab_size - self.first, 0), self.rows)


class TokenLosses(NamedTuple):
    """Losses, and what their gradient needs; wide [t] but for the columns."""

    losses: Tensor
    """Infinite for a label that is no id of the vocabulary."""
    log_sums: Tensor
    """Logarithm of the sum of the logits' exponentials."""
    rows: Rows
    columns: Tensor
    """Each label's column here; -1 where another rank holds it."""


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, vocab: VocabShard) -> TokenLosses:
    """Loss of each token over the whole vocabulary; uses up `logits`.

    Args:
        logits: this rank's columns, [t, v/tp]; those of padding are left out of the softmax.
        labels: ids, [t], from 0 on.
    """
    local = labels - vocab.first
    columns = local.masked_fill((local < 0) | (local >= vocab.rows), -1)
    rows = logit_statistics(logits, columns, vocab.num_real)
    targets = rows.targets.masked_fill(labels >= vocab.vocab_size, float("-inf"))
    if vocab.group.size == 1:
        log_sums = rows.sums.log() + rows.largest
    else:
        # A rank that holds padding alone has the smallest number as its largest logit, and adds nothing to the sum.
        largest = all_reduce(rows.largest.clone(), vocab.group, "max")
        own = rows.sums * (rows.largest - largest).exp()
        sums, targets = all_reduce(torch.stack((own, targets)), vocab.group)
        log_sums = sums.log() + largest
    return TokenLosses(log_sums - targets, log_sums, rows, columns)


def vocab_parallel_logits_gradient(
    known: TokenLosses,
    token_scale: Tensor,
    vocab: VocabShard,
    dtype: torch.dtype,
    *,
    z_loss_coeff: float = 0.0,
) -> Tensor:
    """((1 + 2 * coefficient * log sum) * p - onehot) * scale of each token, [t, v/tp]; uses up what is known.

    That is the gradient of scale * (loss + coefficient * log sum ** 2).
    """
    share = token_scale * (1 + 2 * z_loss_coeff * known.log_sums) if z_loss_coeff else token_scale
    return cross_entropy_backward(
        known.rows, known.log_sums, known.columns, share, token_scale, vocab.num_real, dtype
    )
