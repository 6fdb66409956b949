"""The settings of a run of Megatron-LM, from the arguments that its checkpoint stores.

    args (a pickled Namespace of 850 values)
      ─> those that are settings here, and every switch that is on ─> flags ─> parse, resolve ─> Plan

Switches that megatrain refuses are refused here too: the stored model may compute what this one does not.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from megatrain.checkpoint.errors import MismatchError
from megatrain.checkpoint.manifest import Manifest
from megatrain.config import ConfigError, Facts, Plan, parse, resolve
from megatrain.config.cli.flag_words import FlagWords, words_of
from megatrain.config.cli.megatron_yaml import read_arguments
from megatrain.config.schema.tokenizer import TokenizerConfig, tokenizer_problems
from megatrain.config.schema.tree import settings
from megatrain.config.subjects.pipeline import parse_layout
from megatrain.storage.untrusted_json import InvalidError, record_of

_SECTIONS: Final = (
    "model",
    "experts",
    "vision",
    "data",
    "tokenizer",
    "training",
    "optimizer",
    "schedule",
    "precision",
)
_ELSEWHERE: Final = frozenset(
    """
    attention_backend data_args_path data_cache_path device heterogeneous_layers_config_path init_model_with_meta_device
    num_workers per_split_data_args_path rank test_data_path tokenizer_model train_data_path transformer_impl valid_data_path
    merge_file vocab_file use_dist_ckpt override_opt_param_scheduler use_checkpoint_opt_param_scheduler skip_train
    te_precision_config_file
    """.split()
)
"""Arguments about files, devices and the start of a run: they belong to a command, not to a model or its training."""
_RENAMED: Final = {"norm_epsilon": "layernorm_epsilon"}
_OPPOSITES: Final = {
    "disable_bias_linear": "add_bias_linear",
    "no_bias_gelu_fusion": "bias_gelu_fusion",
    "no_data_sharding": "data_sharding",
    "no_mmap_bin_files": "mmap_bin_files",
    "muon_no_split_qkv": "muon_split_qkv",
    "bert_no_binary_head": "bert_binary_head",
}
_NOT_THERE: Final = frozenset(
    """
    attention_backend model_family spec spec_digest norm_position qk_layernorm_width softmax_scale z_loss_coeff embedding_multiplier
    attn_logit_softcapping final_logit_softcapping context_parallel_chunk_means pipeline_schedule data_cache_path
    data_parallel_sharding_strategy use_distributed_optimizer overlap_grad_reduce overlap_param_gather distributed_backend
    compile device dry_run eval_at_start require_parity recompute_norms recompute_mlp_act recompute_activations transformer_impl
    moe_router_group_score_topk overlap_p2p_communication train_data_path valid_data_path test_data_path num_workers
    te_precision_config_file te_precision_config_digest dataset dataset_digest loss loss_digest callbacks callbacks_digest
    """.split()
)
"""Settings that Megatron-LM lacks, or that belong to a command."""
_WITH_DTYPE: Final = ("params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_AS_DTYPES: Final = {
    "fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16,
}  # fmt: skip
_MODEL_PARALLEL: Final = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
_LAYOUT: Final = (
    *_MODEL_PARALLEL,
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)
_LISTS: Final = frozenset({"high_priority_stream_groups", "offload_modules"})
"""Arguments that are lists even if they have one value or none."""
_INDEXER: Final = (
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "dsa_indexer_topk",
    "dsa_indexer_loss_coeff",
)
"""Arguments that have no value without sparse attention."""
_PATTERNS: Final = ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq", "linear_attention_freq")


def plan_of(arguments: Mapping[str, Any], family: str, source: Path) -> Plan:
    """Return the plan of the run that wrote a checkpoint.

    Args:
        arguments: plain values and records, by the names of Megatron-LM's arguments.
        family: `model_family`, which no argument says.
        source: the checkpoint, for messages.

    Raises:
        MismatchError: megatrain has no equal model or training.
    """
    wanted = {setting.path for setting in settings() if setting.section in _SECTIONS}
    of_tokenizer = {setting.name for setting in settings() if setting.section == "tokenizer"}
    left_out = _ELSEWHERE | of_tokenizer | frozenset(_implied(arguments))
    given = {
        name: _as_pattern(value) if name in _PATTERNS else value
        for name, value in arguments.items()
        if name not in left_out and _is_plain(value)
    }
    if family == "vlm":  # whose sequence length is that of the tower
        given["seq_length"] = given.pop("dataloader_seq_length", None) or given["seq_length"]
        given["vision_projection_norm"] = arguments.get("transformer_impl") != "local"
    words = ["--model-family", family]
    for item in read_arguments(given, str(source), wanted):
        if isinstance(item, FlagWords):
            words += words_of(item.flag, *item.words)
    padded, size = arguments.get("padded_vocab_size"), _num_replicas(arguments)
    if not isinstance(padded, int) or size < 1:
        raise MismatchError(
            f"{source}: its arguments have no padded_vocab_size or world_size",
            fix="convert a checkpoint that a pretrain_*.py of Megatron-LM wrote",
        )
    try:
        request = parse([*words, "--tokenizer-type", "NullTokenizer", "--vocab-size", str(padded)])
        return resolve(request, replace(Facts(), world_size=size, vocab_size=padded, eod_id=0))
    except ConfigError as error:
        first = error.problems[0]
        raise MismatchError(f"{source}: its arguments: {first.text}", fix=first.fix) from error


def arguments_of(manifest: Manifest, padded_vocab_size: int) -> dict[str, Any]:
    """Return the arguments for the run that a manifest describes: settings with Megatron-LM's names and forms."""
    config = manifest.config
    found: dict[str, Any] = {
        setting.name: _in_their_form(setting.name, config[setting.section][setting.name])
        for setting in settings()
        if setting.section in (*_SECTIONS, "parallel")
        and setting.name in config.get(setting.section, {})
        and setting.name not in _NOT_THERE
    }
    found |= {theirs: found.pop(ours) for ours, theirs in _RENAMED.items() if ours in found}
    found |= {theirs: not found.pop(ours) for ours, theirs in _OPPOSITES.items() if ours in found}
    if not found["multi_latent_attention"]:
        found["rope_type"] = None
    if found["swiglu"] or not found["add_bias_linear"]:
        found["bias_gelu_fusion"] = False
    if found["experimental_attention_variant"] != "dsa":
        found |= dict.fromkeys(_INDEXER, None)
    found |= _layout_arguments(manifest)
    return found | {
        "data_path": config["data"]["data_path"] or None,
        "fim_eod_token": config["data"].get("fim_eod_token") or "<|endoftext|>",
        "iterations_to_skip": config["training"].get("iterations_to_skip", []),
        "padded_vocab_size": padded_vocab_size,
        "consumed_train_samples": manifest.consumed_train_samples,
        "consumed_valid_samples": manifest.state["consumed_valid_samples"],
        "group_query_attention": found["num_query_groups"] not in (None, found["num_attention_heads"]),
        "add_position_embedding": True,
        "encoder_num_layers": config["model"]["num_layers"],
        "encoder_seq_length": config["data"]["seq_length"],
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
    }


