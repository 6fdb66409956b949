"""Tensor and sequence parallelism: linear layers, embeddings and the cross-entropy split over the tp group.

                      between the layers            inside attention and MLP
    without sp        x is replicated               columns of the first weight, rows of the second, split by tp
    with sp           x is split by the sequence    the same; the sequence is gathered before, reduced and split after

Conjugate pairs (forward / backward): all-gather / reduce-scatter, copy / all-reduce, and the same two reversed. At tp 1
they return their argument. Weight gradients bypass autograd: they are accumulated into views of the gradient buffer, at
once or when the schedule says so (`PassInfo.compute_weight_gradient`).

Backward pass of a column-parallel layer; two of its three GEMMs hide communication:

    gather x        |--------|
    dx = dy W       |------------|
    reduce dx                    |----------|
    dW += dy^T x                 |------------|

Sources: Shoeybi et al., arXiv:1909.08053 (tensor), Korthikanti et al., arXiv:2205.05198 (sequence).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.activations import Activation, activate, activate_backward
from megatrain.kernels.conjugate import Conjugate
from megatrain.kernels.cross_entropy import LogitStatistics, cross_entropy_backward, logit_statistics
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.linear import accumulate_weight_gradient, linear
from megatrain.kernels.sums import ColumnSums, add_column_sums
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import (
    Transfer,
    all_gather,
    all_reduce,
    begin_all_gather,
    begin_all_reduce,
    begin_reduce_scatter,
    reduce_scatter,
)
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_overlap import gemms
from megatrain.parallel.tensor_overlap.peer_memory import PeerMemory
from megatrain.parallel.tensor_overlap.terms import PendingTerm


@dataclass(frozen=True)
class TensorParallel:
    """The ranks over which layers are split."""

    group: RankGroup
    kv: RankGroup
    """Ranks of `group` with the same keys and values."""
    sequence_parallel: bool
    """The sequence is split over `group` between layers."""
    peers: PeerMemory | None = None
    """Memory for sends that GEMMs overlap (`sequence_parallel`, size above 1); None: layers use collectives."""
    halves_gradients: bool = False  # True: see `gemms.first_half`

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def norm_grad_sums(self) -> tuple[str, ...]:
        """`grad_sum_groups` of weights that are applied to a split sequence."""
        return (self.group.name,) if self.sequence_parallel and self.size > 1 else ()

    def sequence_rows(self, seq_length: int) -> int:
        """Return the length of this rank's part of the sequence between layers."""
        return seq_length // self.size if self.sequence_parallel else seq_length

    def first_row(self, rows: int) -> int:
        """Return the position in the sequence of the first of this rank's `rows` between layers."""
        return self.rank * rows if self.sequence_parallel else 0

    def full_length(self, rows: int) -> int:
        """Return the length of the sequence from this rank's `rows` between layers."""
        return rows * self.size if self.sequence_parallel else rows


Map = Callable[[Tensor], Tensor]
_GroupFn = Callable[[Tensor, RankGroup], Tensor]


def enter_tp_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return the whole sequence on every rank: [s/tp, b, h] with sp, else [s, b, h] -> [s, b, h]."""
    return all_gather_rows(x, tp.group) if tp.sequence_parallel else conjugate(x, tp.group, _copy, _sum)


def exit_tp_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Sum the ranks' partial results: [s, b, h] -> [s/tp, b, h] with sp, else [s, b, h]."""
    return reduce_scatter_rows(x, tp.group) if tp.sequence_parallel else conjugate(x, tp.group, _sum, _copy)


def all_gather_rows(x: Tensor, group: RankGroup) -> Tensor:
    """Concatenate the ranks' rows, differentiably: [n, ...] -> [n * size, ...]."""
    return conjugate(x, group, all_gather, reduce_scatter)


def reduce_scatter_rows(x: Tensor, group: RankGroup) -> Tensor:
    """Sum over the ranks and keep this rank's rows, differentiably: [n * size, ...] -> [n, ...]."""
    return conjugate(x, group, reduce_scatter, all_gather)


