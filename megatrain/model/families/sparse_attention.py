"""DeepSeek sparse attention (DSA): latent attention to the keys that an indexer selects for each query.

norm ─┬─ latents ── up-projection ── queries, keys, values ──┬──────────── core attention ── projection ── output
      │      └─ latent of queries ─┐                          └ probabilities ┐       │
      └────────────────────────────┴─ indexer ── scores ─┬─ divergence (loss) ┘       │
                                                         └─ top k keys of a query ────┘

The indexer reads inputs without their gradient, and its loss alone trains it:

    score of query s and key t = sum over heads h of weight[s, h] * relu(q[s, h] . k[t])
    loss = mean over queries of KL(mean over heads of attention probabilities || softmax of scores)

    over tp    every rank computes the indexer of its rows (sp) or of all, and all scores; probabilities are summed over the ranks

Scores and masks of all pairs are in memory for a few queries at a time; the mask of selected keys is kept, a byte a pair.

Source: DeepSeek-V3.2-Exp, section 2.1; tensors and loss are those of Megatron-LM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatrain.config.model_spec.attention import IndexerSpec, SparseAttentionSpec
from megatrain.kernels.attention.masked import eager_masked_attention, masked_attention
from megatrain.kernels.conjugate import Conjugate
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.moe.routing_losses import add_loss
from megatrain.model import functions
from megatrain.model.families.masked_attention import MaskedAttention
from megatrain.model.implementations.module_protocols import Pointwise
from megatrain.model.latent_attention import Heads, Latents, UpProjection, latent_norm
from megatrain.model.layer import branch_output
from megatrain.model.layer_context import LayerContext
from megatrain.model.layouts import norm_weights
from megatrain.model.recompute import RecomputedModule, discarded
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.context.latent_context import gather_latents

_PAIRS = 1 << 24
"""Scores of the indexer's heads in memory at a time."""
_EPSILON = 1e-10
"""Added to probabilities before their logarithm."""

Target = Callable[[slice, Tensor], Tensor]
"""Maps queries, and the keys [b, rows, keys] to compare, to the distribution that the indexer learns, [b, rows, keys]."""


class SparseAttention(nn.Module):
    """Sparse attention over this rank's heads, from the norm to the output of the branch."""

    def __init__(self, spec: SparseAttentionSpec, context: LayerContext) -> None:
        super().__init__()
        assert spec.latent is not None
        linears, sizes = context.linears(spec), spec.latent
        rank, builder, norms = sizes.query_rank, context.builder, latent_norm(spec, context)
        self.norm = builder.residual_norm(context.branch_norm(spec))
        self.down = context.replicated_linear(linears["kv_down" if rank is None else "q_down"], None)
        self.sizes = [*([] if rank is None else [rank]), sizes.kv_rank, sizes.qk_rope_head_dim]
        self.query_norm: Pointwise | None = None
        # Apart from the up-projection: the indexer reads its output too.
        if rank is not None and spec.qk_norm == "latent":
            weights = norm_weights(f"{context.name(spec)}.q_norm", rank, norms, context.tp)
            self.query_norm = builder.norm(weights, norms)
        self.attention, self.layer = IndexedAttention(spec, context), context.number
        self.proj = context.row_linear(linears["proj"], has_bias=spec.has_bias)
        self.output = branch_output(spec, context)

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor | None]:
        residual, x = self.norm.add_and_norm(residual, delta)
        *queries, keys_values, rotary_keys = self.down(x, None, info)[1].split(self.sizes, dim=-1)
        latent = queries[0] if queries else x
        latent = latent if self.query_norm is None else self.query_norm(latent, info)
        out, loss = self.attention(Latents(latent, keys_values, rotary_keys), x, info)
        if loss is not None:
            out = add_loss(out, loss, info.router_loss_scale)
            info.indexer_losses[self.layer] = loss.detach() / self.attention.indexer.spec.loss_coeff
        return self.output.add_to(residual, self.proj(out, info), info)


