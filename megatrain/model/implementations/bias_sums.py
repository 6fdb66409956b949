"""Gradients of biases from the kernels that write the gradients of linear layers' outputs, and scales of these in FP8.

    qkv ─ core attention        fc1 ─ activation        projection, fc2 ─ dropout

The backward pass of the right side has the gradients in registers, sums their columns and leaves the sums for the bias on the left,
whose layer saves a pass over memory. So does the largest absolute value, which the activation leaves for the cast of fc1's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from megatrain.kernels.fp8.quantize import Amax
from megatrain.kernels.sums import ColumnSums
from megatrain.model.families.cross_attention import CrossAttention
from megatrain.model.families.masked_attention import MaskedAttention
from megatrain.model.implementations.dropout import LocalDropout
from megatrain.model.implementations.local import LocalColumnLinear, LocalRowLinear
from megatrain.model.layer import Attention, BranchOutput, Mlp
from megatrain.model.recompute import RecomputedModule


def leave_sums_and_amaxes(branches: Sequence[nn.Module]) -> None:
    """Connect the modules of each branch."""
    for branch in branches:
        if isinstance(branch, Mlp):
            _of_dropout(branch.fc2, branch.output)
            _of_activation(branch.fc1, branch.fc2)
        elif isinstance(branch, CrossAttention):
            _of_dropout(branch.proj, branch.output)
            _of_attention([branch.q, branch.kv], branch.core)
        elif isinstance(branch, Attention):
            _of_dropout(branch.proj, branch.output)
            between = [*branch.query_output.steps, *branch.key_output.steps]
            if branch.rope is None and not between and len(branch.sizes) == 3:
                _of_attention([branch.qkv], branch.core)


def _of_dropout(last: object, output: BranchOutput) -> None:
    if isinstance(last, LocalRowLinear) and hasattr(last, "bias") and len(output.steps) == 1:
        (step,) = output.steps
        if isinstance(step, LocalDropout):
            last.dy_sums = step.dx_sums = ColumnSums()


def _of_activation(first: object, last: object) -> None:
    if not (isinstance(first, LocalColumnLinear) and isinstance(last, LocalRowLinear)):
        return
    if hasattr(first, "bias") and last.activation is not None:
        first.dy_sums = ColumnSums()
        last.activation = replace(last.activation, dx_sums=first.dy_sums)
    if first.fp8 is not None and first.fp8.gradient.needs_amax and last.activation is not None:
        first.fp8.dy_amax = Amax()
        last.activation = replace(last.activation, dx_amax=first.fp8.dy_amax)


def _of_attention(linears: Sequence[object], core: nn.Module) -> None:
    core = core.module if isinstance(core, RecomputedModule) else core
    local = [one for one in linears if isinstance(one, LocalColumnLinear) and hasattr(one, "bias")]
    if isinstance(core, MaskedAttention) and len(local) == len(linears):
        for one in local:
            one.dy_sums = ColumnSums()
        core.dx_sums = tuple(one.dy_sums for one in local if one.dy_sums is not None)
