"""Megatron-LM's parameters and the canonical tensors in them, as pure functions of names and shapes.

decoder.layers.self_attention.linear_qkv.weight [layers, rows, h]    the layers of a uniform model are stacked
decoder.layers.1.mlp.experts.experts.linear_fc1.weight [experts, rows, h]    the experts always are

linear_qkv, 2 query groups     rows  q0 q1 k0 v0 | q2 q3 k1 v1   ->  q: q0 q1 q2 q3,  k: k0 k1,  v: v0 v1
with an output gate            rows  q0 q1 g0 g1 k0 v0 | ...
linear_fc1 of a gated MLP      rows  gate up                     ->  gate,  up
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from megatrain.config.schema.model import ModelConfig

_LAYER: Final = {
    "input_layernorm": ("attention.norm",),
    "self_attention.linear_qkv": ("attention.q", "attention.gate", "attention.k", "attention.v"),
    "self_attention.q_layernorm": ("attention.q_norm",),
    "self_attention.k_layernorm": ("attention.k_norm",),
    "self_attention.linear_q_proj": ("attention.q",),
    "self_attention.linear_q_down_proj": ("attention.q_down",),
    "self_attention.linear_q_up_proj": ("attention.q_up",),
    "self_attention.linear_kv_down_proj": ("attention.kv_down",),
    "self_attention.linear_kv_up_proj": ("attention.kv_up",),
    "self_attention.kv_layernorm": ("attention.kv_norm",),
    "self_attention.linear_proj": ("attention.proj",),
    "pre_mlp_layernorm": ("mlp.norm",),
    "mlp.linear_fc1": ("mlp.gate", "mlp.up"),
    "mlp.linear_fc2": ("mlp.down",),
    "mlp.router": ("mlp.router",),
    "mlp.experts.{}.linear_fc1": ("mlp.experts.{}.gate", "mlp.experts.{}.up"),
    "mlp.experts.{}.linear_fc2": ("mlp.experts.{}.down",),
    "mlp.shared_experts.linear_fc1": ("mlp.shared.gate", "mlp.shared.up"),
    "mlp.shared_experts.linear_fc2": ("mlp.shared.down",),
    "mlp.shared_gate": ("mlp.shared_gate",),
    "mlp.fc1_latent_proj": ("mlp.latent_down",),
    "mlp.fc2_latent_proj": ("mlp.latent_up",),
    "pre_cross_attn_layernorm": ("cross_attention.norm",),
    "cross_attention.linear_q": ("cross_attention.q",),
    "cross_attention.linear_kv": ("cross_attention.k", "cross_attention.v"),
    "cross_attention.linear_proj": ("cross_attention.proj",),
}
STACKS: Final = ("encoder", "decoder")
_VISION: Final = {
    "vision_model.class_token": ("vision.class_token",),
    "vision_model.conv1": ("vision.patch_embedding",),
    "vision_model.position_embeddings": ("vision.position_embeddings",),
    "vision_model.ln_pre": ("vision.pre_norm",),
    "vision_model.ln_post": ("vision.final_norm",),
    "vision_projection.encoder.linear_fc1.layer_norm": ("vision.projector.norm",),
    "vision_projection.encoder.linear_fc1": ("vision.projector.gate", "vision.projector.up"),
    "vision_projection.encoder.linear_fc2": ("vision.projector.down",),
    "vision_projection.encoder": ("vision.projector.down",),
}
"""Modules of the vision tower and the projector; see `LANGUAGE`."""
LANGUAGE: Final = "language_model."
"""Prefix of the language model's names, if there is a vision tower."""
TABLE: Final = {
    "embedding.word_embeddings": ("embedding.word_embeddings",),
    "position_embeddings": ("embedding.position_embeddings",),
    "embedding.position_embeddings": ("embedding.position_embeddings",),
    "embedding.tokentype_embeddings": ("embedding.tokentype_embeddings",),
    "output_layer": ("output_layer",),
    "lm_head.dense": ("lm_head.dense",),
    "lm_head.layer_norm": ("lm_head.norm",),
    "pooler.dense": ("pooler.dense",),
    "binary_head": ("binary_head",),
    **{f"{stack}.final_layernorm": (f"{stack}.final_norm",) for stack in STACKS},
    **{
        f"{stack}_relative_pos_emb.relative_attention_bias": (f"{stack}.relative_positions",)
        for stack in STACKS
    },
    **{
        f"{stack}.layers.{{}}.{theirs}": tuple(f"{stack}.layers.{{}}.{name}" for name in ours)
        for stack in STACKS
        for theirs, ours in _LAYER.items()
    },
    **_VISION,
    **{
        f"vision_model.decoder.layers.{{}}.{theirs}": tuple(f"vision.layers.{{}}.{name}" for name in ours)
        for theirs, ours in _LAYER.items()
    },
    **{
        f"mtp.layers.{{}}.transformer_layer.{theirs}": tuple(f"mtp.layers.{{}}.{name}" for name in ours)
        for theirs, ours in _LAYER.items()
    },
    "mtp.layers.{}.enorm": ("mtp.layers.{}.embedding_norm",),
    "mtp.layers.{}.hnorm": ("mtp.layers.{}.hidden_norm",),
    "mtp.layers.{}.eh_proj": ("mtp.layers.{}.projection",),
    "mtp.layers.{}.final_layernorm": ("mtp.layers.{}.final_norm",),
}
"""Megatron-LM's modules and the canonical ones whose rows they hold; `{}` is the number of a layer or an expert. Of two
modules with the same rows the second is written."""
_RENAMED: Final = {
    "mtp_model_layer.": "transformer_layer.",
    "lm_head.output_layer.": "output_layer.",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "encoder.linear_fc1.layer_norm_": "encoder.linear_fc1.layer_norm.",
    "vision_model.class_token": "vision_model.class_token.weight",
    LANGUAGE: "",
}
"""The layer of multi-token prediction, by its parameters' names; norms that are stored under the name of the linear layer that follows."""
STORED_TWICE: Final = {
    "lm_head.output_layer.": "output_layer.",
    "embedding.position_embeddings.": "position_embeddings.",
}
"""Modules of T5 with two names: the weights have both, the optimizer's state has the second."""
GATED: Final = ("swiglu", "geglu", "quick_geglu")
"""Settings, named as Megatron-LM's arguments, with which fc1 has a gate."""
GATE_NAMES: Final = ("mlp.shared_experts.gate_weight", "mlp.shared_gate.weight")
"""The gate of the shared expert, whose name has no module, and the name as if it had one."""
_EXPERTS: Final = re.compile(r"mlp\.experts\.(experts|local_experts)\.")
NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
VOCABULARY: Final = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Canonical tensors whose rows are token ids: Megatron-LM's also have rows of padding."""

