"""Linear layers with low-rank adapters (--lora-rank): the modules of `local` else.

                     A                                        B                                    over tensor ranks
    column-parallel  whole, of local rows -> [s/tp, b, r]     split by outputs -> [s, b, o/tp]     u = A x is gathered
    row-parallel     split by inputs, sum -> [s/tp, b, r]     whole, of local rows -> [s/tp, b, o] u = A x is summed

Each canonical tensor of a fused weight has an adapter of its own. B is 0 at first. Source: Hu et al., arXiv:2106.09685.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.config.model_spec.lora import LoraSpec, adapter_names, is_adapter
from megatrain.kernels.activations import activate
from megatrain.kernels.random import dropout_factor, keep_mask, stream_key
from megatrain.model.implementations.fake_quantized import apply_activation
from megatrain.model.implementations.local import LocalColumnLinear, LocalRowLinear, bias_of
from megatrain.model.implementations.local_builder import LocalBuilder, alone
from megatrain.model.layouts import replicated_layout, rows_layout
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context_parallel import ContextParallel, TokenSplit
from megatrain.parallel.layout import Init, ParamLayout, Piece, ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel, column_linear, row_linear


def lora_builder(lora: LoraSpec) -> Callable[..., LocalBuilder]:
    """Return what makes a builder whose linear layers have adapters, given the arguments of `LocalBuilder`."""

    def build(tp: TensorParallel, cp: ContextParallel, *others: Any) -> LocalBuilder:
        _, _, seed, *_ = others
        options: dict[str, Any] = {"lora": lora, "cp": cp, "seed": seed}
        column = functools.partial(LoraColumnLinear, **options)
        row = functools.partial(LoraRowLinear, **options)
        make: Callable[..., LocalBuilder] = functools.partial(LocalBuilder, column=column, row=row)
        return make(tp, cp, *others)

    return build


class LoraColumnLinear(LocalColumnLinear):
    """Residual addition, norm if there is one, and column-parallel linear layer with adapters."""

    def __init__(
        self, *layer: Any, lora: LoraSpec, cp: ContextParallel, seed: int, recompute_norm: bool, fp8: None
    ) -> None:
        """Take the arguments of `LocalColumnLinear`, and those of the adapters."""
        super().__init__(*layer, recompute_norm=recompute_norm, fp8=fp8)
        _, linear, tp, dtype = layer
        self.scale, self.tps = lora.scale, (alone(tp), tp)
        self.parts: list[tuple[Adapter, slice]] = []
        """Each adapter with its outputs."""
        for piece in linear.weight.pieces:
            if not lora.adapts(piece.name):
                continue
            (first, stop), (_, num_inputs) = piece.box
            name, _ = adapter_names(piece.name)
            a = replicated_layout([(name, lora.rank)], num_inputs, _init_of(num_inputs), tp)
            b = ParamLayout(
                shape=(stop - first, lora.rank), pieces=(_piece_of_b(piece, lora.rank),), init=Init()
            )
            drop = AdapterDropout(
                lora.dropout, stream_key(seed, f"{name}.dropout"), TokenSplit(tp, cp), num_inputs
            )
            self.parts.append((Adapter(a, b, dtype, drop), slice(piece.row, piece.row + stop - first)))
        self.adapters = nn.ModuleList(adapter for adapter, _ in self.parts)

    def forward(self, hidden: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        hidden, x = self.norm.add_and_norm(hidden, delta)
        again = functools.partial(self.norm.recompute, hidden.detach()) if self.recompute_norm else None
        y = column_linear(x, self.weight, None, self.tp, info, bias_of(self))
        terms = [
            (adapter.product(x, column_linear, self.tps, info, again), part) for adapter, part in self.parts
        ]
        return hidden, _sum(y, terms, self.scale)


class LoraRowLinear(LocalRowLinear):
    """Activation, if there is one, and row-parallel linear layer with an adapter."""

    def __init__(self, *layer: Any, lora: LoraSpec, cp: ContextParallel, seed: int) -> None:
        """Take the arguments of `LocalRowLinear`, and those of the adapter."""
        super().__init__(*layer)
        linear, tp, dtype, _ = layer
        self.scale, self.tps = lora.scale, (alone(tp), tp)
        self.adapter: Adapter | None = None
        (piece,) = linear.weight.pieces
        num_outputs, num_inputs = piece.shape
        if lora.adapts(piece.name):
            name_a, name_b = adapter_names(piece.name)
            a = rows_layout(name_a, lora.rank, num_inputs, _init_of(num_inputs), tp)
            b = replicated_layout([(name_b, num_outputs)], lora.rank, Init(), tp)
            split, first = TokenSplit(self.tps[0], cp), piece.box[1][0]
            drop = AdapterDropout(
                lora.dropout, stream_key(seed, f"{name_a}.dropout"), split, num_inputs, first
            )
            self.adapter = Adapter(a, b, dtype, drop)

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        again = None
        if self.activation is not None:
            again = functools.partial(self._activate, x.detach()) if self.activation.is_recomputed else None
            x = apply_activation(x, self.activation)
        y = row_linear(x, self.weight, None, self.tp, info, bias_of(self))
        if self.adapter is None:
            return y
        return y + self.adapter.product(x, row_linear, self.tps[::-1], info, again) * self.scale

    def _activate(self, x: Tensor) -> Tensor:
        assert self.activation is not None
        return activate(x, self.activation)


@dataclass(frozen=True)
class AdapterDropout:
    """Dropout of the inputs of an adapter; the mask does not depend on the layout."""

    p: float
    key: int
    split: TokenSplit
    """Split of the rows of the inputs."""
    num_columns: int
    """Inputs of the layer, on all tensor ranks."""
    first: int = 0
    """The first of this rank's."""

    def __call__(self, x: Tensor, info: PassInfo) -> Tensor:
        """Return inputs [rows, b, i] without those that are dropped, in training."""
        if self.p == 0 or not info.is_training:
            return x
        rows, samples, columns = x.shape
        tokens = self._token_indices(rows, samples, info, x.device)
        kept = keep_mask(tokens, self.num_columns, key=self.key, p=self.p)
        kept = kept[..., self.first : self.first + columns]
        return (x * dropout_factor(self.p)).masked_fill(~kept, 0)

    def _token_indices(self, rows: int, samples: int, info: PassInfo, device: torch.device) -> Tensor:
        """Return the indices of the tokens; of a chunk, those that the whole MLP has for its rows."""
        if info.chunk is None:
            return self.split.token_indices(rows, samples, info, device)
        chunk, count = info.chunk
        ranks = rows // (chunk.stop - chunk.start)  # whose rows are gathered
        tokens = self.split.token_indices(count * ranks, samples, info, device)
        return tokens.view(ranks, count, samples)[:, chunk].flatten(0, 1)

    def recompute(self, recompute_fn: functools.partial[Tensor], info: PassInfo) -> functools.partial[Tensor]:
        """Return a `recompute_fn` of a linear layer that also drops."""
        compute = recompute_fn.func

        def dropped(kept: Tensor) -> Tensor:
            return self(compute(kept), info)

        return functools.partial(dropped, *recompute_fn.args)


