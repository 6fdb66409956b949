"""Dropout of the `local` implementation."""

from __future__ import annotations

from torch import Tensor, nn

from megatrain.kernels.random import drop
from megatrain.kernels.sums import ColumnSums
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context_parallel import ContextParallel, TokenSplit
from megatrain.parallel.tensor_parallel import TensorParallel


class LocalDropout(nn.Module):
    """Dropout of this rank's rows of the sequence, [s/(cp tp), b, h]; the mask does not depend on the layout."""

    def __init__(self, p: float, key: int, tp: TensorParallel, cp: ContextParallel) -> None:
        super().__init__()
        self.p = p
        self.key = key
        self.split = TokenSplit(tp, cp)
        self.dx_sums: ColumnSums | None = None

    def forward(self, x: Tensor, info: PassInfo, residual: Tensor | None = None) -> Tensor:
        """Drop; add the result to `residual`, in the same kernel, if there is one."""
        if not info.is_training:
            return x if residual is None else residual + x
        rows, samples, _ = x.shape
        tokens = self.split.shared_token_indices(rows, samples, info, x.device)
        return drop(x, tokens, residual, key=self.key, p=self.p, dx_sums=self.dx_sums)
