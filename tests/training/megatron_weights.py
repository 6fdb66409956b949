"""Canonical names of Megatron-LM's parameters, as pure functions of names and shapes.

linear_qkv, 2 query groups     rows  q0 q1 k0 v0 | q2 q3 k1 v1   ->  q: q0 q1 q2 q3,  k: k0 k1,  v: v0 v1
linear_fc1 of a gated MLP      rows  gate up                     ->  gate,  up
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_LAYER = {
    "input_layernorm": ("attention.norm",),
    "self_attention.linear_qkv": ("attention.q", "attention.k", "attention.v"),
    "self_attention.q_layernorm": ("attention.q_norm",),
    "self_attention.k_layernorm": ("attention.k_norm",),
    "self_attention.linear_proj": ("attention.proj",),
    "pre_mlp_layernorm": ("mlp.norm",),
    "mlp.linear_fc1": ("mlp.gate", "mlp.up"),
    "mlp.linear_fc2": ("mlp.down",),
    "mlp.router": ("mlp.router",),
    "mlp.experts.local_experts.{}.linear_fc1": ("mlp.experts.{}.gate", "mlp.experts.{}.up"),
    "mlp.experts.local_experts.{}.linear_fc2": ("mlp.experts.{}.down",),
}
TABLE = {
    "embedding.word_embeddings": ("embedding.word_embeddings",),
    "embedding.position_embeddings": ("embedding.position_embeddings",),
    "decoder.final_layernorm": ("decoder.final_norm",),
    "output_layer": ("output_layer",),
    **{
        f"decoder.layers.{{}}.{theirs}": tuple(f"decoder.layers.{{}}.{name}" for name in ours)
        for theirs, ours in _LAYER.items()
    },
}
"""Megatron-LM's modules and the canonical ones whose rows they hold; `{}` is the number of a layer or an expert."""


@dataclass(frozen=True)
class FusedRows:
    """Sizes that decide which rows of a fused parameter belong to which canonical tensor."""

    num_heads: int
    num_query_groups: int
    is_gated: bool
    """MLPs are gated: `linear_fc1` holds gate and up."""


@dataclass(frozen=True)
class Part:
    """Rows of one of Megatron-LM's parameters that form a canonical tensor, in this order."""

    name: str
    rows: tuple[slice, ...]


def parts_of(name: str, num_rows: int, fused: FusedRows) -> tuple[Part, ...]:
    """Return the canonical tensors in a parameter of Megatron-LM.

    Args:
        name: Megatron-LM's, such as `decoder.layers.3.mlp.linear_fc1.weight`.
        num_rows: size of its first dimension.
        fused: sizes of the model.
    """
    module, kind = name.rsplit(".", 1)
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", module)
    names = TABLE[re.sub(r"(?<=\.)\d+(?=\.)", "{}", module)]
    rows = {1: _whole, 2: _gate_and_up, 3: _queries_keys_values}[len(names)](num_rows, fused)
    return tuple(
        Part(f"{one.format(*numbers)}.{kind}", part) for one, part in zip(names, rows, strict=True) if part
    )


def to_canonical(parameters: Mapping[str, Tensor], fused: FusedRows) -> dict[str, Tensor]:
    """Return Megatron-LM's parameters, or their gradients, as canonical tensors."""
    return {
        part.name: torch.cat([tensor[rows] for rows in part.rows])
        for name, tensor in parameters.items()
        for part in parts_of(name, len(tensor), fused)
    }


_Rows = tuple[slice, ...]


def _whole(num_rows: int, fused: FusedRows) -> tuple[_Rows]:
    return ((slice(0, num_rows),),)


def _gate_and_up(num_rows: int, fused: FusedRows) -> tuple[_Rows, _Rows]:
    gate = num_rows // 2 if fused.is_gated else 0
    return (slice(0, gate),) if gate else (), (slice(gate, num_rows),)


def _queries_keys_values(num_rows: int, fused: FusedRows) -> tuple[_Rows, _Rows, _Rows]:
    group = num_rows // fused.num_query_groups
    head = num_rows // (fused.num_heads + 2 * fused.num_query_groups)
    starts = range(0, num_rows, group)
    return (
        tuple(slice(start, start + group - 2 * head) for start in starts),
        tuple(slice(start + group - 2 * head, start + group - head) for start in starts),
        tuple(slice(start + group - head, start + group) for start in starts),
    )
