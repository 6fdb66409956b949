"""A trial of the user's own parts at the start: one forward and one backward pass of each, of a micro-batch of random numbers.

    residual, delta ──> forward ──> residual + delta, output      both [s/tp, b, h]

The part is built whole, on this rank's device. What a trial finds would otherwise be an error in the first step, or none at all:
a part that sees later tokens, leaves `delta` out, or has a parameter that is not trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from megatrain.config import Plan
from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.part import Part
from megatrain.model.gpt import build_model
from megatrain.model.layer import TransformerLayer
from megatrain.model.parts import failure_of
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.layout import ParamRegistry
from megatrain.parallel.rank_lists import GridShape

_MOST_WEIGHTS: Final = 1 << 30
"""Parts of more weights, which one rank may not hold whole, are not tried."""


def try_parts(plan: Plan, device: torch.device) -> None:
    """Try each of the user's own parts once. Raises ConfigError."""
    spec, config = plan.derived.model_spec, plan.config
    tried = {
        part: (replace(layer, parts=(part,)), stack.name == "decoder")
        for stack in spec.stacks
        for layer in stack.layers
        for part in layer.parts
        if type(part).module is not None
    }
    if not tried:
        return
    num_tokens = config.data.seq_length // config.parallel.context_parallel_size
    stack = replace(spec.stacks[-1], layers=tuple(layer for layer, _ in tried.values()), memory=None)
    model = build_model(
        replace(spec, stacks=(stack,), mtp=None),
        build_grid(GridShape(), 0),
        seq_length=num_tokens,
        sequence_parallel=False,
        dtype=getattr(torch, config.precision.params_dtype),
        device=device,
    )
    layers = [
        one for segment in model.segments for one in segment.modules() if isinstance(one, TransformerLayer)
    ]
    for layer, (part, (_, is_causal)) in zip(layers, tried.items(), strict=True):
        (module,) = layer.branches
        if _allocate(module, device):
            shape = (num_tokens, config.training.micro_batch_size, spec.hidden_size)
            x = torch.rand(shape, device=device, dtype=model.hidden_dtype)
            _Trial(part, module, x, is_causal=is_causal).run()


def _allocate(module: nn.Module, device: torch.device) -> bool:
    """Allocate the parameters and fill them with random numbers; return False if they are too many."""
    registry = ParamRegistry.of([module])
    entries = list(registry.entries.values())
    if sum(math.prod(entry.layout.shape) for entry in entries) > _MOST_WEIGHTS:
        return False
    (dtype,) = {entry.parameter.dtype for entry in entries} or {torch.float32}
    grid = build_grid(GridShape(), 0)
    allocate_buffers(registry, grid=grid, weight_dtype=dtype, grad_dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(1)
    for entry in entries:
        weight, is_matrix = entry.parameter, entry.parameter.dim() > 1
        with torch.no_grad():
            weight.normal_(
                0 if is_matrix else 1, weight.shape[-1] ** -0.5 if is_matrix else 0.1, generator=generator
            )
    return True


@dataclass(frozen=True)
class _Trial:
    part: Part
    module: nn.Module
    x: Tensor
    """Random numbers [s, b, h]."""
    is_causal: bool
    """Later tokens have no effect: the part is of a decoder."""

    def run(self) -> None:
        """Raises ConfigError."""
        x, first = self.x, len(self.x) // 2
        residual, output = self._forward(x, None)
        self._require_equal(
            residual, x, "the residual stream with delta=None", "the residual stream that it got"
        )
        self._require_equal(self._forward(x, None)[1], output, "its output", "that of an equal call before")
        half = 0.5 * x
        residual, added = self._forward(half, half)
        self._require_equal(residual, x, "the residual stream", "residual + delta")
        self._require_equal(added, output, "its output for residual and delta", "that for their sum alone")
        first = first if self.is_causal else len(x)
        later = torch.cat([x[:first], x[first:].flip(-1)])
        seen = self._forward(later, None)[1][:first]
        self._require_equal(
            seen, output[:first], "its output for a token", "that before a change of later tokens"
        )
        if x.shape[1] > 1:
            others = torch.cat([x[:, :1], x[:, 1:].flip(-1)], dim=1)
            seen = self._forward(others, None)[1][:, :1]
            self._require_equal(
                seen, output[:, :1], "its output for a sample", "that before a change of other samples"
            )
        self._backward()

    def _forward(
        self, residual: Tensor, delta: Tensor | None, *, is_training: bool = False
    ) -> tuple[Tensor, Tensor]:
        try:
            returned = self.module(residual, delta, PassInfo(is_training=is_training))
        except Exception as error:
            raise failure_of(self.part, error) from error
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        shapes = [
            list(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in returned if is_pair
        ]
        if not is_pair or shapes != [list(residual.shape)] * 2:
            found = " and ".join(map(str, shapes)) if is_pair else type(returned).__name__
            raise self._error(
                f"forward returned {found}, not two tensors [s/tp, b, h], here {list(residual.shape)}"
            )
        residual, added = returned
        return residual, added

    def _backward(self) -> None:
        x = self.x.clone().requires_grad_()
        residual, output = self._forward(x, None, is_training=True)
        try:
            (residual + output).sum().backward()
        except Exception as error:
            raise failure_of(self.part, error) from error
        for name, weight in self.module.named_parameters():
            if weight.grad is not None:
                raise self._error(
                    f"the gradient of its parameter {name} does not reach the gradient buffer",
                    f'read it in forward with weight_of(self, "{name.rpartition(".")[2]}"), not as an attribute',
                )

    def _require_equal(self, found: Tensor, expected: Tensor, what: str, other: str) -> None:
        tolerance = 1e-3 if found.dtype in (torch.float32, torch.float64) else 2e-2
        error, scale = (found - expected).abs().max().item(), expected.abs().max().item()
        if not error <= tolerance * scale:
            raise self._error(
                f"{what} differs from {other}, by {error:.2g} at most, with values up to {scale:.2g}"
            )

    def _error(self, problem: str, fix: str = "") -> ConfigError:
        kind = type(self.part)
        return ConfigError(
            f"--spec: {kind.__name__} ({kind.module.__name__}): {problem}",
            fix=fix
            or "return (residual + delta, output) from forward, computed from this and earlier tokens of the same sample, without"
            " random numbers; column_linear adds delta and returns the sum",
        )