class Adapter(ShardedModule):
    """A and B of one weight."""

    a: Tensor
    b: Tensor

    def __init__(self, a: ParamLayout, b: ParamLayout, dtype: torch.dtype, drop: AdapterDropout) -> None:
        super().__init__()
        self.drop = drop
        self.add_weight("a", a, dtype)
        self.add_weight("b", b, dtype)

    def product(
        self,
        x: Tensor,
        linear_a: Callable[..., Tensor],
        tps: tuple[TensorParallel, TensorParallel],
        info: PassInfo,
        recompute_fn: functools.partial[Tensor] | None,
    ) -> Tensor:
        """Return B A x, of x without the inputs that are dropped: [s/tp, b, h] -> [s, b, o/tp], or [s, b, i/tp] -> [s/tp, b, o].

        Args:
            linear_a: `column_linear`, or `row_linear` where the inputs are split.
            tps: ranks of A and of B, over which one of them is split.
        """
        again = recompute_fn and self.drop.recompute(recompute_fn, info)
        grad_a, grad_b = self.weight_grads.get("a"), self.weight_grads.get("b")
        u = linear_a(self.drop(x, info), self.a, grad_a, tps[0], info, recompute_fn=again)
        return column_linear(u, self.b, grad_b, tps[1], info)


def freeze_base(segments: Sequence[nn.Module]) -> None:
    """Mark all parameters but those of adapters as not trained; a stage's first output requires gradients all the same."""
    for segment in segments:
        for module in [one for one in segment.modules() if isinstance(one, ShardedModule)]:
            for attribute, layout in module.layouts.items():
                if not is_adapter(layout.pieces[0].name):
                    module.layouts[attribute] = dataclasses.replace(layout, is_trained=False)
        segment.register_forward_hook(_require_gradient)


def _require_gradient(module: nn.Module, inputs: object, output: Tensor) -> None:  # noqa: ARG001 (a hook's signature)
    """Let the backward pass of a segment without trained parameters and inputs, such as the embedding, have a root."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _init_of(num_inputs: int) -> Init:
    """Return the initial values of A: those of `torch.nn.Linear`, as in peft."""
    return Init(uniform=(-(num_inputs**-0.5), num_inputs**-0.5))


def _piece_of_b(piece: Piece, rank: int) -> Piece:
    """Return the piece of B that has the outputs of a piece of the weight."""
    _, name = adapter_names(piece.name)
    shape, box = (piece.shape[0], rank), (piece.box[0], (0, rank))
    return dataclasses.replace(piece, name=name, shape=shape, box=box, row=0)


def _sum(y: Tensor, terms: Sequence[tuple[Tensor, slice]], scale: float) -> Tensor:
    """Add the terms to their outputs."""
    if not terms:
        return y
    parts: list[Tensor] = []
    done = 0
    for term, part in terms:
        parts += [y[..., done : part.start], y[..., part] + term * scale]
        done = part.stop
    return torch.cat([*parts, y[..., done:]], -1)