class IndexedAttention(nn.Module):
    """Up-projection, indexer and core attention to the keys that it selects."""

    def __init__(self, spec: SparseAttentionSpec, context: LayerContext) -> None:
        super().__init__()
        recompute = context.recompute
        self.up = UpProjection(spec, context, is_gathered=False, has_query_norm=False)
        self.discards_heads = recompute.has_part("mla_up_proj")
        self.indexer = Indexer(spec, context)
        core = SelectedAttention(spec, context)
        self.core = RecomputedModule(core) if recompute.has_part("core_attn") else core
        self.tp, self.scale = context.tp, core.scale

    def forward(self, latents: Latents, x: Tensor, info: PassInfo) -> tuple[Tensor, Tensor | None]:
        """Return [s, b, n/tp * value channels], and the loss of the indexer times its coefficient, if it is trained.

        Args:
            latents: that of queries is normalized.
            x: norm of the hidden states, [s/tp, b, h].
        """
        heads: Heads = self.up(*latents, info)
        selected, loss = self.indexer(x, latents.queries, info, self._target(heads))
        if not self.discards_heads:
            return self.core(*heads, selected, info), loss
        kept = [one.detach() for one in latents]
        with discarded(heads, lambda: self.up(*kept, info)):
            return self.core(*heads, selected, info), loss

    def _target(self, heads: Heads) -> Target:
        """Return the mean attention probabilities of the heads of all tensor ranks."""
        kind = accumulation_dtype(heads.q.dtype)
        q, k = (x.detach().permute(1, 2, 0, 3) for x in heads[:2])  # [b, n/tp, s, d]

        def probabilities(rows: slice, is_compared: Tensor) -> Tensor:
            keys = k[:, :, : is_compared.shape[-1]].to(kind)
            total = torch.zeros_like(is_compared, dtype=kind)
            for head in range(q.shape[1]):
                scores = (q[:, head, rows].to(kind) * self.scale) @ keys[:, head].mT
                total += scores.masked_fill_(~is_compared, float("-inf")).softmax(-1)
            total = all_reduce(total, self.tp.group)
            return total / total.sum(-1, keepdim=True)

        return probabilities


class SelectedAttention(MaskedAttention):
    """Core attention of this rank's heads to selected keys, by plain operators: every score is computed."""

    def forward(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, selected: Tensor, info: PassInfo
    ) -> Tensor:
        """Map q, k [s, b, n/tp, d], v [s, b, n/tp, value channels] and `selected` [b, s, s] to [s, b, n/tp * value channels]."""
        dropout, mask = self.dropout(q, k, info), selected.unsqueeze(1)
        if dropout is None and self.kernel != "math":
            return masked_attention(q, k, v, mask=mask, bias=None, scale=self.scale).flatten(2)
        kept = None
        if dropout is not None:
            kept = dropout.mask(q.shape[1], q.shape[2], q.device) * dropout.factor
        return eager_masked_attention(q, k, v, mask=mask, bias=None, scale=self.scale, kept=kept).flatten(2)


class Indexer(nn.Module):
    """Selects the keys of each query, and learns the attention probabilities."""

    def __init__(self, spec: SparseAttentionSpec, context: LayerContext) -> None:
        super().__init__()
        self.spec, linears = spec.indexer, context.linears(spec)
        self.tp, self.cp, self.rope = context.tp, context.ranks.split.cp, context.rope_of(spec)
        self.queries = context.replicated_linear(linears["index_q"], None)
        self.keys_weights = context.replicated_linear(linears["index_k"], None)
        norm = dataclasses.replace(context.model.norm, kind="LayerNorm", epsilon=self.spec.norm_epsilon)
        weights = norm_weights(f"{context.name(spec)}.index_k_norm", self.spec.head_dim, norm, context.tp)
        self.key_norm = context.builder.norm(weights, norm)

    def forward(
        self, x: Tensor, latent: Tensor, info: PassInfo, target: Target
    ) -> tuple[Tensor, Tensor | None]:
        """Return the selected keys, bool [b, s, s], and the loss times its coefficient, if it is trained.

        Args:
            x: norm of the hidden states, [s/tp, b, h].
            latent: normalized latent of queries, [s/tp, b, channels].
        """
        found = self.projected(x, latent, info)
        if not (self.spec.loss_coeff and info.is_training):
            return selected_keys(*found, self.spec), None
        selected, loss = _Selection.apply(*found, self.spec, target)
        return selected, loss

    def projected(self, x: Tensor, latent: Tensor, info: PassInfo) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [s, b, n, d] and keys [s, b, d] with RoPE, and weights [s, b, n]."""
        spec = self.spec
        q = self.queries(_stopped(latent), None, info)[1]
        keys_weights = self.keys_weights(_stopped(x), None, info)[1]
        k, weights = keys_weights.split([spec.head_dim, spec.num_heads], dim=-1)
        k = self.key_norm(k, info)
        q, k, weights = (gather_latents(one, self.tp, self.cp) for one in (q, k, weights))
        rows = self.rope.rows(len(q))
        q, k = (
            functions.apply_rope(one, *rows, is_interleaved=spec.is_interleaved)
            for one in (q.unflatten(-1, (spec.num_heads, -1)), k.unsqueeze(2))
        )
        return q, k.squeeze(2), weights


def _stopped(x: Tensor) -> Tensor:
    """Return x; its gradient stops here: modules that compute weight gradients themselves need an input with a gradient."""
    out: Tensor = Conjugate.apply(lambda x: x.view_as(x), lambda _: None, x)
    return out


class _Selection(Function):
    """q [s, b, n, d], k [s, b, d], weights [s, b, n] -> selected keys, bool [b, s, s], and the loss times its coefficient.

    The forward pass computes the gradients of the loss, for a few queries at a time; the backward pass scales them.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, weights: Tensor, spec: IndexerSpec, target: Target
    ) -> tuple[Tensor, Tensor]:
        s, b, _, _ = q.shape
        kind = accumulation_dtype(q.dtype)
        selected = torch.zeros(b, s, s, dtype=torch.bool, device=q.device)
        loss = torch.zeros((), dtype=kind, device=q.device)
        inputs = [x.detach().to(kind) for x in (q, k, weights)]
        grads = [torch.zeros_like(x) for x in inputs]
        for rows, keys in _few_queries(q, k):
            places = (rows, keys, rows)
            parts = [x[one].requires_grad_() for x, one in zip(inputs, places, strict=True)]
            with torch.enable_grad():
                scores = index_scores(parts[0], parts[1], parts[2], spec)
                chosen = _largest(scores.detach(), spec.top_k)
                selected[:, rows, keys] = chosen
                is_compared = chosen if spec.has_sparse_loss else scores.isfinite()
                part = _divergence(scores, is_compared, target(rows, is_compared)) * (
                    spec.loss_coeff / (s * b)
                )
            for grad, one, found in zip(grads, places, torch.autograd.grad(part, parts), strict=True):
                grad[one] += found
            loss += part.detach()
        ctx.save_for_backward(*(grad.to(q.dtype) for grad in grads))
        ctx.mark_non_differentiable(selected)
        return selected, loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *(grad * grads[1].to(grad.dtype) for grad in ctx.saved_tensors), None, None


