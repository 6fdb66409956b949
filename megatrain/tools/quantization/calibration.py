"""Samples of a dataset run through a model, layer by layer; hooks collect statistics of the inputs of its linear layers.

    dataset ─> tokens [n, s] ─> embedding ─> hidden-0.bin ─> layer 0 ─> hidden-1.bin ─> layer 1 ...

One layer has memory at a time. Hidden states lie in files, so that a command that was stopped continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatrain.checkpoint.reader import TensorReader
from megatrain.inference.stored_model import ModelOptions, build_without_weights, load_weights
from megatrain.kernels.activations import activate, activate_weighted
from megatrain.kernels.moe.grouped_bias import add_grouped_bias
from megatrain.kernels.moe.grouped_gemm import groups_of
from megatrain.model.implementations.grouped_mlp import LocalGroupedMlp
from megatrain.model.implementations.local import LocalColumnLinear, LocalRowLinear
from megatrain.model.layer import Attention
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.layout import ParamRegistry

_TOKENS_OF_A_PASS = 4096


@dataclass
class InputStatistics:
    """Statistics of the inputs of a linear layer."""

    hessian: Tensor
    """Mean of x x^T, fp32 [i, i]."""
    mean_abs: Tensor
    """Mean of |x|, fp32 [i]."""
    count: int = 0

    @classmethod
    def zeros(cls, size: int, device: torch.device) -> InputStatistics:
        return cls(torch.zeros(size, size, device=device), torch.zeros(size, device=device))

    def add(self, x: Tensor) -> None:
        """Add inputs [..., i]."""
        rows = x.flatten(0, -2).float()
        total = self.count + len(rows)
        self.hessian.mul_(self.count / total).addmm_(rows.t(), rows, alpha=1 / total)
        self.mean_abs.mul_(self.count / total).add_(rows.abs().sum(0), alpha=1 / total)
        self.count = total

    def scale_channels(self, scales: Tensor) -> None:
        """Change to the statistics of x / scales."""
        self.hessian.div_(scales).div_(scales[:, None])
        self.mean_abs.div_(scales)


@dataclass
class LayerStatistics:
    """Statistics of a pass through a layer."""

    inputs: dict[str, InputStatistics] = field(default_factory=dict)
    """By the name of each tensor of ours in the weight."""
    largest_key: float = 0.0
    largest_value: float = 0.0


class Calibration:
    """The model of a reader; one segment has weights at a time.

    Args:
        tokens: int64 [n, s].
        folder: of the files of hidden states.
    """

    def __init__(
        self, reader: TensorReader, tokens: Tensor, folder: Path, *, vocab_size: int, device: torch.device
    ) -> None:
        self.reader, self.tokens, self.folder = reader, tokens, folder
        self.options = ModelOptions(device=device, dtype=torch.float32)
        self.model, self.grid = build_without_weights(reader, self.options, vocab_size=vocab_size)

    @contextmanager
    def segment(self, number: int) -> Iterator[nn.Module]:
        """Give a segment memory and the reader's weights."""
        segment = self.model.segments[number]
        registry = ParamRegistry.of([segment])
        load_weights(registry, self.reader, self.grid, self.options)
        yield segment
        for entry in registry.entries.values():
            empty = torch.empty(entry.layout.shape, dtype=torch.float32, device="meta")
            entry.module.register_parameter(entry.attribute, nn.Parameter(empty))

    def embed(self) -> None:
        """Write the hidden states before the first layer."""
        with self.segment(0) as embedding:
            self._run(embedding, None, self._path(0))

    @torch.no_grad()
    def statistics(self, layer: int, progress: Callable[[float], None]) -> LayerStatistics:
        """Return what the inputs of a layer's linear layers are like."""
        found = LayerStatistics()
        with self.segment(layer + 1) as segment:
            hooks = [*_observe_inputs(segment, found), *_observe_cache(segment, found)]
            self._run(segment, self._path(layer), None, progress)
            for hook in hooks:
                hook.remove()
        return found

    def advance(self, layer: int, progress: Callable[[float], None]) -> None:
        """Write the hidden states after a layer, with the reader's weights."""
        with self.segment(layer + 1) as segment:
            self._run(segment, self._path(layer), self._path(layer + 1), progress)

    def forget(self, layer: int) -> None:
        """Remove the hidden states before a layer."""
        self._path(layer).unlink(missing_ok=True)

    def _path(self, layer: int) -> Path:
        return self.folder / f"hidden-{layer}.bin"

    @torch.no_grad()
    def _run(
        self,
        segment: nn.Module,
        source: Path | None,
        target: Path | None,
        progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Run all samples through a segment, from and to a file fp32 [n, s, h]."""
        n, s = self.tokens.shape
        shape = (n, s, self.model.spec.hidden_size)
        before = None if source is None else np.memmap(source, np.float32, "r", shape=shape)
        after = None if target is None else np.memmap(target, np.float32, "w+", shape=shape)
        step, info = max(1, _TOKENS_OF_A_PASS // s), PassInfo(is_training=False)
        for start in range(0, n, step):
            part = slice(start, min(start + step, n))
            hidden = None
            if before is not None:
                hidden = (
                    torch.from_numpy(before[part].copy()).transpose(0, 1).contiguous().to(self.options.device)
                )
            out = segment(hidden, self._batch(part), info)
            if after is not None:
                after[part] = out.transpose(0, 1).float().cpu().numpy()
            progress(part.stop / n)
        if after is not None:
            after.flush()

    def _batch(self, part: slice) -> Batch:
        tokens = self.tokens[part].to(self.options.device)
        unused, positions = torch.zeros_like(tokens), torch.arange(tokens.shape[1], device=tokens.device)
        return Batch(
            tokens=tokens, labels=unused, loss_mask=unused.float(), position_ids=positions.expand_as(tokens)
        )


def _observe_inputs(
    segment: nn.Module, found: LayerStatistics
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Add the inputs of each linear layer to `found` when it runs."""
    for leaf in segment.modules():
        if isinstance(leaf, LocalGroupedMlp):
            yield _observe_experts(leaf, found)
        if not isinstance(leaf, LocalColumnLinear | LocalRowLinear):
            continue
        statistics = InputStatistics.zeros(leaf.weight.shape[1], leaf.weight.device)
        found.inputs |= {piece.name: statistics for piece in leaf.layouts["weight"].pieces}

        def observe(
            module: nn.Module, arguments: tuple[Tensor, ...], to: InputStatistics = statistics
        ) -> None:
            to.add(_input_of(module, arguments))

        yield leaf.register_forward_pre_hook(observe)


def _observe_experts(experts: LocalGroupedMlp, found: LayerStatistics) -> torch.utils.hooks.RemovableHandle:
    """Add the inputs of each expert's linear layers, those of the second times the routing probability."""
    statistics: dict[str, list[InputStatistics]] = {}
    for name in ("fc1", "fc2"):
        layout, inputs = experts.layouts[name], getattr(experts, name).shape[1]
        count, device = experts.num_local_experts, getattr(experts, name).device
        statistics[name] = [InputStatistics.zeros(inputs, device) for _ in range(count)]
        pieces = len(layout.pieces) // count
        found.inputs |= {
            piece.name: statistics[name][number // pieces] for number, piece in enumerate(layout.pieces)
        }

    def observe(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        rows, ends, probs = arguments[0][:3]
        fc1 = experts.weight_of("fc1")
        inner = experts.products.fc1(experts.products.cast(rows), fc1.value, ends, arguments[1])
        if fc1.bias is not None:
            add_grouped_bias(inner, fc1.bias.value, ends)
        weighted = activate_weighted(inner, probs, experts.activation, ends)
        for number, group in groups_of(ends):
            statistics["fc1"][number].add(rows[group])
            statistics["fc2"][number].add(weighted[group])

    return experts.register_forward_pre_hook(observe)


def _input_of(leaf: nn.Module, arguments: tuple[Tensor, ...]) -> Tensor:
    """Return the input of the GEMM of a linear layer, from the arguments of its module."""
    if isinstance(leaf, LocalColumnLinear):
        return leaf.norm.add_and_norm(arguments[0], arguments[1])[1]
    assert isinstance(leaf, LocalRowLinear)
    return arguments[0] if leaf.activation is None else activate(arguments[0], leaf.activation)


def _observe_cache(segment: nn.Module, found: LayerStatistics) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Keep the largest absolute key and value."""

    def observe(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        found.largest_key = max(found.largest_key, float(arguments[1].abs().max()))
        found.largest_value = max(found.largest_value, float(arguments[2].abs().max()))

    for module in segment.modules():
        if isinstance(module, Attention):
            yield module.core.register_forward_pre_hook(observe)
