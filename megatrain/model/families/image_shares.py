"""The images of a micro-batch over the ranks that process it: each runs the tower on its share, and gathers the vectors of all.

    images 0 1 2 3 4   over 2 x cp     rank 0: 0 1 2    rank 1: 3 4 and a black one, which nothing uses
    vectors            gathered        gradients: summed over the ranks, since each has those of its own tokens, and split

Context ranks always share images. Tensor ranks split the tower's layers instead, unless the tower is whole on each of them
(`--spread-images`): its gradients are then partial sums over tensor ranks too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatrain.parallel.collectives import all_gather
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel, all_gather_rows, conjugate


@dataclass(frozen=True)
class ImageShares:
    """The ranks that share images.

    Attributes:
        tp: of the language model.
        spreads_over_tp: tensor ranks hold the tower whole, and share images too.
    """

    tp: TensorParallel
    cp: RankGroup
    spreads_over_tp: bool

    @property
    def size(self) -> int:
        return self.cp.size * (self.tp.size if self.spreads_over_tp else 1)

    @property
    def rank(self) -> int:
        return self.cp.rank * self.tp.size + self.tp.rank if self.spreads_over_tp else self.cp.rank

    def own(self, images: Tensor) -> Tensor:
        """Return this rank's images, [m, ...] -> [ceil(m / size), ...]; black ones follow the last."""
        if self.size == 1:
            return images
        share = -(-len(images) // self.size)
        found = images[self.rank * share : (self.rank + 1) * share]
        return torch.cat((found, images.new_zeros(share - len(found), *images.shape[1:])))

    def gather(self, vectors: Tensor, num_images: int) -> Tensor:
        """Return the vectors of all images, [n, m / size, h] -> [n, m, h]."""
        if self.size == 1:
            return vectors
        x = vectors.transpose(0, 1).contiguous()
        if self.spreads_over_tp and self.tp.sequence_parallel:
            x = all_gather_rows(x, self.tp.group)
        elif self.spreads_over_tp:  # the gradient is whole on each tensor rank
            x = conjugate(x, self.tp.group, all_gather, _own_rows)
        return all_gather_rows(x, self.cp)[:num_images].transpose(0, 1)


def _own_rows(x: Tensor, group: RankGroup) -> Tensor:
    return x.chunk(group.size)[group.rank].contiguous()


def replicate(modules: Iterable[nn.Module], tp: TensorParallel) -> None:
    """Declare that tensor ranks hold these modules whole, each with the gradients of its own images."""
    sums = (tp.group.name,) if tp.size > 1 else ()
    found = [one for module in modules for one in module.modules() if isinstance(one, ShardedModule)]
    for module in found:
        for attribute, layout in module.layouts.items():
            pieces = [
                replace(piece, copies=(tp.group.name,), grad_sum_groups=sums) for piece in layout.pieces
            ]
            module.layouts[attribute] = replace(layout, pieces=tuple(pieces))
