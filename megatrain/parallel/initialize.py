"""Initial weights: each canonical tensor has a random stream of its own, so they are the same under every layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.kernels.random import fill_normal, fill_uniform, stream_key
from megatrain.parallel.layout import Box, BoxRange, ParamLayout


@dataclass(frozen=True)
class InitialWeights:
    """Source of the weights of a run that starts from scratch."""

    seed: int

    def fill(self, out: Tensor, layout: ParamLayout, box: BoxRange) -> None:
        """Fill `out`, contiguous and of the shape of the box, with the box's initial values."""
        init, piece = layout.init, box.piece
        bounds = init.uniform or init.log_of
        if init.softplus_of is not None:
            bounds = (math.log(init.softplus_of[0]), math.log(init.softplus_of[1]))
        if bounds is not None:
            values = _uniform(stream_key(self.seed, piece.name), piece.shape, box.box, *bounds)
            if init.softplus_of is not None:
                size = values.exp()
                values = size + (-torch.expm1(-size)).log()  # the inverse of softplus
            out.copy_(values.log() if init.log_of else values)
        elif init.std == 0.0:
            out.fill_(init.mean)
        else:
            _fill(out, stream_key(self.seed, piece.name), piece.shape, box.box, 0, init.mean, init.std)


def _uniform(key: int, shape: tuple[int, ...], box: Box, low: float, high: float) -> Tensor:
    """Return a box of a tensor [rows, ...] of uniform numbers, in double precision, on the CPU."""
    (first, last), *inner = box
    whole = torch.empty(last - first, math.prod(shape[1:]), dtype=torch.float64)
    fill_uniform(whole, torch.arange(first, last), key=key, low=low, high=high)
    return whole.view(-1, *shape[1:])[:, *(slice(*one) for one in inner)]


def _fill(
    out: Tensor, key: int, shape: tuple[int, ...], box: Box, first: int, mean: float, std: float
) -> None:
    """Fill a box of a tensor whose first element has index `first`; recurse over all but the last two dimensions."""
    if len(shape) == 1:
        out, shape, box = out[None], (1, *shape), ((0, 1), *box)
    if len(shape) == 2:
        (row, _), (column, _) = box
        start = first + row * shape[1] + column
        fill_normal(out, key=key, first=start, row_stride=shape[1], mean=mean, std=std)
        return
    size = 1
    for length in shape[1:]:
        size *= length
    for index in range(*box[0]):
        _fill(out[index - box[0][0]], key, shape[1:], box[1:], first + index * size, mean, std)