_MAX_STACKED: Final = 1 << 22
"""Most layers times experts of a stacked parameter."""
_MAX_QUERY_GROUPS: Final = 1 << 16

BIASES: Final = {
    ".mlp.router.expert_bias": (".mlp.router.expert_bias", 1.0),
    ".mlp.router.qb_beta": (".mlp.router.quantile_bias", -1.0),
}
"""Biases of experts that are no parameters: the names here, and the sign."""


@dataclass(frozen=True)
class FusedRows:
    """Sizes that decide which rows of a fused parameter belong to which canonical tensor."""

    num_heads: int
    num_query_groups: int
    is_gated: bool
    """MLPs are gated: `linear_fc1` holds gate and up."""
    has_output_gate: bool = False
    """Attention is gated: `linear_qkv` holds queries, gates, keys and values."""

    @classmethod
    def of(cls, model: ModelConfig) -> FusedRows:
        """Return the sizes of a model."""
        return cls(
            model.num_attention_heads,
            model.num_query_groups or model.num_attention_heads,
            is_gated=any(getattr(model, name) for name in GATED),
            has_output_gate=model.attention_output_gate,
        )


@dataclass(frozen=True)
class Part:
    """Rows of one of Megatron-LM's parameters that form a canonical tensor, in this order."""

    name: str
    shape: tuple[int, ...]
    theirs: str
    place: tuple[int, ...]
    """Indices of the leading dimensions, over which layers and experts are stacked."""
    rows: tuple[slice, ...]


