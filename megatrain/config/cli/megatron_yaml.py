"""Megatron-LM's YAML files of arguments, read as the flags that they stand for.

    language_model:                        MODEL_ARGS:
      num_layers: 24                         --num-layers: 24
      layernorm_epsilon: 1.e-5               --bf16: true
    lr: 2.5e-4                               --recompute-modules: [moe_act]

The left form, of --yaml-cfg, holds names of arguments, and in two sections names of `TransformerConfig`. The right form
is that of the functional tests: true is a flag without value, false and null leave the flag out. In both, a
later line overrides an earlier one, and the sections override the names outside.

Source: Megatron-LM, megatron/training/yaml_arguments.py and tests/functional_tests/shell_test_utils/_run_training.sh.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Final

import yaml

from megatrain.config.cli.flag_words import FlagWords
from megatrain.config.cli.yaml_file import MEGATRON_SECTIONS, compose, is_null
from megatrain.config.errors import Problem
from megatrain.config.megatron.flags import aliases, megatron_flags
from megatrain.config.schema.tree import flag_of, section_types, settings

*_SECTIONS, _TEST_ARGUMENTS = MEGATRON_SECTIONS
_RENAMED: Final[Mapping[str, str]] = {
    "add_bias_linear": "bias_linear",
    "add_position_embedding": "position_embedding",
    "apply_rope_fusion": "rope_fusion",
    "bias_activation_fusion": "bias_gelu_fusion",
    "fp4": "fp4_format",
    "fp8": "fp8_format",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts",
    "overlap_p2p_comm": "overlap_p2p_communication",
    "perform_initialization": "initialization",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}
"""Fields of `TransformerConfig` and destinations of flags, and the flag's name without `--`, `--no-` or `--disable-`."""

_IGNORED: Final = dict(
    entry.split("=")
    for entry in """
    adlr_autoresume_interval=1000 barrier_with_L1_time=* batch_p2p_comm=* batch_p2p_sync=*
    cpu_offloading=* cpu_offloading_activations=* cpu_offloading_weights=* deallocate_pipeline_outputs=*
    delay_grad_reduce=* delay_param_gather=* enable_autocast=false enable_one_logger=*
    fp8_amax_compute_algo=most_recent fp8_amax_history_len=1 fp8_interval=1 fp8_margin=0 gated_linear_unit=false
    mask_prob=0.15 memory_efficient_layer_norm=* moe_token_dropping=* one_logger_project=*
    retriever_seq_length=256 sample_rate=1.0 scatter_gather_tensors_in_pipeline=* short_seq_prob=0.1
    tp_comm_atomic_ag=* tp_comm_atomic_rs=* variable_seq_lengths=*
    """.split()
)
"""Names that a complete file holds, and the value with which they change no result; `*`: every value."""

_ACTIVATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "swiglu": ("--swiglu", "--no-squared-relu"),
    "squaredrelu": ("--squared-relu", "--no-swiglu"),
    "gelu": ("--no-swiglu", "--no-squared-relu", "--no-bias-gelu-fusion"),
}
"""Values of `activation_func`, and the flags for the same function; `gelu` is exact without its fusion."""


def read_megatron_yaml(file: str) -> Iterator[FlagWords | Problem | str]:
    """Read a file: flags with their place, problems, and notes on keys that are not arguments."""
    root = compose(file, "--yaml-cfg")
    if isinstance(root, Problem):
        yield root
    elif isinstance(root, yaml.MappingNode):
        yield from _Reader(file).flags(root)
    elif root is not None:
        yield Problem(f"{file}: expected names and values", "write `num_layers: 24`")


def read_arguments(
    arguments: Mapping[str, object], source: str, wanted: Container[str]
) -> Iterator[FlagWords]:
    """Read arguments that Megatron-LM has resolved: all of them, with every default.

    Flags are yielded for those that set a setting of `wanted`, by path, and for every other flag that is switched on.
    """
    wanted_flags = {
        flag
        for setting in settings()
        if setting.path in wanted
        for flag in (setting.flag, setting.opposite_flag)
    }
    known = {*megatron_flags(), *aliases()}
    given = {
        name: value
        for name, value in arguments.items()
        if {_flag(name), *_opposites(_flag(name))} & wanted_flags or (value is True and _flag(name) in known)
    }
    root = yaml.compose(yaml.safe_dump(given))
    assert isinstance(root, yaml.MappingNode)
    yield from (item for item in _Reader(source).values(root.value) if isinstance(item, FlagWords))


