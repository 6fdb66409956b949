"""Gradients of the tiny model of a parity layout on one process."""

from __future__ import annotations

import torch

from megatrain.tools.parity.measure import engine_of, local_batches, tiny_plan
from megatrain.tools.parity.rows import Layout


def tiny_gradients(words: str, *flags: str) -> torch.Tensor:
    """Return the gradients of one step, flat."""
    layout = Layout.of(words)
    engine = engine_of(tiny_plan(layout, 1, *flags), 0)
    engine.accumulate_gradients(list(local_batches(0, layout, 0)), first_sample=8)
    return torch.cat(engine.buffers.gradients.full)
