"""Planted faults of vision-language models: places of images, loss on their tokens, frozen weights, gradients of the tower."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megatrain.model.families import image_shares, vision
from megatrain.model.families.image_shares import ImageShares
from megatrain.model.families.vision import Newline
from megatrain.optim.lr_schedule import Hyperparams
from megatrain.optim.sharded import ShardedOptimizer
from megatrain.parallel.batch import Batch
from megatrain.parallel.collectives import all_gather
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import TensorParallel, conjugate
from megatrain.tools.parity.runs.program import Patch
from megatrain.training.engine import Engine

_PUT = vision.put_vectors
_REPLICATE = image_shares.replicate


def _images_shifted_by_one() -> AbstractContextManager[Any]:
    """Take the vector before the one of each place."""

    def shifted(x: Tensor, vectors: Tensor, tokens: Tensor, newline: Newline | None) -> Tensor:
        return _PUT(x, vectors.roll(1, dims=0), tokens, newline)

    return mock.patch.object(vision, "put_vectors", shifted)


def _image_of_the_neighbouring_sample() -> AbstractContextManager[Any]:
    def adjacent(x: Tensor, vectors: Tensor, tokens: Tensor, newline: Newline | None) -> Tensor:
        return _PUT(x, vectors.roll(1, dims=1), tokens, newline)

    return mock.patch.object(vision, "put_vectors", adjacent)


def _loss_on_image_tokens() -> AbstractContextManager[Any]:
    shard = Engine.shard_batches

    def counted(self: Engine, batches: Sequence[Batch]) -> list[Batch]:
        return [
            replace(one, loss_mask=one.loss_mask.masked_fill(one.tokens < 0, 1), denominator=None)
            for one in shard(self, batches)
        ]

    return mock.patch.object(Engine, "shard_batches", counted)


def _frozen_weights_decay() -> AbstractContextManager[Any]:
    step = ShardedOptimizer.step

    def decayed(self: ShardedOptimizer, hyperparams: Hyperparams, **values: Any) -> None:
        step(self, hyperparams, **values)
        for shard, master in zip(self.buffers.shards, self.master_weights, strict=True):
            if not shard.bucket.is_trained:
                master.mul_(1 - hyperparams.lr * hyperparams.weight_decay)

    return mock.patch.object(ShardedOptimizer, "step", decayed)


def _gradients_of_own_rows_alone() -> AbstractContextManager[Any]:
    """Leave out the sum of the gradients of images over tensor ranks, which have rows of their own."""

    def alone(x: Tensor, tp: TensorParallel) -> Tensor:
        return x

    return mock.patch.object(vision, "enter_tp_region", alone)


def _same_image_on_every_place() -> AbstractContextManager[Any]:
    def first(x: Tensor, vectors: Tensor, tokens: Tensor, newline: Newline | None) -> Tensor:
        n = len(vectors)
        return _PUT(x, vectors, torch.where(tokens < -n, tokens + n, tokens), newline)

    return mock.patch.object(vision, "put_vectors", first)


def _tiles_in_another_order() -> AbstractContextManager[Any]:
    """Take the vectors of the ranks in another order than that of their images."""
    gather = ImageShares.gather

    def turned(self: ImageShares, vectors: Tensor, num_images: int) -> Tensor:
        return gather(self, vectors, num_images).roll(1, dims=1)

    return mock.patch.object(ImageShares, "gather", turned)


def _gradients_of_own_tokens_alone() -> AbstractContextManager[Any]:
    """Split the gradients of shared images over context ranks without their sum."""

    def alone(x: Tensor, group: RankGroup) -> Tensor:
        return conjugate(x, group, all_gather, image_shares._own_rows)

    return mock.patch.object(image_shares, "all_gather_rows", alone)


def _gradients_of_own_images_alone() -> AbstractContextManager[Any]:
    """Leave out the sum of the gradients of a tower that tensor ranks hold whole, each with images of its own."""

    def alone(modules: Iterable[nn.Module], tp: TensorParallel) -> None:
        _REPLICATE(modules, replace(tp, group=RankGroup(tp.group.name, (tp.group.ranks[tp.rank],), 0)))

    return mock.patch.object(vision, "replicate", alone)


def _gradients_of_own_newlines_alone() -> AbstractContextManager[Any]:
    """Leave out the sum of the newline's gradients over tensor ranks, which have rows of their own."""

    class Alone(Newline):
        def __init__(self, width: int, tp: TensorParallel, dtype: torch.dtype) -> None:
            super().__init__(width, replace(tp, sequence_parallel=False, peers=None), dtype)

    return mock.patch.object(vision, "Newline", Alone)


VISION_FAULTS: dict[str, tuple[Patch, str]] = {
    "images shifted by one": (_images_shifted_by_one, "tp2 vlm"),
    "image of the neighbouring sample": (_image_of_the_neighbouring_sample, "dp2 vlm"),
    "loss on image tokens": (_loss_on_image_tokens, "dp2 vlm"),
    "frozen weights decay": (_frozen_weights_decay, "dp2 zero1 llava"),
    "gradients of images of own rows alone": (_gradients_of_own_rows_alone, "tp2 sp vlm"),
    "the first image in place of the second": (_same_image_on_every_place, "cp2 vlm"),
    "tiles in another order": (_tiles_in_another_order, "cp2 tiles"),
    "gradients of shared images of own tokens alone": (_gradients_of_own_tokens_alone, "cp2 tiles"),
    "gradients of a whole tower of own images alone": (_gradients_of_own_images_alone, "tp2 tiles"),
    "gradients of newlines of own rows alone": (_gradients_of_own_newlines_alone, "tp2 sp tiles"),
}
"""The function that plants each fault, and the layout in which parity finds it."""