def parts_of(name: str, shape: tuple[int, ...], fused: FusedRows) -> Iterator[Part]:
    """Yield the canonical tensors in a parameter of Megatron-LM.

    Args:
        name: Megatron-LM's, such as `decoder.layers.mlp.linear_fc1.weight`.
        shape: of the parameter, with its stacked dimensions.
        fused: sizes of the model.

    Raises:
        KeyError: the name is not known.
        ValueError: more layers, experts or query groups than any model has.
    """
    module, kind = _unstacked(name).rsplit(".", 1)
    numbers = NUMBER.findall(module)
    pattern = NUMBER.sub("{}", module)
    if "layers." in pattern and "layers.{}." not in pattern:
        pattern = pattern.replace("layers.", "layers.{}.")
    pattern = pattern.replace("mlp.experts.linear", "mlp.experts.{}.linear")
    names = TABLE[pattern]
    num_stacked = pattern.count("{}") - len(numbers)
    size, rest = shape[num_stacked], shape[num_stacked + 1 :]
    if math.prod(shape[:num_stacked]) > _MAX_STACKED or fused.num_query_groups > _MAX_QUERY_GROUPS:
        raise ValueError(f"{shape[:num_stacked]} layers and experts, {fused.num_query_groups} query groups")
    fused_rows = {1: _whole, 2: _gate_and_up, 4: _queries_gates_keys_values}[len(names)]
    found = (_keys_and_values if pattern.endswith("linear_kv") else fused_rows)(size, fused)
    for place in itertools.product(*map(range, shape[:num_stacked])):
        for one, rows in zip(names, found, strict=True):
            if rows:
                num_rows = sum(part.stop - part.start for part in rows)
                ours = one.format(*numbers, *place)
                yield Part(f"{ours}.{kind}", (num_rows, *rest), name, place, rows)


def family_of(names: Iterable[str]) -> str:
    """Return the `model_family` of a model from the names of its parameters, which begin with its stacks."""
    has = {name.partition(".")[0] for name in names}
    if "vision_model" in has:
        return "vlm"
    return "gpt" if "encoder" not in has else "t5" if "decoder" in has else "bert"


def _unstacked(name: str) -> str:
    for stored, module in _RENAMED.items():
        name = name.replace(stored, module)
    return _EXPERTS.sub("mlp.experts.", name.replace(*GATE_NAMES))


_Rows = tuple[slice, ...]


def _whole(num_rows: int, _: FusedRows) -> tuple[_Rows]:
    return ((slice(0, num_rows),),)


def _gate_and_up(num_rows: int, fused: FusedRows) -> tuple[_Rows, _Rows]:
    gate = num_rows // 2 if fused.is_gated else 0
    return (slice(0, gate),) if gate else (), (slice(gate, num_rows),)


def _keys_and_values(num_rows: int, fused: FusedRows) -> tuple[_Rows, _Rows]:
    """Cross-attention has no groups: each head has its key and then its value."""
    head = num_rows // (2 * fused.num_heads)
    starts = range(0, num_rows, 2 * head)
    keys = tuple(slice(start, start + head) for start in starts)
    return keys, tuple(slice(start + head, start + 2 * head) for start in starts)


def _queries_gates_keys_values(num_rows: int, fused: FusedRows) -> tuple[_Rows, ...]:
    queries = fused.num_heads // fused.num_query_groups
    heads = (queries, queries if fused.has_output_gate else 0, 1, 1)  # of each query group
    group = num_rows // fused.num_query_groups
    head = group // sum(heads)
    ends = [head * end for end in itertools.accumulate(heads)]
    return tuple(
        tuple(slice(start + end - head * count, start + end) for start in range(0, num_rows, group) if count)
        for count, end in zip(heads, ends, strict=True)
    )