def conjugate(x: Tensor, group: RankGroup, forward_fn: _GroupFn, backward_fn: _GroupFn) -> Tensor:
    """Apply `forward_fn` to x, and `backward_fn` to the gradient of the result; return x if the group has one rank."""
    if group.size > 1:
        x = Conjugate.apply(lambda x: forward_fn(x, group), lambda dy: backward_fn(dy, group), x)
    return x


class Bias(NamedTuple):
    """The bias of a linear layer and its gradient buffer (None where no gradients are kept)."""

    value: Tensor
    grad: Tensor | None
    dy_sums: ColumnSums | None = None


def column_linear(
    x: Tensor,
    weight: Tensor,
    weight_grad: Tensor | None,
    tp: TensorParallel,
    info: PassInfo,
    bias: Bias | None = None,
    *,
    recompute_fn: partial[Tensor] | None = None,
    dx_term: PendingTerm | None = None,
) -> Tensor:
    """y = x W^T + bias with the rows of W (columns of the output) split over tp.

    With sp the gathered input is not kept: the backward pass gathers it again.

    Args:
        x: [s/tp, b, h] with sp, else [s, b, h].
        weight: this rank's rows, [o/tp, h]; its gradient is added to `weight_grad` (None where no gradients are kept).
        recompute_fn: returns x in the backward pass from its one argument, which is kept in place of x.
        dx_term: receives a term of the gradient of x, which the backward pass of the operation before has to add.
    Returns:
        [s, b, o/tp].
    """
    out: Tensor = _ColumnLinear.apply(x, weight, weight_grad, bias, tp, info, recompute_fn, dx_term)
    return out


def row_linear(
    x: Tensor,
    weight: Tensor,
    weight_grad: Tensor | None,
    tp: TensorParallel,
    info: PassInfo,
    bias: Bias | None = None,
    *,
    activation: Activation | None = None,
    recompute_fn: partial[Tensor] | None = None,
    returns_partial_sums: bool = False,
) -> Tensor:
    """y = activation(x) W^T + bias with the columns of W split over tp, summed over the ranks.

    Args:
        x: [s, b, i/tp], or [s, b, 2 i/tp] with a gated activation.
        weight: this rank's columns, [o, i/tp].
        recompute_fn: returns x, of no activation, in the backward pass from its one argument, which is kept in place of x.
        returns_partial_sums: with overlapped GEMMs and no bias, return the terms of the sum, which the next send but one overwrites.
    Returns:
        [s/tp, b, o] with sp, else [s, b, o]; terms have a dimension of ranks before these.
    """
    fused_bias = bias if tp.size == 1 else None
    out: Tensor = _Linear.apply(
        x, weight, weight_grad, activation, fused_bias, tp, info, recompute_fn, returns_partial_sums
    )
    out = exit_tp_region(out, tp) if tp.peers is None else out
    if bias is not None and tp.size > 1:
        out = AddBias.apply(out, bias)
    return out


def vocab_parallel_embedding(
    ids: Tensor, weight: Tensor, weight_grad: Tensor | None, tp: TensorParallel, info: PassInfo
) -> Tensor:
    """Look up rows of a table whose vocabulary is split over tp.

    Args:
        ids: [s, b].
        weight: this rank's rows, [v/tp, h]; rank r holds the ids from r * v/tp on.
    Returns:
        [s/tp, b, h] with sp, else [s, b, h].
    """
    first = tp.rank * weight.shape[0] if tp.size > 1 else None
    return exit_tp_region(_Embedding.apply(ids, weight, weight_grad, first, info), tp)


def replicated_embedding(ids: Tensor, weight: Tensor, weight_grad: Tensor | None, info: PassInfo) -> Tensor:
    """Look up rows of a table that every rank holds: ids [...] -> [..., h]."""
    rows: Tensor = _Embedding.apply(ids, weight, weight_grad, None, info)
    return rows


def _copy(x: Tensor, group: RankGroup) -> Tensor:  # noqa: ARG001 (the signature of a collective)
    return x.view_as(x)


