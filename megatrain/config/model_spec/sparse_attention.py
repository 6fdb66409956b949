"""DeepSeek sparse attention (DSA): latent attention to the keys that an indexer selects for each query.

Source: DeepSeek-V3.2-Exp, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.linear import Linear, Piece
from megatrain.config.model_spec.part import CacheSizes

_FLAGS = "--dsa-indexer-n-heads, --dsa-indexer-head-dim"


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """The indexer: few narrow heads whose scores select keys. A query and a key have one score for all heads of attention."""

    num_heads: int
    head_dim: int
    """Channels of its heads; the first of them have RoPE."""
    top_k: int
    """Keys that a query attends to."""
    norm_epsilon: float
    """Epsilon of the LayerNorm of its keys."""
    loss_coeff: float = 0.0
    """Factor of the divergence of its scores from the attention probabilities; 0: it is not trained."""
    has_sparse_loss: bool = False
    """The loss compares the selected keys alone."""
    is_interleaved: bool = False
    """Adjacent channels form a pair of RoPE."""
    has_relu: bool = True
    """Products of a head's queries and keys below 0 count as 0."""


@dataclass(frozen=True, kw_only=True)
class SparseAttentionSpec(AttentionSpec):
    """Latent attention to selected keys."""

    needs_whole_samples: ClassVar[bool] = True

    indexer: IndexerSpec

    def linears(self, hidden_size: int) -> Iterator[Linear]:
        """Yield those of latent attention, then of the indexer, which each tensor rank has whole."""
        assert self.latent is not None
        yield from super().linears(hidden_size)
        indexer, rank = self.indexer, self.latent.query_rank
        queries = Piece("index_q", indexer.num_heads * indexer.head_dim)
        yield Linear(
            part="attention", pieces=(queries,), inputs=hidden_size if rank is None else rank, split="none",
            reads="hidden states" if rank is None else "the latent of queries", writes="queries of the indexer",
            flags=_FLAGS, modules=(f"{_MODULE}.linear_wq_b",),
        )  # fmt: skip
        pieces = Piece("index_k", indexer.head_dim), Piece("index_weights", indexer.num_heads)
        yield Linear(
            part="attention", pieces=pieces, inputs=hidden_size, split="none", reads="hidden states",
            writes="keys and weights of the indexer", flags=_FLAGS,
            modules=(f"{_MODULE}.linear_wk", f"{_MODULE}.linear_weights_proj"),
        )  # fmt: skip

    def other_weights(self, hidden_size: int) -> int:
        return super().other_weights(hidden_size) + 2 * self.indexer.head_dim

    @property
    def pair_channels(self) -> int:
        """Attention computes the scores of all keys, and so does the indexer."""
        return super().pair_channels + self.indexer.num_heads * self.indexer.head_dim

    def cache_sizes(self, num_ranks: int) -> CacheSizes | None:  # noqa: ARG002
        """No cache has the indexer's keys."""
        return None


_MODULE = "self_attention.core_attention.indexer"
