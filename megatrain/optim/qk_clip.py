"""QK-Clip: scales the projections of queries and keys of heads whose largest attention logit exceeds a threshold.

    eta = threshold / largest logit of a head or, with grouped queries, of a group of heads; 1 up to the threshold
    queries, keys       weights *= eta^alpha, eta^(1 - alpha)       logits of the same input *= eta
    with latents        the rotary channels of keys belong to all heads: those of queries *= eta

It acts on master weights between the update and the all-gather, of every optimizer. Source: Kimi K2, arXiv:2507.20534,
section 2.1; Megatron-LM has the same exponents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.kernels.optimizer.shard_update import FlatUpdate
from megatrain.parallel.buckets import Shard
from megatrain.parallel.layout import Box, box_shape


@dataclass(frozen=True)
class _Rows:
    """The rows of a projection: `units`, heads or groups of heads, each with an exponent of eta for every channel."""

    layer: int
    heads: int
    units: int
    exponents: tuple[float, ...]

    def factors(self, eta: Tensor) -> Tensor:
        """Return the factor of each row from the eta of all heads, [layers, heads]: fp64 [units * channels]."""
        of_units = eta[self.layer, : self.heads].view(self.units, -1).amin(1)
        exponents = torch.tensor(self.exponents, dtype=eta.dtype, device=eta.device)
        return of_units[:, None].pow(exponents).flatten()


@dataclass(frozen=True)
class _Part:
    """A box of such a projection in a shard."""

    name: str
    box: Box
    elements: slice


class QkClip:
    """Scales this rank's shards.

    Args:
        specs: attention of all layers, by the prefix of its canonical names, in the order of the logits.
        shards: of this rank.
        alpha: share of queries in the exponents.
        threshold: largest logit that changes nothing.
    """

    def __init__(
        self, specs: Mapping[str, AttentionSpec], shards: Sequence[Shard], *, alpha: float, threshold: float
    ) -> None:
        self.threshold = threshold
        self._rows = {
            f"{prefix}.{name}": rows
            for layer, (prefix, spec) in enumerate(specs.items())
            for name, rows in _projections(layer, spec, alpha).items()
        }
        self._parts = [
            [
                _Part(name, box.box, elements)
                for _, box, elements in shard.owned()
                if (name := box.piece.name.rpartition(".")[0]) in self._rows
            ]
            for shard in shards
        ]
        self._factors: dict[str, Tensor] = {}

    def begin(self, largest: Tensor, may_update: Tensor) -> None:
        """Take the logits of a step, before its update.

        Args:
            largest: the largest logit of each head, [layers, heads], equal on all ranks.
            may_update: bool []; False: nothing is scaled.
        """
        exceeds = may_update & (largest > self.threshold)
        eta = torch.where(exceeds, self.threshold / largest.double(), 1.0)
        names = {part.name for parts in self._parts for part in parts}
        self._factors = {name: self._rows[name].factors(eta) for name in sorted(names)}

    def scale(self, number: int, shard: FlatUpdate) -> None:
        """Scale the updated master weights of a shard, and the weights."""
        for part in self._parts[number]:
            master, (start, stop) = shard.master[part.elements], part.box[0]
            factors = self._factors[part.name][start:stop].to(master)
            shape = box_shape(part.box)
            master.view(shape).mul_(factors.view(-1, *(1 for _ in shape[1:])))
            if shard.has_separate_weight:
                shard.weight[part.elements].copy_(master)


def _projections(layer: int, spec: AttentionSpec, alpha: float) -> dict[str, _Rows]:
    """Return the projections of queries and keys by name."""
    heads, latent = spec.num_heads, spec.latent
    if latent is None:
        groups, d = spec.num_query_groups, spec.head_dim
        keys = _Rows(layer, heads, groups, (1 - alpha,) * d)
        return {"q": _Rows(layer, heads, groups, (alpha,) * d * (heads // groups)), "k": keys}
    nope, rope = latent.qk_nope_head_dim, latent.qk_rope_head_dim
    queries = _Rows(layer, heads, heads, (alpha,) * nope + (1.0,) * rope)
    keys = _Rows(layer, heads, heads, (1 - alpha,) * nope + (0.0,) * latent.v_head_dim)
    return {"q" if latent.query_rank is None else "q_up": queries, "kv_up": keys}
