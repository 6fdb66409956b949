"""Allocates the flat buffers of a model chunk: weights and gradients in one tensor per bucket, at the same offsets.

    parameter                -> view of its bucket's weights
    module.weight_grads[...] -> view of its bucket's gradients, into which weight gradients are accumulated

Parameters have no memory before this.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from megatrain.parallel.buckets import Bucket, FirstWrites, cut_buckets, local_shard
from megatrain.parallel.data_parallel import BucketMemory, FlatBuffers
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.layout import ParamRegistry


def allocate_buffers(
    registry: ParamRegistry,
    *,
    grid: RankGrid,
    weight_dtype: torch.dtype,
    grad_dtype: torch.dtype | None = None,
    device: torch.device,
    keep_full_weights: bool = True,
    keep_full_gradients: bool = True,
    whole_segments: Collection[int] = (),
) -> FlatBuffers:
    """Allocate weights and gradients, and make the parameters views of them.

    Args:
        registry: the chunk's parameters.
        grid: the ranks over which optimizer state is sharded, per family.
        grad_dtype: None: no gradients, for inference.
        keep_full_weights, keep_full_gradients: keep full buckets allocated; else only this rank's shards, except
            for a tied embedding, and for scales, which passes write.
        whole_segments: segments whose weights are kept full anyway.
    """
    buckets = cut_buckets(registry, grid)
    shards = [local_shard(bucket, grid.family(bucket.family).shard) for bucket in buckets]
    weights, gradients = BucketMemory(weight_dtype, device), BucketMemory(grad_dtype or weight_dtype, device)
    buckets_of: dict[int, list[int]] = {}
    for number, (bucket, shard) in enumerate(zip(buckets, shards, strict=True)):
        for user in bucket.users:
            buckets_of.setdefault(user, []).append(number)
        first = bucket.params[0].entry
        is_kept = shard.numel == bucket.size or first.is_shared or first.layout.kind == "scale"
        is_kept = is_kept or first.segment in whole_segments
        own = slice(shard.start, shard.stop)
        weights.add(bucket.size, own, is_kept_full=is_kept or keep_full_weights)
        has_own = grad_dtype is not None and bucket.is_trained
        if has_own:
            is_kept = is_kept or keep_full_gradients
            gradients.add(bucket.size, own, is_kept_full=is_kept, overwritten=_first_writes(bucket))
        elif grad_dtype is not None:
            gradients.add(0, slice(0), is_kept_full=True)
        _make_views(bucket, weights.full[number], gradients.full[number] if has_own else None)
        weights.free(number)
        if grad_dtype is not None:
            gradients.free(number)
    return FlatBuffers(registry, buckets, shards, buckets_of, weights, gradients)


def _make_views(bucket: Bucket, weights: torch.Tensor, gradients: torch.Tensor | None) -> None:
    """Make parameters views of the weights, and their modules' `weight_grads` views of the gradients."""
    for param in bucket.params:
        module, name, shape = param.entry.module, param.entry.attribute, param.entry.layout.shape
        view = weights[param.start : param.stop].view(shape)
        module.register_parameter(name, nn.Parameter(view, requires_grad=gradients is not None))
        if gradients is not None:
            module.weight_grads[name] = gradients[param.start : param.stop].view(shape)


def _first_writes(bucket: Bucket) -> FirstWrites:
    places = ((param.entry, slice(param.start, param.stop)) for param in bucket.params)
    writes = [(entry.module.first_writes.get(entry.attribute), part) for entry, part in places]
    return [(first, part) for first, part in writes if first is not None]
