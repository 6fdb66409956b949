"""Planted faults of vision-language models: places of images, loss on their tokens, frozen weights, gradients of the tower."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatrain.model.families import vision
from megatrain.optim.lr_schedule import Hyperparams
from megatrain.optim.sharded import ShardedOptimizer
from megatrain.parallel.batch import Batch
from megatrain.parallel.tensor_parallel import TensorParallel
from megatrain.tools.parity.runs.program import Patch
from megatrain.training.engine import Engine

_PUT = vision.put_vectors


def _images_shifted_by_one() -> AbstractContextManager[Any]:
    """Take the vector before the one of each place."""

    def shifted(x: Tensor, vectors: Tensor, tokens: Tensor) -> Tensor:
        return _PUT(x, vectors.roll(1, dims=0), tokens)

    return mock.patch.object(vision, "put_vectors", shifted)


def _image_of_the_neighbouring_sample() -> AbstractContextManager[Any]:
    def adjacent(x: Tensor, vectors: Tensor, tokens: Tensor) -> Tensor:
        return _PUT(x, vectors.roll(1, dims=1), tokens)

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
    def first(x: Tensor, vectors: Tensor, tokens: Tensor) -> Tensor:
        n = len(vectors)
        return _PUT(x, vectors, torch.where(tokens < -n, tokens + n, tokens))

    return mock.patch.object(vision, "put_vectors", first)


VISION_FAULTS: dict[str, tuple[Patch, str]] = {
    "images shifted by one": (_images_shifted_by_one, "tp2 vlm"),
    "image of the neighbouring sample": (_image_of_the_neighbouring_sample, "dp2 vlm"),
    "loss on image tokens": (_loss_on_image_tokens, "dp2 vlm"),
    "frozen weights decay": (_frozen_weights_decay, "dp2 zero1 llava"),
    "gradients of images of own rows alone": (_gradients_of_own_rows_alone, "tp2 sp vlm"),
    "the first image in place of the second": (_same_image_on_every_place, "cp2 vlm"),
}
"""The function that plants each fault, and the layout in which parity finds it."""