def _sum(x: Tensor, group: RankGroup) -> Tensor:
    return all_reduce(x.clone(), group)


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
        recompute_fn: partial[Tensor] | None,
        dx_term: PendingTerm | None,
    ) -> Tensor:
        kept = x if recompute_fn is None else recompute_fn.args[0]
        ctx.save_for_backward(None if weight_grad is None else kept, weight)  # only weight gradients read x
        ctx.weight_grad, ctx.bias, ctx.tp, ctx.info = weight_grad, bias, tp, info
        ctx.recompute_fn, ctx.dx_term = recompute_fn and recompute_fn.func, dx_term
        if tp.peers is not None:
            return gemms.gathered_gemm(x, weight.t(), tp.peers, bias and bias.value)
        return linear(all_gather(x, tp.group) if tp.sequence_parallel else x, weight, bias and bias.value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        tp: TensorParallel = ctx.tp
        dy, peers = grads[0], tp.peers
        full_x, gather = None, Transfer()
        if x is not None:
            x = x if ctx.recompute_fn is None else ctx.recompute_fn(x)
            full_x, gather = begin_gather(x, tp) if peers is None else gemms.begin_gather(x, peers)
        dx = torch.matmul(dy, weight)
        dx, reduction = gemms.begin_reduction(dx, peers, ctx.dx_term) if peers else begin_reduction(dx, tp)
        gather.wait()
        if full_x is not None:
            x = _until_accumulated(full_x, tp, ctx.info)
            halved = peers if tp.halves_gradients and ctx.info.deferred is None else None
            grad, rows = gemms.first_half(ctx.weight_grad, dy, x, halved) if halved else (ctx.weight_grad, dy)
            _accumulate_weight_gradient(grad, rows, x, ctx.info, may_be_late=tp.size == 1)
        accumulate_bias_gradient(ctx.bias, dy)
        reduction.wait()
        return dx, *[None] * 7


def begin_gather(x: Tensor, tp: TensorParallel) -> tuple[Tensor, Transfer]:
    """Begin what `enter_tp_region` does forwards."""
    if tp.size == 1 or not tp.sequence_parallel:
        return x, Transfer()
    return begin_all_gather(x, tp.group)


def begin_reduction(x: Tensor, tp: TensorParallel) -> tuple[Tensor, Transfer]:
    """Begin what `enter_tp_region` does backwards; overwrites `x`."""
    if tp.size == 1 or not tp.sequence_parallel:
        return x, begin_all_reduce(x, tp.group)
    return begin_reduce_scatter(x, tp.group)


class _Linear(Function):
    """A linear layer of this rank's columns, applied to an activation or to x itself; overlapped, also its region's exit."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_grad: Tensor | None,
        activation: Activation | None,
        bias: Bias | None,
        tp: TensorParallel,
        info: PassInfo,
        recompute_fn: partial[Tensor] | None,
        returns_partial_sums: bool,
    ) -> Tensor:
        y = x if activation is None else activate(x, activation)
        ctx.is_recomputed = activation is not None and activation.is_recomputed
        ctx.recompute_fn = recompute_fn and recompute_fn.func
        kept_x = x if activation is not None else recompute_fn and recompute_fn.args[0]
        keeps_y = weight_grad is not None and recompute_fn is None and not ctx.is_recomputed
        ctx.save_for_backward(kept_x, weight, y if keeps_y else None)  # only weight gradients read y
        ctx.weight_grad, ctx.bias, ctx.activation, ctx.tp, ctx.info = weight_grad, bias, activation, tp, info
        ctx.returns_partial_sums = returns_partial_sums
        if tp.peers is not None:
            return gemms.gemm_reduce_scatter(
                y, weight.t(), tp.peers, returns_partial_sums=returns_partial_sums
            )
        return linear(y, weight, bias and bias.value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w, y = ctx.saved_tensors
        peers, dy = ctx.tp.peers, grads[0][0] if ctx.returns_partial_sums else grads[0]
        dy, dx = (dy, torch.matmul(dy, w)) if peers is None else gemms.all_gather_gemm(dy, w, peers)
        if ctx.is_recomputed:  # y takes the memory of dx, and dx below that of x: nothing else reads them
            y = dx
        elif ctx.recompute_fn is not None:
            y = ctx.recompute_fn(x)
        if ctx.activation is not None:
            out = y if ctx.is_recomputed else None
            dx = activate_backward(dx, x.detach(), ctx.activation, recomputed=out, overwrites_x=is_fused(x))
        if ctx.weight_grad is not None:
            rows = _until_accumulated(dy, ctx.tp, ctx.info)
            _accumulate_weight_gradient(ctx.weight_grad, rows, y, ctx.info, may_be_late=ctx.tp.size == 1)
        accumulate_bias_gradient(ctx.bias, dy)
        return dx, *[None] * 8


class AddBias(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Bias) -> Tensor:
        ctx.bias = bias
        return x + bias.value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        accumulate_bias_gradient(ctx.bias, grads[0])
        return grads[0], None


def accumulate_bias_gradient(bias: Bias | None, dy: Tensor) -> None:
    if bias is None:
        return
    parts = bias.dy_sums.take() if bias.dy_sums is not None else ()
    if bias.grad is not None:
        parts = parts or (dy.flatten(0, -2),)
        for grad, x in zip(bias.grad.split([x.shape[1] for x in parts]), parts, strict=True):
            add_column_sums(grad, x)


def _accumulate_weight_gradient(
    weight_grad: Tensor | None, dy: Tensor, x: Tensor, info: PassInfo, **when: bool
) -> None:
    rows = dy.flatten(0, -2), x.flatten(0, -2)
    info.compute_weight_gradient(lambda: accumulate_weight_gradient(weight_grad, *rows), **when)


def _until_accumulated(rows: Tensor, tp: TensorParallel, info: PassInfo) -> Tensor:
    """Copy gathered rows that a later send may overwrite before their weight gradient is computed."""
    return rows.clone() if tp.peers is not None and info.deferred is not None else rows


class _Embedding(Function):
    """Rows of the part of a table that begins at row `first`, zeros for other ids; None: the whole table."""

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
    """This rank's part of the vocabulary: `rows` ids from `first` on; ids from `vocab_size` on are padding."""

    group: RankGroup
    rows: int
    vocab_size: int

    @property
    def first(self) -> int:
        return self.group.rank * self.rows

    @property
    def num_real(self) -> int:
        """Number of rows that are ids of the tokenizer."""
        return min(max(self.vocab_size - self.first, 0), self.rows)


class TokenLosses(NamedTuple):
    """Losses and what their gradient needs; [t] in the accumulation dtype unless noted."""

    losses: Tensor
    """Infinite for a label outside the vocabulary."""
    log_sums: Tensor
    """Log-sum-exp of the logits."""
    stats: LogitStatistics
    columns: Tensor
    """Each label's column on this rank, int64; -1 if another rank holds it."""


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, vocab: VocabShard) -> TokenLosses:
    """Return each token's loss over the whole vocabulary; overwrites `logits` and sends three numbers per token.

    Args:
        logits: this rank's columns, [t, v/tp]; the softmax excludes padding.
        labels: ids from 0 on, [t].
    """
    local = labels - vocab.first
    columns = local.masked_fill((local < 0) | (local >= vocab.rows), -1)
    stats = logit_statistics(logits, columns, vocab.num_real)
    targets = stats.target_logits.masked_fill(labels >= vocab.vocab_size, float("-inf"))
    if vocab.group.size == 1:
        log_sums = stats.sum_exp.log() + stats.max_logits
    else:
        # On a rank with padding only, the largest logit is the smallest number, and its sum adds nothing.
        largest = all_reduce(stats.max_logits.clone(), vocab.group, "max")
        own = stats.sum_exp * (stats.max_logits - largest).exp()
        sums, targets = all_reduce(torch.stack((own, targets)), vocab.group)
        log_sums = sums.log() + largest
    return TokenLosses(log_sums - targets, log_sums, stats, columns)


def vocab_parallel_logits_gradient(
    known: TokenLosses,
    token_scale: Tensor,
    vocab: VocabShard,
    dtype: torch.dtype,
    *,
    z_loss_coeff: float = 0.0,
) -> Tensor:
    """Return the gradient of token_scale * (loss + z_loss_coeff * log_sum ** 2), [t, v/tp]; overwrites `known`."""
    scale = token_scale * (1 + 2 * z_loss_coeff * known.log_sums) if z_loss_coeff else token_scale
    stats, num_real = known.stats, vocab.num_real
    return cross_entropy_backward(stats, known.log_sums, known.columns, scale, token_scale, num_real, dtype)