def _layout_arguments(manifest: Manifest) -> dict[str, Any]:
    """Return the arguments that Megatron-LM has for the layout of the run that a manifest describes, derived ones too."""
    parallel, micro_batch = manifest.config["parallel"], manifest.config["training"]["micro_batch_size"]
    tp, pp, cp = (parallel[name] for name in _MODEL_PARALLEL)
    dp = max(manifest.state["pass_size"] // micro_batch, 1)
    pipeline = parallel["pipeline_model_parallel_layout"]
    pipeline = None if pipeline == "auto" else pipeline  # a layout that Megatron-LM lacks
    chunks = _virtual_stages(parallel, manifest.config["model"]["num_layers"], pipeline) if pp > 1 else 1
    return {
        "world_size": tp * pp * cp * dp,
        "rank": 0,
        "data_parallel_size": dp,
        "expert_tensor_parallel_size": parallel["expert_tensor_parallel_size"] or tp,
        "transformer_pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "pipeline_model_parallel_layout": pipeline,
        "cp_comm_type": parallel["cp_comm_type"] or ["p2p"],
    }


def _virtual_stages(parallel: Mapping[str, Any], num_layers: int, layout: str | None) -> int:
    """Return the model chunks of each pipeline rank, by the rules of Megatron-LM."""
    pp: int = parallel["pipeline_model_parallel_size"]
    per_stage: int | None = parallel["num_layers_per_virtual_pipeline_stage"]
    given: int | None = parallel["num_virtual_stages_per_pipeline_rank"]
    if layout is not None:
        return len(parse_layout(layout)) // pp
    if per_stage is None:
        return given or 1
    others = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    units: int = num_layers + sum(parallel[name] for name in others)
    return units // pp // per_stage


def _in_their_form(name: str, value: Any) -> Any:
    """Return a stored value as Megatron-LM has it: one value for a list of one, dtypes, patterns as lists."""
    if isinstance(value, list) and len(value) < 2 and name not in _LISTS:
        return value[0] if value else None
    if name in _WITH_DTYPE:
        return _AS_DTYPES.get(str(value), value)
    if name in _PATTERNS and isinstance(value, str) and re.fullmatch(r"[\d,\[\] ]+", value):
        return json.loads(value)
    return value


def tokenizer_settings(arguments: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the settings of the tokenizer, by name: of token ids alone if megatrain has no such tokenizer."""
    names = [setting.name for setting in settings() if setting.section == "tokenizer"]
    given = {name: arguments[name] for name in names if _is_plain(arguments.get(name))}
    numbers = {"tokenizer_type": "NullTokenizer", "vocab_size": vocab_size}
    try:
        record_of(TokenizerConfig, is_complete=False)(given, "tokenizer")
    except InvalidError:
        return numbers
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    config = TokenizerConfig(**values)
    is_text = config.tokenizer_type != "NullTokenizer" and not any(tokenizer_problems(config))
    return {"vocab_size": None, **given} if is_text else numbers


def layout_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the parallel layout of the run, which its model and training do not depend on."""
    found = {name: arguments[name] for name in _LAYOUT if _is_plain(arguments.get(name))}
    stages = arguments.get("virtual_pipeline_model_parallel_size")
    return found | ({"num_virtual_stages_per_pipeline_rank": stages} if _is_plain(stages) else {})


def _num_replicas(arguments: Mapping[str, Any]) -> int:
    """Return the number of replicas of the model, each on one rank of the plan; 0: it is not stored."""
    sizes = [arguments.get(name) or 1 for name in _MODEL_PARALLEL]
    world_size = arguments.get("world_size")
    if not all(isinstance(size, int) and size > 0 for size in (world_size, *sizes)):
        return 0
    assert isinstance(world_size, int)
    return world_size // math.prod(sizes)


def _implied(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield arguments that Megatron-LM sets from others, and those that act on nothing: neither changes the result."""
    if not arguments.get("fim_data"):
        yield from (name for name in arguments if name.startswith("fim_"))
    if arguments.get("eval_micro_batch_size") == arguments.get("micro_batch_size"):
        yield "eval_micro_batch_size"
    if arguments.get("add_bias_linear"):
        yield "add_qkv_bias"
    if arguments.get("swiglu") or not arguments.get("add_bias_linear"):
        yield "bias_gelu_fusion"


def _as_pattern(value: Any) -> Any:
    """Return the words of a flag for a pattern of layers, which Megatron-LM stores as the list of their values."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, int | float | str) for item in value)
    return isinstance(value, bool | int | float | str)
