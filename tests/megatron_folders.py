"""Small checkpoints as Megatron-LM writes them in its format `torch_dist`: torch's own writer, under Megatron-LM's names."""

import argparse
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

ARGUMENTS = {
    "num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 12, "num_attention_heads": 2, "seq_length": 16,
    "max_position_embeddings": 16, "position_embedding_type": "rope", "swiglu": True, "add_bias_linear": False,
    "normalization": "RMSNorm", "untie_embeddings_and_output_weights": True, "micro_batch_size": 1,
    "global_batch_size": 2, "train_iters": 10, "lr": 1e-3, "bf16": True, "world_size": 1, "vocab_size": 30,
    "padded_vocab_size": 32, "consumed_train_samples": 6, "consumed_valid_samples": 0, "mock_data": True,
    "tokenizer_type": "NullTokenizer", "bias_gelu_fusion": False, "eval_iters": 0, "hidden_dropout": 0.0, "rank": 0,
}  # fmt: skip
SHAPES = {
    "embedding.word_embeddings.weight": (32, 8),
    "decoder.layers.input_layernorm.weight": (2, 8),
    "decoder.layers.self_attention.linear_qkv.weight": (2, 24, 8),
    "decoder.layers.self_attention.linear_proj.weight": (2, 8, 8),
    "decoder.layers.pre_mlp_layernorm.weight": (2, 8),
    "decoder.layers.mlp.linear_fc1.weight": (2, 24, 8),
    "decoder.layers.mlp.linear_fc2.weight": (2, 8, 12),
    "decoder.final_layernorm.weight": (8,),
    "output_layer.weight": (32, 8),
}


def weights() -> dict[str, Tensor]:
    """Return bf16 weights, and fp32 master weights and moments, by Megatron-LM's names."""
    generator = torch.Generator().manual_seed(1)
    found: dict[str, Tensor] = {}
    for name, shape in SHAPES.items():
        master = torch.randn(shape, generator=generator)
        found[name] = master.bfloat16()
        found[f"optimizer.state.fp32_param.{name}"] = master
        found[f"optimizer.state.exp_avg.{name}"] = torch.randn(shape, generator=generator)
        found[f"optimizer.state.exp_avg_sq.{name}"] = torch.rand(shape, generator=generator)
    return found


def write(folder: Path, tensors: Mapping[str, Tensor], common: Any = None, **arguments: Any) -> Path:
    """Write a checkpoint of iteration 3 as Megatron-LM does; return its folder."""
    common = common or {
        "iteration": 3,
        "args": argparse.Namespace(**{**ARGUMENTS, **arguments}),
        "opt_param_scheduler": {"num_steps": 6},
        "optimizer": {"param_groups": [{"step": 3}]},
    }
    path = folder / "iter_0000003"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        state = {**tensors, "common_state/shard_0_1": [common]}
        dcp.save(state, checkpoint_id=path, planner=planner, no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return path
