"""Planted faults of multi-latent and sparse attention, each with the layout in which parity must find it."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from megatrain.model import latent_attention, layer_context
from megatrain.model.families import sparse_attention
from megatrain.model.implementations.local import LocalNorm
from megatrain.model.layouts import replicated_layout
from megatrain.parallel.collectives import reduce_scatter
from megatrain.parallel.layout import ParamLayout
from megatrain.tools.parity.runs.program import Patch
from megatrain.training import losses

_LATENT_NORMS = (".q_norm.weight", ".kv_norm.weight")


def _latent_norms_skipped() -> AbstractContextManager[Any]:
    add_and_norm = LocalNorm.add_and_norm

    def skipping(self: LocalNorm, hidden: Tensor, delta: Tensor | None, *terms: Any) -> tuple[Tensor, Tensor]:
        name = self.layouts["weight"].pieces[0].name
        is_skipped = name.endswith(_LATENT_NORMS) and dist.get_rank() == dist.get_world_size() - 1
        return (hidden, hidden) if is_skipped else add_and_norm(self, hidden, delta, *terms)

    return mock.patch.object(LocalNorm, "add_and_norm", skipping)


def _rotary_keys_per_rank() -> AbstractContextManager[Any]:
    """Skip the sum of the rotary keys' gradient over the tensor ranks, as if each had its own."""
    return mock.patch.object(latent_attention, "enter_tp_region", lambda x, _tp: x)


def _latent_gradients_not_reduced() -> AbstractContextManager[Any]:
    def of_own_tokens(*known: Any) -> ParamLayout:
        layout = replicated_layout(*known)
        pieces = tuple(dataclasses.replace(piece, grad_sum_groups=()) for piece in layout.pieces)
        return dataclasses.replace(layout, pieces=pieces)

    return mock.patch.object(layer_context, "replicated_layout", of_own_tokens)


def _gathered_gradients_summed() -> AbstractContextManager[Any]:
    """Sum the gradients of gathered latents over tensor ranks, which all have the whole gradient."""
    return mock.patch("megatrain.parallel.context.latent_context._local_rows", reduce_scatter)


def _probabilities_of_local_heads() -> AbstractContextManager[Any]:
    """Let the indexer of each tensor rank learn from its own heads."""
    return mock.patch.object(sparse_attention, "all_reduce", lambda x, _group: x)


def _indexer_losses_of_a_stage() -> AbstractContextManager[Any]:
    """Log the indexer losses of the stage alone."""
    return mock.patch.object(losses, "all_reduce", lambda x, _group: x)


LATENT_FAULTS: dict[str, tuple[Patch, str]] = {
    "latent norm skipped on one rank": (_latent_norms_skipped, "tp2 mla"),
    "rotary channels of keys not shared over the heads of all ranks": (_rotary_keys_per_rank, "tp2 mla"),
    "gradient of a down-projection not reduced under sp": (_latent_gradients_not_reduced, "tp2 sp mla"),
    "gradient of gathered latents summed over tensor ranks": (
        _gathered_gradients_summed,
        "tp2 sp cp2 allgather mla",
    ),
    "gradient of the indexer summed over tensor ranks": (_gathered_gradients_summed, "tp2 sp dsa"),
    "indexer learns from the heads of one rank": (_probabilities_of_local_heads, "tp2 dsa"),
    "indexer losses of one stage logged": (_indexer_losses_of_a_stage, "pp2 dsa"),
}
"""Context manager and layout of each fault."""