@torch.no_grad()
def selected_keys(q: Tensor, k: Tensor, weights: Tensor, spec: IndexerSpec) -> Tensor:
    """Return which keys each query attends to, bool [b, queries, keys]; see `index_scores`."""
    kind = accumulation_dtype(q.dtype)
    q, k, weights = (x.to(kind) for x in (q, k, weights))
    selected = torch.zeros(q.shape[1], len(q), len(k), dtype=torch.bool, device=q.device)
    for rows, keys in _few_queries(q, k):
        selected[:, rows, keys] = _largest(index_scores(q[rows], k[keys], weights[rows], spec), spec.top_k)
    return selected


def _few_queries(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive queries whose scores are in memory at a time, and their keys."""
    count, b, n, _ = q.shape
    step = max(1, _PAIRS // (b * n * len(k)))
    for first in range(0, count, step):
        stop = min(first + step, count)
        yield slice(first, stop), slice(len(k) - count + stop)


def index_scores(q: Tensor, k: Tensor, weights: Tensor, spec: IndexerSpec) -> Tensor:
    """Return the scores of queries and keys, [b, queries, keys]; those of later keys are -inf.

    Args:
        q, weights: of the last positions, [queries, b, n, d] and [queries, b, n].
        k: keys of all positions, [keys, b, d].
    """
    products = torch.einsum("sbnd,tbd->bnst", q, k)
    if spec.has_relu:
        products = products.relu()
    factors = weights * (spec.num_heads**-0.5 * spec.head_dim**-0.5)
    scores = torch.einsum("bnst,sbn->bst", products, factors)
    is_later = torch.ones_like(scores[0], dtype=torch.bool).triu(1 + len(k) - len(q))
    return scores.masked_fill(is_later, float("-inf"))


def _largest(scores: Tensor, top_k: int) -> Tensor:
    """Return which keys of each query have its largest scores, bool like `scores`; a query with fewer keys has all.

    Of equal scores (0, where no head has a positive product) the first keys count, in every pass that computes them.
    """
    last = scores.topk(min(top_k, scores.shape[-1]), dim=-1).values[..., -1:]
    is_larger, is_last = scores > last, scores == last
    places = top_k - is_larger.sum(-1, keepdim=True)
    return (is_larger | (is_last & (is_last.cumsum(-1) <= places))) & scores.isfinite()


def _divergence(scores: Tensor, is_compared: Tensor, target: Tensor) -> Tensor:
    """Return the sum over queries of the divergence of the target from the softmax of the scores."""
    probs = scores.masked_fill(~is_compared, float("-inf")).softmax(-1)
    return (target * ((target + _EPSILON).log() - (probs + _EPSILON).log())).sum()
