"""The importance of the parts of a model, from its activations on a calibration set.

    channels of the stream   |norm output|            of every branch
    heads                    length of a head's output, before the projection
    neurons                  |activation|             of MLPs, shared and routed experts
    experts                  share of the tokens that are routed to it
    layers                   1 - cosine of input and output (block influence), or the loss of the model without the layer

Means over a sample's tokens are squared and summed over samples: sums of parts of the set add up, so a command that was stopped
continues. Sources: Muralidharan et al., arXiv:2407.14679 (Minitron; channels, heads and neurons), Men et al., arXiv:2403.03853
(block influence).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.kernels.activations import activate
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.moe.grouped_bias import add_grouped_bias
from megatrain.model.experts.experts import ExpertBranch
from megatrain.model.gpt import Model
from megatrain.model.head import Head
from megatrain.model.implementations.grouped_mlp import LocalGroupedMlp
from megatrain.model.implementations.local import LocalRowLinear
from megatrain.model.latent_attention import LatentAttention
from megatrain.model.layer import Attention, TransformerLayer
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.expert_parallel import DispatchedTokens
from megatrain.tools.prune.sizes import EXPERT_FFN, EXPERTS, FFN, HEADS, HIDDEN, LAYERS, SHARED_FFN

ENERGY = "energy"
"""Mean share of each channel in the squared length of the stream."""


class Importance:
    """Sums over samples by name: LAYERS [L], HIDDEN [h], ENERGY [h], and `N.PATH` of the sizes of layer N.

    Args:
        layers: of the whole model.
        by_loss: layers are scored by the loss of the model without them.
    """

    def __init__(self, num_layers: int, *, by_loss: bool) -> None:
        self.sums: dict[str, Tensor] = {LAYERS: torch.zeros(num_layers, dtype=torch.float64)}
        self._by_loss = by_loss
        self._is_watching = True

    def watch(self, model: Model, numbers: Sequence[int]) -> None:
        """Record the passes of a model whose layers have these numbers, each of one micro-batch of one sample."""
        for number, layer in zip(numbers, _layers(model), strict=True):
            if not self._by_loss:
                self._before(layer, partial(self._of_layer, number), is_after=True)
            attention = model.spec.layers[number].attention
            for branch in layer.branches:
                norm = next(module for module in branch.modules() if hasattr(module, "add_and_norm"))
                self._before(branch, partial(self._of_stream, norm))
                if isinstance(branch, Attention | LatentAttention):
                    assert attention is not None
                    assert isinstance(branch.proj, nn.Module)
                    self._before(branch.proj, partial(self._of_heads, number, attention.num_heads))
                width = SHARED_FFN if isinstance(branch, ExpertBranch) else FFN
                for module in branch.modules():
                    if isinstance(module, LocalRowLinear) and module.activation is not None:
                        self._before(module, partial(self._of_neurons, f"{number}.{width}", module))
                    elif isinstance(module, LocalGroupedMlp):
                        self._before(module, partial(self._of_experts, number, module))

    @torch.no_grad()
    def add_losses(self, model: Model, batch: Batch, info: PassInfo) -> None:
        """Add the losses of a whole model without each of its layers."""
        self._is_watching = False
        *segments, head = model.segments
        assert isinstance(head, Head)
        inputs: list[Tensor | None] = [None]
        for segment in segments:
            inputs.append(segment(inputs[-1], batch, info))
        number = 0
        for place, segment in enumerate(segments):
            if not isinstance(segment, TransformerLayer):
                continue
            hidden = inputs[place]
            for later in segments[place + 1 :]:
                hidden = later(hidden, batch, info)
            assert hidden is not None
            logits = head.logits(hidden, info).flatten(0, 1)
            loss = F.cross_entropy(logits.to(accumulation_dtype(logits.dtype)), batch.labels.t().flatten())
            self.sums[LAYERS][number] += loss.double().cpu()
            number += 1
        self._is_watching = True

    def _before(self, module: nn.Module, record: Callable[..., None], *, is_after: bool = False) -> None:
        """Call `record` with the arguments of each pass of a module; after it, with the result before them."""

        def hook(_: nn.Module, given: Any, *result: Any) -> None:
            if self._is_watching:
                record(*result, *given)

        if is_after:
            module.register_forward_hook(hook)
        else:
            module.register_forward_pre_hook(hook)

    def _of_layer(self, number: int, out: Tensor, hidden: Tensor, *_: Any) -> None:
        wide = accumulation_dtype(hidden.dtype)
        similar = F.cosine_similarity(hidden.to(wide), out.to(wide), dim=-1)
        self.sums[LAYERS][number] += (1 - similar).double().mean().cpu()

    def _of_stream(self, norm: Any, residual: Tensor, delta: Tensor | None, *_: Any) -> None:
        total, normed = norm.add_and_norm(residual, delta)
        squares = total.double().square()
        self._add(ENERGY, (squares / squares.sum(-1, keepdim=True)).mean((0, 1)))
        self._add_mean(HIDDEN, normed)

    def _of_heads(self, number: int, num_heads: int, heads: Tensor, *_: Any) -> None:
        wide = heads.to(accumulation_dtype(heads.dtype))
        self._add_mean(f"{number}.{HEADS}", wide.unflatten(-1, (num_heads, -1)).norm(dim=-1))

    def _of_neurons(self, name: str, module: LocalRowLinear, x: Tensor, *_: Any) -> None:
        assert module.activation is not None
        self._add_mean(name, activate(x, module.activation))

    def _of_experts(
        self, number: int, module: LocalGroupedMlp, dispatched: DispatchedTokens, info: PassInfo
    ) -> None:
        ends = dispatched.ends
        fc1 = module.weight_of("fc1")
        inner = module.products.fc1(module.products.cast(dispatched.rows), fc1.value, ends, info)
        if fc1.bias is not None:
            add_grouped_bias(inner, fc1.bias.value, ends)
        active = activate(inner, module.activation).double().abs()
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        sums = [rows.sum(0) for rows in active[: sum(counts)].split(counts)]
        num_tokens = sum(counts) or 1
        self._add(f"{number}.{EXPERT_FFN}", (torch.stack(sums) / num_tokens).square())
        self._add(f"{number}.{EXPERTS}", torch.tensor(counts).double() / num_tokens)

    def _add_mean(self, name: str, x: Tensor) -> None:
        """Add the squared mean of |x| over the tokens of a sample, [s, 1, n]."""
        self._add(name, x.double().abs().mean((0, 1)).square())

    def _add(self, name: str, value: Tensor) -> None:
        found = self.sums.get(name)
        self.sums[name] = value.cpu() if found is None else found + value.cpu()


def _layers(model: Model) -> Iterator[TransformerLayer]:
    modules = (module for segment in model.segments for module in segment.modules())
    return (module for module in modules if isinstance(module, TransformerLayer))
