"""Routers as Megatron-LM computed them in its recordings: Transformer Engine rounds both factors of fp32 products to TF32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatrain.model.experts import router

Logits = router._Logits


class Tf32Logits(Logits):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *others: Any) -> Tensor:
        return Logits.forward(ctx, as_tf32(x), as_tf32(weight), *others)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Logits.backward(ctx, *map(as_tf32, grads))


def as_tf32(x: Tensor) -> Tensor:
    """Round fp32 to 10 bits of mantissa, ties away from zero, as tensor cores do."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@contextmanager
def routers_in_tf32() -> Iterator[None]:
    """Compute the routers' products, forward and backward, with factors rounded to TF32."""
    router._Logits = Tf32Logits  # type: ignore[misc]
    try:
        yield
    finally:
        router._Logits = Logits  # type: ignore[misc]
