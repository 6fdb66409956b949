"""The settings of a run of Megatron-LM, from the arguments that its checkpoint stores.

    args (a pickled Namespace of 850 values)
      ─> those that are settings here, and every switch that is on ─> flags ─> parse, resolve ─> Plan

Switches that megatrain refuses are refused here too: the stored model may compute what this one does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from megatrain.checkpoint.errors import MismatchError
from megatrain.checkpoint.untrusted_json import InvalidError, record_of
from megatrain.config import ConfigError, Facts, Plan, parse, resolve
from megatrain.config.cli.flag_words import FlagWords
from megatrain.config.cli.megatron_yaml import read_arguments
from megatrain.config.schema.tokenizer import TokenizerConfig, tokenizer_problems
from megatrain.config.schema.tree import settings

_SECTIONS: Final = ("model", "experts", "data", "tokenizer", "training", "optimizer", "schedule", "precision")
_ELSEWHERE: Final = frozenset(
    """
    attention_backend data_args_path data_cache_path device heterogeneous_layers_config_path init_model_with_meta_device
    num_workers per_split_data_args_path rank test_data_path tokenizer_model train_data_path transformer_impl valid_data_path
    merge_file vocab_file use_dist_ckpt override_opt_param_scheduler use_checkpoint_opt_param_scheduler skip_train
    """.split()
)
"""Arguments about files, devices and the start of a run: they belong to a command, not to a model or its training."""
_PATTERNS: Final = ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq")


def plan_of(arguments: Mapping[str, Any], source: Path) -> Plan:
    """Return the plan of the run that wrote a checkpoint.

    Args:
        arguments: plain values and records, by the names of Megatron-LM's arguments.
        source: the checkpoint, for messages.

    Raises:
        MismatchError: megatrain has no equal model or training.
    """
    wanted = {setting.path for setting in settings() if setting.section in _SECTIONS}
    left_out = _ELSEWHERE | frozenset(_implied(arguments))
    given = {
        name: _as_pattern(value) if name in _PATTERNS else value
        for name, value in arguments.items()
        if name not in left_out and _is_plain(value)
    }
    words: list[str] = []
    for item in read_arguments(given, str(source), wanted):
        if isinstance(item, FlagWords):
            words += [item.flag, *item.words]
    padded, size = arguments.get("padded_vocab_size"), arguments.get("world_size")
    if not isinstance(padded, int) or not isinstance(size, int) or size < 1:
        raise MismatchError(
            f"{source}: its arguments have no padded_vocab_size or world_size",
            fix="convert a checkpoint that pretrain_gpt.py of Megatron-LM wrote",
        )
    try:
        request = parse([*words, "--tokenizer-type", "NullTokenizer", "--vocab-size", str(padded)])
        return resolve(request, replace(Facts(), world_size=size, vocab_size=padded, eod_id=0))
    except ConfigError as error:
        first = error.problems[0]
        raise MismatchError(f"{source}: its arguments: {first.text}", fix=first.fix) from error


def tokenizer_settings(arguments: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the settings of the tokenizer, by name: those of token ids alone if megatrain has no such tokenizer."""
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
    return given if is_text else numbers


def _implied(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield arguments that Megatron-LM sets from others, without effect on the result."""
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
