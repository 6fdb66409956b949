"""Weights of another program as the source of our model's weights."""

from collections.abc import Mapping

from torch import Tensor

from megatrain.parallel.layout import BoxRange, ParamLayout


class CopiedWeights:
    """Whole tensors by canonical name; a `TensorSource`. `unused` has the names that no box was copied from."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.unused = set(weights)

    def fill(self, out: Tensor, layout: ParamLayout, box: BoxRange) -> None:
        whole = self.weights[box.piece.name]
        assert whole.shape == box.piece.shape, box.piece.name
        out.copy_(whole[tuple(slice(*edge) for edge in box.box)])
        self.unused.discard(box.piece.name)
