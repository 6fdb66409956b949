"""One pass of SGD with momentum over a flat range.

    main, momentum, gradient  ->  main, momentum, weight

Weight decay is part of the gradient, as in PyTorch and Megatron-LM.
"""

from __future__ import annotations

from torch import Tensor


def sgd(
    main: Tensor,
    momentum_buffer: Tensor,
    grad: Tensor,
    weight: Tensor,
    *,
    lr: float,
    momentum: float,
    grad_scale: Tensor,
    weight_decay: float,
) -> None:
    """Update a flat range in place; `weight` gets the new `main` in its own dtype (it may be `main` itself)."""
    scaled = grad.to(main.dtype) * grad_scale
    momentum_buffer.mul_(momentum).add_(scaled.add_(main, alpha=weight_decay))
    main.add_(momentum_buffer, alpha=-lr)
    if weight.data_ptr() != main.data_ptr():
        weight.copy_(main)
