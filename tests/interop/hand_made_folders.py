"""Folders as transformers writes them, made without it: names and shapes of Llama and of GPT-2, values by a formula.

`LOGITS` has logits that transformers 5.23 computes from them, in fp32.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, LAYERS = 23, 2
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 16,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 16, "n_layer": LAYERS,
    "n_head": 4, "n_positions": 32, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05,
}  # fmt: skip
_LLAMA_SHAPES = {
    "self_attn.q_proj.weight": (16, 16), "self_attn.k_proj.weight": (8, 16), "self_attn.v_proj.weight": (8, 16),
    "self_attn.o_proj.weight": (16, 16), "mlp.gate_proj.weight": (24, 16), "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24), "input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,),
}  # fmt: skip
_GPT2_SHAPES = {
    "ln_1.weight": (16,), "ln_1.bias": (16,), "attn.c_attn.weight": (16, 48), "attn.c_attn.bias": (48,),
    "attn.c_proj.weight": (16, 16), "attn.c_proj.bias": (16,), "ln_2.weight": (16,), "ln_2.bias": (16,),
    "mlp.c_fc.weight": (16, 64), "mlp.c_fc.bias": (64,), "mlp.c_proj.weight": (64, 16), "mlp.c_proj.bias": (16,),
}  # fmt: skip
SHAPES = {
    "llama": {
        "model.embed_tokens.weight": (VOCAB, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (VOCAB, 16),
        **{
            f"model.layers.{layer}.{name}": shape
            for layer in range(LAYERS)
            for name, shape in _LLAMA_SHAPES.items()
        },
    },
    "gpt2": {
        "transformer.wte.weight": (VOCAB, 16),
        "transformer.wpe.weight": (32, 16),
        "transformer.ln_f.weight": (16,),
        "transformer.ln_f.bias": (16,),
        **{
            f"transformer.h.{layer}.{name}": shape
            for layer in range(LAYERS)
            for name, shape in _GPT2_SHAPES.items()
        },
    },
}
CONFIGS: dict[str, dict[str, Any]] = {"llama": LLAMA, "gpt2": GPT2}
TOKENS = torch.tensor([[3, 1, 4, 15, 9, 2, 6, 5, 22, 0]])
LOGITS = {
    "llama": [[0.694874, -0.518697, 0.298596], [1.586253, -1.396257, 1.088025]],
    "gpt2": [[-1.95692, 1.762863, -1.524355], [0.673518, -0.706194, 0.721063]],
}
"""Logits of the first three tokens after the last two of `TOKENS`."""


def made(kind: str) -> dict[str, Tensor]:
    """Return tensors in the order of their names: sines of a frequency each."""
    found: dict[str, Tensor] = {}
    for number, (name, shape) in enumerate(sorted(SHAPES[kind].items()), 1):
        values = torch.arange(math.prod(shape), dtype=torch.float64).mul(math.sqrt(number)).sin().mul(0.3)
        found[name] = (values + ("norm" in name or ".ln_" in name)).float().reshape(shape)
    return found


def write_folder(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, num_files: int = 1
) -> Path:
    """Write a folder; with several files they have an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if num_files == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    index: dict[str, str] = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::num_files]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder
