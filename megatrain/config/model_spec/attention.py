"""Self-attention with grouped queries, or with latents (multi-latent attention): causal, to all tokens of a sample, or to selected keys.

Source of selected keys (DeepSeek sparse attention, DSA): DeepSeek-V3.2-Exp, section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from megatrain.config.model_spec.latent_attention import LatentSizes
from megatrain.config.model_spec.linear import Linear, Piece
from megatrain.config.model_spec.part import CacheSizes, Part, Role
from megatrain.config.model_spec.rotary import RotarySpec

_HEADS = "--num-attention-heads, --kv-channels, --num-query-groups, --tensor-model-parallel-size"
_INDEXER_FLAGS = "--dsa-indexer-n-heads, --dsa-indexer-head-dim"
_INDEXER = "self_attention.core_attention.indexer"


@dataclass(frozen=True, kw_only=True)
class RelativePositionSpec:
    """Relative position bias of T5: a learned number per head and bucket of distances, added to the scaled scores.

        distance = key - query      0 .. e - 1  a bucket each       e .. D  buckets of growing width      beyond D  the last one

    The layers of a stack share its table. Source: Raffel et al., arXiv:1910.10683, section 2.1.
    """

    num_buckets: int
    max_distance: int
    """Distance from which all keys are in the last bucket."""
    is_bidirectional: bool
    """Half of the buckets are for keys after the query; else those are in the bucket of distance 0."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(Part):
    """Self-attention with grouped queries."""

    name: ClassVar[str] = "attention"
    role: ClassVar[Role] = "mixer"

    num_heads: int
    num_query_groups: int
    head_dim: int
    """Channels of a head of queries and keys."""
    latent: LatentSizes | None = None
    """Latents of queries, keys and values (multi-latent attention); None: one projection."""
    mask: Literal["causal", "padding"] = "causal"
    """Tokens that a query attends to: those up to its own, or all that are no padding."""
    rotary: RotarySpec | None = None
    """RoPE; None: none is applied."""
    relative: RelativePositionSpec | None = None
    """Relative position bias, a table that the layers of a stack share; None: none is added."""
    window: int | None = None
    """Number of earlier tokens that a query attends to; None: all."""
    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head channels)."""
    softcap: float | None = None
    """Limit of the scores: cap * tanh(score / cap); None: no limit."""
    sink: Literal["none", "zero", "learned"] = "none"
    """Sink logit of each head, in the softmax denominator: 0 or learned."""
    dropout: float = 0.0
    """Probability that training drops an attention probability."""
    qk_norm: Literal["none", "head", "l2", "all_heads", "latent"] = "none"
    """Norm of queries and keys, over the channels of a head, without weights (l2), or of all heads; or of the latents."""
    qk_norm_decays: bool = False
    """Weight decay applies to these norms."""
    has_output_gate: bool = False
    """The output of each head is multiplied by the sigmoid of a projection of the layer's input."""
    has_qkv_bias: bool = False
    has_bias: bool = False
    """The output projection has a bias."""

    @property
    def v_head_dim(self) -> int:
        """Channels of a head of values."""
        return self.head_dim if self.latent is None else self.latent.v_head_dim

    @property
    def score_scale(self) -> float:
        """Factor of the scores."""
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def rope_dim(self) -> int:
        """Channels of a head that RoPE receives; it may leave some unchanged."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    def other_weights(self, hidden_size: int) -> int:  # noqa: ARG002
        return 0 if self.latent is None else self.latent.norm_weights

    @property
    def pair_channels(self) -> int:
        """With a causal mask the half of all pairs; see `Part`."""
        return self.num_heads * (self.head_dim + self.v_head_dim) * (1 if self.mask == "causal" else 2)

    def cache_sizes(self, num_ranks: int) -> CacheSizes | None:
        """With latents, one row for all heads: the latent and the rotary channels of keys. An encoder keeps nothing."""
        if self.mask == "padding":
            return CacheSizes()
        if self.latent is not None:
            return CacheSizes(
                window=self.window, rows=((1, self.latent.kv_rank + self.latent.qk_rope_head_dim),)
            )
        groups = max(1, self.num_query_groups // num_ranks)
        return CacheSizes(window=self.window, rows=((groups, self.head_dim), (groups, self.v_head_dim)))

    def linears(self, hidden_size: int) -> Iterator[Linear]:
        """Yield the GEMMs: one projection to queries, keys and values, or those of latents, and the output projection."""
        if self.latent is not None:
            yield from self.latent.linears(hidden_size, self.num_heads)
            return
        heads, groups, d = self.num_heads, self.num_query_groups, self.head_dim
        gate = (_of_heads("gate", heads, d, "the output gate"),) if self.has_output_gate else ()
        pieces = (
            _of_heads("q", heads, d, "queries"),
            *(self._of_groups(name, groups, d, what) for name, what in (("k", "keys"), ("v", "values"))),
            *gate,
        )
        yield Linear(
            part="attention", pieces=pieces, inputs=hidden_size, split="outputs", reads="hidden states",
            writes="queries, keys and values", flags=_HEADS, modules=("self_attention.linear_qkv",),
        )  # fmt: skip
        yield Linear(
            part="attention", pieces=(Piece("proj", hidden_size),), inputs=heads * d, split="inputs", reads="the heads",
            writes="hidden states", flags=_HEADS, modules=("self_attention.linear_proj",),
        )  # fmt: skip

    def _of_groups(self, name: str, groups: int, head_dim: int, what: str) -> Piece:
        if groups == self.num_heads:
            return _of_heads(name, groups, head_dim, what)
        return Piece(
            name, groups * head_dim, groups, what, is_copied=True, unit="query groups", path="model.num_query_groups"
        )  # fmt: skip


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
            flags=_INDEXER_FLAGS, modules=(f"{_INDEXER}.linear_wq_b",),
        )  # fmt: skip
        pieces = Piece("index_k", indexer.head_dim), Piece("index_weights", indexer.num_heads)
        yield Linear(
            part="attention", pieces=pieces, inputs=hidden_size, split="none", reads="hidden states",
            writes="keys and weights of the indexer", flags=_INDEXER_FLAGS,
            modules=(f"{_INDEXER}.linear_wk", f"{_INDEXER}.linear_weights_proj"),
        )  # fmt: skip

    def other_weights(self, hidden_size: int) -> int:
        return super().other_weights(hidden_size) + 2 * self.indexer.head_dim

    @property
    def pair_channels(self) -> int:
        """Attention computes the scores of all keys, and so does the indexer."""
        return super().pair_channels + self.indexer.num_heads * self.indexer.head_dim

    def cache_sizes(self, num_ranks: int) -> CacheSizes | None:
        """Also the keys of the indexer."""
        sizes = super().cache_sizes(num_ranks)
        assert sizes is not None
        return replace(sizes, rows=(*sizes.rows, (1, self.indexer.head_dim)))


def _of_heads(name: str, heads: int, head_dim: int, what: str) -> Piece:
    return Piece(name, heads * head_dim, heads, what, path="model.num_attention_heads")
