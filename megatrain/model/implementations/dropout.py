"""Dropout of the `local` implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from megatrain.kernels.random import drop
from megatrain.kernels.sums import ColumnSums
from megatrain.model.implementations.local import LocalColumnLinear, LocalRowLinear
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
        tokens = self.split.token_indices(rows, samples, first_sample=info.first_sample, device=x.device)
        return drop(x, tokens, residual, key=self.key, p=self.p, dx_sums=self.dx_sums)


def leave_sums_to_biases(branches: Sequence[nn.Module]) -> None:
    """Let the kernels that write the gradients of linear layers' outputs, of dropout and of activations, sum them for the biases."""
    for branch in branches:
        parts = dict(branch.named_children())
        last, first = parts.get("proj", parts.get("fc2")), parts.get("fc1")
        output = list(parts["output"].modules())[2:] if "output" in parts else []
        if not isinstance(last, LocalRowLinear) or not hasattr(last, "bias"):
            continue
        if len(output) == 1 and isinstance(output[0], LocalDropout):
            last.dy_sums = output[0].dx_sums = ColumnSums()
        if isinstance(first, LocalColumnLinear) and last.activation is not None:
            first.dy_sums = ColumnSums()
            last.activation = replace(last.activation, dx_sums=first.dy_sums)
