"""The table of relative position bias that the layers of a stack share."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from megatrain.config.model_spec.attention import RelativePositionSpec
from megatrain.kernels.attention.interface import DistanceBias
from megatrain.model import functions
from megatrain.parallel.layout import Init, ParamLayout, Piece, ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel


class RelativePositions(ShardedModule):
    """A bias per bucket and head, [buckets, n/tp].

    Args:
        is_shared: every pipeline rank holds it.
    """

    weight: Tensor

    def __init__(
        self,
        spec: RelativePositionSpec,
        name: str,
        num_heads: int,
        init: Init,
        tp: TensorParallel,
        dtype: torch.dtype,
        *,
        is_shared: bool,
    ) -> None:
        super().__init__()
        self.spec = spec
        groups = ("pp",) if is_shared else ()
        heads = num_heads // tp.size
        box = ((0, spec.num_buckets), (tp.rank * heads, (tp.rank + 1) * heads))
        piece = Piece(name, (spec.num_buckets, num_heads), box, copies=groups, grad_sum_groups=groups)
        shape = (spec.num_buckets, heads)
        self.add_weight(
            "weight", ParamLayout(shape=shape, pieces=(piece,), init=init, kind="positions"), dtype
        )

    def bias(self, num_queries: int, num_keys: int) -> Tensor:
        """Return the bias of the scores, [1, n/tp, sq, sk]; the queries are the last ones of as many positions as keys."""
        weight = functions.weight_of(self, "weight")
        buckets = _buckets(self.spec, num_queries, num_keys, weight.device)
        return weight[buckets].permute(2, 0, 1).unsqueeze(0)

    def bias_of_distances(self, num_queries: int, num_keys: int) -> DistanceBias:
        """Return the same by distance, for kernels that add the gradient of the table in fp32."""
        buckets = _buckets_of_distances(self.spec, num_queries, num_keys, self.weight.device)
        return DistanceBias(self.weight, buckets, self.spec.max_distance, self.weight_grads.get("weight"))


@functools.lru_cache(maxsize=8)
def _buckets_of_distances(
    spec: RelativePositionSpec, num_queries: int, num_keys: int, device: torch.device
) -> Tensor:
    return bucket_of(torch.arange(1 - num_queries, num_keys, device=device), spec).int()


@functools.lru_cache(maxsize=8)
def _buckets(spec: RelativePositionSpec, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    keys = torch.arange(num_keys, device=device)
    queries = keys[num_keys - num_queries :]
    return bucket_of(keys - queries.unsqueeze(1), spec)


def bucket_of(distance: Tensor, spec: RelativePositionSpec) -> Tensor:
    """Return the bucket of each distance, key - query."""
    count, first = spec.num_buckets, torch.zeros_like(distance)
    if spec.is_bidirectional:
        count //= 2
        first, distance = (distance > 0) * count, distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = count // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(spec.max_distance / exact)
    far = (exact + (ratio * (count - exact)).long()).clamp(max=count - 1)
    return first + torch.where(distance < exact, distance, far)