class _Reader:
    def __init__(self, file: str) -> None:
        self.file = file

    def flags(self, root: yaml.MappingNode) -> Iterator[FlagWords | Problem | str]:
        sections = {key.value: node for key, node in root.value if isinstance(node, yaml.MappingNode)}
        if _TEST_ARGUMENTS in sections:
            others = [key.value for key, _ in root.value if key.value != _TEST_ARGUMENTS]
            if others:
                yield f"{self.file}: {', '.join(others)} are ignored: only {_TEST_ARGUMENTS} are arguments"
            yield from self.values(sections[_TEST_ARGUMENTS].value)
            return
        yield from self.values([(key, node) for key, node in root.value if key.value not in _SECTIONS])
        for name in _SECTIONS:
            if name in sections:
                yield from self.values(_without_known(sections[name].value), in_section=True)

    def values(
        self, entries: Sequence[tuple[yaml.Node, yaml.Node]], *, in_section: bool = False
    ) -> Iterator[FlagWords | Problem | str]:
        ignored: list[str] = []
        for key, node in entries:
            place = f"{self.file}:{key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                yield Problem(f"{place}: a list or mapping is not a name", "write `name: value`")
            elif isinstance(node, yaml.MappingNode):
                yield _section_problem(place, key.value)
            elif is_null(node):
                continue
            elif _IGNORED.get(key.value) in ("*", str(node.value).lower()):
                ignored.append(key.value)
            elif in_section and key.value == "num_query_groups":
                written = f"{key.value}: {node.value}"
                yield FlagWords("--group-query-attention", (), place, written)
                yield FlagWords("--num-query-groups", (node.value,), place, written)
            else:
                yield from _flags_of(place, key.value, node)
        if ignored:
            yield f"{self.file}: {', '.join(ignored)}: ignored, since they change no result"


def _flags_of(place: str, key: str, node: yaml.Node) -> Iterator[FlagWords | Problem]:
    """Yield the flags for one line."""
    if isinstance(node, yaml.SequenceNode):
        if all(isinstance(item, yaml.ScalarNode) for item in node.value):
            words = tuple(item.value for item in node.value)
            yield FlagWords(_flag(key), words, place, f"{key}: {' '.join(words)}")
        else:
            yield Problem(f"{place}: {key} has other entries than plain values", "write `[a, b]`")
        return
    written = f"{key}: {node.value}"
    if key == "activation_func" and node.value not in _ACTIVATIONS:
        yield Problem(f"{place}: {written} is not known", f"write {' or '.join(_ACTIVATIONS)}")
    elif key == "activation_func":
        yield from (FlagWords(flag, (), place, written) for flag in _ACTIVATIONS[node.value])
    elif node.tag.endswith(":bool"):
        yield from (FlagWords(flag, (), place, written) for flag in _switch(key, is_true=not _is_false(node)))
    elif node.value:
        yield FlagWords(_flag(key), (node.value,), place, written)


def _is_false(node: yaml.Node) -> bool:
    return bool(node.tag.endswith(":bool")) and node.value.lower() in {"false", "no", "off"}


def _without_known(entries: Sequence[tuple[yaml.Node, yaml.Node]]) -> list[tuple[yaml.Node, yaml.Node]]:
    """Leave out `gated_linear_unit` if `activation_func: swiglu` implies it."""
    is_swiglu = any(key.value == "activation_func" and node.value == "swiglu" for key, node in entries)
    return [(key, node) for key, node in entries if not (is_swiglu and key.value == "gated_linear_unit")]


def _flag(key: str) -> str:
    return key if key.startswith("-") else flag_of(_RENAMED.get(key, key))


def _switch(key: str, *, is_true: bool) -> list[str]:
    """Return the flag for a boolean, or none if the value holds without a flag.

    Megatron-LM has a flag for one of the values: `--swiglu` for true, `--no-rope-fusion` or `--disable-bias-linear` for false.
    """
    flag = _flag(key)
    if key.startswith("-"):
        return [flag] if is_true else []
    settable = {setting.flag: setting.opposite_flag for setting in settings() if setting.kind is bool}
    if flag in settable:
        return [flag if is_true else settable[flag]]
    known = [name for name in _opposites(flag) if name in {*settable, *megatron_flags(), *aliases()}]
    if known:
        return [] if is_true else known[:1]
    return [flag] if is_true or flag not in {*megatron_flags(), *aliases()} else []


def _opposites(flag: str) -> tuple[str, ...]:
    """Return the flags that may set the opposite of a switch, such as `--bert-no-binary-head`."""
    first, _, rest = flag[2:].partition("-")
    return f"--no-{flag[2:]}", f"--disable-{flag[2:]}", f"--{first}-no-{rest}"


def _section_problem(place: str, key: str) -> Problem:
    if key in section_types():
        return Problem(f"{place}: {key} is a section of --config files", "use --config FILE")
    return Problem(
        f"{place}: {key} is not a section of Megatron-LM's files",
        f"write its values outside of it, or below {' or '.join(_SECTIONS)}",
    )
