"""Conversion of weights of the `transformers` library to our canonical names."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

Weights = dict[str, Tensor]
LAYER = "decoder.layers.{}"


def gpt2(theirs: Weights, num_layers: int) -> Weights:
    """Convert GPT-2, whose linear layers store transposed weights, and q, k and v in one."""
    ours = {
        "embedding.word_embeddings.weight": theirs["transformer.wte.weight"],
        "embedding.position_embeddings.weight": theirs["transformer.wpe.weight"],
        **_both("decoder.final_norm", theirs, "transformer.ln_f"),
    }
    for number in range(num_layers):
        there, here = f"transformer.h.{number}", LAYER.format(number)
        ours |= _both(f"{here}.attention.norm", theirs, f"{there}.ln_1")
        ours |= _both(f"{here}.mlp.norm", theirs, f"{there}.ln_2")
        for kind in ("weight", "bias"):
            qkv = theirs[f"{there}.attn.c_attn.{kind}"].t().chunk(3) if kind == "weight" else None
            qkv = qkv or theirs[f"{there}.attn.c_attn.{kind}"].chunk(3)
            for name, part in zip("qkv", qkv, strict=True):
                ours[f"{here}.attention.{name}.{kind}"] = part
        for name, source in (
            ("attention.proj", "attn.c_proj"),
            ("mlp.up", "mlp.c_fc"),
            ("mlp.down", "mlp.c_proj"),
        ):
            ours[f"{here}.{name}.weight"] = theirs[f"{there}.{source}.weight"].t()
            ours[f"{here}.{name}.bias"] = theirs[f"{there}.{source}.bias"]
    return ours


_LLAMA = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.proj": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
PRE_NORMS = {"attention.norm": "input_layernorm", "mlp.norm": "post_attention_layernorm"}
LLAMA4_NORMS = {
    **PRE_NORMS,
    **{f"mlp.{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
}
QK_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
OLMO2_NORMS = {
    "attention.post_norm": "post_attention_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
    **QK_NORMS,
}
GEMMA2_NORMS = {
    "attention.norm": "input_layernorm",
    "attention.post_norm": "post_attention_layernorm",
    "mlp.norm": "pre_feedforward_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
}

LATENTS = {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}


def llama_like(theirs: Weights, num_layers: int, norms: dict[str, str]) -> Weights:
    """Convert Llama and models with its names."""
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_norm.weight": theirs["model.norm.weight"],
        "output_layer.weight": theirs.get("lm_head.weight", theirs["model.embed_tokens.weight"]),
    }
    if "model.norm.bias" in theirs:
        ours["decoder.final_norm.bias"] = theirs["model.norm.bias"]
    for number in range(num_layers):
        there, here = f"model.layers.{number}", LAYER.format(number)
        for name, source in {**_LLAMA, **norms}.items():
            for kind in ("weight", "bias"):
                if f"{there}.{source}.{kind}" in theirs:
                    ours[f"{here}.{name}.{kind}"] = theirs[f"{there}.{source}.{kind}"]
        if f"{there}.self_attn.sinks" in theirs:
            ours[f"{here}.attention.sink"] = theirs[f"{there}.self_attn.sinks"]
    return ours


def with_experts(theirs: Weights, num_layers: int, norms: dict[str, str]) -> Weights:
    """Convert Llama with experts in some layers, whose weights are stacked, gate before up."""
    ours = llama_like(theirs, num_layers, norms)
    for number in range(num_layers):
        there, here = f"model.layers.{number}.mlp", f"{LAYER.format(number)}.mlp"
        if f"{there}.gate.weight" not in theirs:
            continue
        ours[f"{here}.router.weight"] = theirs[f"{there}.gate.weight"]
        if f"{there}.shared_expert_gate.weight" in theirs:
            ours[f"{here}.shared_gate.weight"] = theirs[f"{there}.shared_expert_gate.weight"]
        for name, shared in product(("gate", "up", "down"), ("shared_expert", "shared_experts")):
            if f"{there}.{shared}.{name}_proj.weight" in theirs:
                ours[f"{here}.shared.{name}.weight"] = theirs[f"{there}.{shared}.{name}_proj.weight"]
        stacked = zip(
            theirs[f"{there}.experts.gate_up_proj"], theirs[f"{there}.experts.down_proj"], strict=True
        )
        for expert, (first, last) in enumerate(stacked):
            gate, up = first.chunk(2)
            for name, part in (("gate", gate), ("up", up), ("down", last)):
                ours[f"{here}.experts.{expert}.{name}.weight"] = part
    return ours


def qwen3_next(theirs: Weights, num_layers: int, num_heads: int, num_key_heads: int) -> Weights:
    """Convert Qwen3-Next. It stores queries and gates of the output head by head, and linear attention by heads of keys."""
    split = dict(theirs)
    linear: Weights = {}
    for number in range(num_layers):
        projection = f"model.layers.{number}.self_attn.{{}}_proj.weight"
        if projection.format("q") not in split:
            linear |= _linear_attention(theirs, number, num_key_heads)
            continue
        both = split[projection.format("q")].unflatten(0, (num_heads, 2, -1))
        for name, part in zip(("q", "gate"), both.unbind(1), strict=True):
            split[projection.format(name)] = part.flatten(0, 1)
    norms = {**PRE_NORMS, **QK_NORMS, "attention.gate": "self_attn.gate_proj"}
    ours = with_experts(split, num_layers, norms)
    return {name: tensor for name, tensor in ours.items() if name not in _unused(linear)} | linear


def _unused(linear: Weights) -> set[str]:
    """Return the names of the norms of attention in layers with linear attention."""
    return {
        name.replace("linear_attention", "attention")
        for name in linear
        if name.endswith("attention.norm.weight")
    }


def _linear_attention(theirs: Weights, number: int, num_heads: int) -> Weights:
    there, here = f"model.layers.{number}.linear_attn", f"{LAYER.format(number)}.linear_attention"
    values = theirs[f"{there}.dt_bias"].shape[0] // num_heads * theirs[f"{there}.norm.weight"].shape[0]
    grouped = theirs[f"{there}.in_proj_qkvz.weight"].unflatten(0, (num_heads, -1))
    keys = grouped.shape[1] // 2 - values
    ours = {
        f"{here}.norm.weight": theirs[f"model.layers.{number}.input_layernorm.weight"],
        f"{here}.dt_bias": theirs[f"{there}.dt_bias"],
        f"{here}.a_log": theirs[f"{there}.A_log"],
        f"{here}.out_norm.weight": theirs[f"{there}.norm.weight"],
        f"{here}.proj.weight": theirs[f"{there}.out_proj.weight"],
    }
    for name, part in zip(
        ("q", "k", "v", "gate"), grouped.split([keys, keys, values, values], 1), strict=True
    ):
        ours[f"{here}.{name}.weight"] = part.flatten(0, 1)
    by_heads = theirs[f"{there}.in_proj_ba.weight"].unflatten(0, (num_heads, 2, -1))
    for name, part in zip(("beta", "alpha"), by_heads.unbind(1), strict=True):
        ours[f"{here}.{name}.weight"] = part.flatten(0, 1)
    filters = theirs[f"{there}.conv1d.weight"].squeeze(1).split([n * num_heads for n in (keys, keys, values)])
    for name, part in zip("qkv", filters, strict=True):
        ours[f"{here}.{name}.convolution"] = part
    return ours


def gpt_oss(theirs: Weights, num_layers: int) -> Weights:
    """Convert GPT-OSS, whose experts store transposed weights, with gate and up in turns."""
    ours = llama_like(theirs, num_layers, PRE_NORMS)
    for number in range(num_layers):
        there, here = f"model.layers.{number}.mlp", f"{LAYER.format(number)}.mlp"
        ours |= _both(f"{here}.router", theirs, f"{there}.router")
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            first, last = (
                theirs[f"{there}.experts.{name}{suffix}"] for name in ("gate_up_proj", "down_proj")
            )
            parts = (("gate", first[..., ::2]), ("up", first[..., 1::2]), ("down", last))
            for name, stacked in parts:
                for expert, part in enumerate(stacked):
                    ours[f"{here}.experts.{expert}.{name}.{kind}"] = part.t()
    return ours


def gpt_neox(theirs: Weights, num_layers: int, num_heads: int) -> Weights:
    """Convert GPT-NeoX, which stores q, k and v head by head."""
    ours = {
        "embedding.word_embeddings.weight": theirs["gpt_neox.embed_in.weight"],
        "output_layer.weight": theirs.get("embed_out.weight", theirs.get("lm_head.weight")),
        **_both("decoder.final_norm", theirs, "gpt_neox.final_layer_norm"),
    }
    for number in range(num_layers):
        there, here = f"gpt_neox.layers.{number}", LAYER.format(number)
        ours |= _both(f"{here}.attention.norm", theirs, f"{there}.input_layernorm")
        ours |= _both(f"{here}.mlp.norm", theirs, f"{there}.post_attention_layernorm")
        ours |= _both(f"{here}.attention.proj", theirs, f"{there}.attention.dense")
        ours |= _both(f"{here}.mlp.up", theirs, f"{there}.mlp.dense_h_to_4h")
        ours |= _both(f"{here}.mlp.down", theirs, f"{there}.mlp.dense_4h_to_h")
        for kind in ("weight", "bias"):
            fused = theirs[f"{there}.attention.query_key_value.{kind}"]
            for name, part in zip("qkv", fused.unflatten(0, (num_heads, 3, -1)).unbind(1), strict=True):
                ours[f"{here}.attention.{name}.{kind}"] = part.flatten(0, 1)
    return ours


def _both(here: str, theirs: Weights, there: str) -> Weights:
    return {f"{here}.{kind}": theirs[f"{there}.{kind}"] for kind in ("weight", "bias")}


def perturb(weights: Weights) -> None:
    """Add noise to every weight: norms of 1 and biases of 0 would hide errors."""
    generator = torch.Generator().manual_seed(5)
    for tensor in weights.values():
        tensor.copy_(tensor + 0.1 * torch.randn(tensor.shape, generator=generator))
