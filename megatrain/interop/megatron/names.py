"""Megatron-LM's parameters and the canonical tensors in them, as pure functions of names and shapes.

decoder.layers.self_attention.linear_qkv.weight [layers, rows, h]    the layers of a uniform model are stacked
decoder.layers.1.mlp.experts.experts.linear_fc1.weight [experts, rows, h]    the experts always are

linear_qkv, 2 query groups     rows  q0 q1 k0 v0 | q2 q3 k1 v1   ->  q: q0 q1 q2 q3,  k: k0 k1,  v: v0 v1
with an output gate            rows  q0 q1 g0 g1 k0 v0 | ...
linear_fc1 of a gated MLP      rows  gate up                     ->  gate,  up
in_proj of a delta net         rows  q k v z beta alpha, which checkpoints store one by one: in_proj.weight.query ...
in_proj of Mamba-2             rows  z x b c dt, likewise

decoder.layers.3.mixer.norm.weight                   layers of a hybrid are numbered
mtp.layers.0.mtp_model_layer.layers.1.mlp.router     a depth of a hybrid has several
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from megatrain.config.derive.families import mamba_of
from megatrain.config.schema.model import ModelConfig

_DELTA_ROWS: Final = (
    ("query", "q"), ("key", "k"), ("value", "v"), ("z", "gate"), ("beta", "beta"), ("alpha", "alpha"),
)  # fmt: skip
"""Rows of a delta net's first projection: Megatron-LM's name and ours."""
_CHANNEL_ROWS: Final = (*_DELTA_ROWS[:4], ("f", "decay"), ("b", "erase"), ("w", "write"))
"""The same of the second variant."""
_MAMBA_ROWS: Final = (("z", "z"), ("x", "x"), ("B", "b"), ("C", "c"), ("dt", "dt"))
"""The same of Mamba-2."""


def _fused(module: str, ours: str, rows: Sequence[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """Return the entries of a module whose rows checkpoints store one by one: of the whole, then of each."""
    whole = {module: tuple(ours.format(name) for _, name in rows)}
    return whole | {f"{module}.{theirs}": (ours.format(name),) for theirs, name in rows}


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
    "self_attention.core_attention.indexer.linear_wq_b": ("attention.index_q",),
    "self_attention.core_attention.indexer.linear_wk": ("attention.index_k",),
    "self_attention.core_attention.indexer.k_norm": ("attention.index_k_norm",),
    "self_attention.core_attention.indexer.linear_weights_proj": ("attention.index_weights",),
    "self_attention.in_proj_layernorm": ("linear_attention.norm",),
    "self_attention.in_proj_channels": tuple(f"linear_attention.{name}" for _, name in _CHANNEL_ROWS),
    **_fused("self_attention.in_proj", "linear_attention.{}", _DELTA_ROWS),
    **{f"self_attention.in_proj.{rows}": (f"linear_attention.{name}",) for rows, name in _CHANNEL_ROWS[4:]},
    **_fused("self_attention.conv1d", "linear_attention.{}.convolution", _DELTA_ROWS[:3]),
    "self_attention.dt_bias": ("linear_attention.dt_bias",),
    "self_attention.A_log": ("linear_attention.a_log",),
    "self_attention.out_norm": ("linear_attention.out_norm",),
    "self_attention.out_proj": ("linear_attention.proj",),
    "mixer.in_proj_layernorm": ("mamba.norm",),
    **_fused("mixer.in_proj", "mamba.{}", _MAMBA_ROWS),
    **_fused("mixer.conv1d", "mamba.{}.convolution", _MAMBA_ROWS[1:4]),
    **_fused("mixer.conv1d_bias", "mamba.{}.convolution_bias", _MAMBA_ROWS[1:4]),
    "mixer.dt_bias": ("mamba.dt_bias",),
    "mixer.A_log": ("mamba.a_log",),
    "mixer.D": ("mamba.d",),
    "mixer.norm": ("mamba.gate_norm",),
    "mixer.out_proj": ("mamba.proj",),
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
    "decoder.final_norm": ("decoder.final_norm",),
    **_VISION,
    **{
        f"vision_model.decoder.layers.{{}}.{theirs}": tuple(f"vision.layers.{{}}.{name}" for name in ours)
        for theirs, ours in _LAYER.items()
    },
    **{
        f"mtp.layers.{{}}.{theirs_of}{theirs}": tuple(f"mtp.layers.{{}}.{ours_of}{name}" for name in ours)
        for theirs_of, ours_of in (("transformer_layer.", ""), ("transformer_layer.layers.{}.", "layers.{}."))
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
    ".in_proj.layer_norm_": ".in_proj_layernorm.",
    ".conv1d.weight": ".conv1d",
    ".conv1d_weight": ".conv1d",
    ".conv1d.bias": ".conv1d_bias",
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
_CHANNELS: Final = "_channels"
"""Ending of `in_proj` here if its other rows are per channel."""
_STORED_ROWS: Final = re.compile(r"in_proj\.weight\.(\w+)$")
_EXPERT: Final = re.compile(r"mlp\.experts\.(\w+)\.(weight|bias)(\d+)$")
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
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Rows of each canonical tensor in the `in_proj` and `conv1d` of delta nets and Mamba-2, by the module below the layer."""

    @classmethod
    def of(cls, model: ModelConfig) -> FusedRows:
        """Return the sizes of a model."""
        return cls(
            model.num_attention_heads,
            model.num_query_groups or model.num_attention_heads,
            is_gated=any(getattr(model, name) for name in GATED),
            has_output_gate=model.attention_output_gate,
            sizes=_sizes_of_mixers(model),
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
    module, kind = module_and_kind(_unstacked(name))
    numbers = NUMBER.findall(module)
    pattern = NUMBER.sub("{}", module)
    if "layers." in pattern and "layers.{}." not in pattern:
        pattern = pattern.replace("layers.", "layers.{}.")
    pattern = pattern.replace("mlp.experts.linear", "mlp.experts.{}.linear")
    if pattern.rpartition("{}.")[2] + _CHANNELS in fused.sizes:
        pattern += _CHANNELS
    names = TABLE[pattern]
    num_stacked = pattern.count("{}") - len(numbers)
    size, rest = shape[num_stacked], shape[num_stacked + 1 :]
    if math.prod(shape[:num_stacked]) > _MAX_STACKED or fused.num_query_groups > _MAX_QUERY_GROUPS:
        raise ValueError(f"{shape[:num_stacked]} layers and experts, {fused.num_query_groups} query groups")
    found = _rows_of(pattern, size, fused)
    if "conv1d" in pattern:
        rest = rest[-1:]  # theirs is [channels, 1, tokens]
    for place in itertools.product(*map(range, shape[:num_stacked])):
        for one, rows in zip(names, found, strict=True):
            if rows:
                num_rows = sum(part.stop - part.start for part in rows)
                ours = one.format(*numbers, *place)
                yield Part(".".join(filter(None, (ours, kind))), (num_rows, *rest), name, place, rows)


def module_and_kind(name: str) -> tuple[str, str]:
    """Split the name of a parameter: `attention.q.weight` in `attention.q` and `weight`; others are whole, with an empty kind."""
    module, _, kind = name.rpartition(".")
    return (module, kind) if kind.startswith(("weight", "bias")) else (name, "")


def family_of(names: Iterable[str]) -> str:
    """Return the `model_family` of a model from the names of its parameters, which begin with its stacks."""
    names = set(names)
    if "decoder.final_norm.weight" in names:
        return "hybrid"
    has = {name.partition(".")[0] for name in names}
    if "vision_model" in has:
        return "vlm"
    return "gpt" if "encoder" not in has else "t5" if "decoder" in has else "bert"


def _unstacked(name: str) -> str:
    for stored, module in _RENAMED.items():
        name = name.replace(stored, module)
    name = _EXPERT.sub(r"mlp.experts.\3.\1.\2", _STORED_ROWS.sub(r"in_proj.\1.weight", name))
    return _EXPERTS.sub("mlp.experts.", name.replace(*GATE_NAMES))


_Rows = tuple[slice, ...]


def _sizes_of_mixers(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    is_hybrid = model.model_family == "hybrid"
    delta_nets = is_hybrid or model.experimental_attention_variant is not None
    return {
        **(_sizes_of_delta_nets(model) if delta_nets else {}),
        **(_sizes_of_mamba(model) if is_hybrid else {}),
    }


def _sizes_of_mamba(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    mamba = mamba_of(model)
    inner, group = mamba.inner_dim, mamba.group_dim
    convolved = (inner, group, group)
    return {
        "mixer.in_proj": (inner, *convolved, mamba.num_heads),
        "mixer.conv1d": convolved,
        "mixer.conv1d_bias": convolved,
    }


def _sizes_of_delta_nets(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    values = model.linear_num_value_heads * model.linear_value_head_dim
    heads = model.linear_num_value_heads
    convolved = (keys, keys, values)
    sizes: dict[str, tuple[int, ...]] = {"self_attention.conv1d": convolved}
    if model.experimental_attention_variant == "gdn2":
        return sizes | {f"self_attention.in_proj{_CHANNELS}": (*convolved, values, *convolved)}
    return sizes | {"self_attention.in_proj": (*convolved, values, heads, heads)}


def _rows_of(pattern: str, num_rows: int, fused: FusedRows) -> tuple[_Rows, ...]:
    """Return the rows of each canonical tensor in a module."""
    names = TABLE[pattern]
    sizes = fused.sizes.get(pattern.rpartition("{}.")[2])
    if sizes is not None:
        ends = list(itertools.accumulate(sizes))
        if ends[-1] != num_rows:
            raise ValueError(f"{num_rows} rows where {ends[-1]} were expected")
        return tuple((slice(end - size, end),) for end, size in zip(ends, sizes, strict=True))
    if pattern.endswith("linear_kv"):
        return _keys_and_values(num_rows, fused)
    return {1: _whole, 2: _gate_and_up, 4: _queries_gates_keys_values}[len(names)](num_rows, fused)


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
