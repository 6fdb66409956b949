"""Logits of whole sequences, without a cache: to compare models, and the reference of passes with a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.model.gpt import Model
from megatrain.model.head import Head
from megatrain.parallel.batch import Batch, PassInfo


@torch.no_grad()
def all_logits(model: Model, tokens: Tensor) -> Tensor:
    """Return the logits of the next token at each position of `tokens` [b, s]: [s, b, v]."""
    info = PassInfo(is_training=False)
    unused = torch.zeros_like(tokens)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    batch = Batch(tokens=tokens, labels=unused, loss_mask=unused.float(), position_ids=positions)
    hidden = None
    for segment in model.segments[:-1]:
        hidden = segment(hidden, batch, info)
    assert hidden is not None
    head = model.segments[-1]
    assert isinstance(head, Head)
    return head.logits(hidden, info)
