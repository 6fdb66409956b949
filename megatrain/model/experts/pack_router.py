"""The router of a layer with experts whose micro-batches are packs of documents.

Tokens that fill a pack up go to no expert, and count in no load and no loss. They are the last rows of a rank. `aux_loss` is
that of a pack, `seq_aux_loss` the mean over its documents by tokens, which does not depend on how documents are packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.config.model_spec.experts import TopKRule
from megatrain.kernels.moe.routing import router_probs, select_experts, tokens_per_expert
from megatrain.kernels.moe.routing_losses import (
    add_loss,
    load_balancing_loss,
    score_sums,
    score_sums_reference,
)
from megatrain.model.experts.router import ROUTER_METRICS, Router
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.documents import Documents
from megatrain.parallel.packs.context import PackBatch, PackContext


class PackRouter(Router):
    """Router of one layer; losses of the log are means over the step's tokens."""

    @property
    def _cp(self) -> PackContext:
        assert isinstance(self.split.cp, PackContext)
        return self.split.cp

    @property
    def _batch(self) -> PackBatch:
        assert self._cp.batch is not None, "a pass of a pack has begun"
        return self._cp.batch

    def _num_own(self, rows: int) -> int:
        """Return how many of this rank's rows are tokens of documents: the first ones."""
        return min(max(self._cp.num_document_rows - self.split.tp.first_row(rows), 0), rows)

    def _kept(self, experts: Tensor, probs: Tensor, rows: int, samples: int, info: PassInfo) -> Tensor:  # noqa: ARG002
        """Keep the assignments of documents."""
        is_own = torch.arange(rows, device=experts.device) < self._num_own(rows)
        return is_own[:, None].expand(experts.shape)

    def _with_losses(
        self,
        probs: Tensor,
        logits: Tensor,
        experts: Tensor,
        kept: Tensor | None,  # noqa: ARG002
        samples: int,
        info: PassInfo,
    ) -> Tensor:
        count, batch = self._num_own(len(logits)), self._batch
        first = self.split.tp.first_row(len(logits))
        logits, experts = logits[:count], experts[:count]
        metrics = logits.new_zeros(len(ROUTER_METRICS), dtype=torch.float64)
        # Fused kernels of no rows cannot start.
        sums = (score_sums if count else score_sums_reference)(logits, self.spec.score_function, samples)
        metrics[ROUTER_METRICS.index("entropy")] = sums.entropy
        num_tokens, parts = max(batch.num_tokens, 1), list[Tensor]()
        losses = dict(self.spec.losses) | {"z_loss": self.spec.z_loss_coeff or 0.0}
        best = experts
        if not self.spec.selects_top_logits:
            best, _ = select_experts(logits.detach(), TopKRule(top_k=self.spec.top_k))
        for name, coeff in losses.items():
            if not coeff:
                continue
            if name == "z_loss":
                part = sums.squares / num_tokens
            elif name == "aux_loss":
                loads = self.split.sum(tokens_per_expert(best, self.spec.num_experts))
                part = load_balancing_loss(sums.probs[0], loads, top_k=self.spec.top_k, num_tokens=num_tokens)
            else:
                part = self._loss_of_documents(logits, best, first, info.documents) / num_tokens
            metrics[ROUTER_METRICS.index(name)] = part.detach() * (num_tokens / max(batch.work.num_tokens, 1))
            parts.append(coeff * part)
        loads = tokens_per_expert(experts, self.spec.num_experts)
        info.router_metrics[self.layer] = torch.cat([metrics, loads.double()])
        return add_loss(probs, torch.stack(parts).sum(), info.router_loss_scale) if parts else probs

    def _loss_of_documents(
        self, logits: Tensor, experts: Tensor, first: int, documents: Documents | None
    ) -> Tensor:
        """Return this rank's part of the sum over documents of their tokens times their loss."""
        assert documents is not None, "packs have documents"
        rows = self._cp.current.shard(documents.document_ids, 1)[0, first : first + len(logits)] - 1  # from 1
        lengths = documents.cu_seqlens.diff()
        probs = router_probs(logits, self.spec.score_function)
        shares = probs.new_zeros(len(lengths), self.spec.num_experts).index_add(0, rows, probs)
        selected = torch.zeros_like(probs).scatter_(1, experts, 1)
        loads = self.split.sum(torch.zeros_like(shares).index_add_(0, rows, selected))
        scale = self.spec.num_experts / (self.spec.top_k * lengths)
        return ((shares * loads).sum(1) * scale).sum()
