"""The tensors of an export that are quantized, and what is refused before weights are read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from megatrain.config.errors import ConfigError, InputError
from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.schema.quantization import QUANTIZATION_FORMATS, NumberFormat, QuantizationFormat
from megatrain.config.subjects.model_spec import describe_model
from megatrain.interop.hf.export import HfExport

Method = Literal["rtn", "gptq", "awq"]
_EXPERT_FORMATS: Final = ("fp8-tensor", "fp8-channel", "int8-weights", "int4")
"""Formats in which transformers reads experts; it does not round their inputs."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command."""

    name: str
    """Name of the format."""
    format: QuantizationFormat
    method: Method
    has_cache_scales: bool
    dtype: torch.dtype
    """Dtype of scales and of the tensors that are not quantized."""
    device: torch.device
    keeps_scales: bool = False
    """The checkpoint has the scales of this format, of --qat."""

    @property
    def is_calibrated(self) -> bool:
        return self.method != "rtn" or self.has_cache_scales


def format_of(name: str, group_size: int | None, method: Method) -> QuantizationFormat:
    """Return the format of this name. Raises ConfigError if it is unknown, or does not fit the other flags."""
    found = QUANTIZATION_FORMATS.get(name)
    if found is None:
        raise ConfigError(
            f"--format {name}: unknown", fix=f"use --format with one of {', '.join(QUANTIZATION_FORMATS)}"
        )
    weights = found.weights
    if method != "rtn" and weights.kind == "float":
        raise ConfigError(
            f"--method {method} rounds to integers, and --format {name} has none", fix="use --method rtn"
        )
    if group_size is None:
        return found
    if weights.strategy != "group":
        raise ConfigError(f"--group-size: --format {name} has no groups", fix="remove --group-size")
    return dataclasses.replace(found, weights=dataclasses.replace(weights, group_size=group_size))


@dataclass(frozen=True)
class TensorPlan:
    """The tensors of a quantized folder."""

    spec: ModelSpec
    layers: tuple[tuple[str, ...], ...]
    """Their tensors of each layer."""
    others: tuple[str, ...]
    """Their tensors outside of layers."""
    linears: Mapping[str, str]
    """Their weights that are quantized, each with the name of the first tensor of ours in it."""
    attentions: tuple[str, ...]
    """Their module of each layer's attention; empty: keys and values get no scales."""
    ignored: tuple[str, ...]
    """Their linear layers that are not quantized."""

    @property
    def num_files(self) -> int:
        return len(self.layers) + 1


def plan_tensors(export: HfExport, options: Options) -> TensorPlan:
    """Return the tensors of an export that are quantized.

    Raises:
        InputError: the format or a reader of the folder does not have such models.
    """
    config = export.config
    spec = describe_model(config.model, config.experts, vocab_size=export.vocab_size)
    ours = set(_our_linears(spec))
    linears = {
        name: one.parts[0].name
        for name, one in export.tensors.items()
        if one.parts and one.parts[0].name in ours
    }
    _check_readers(export, spec, linears, options)
    _check_sizes(export, linears, options)
    layers, others = _by_layer(export, spec)
    return TensorPlan(
        spec=spec,
        layers=layers,
        others=others,
        linears=linears,
        attentions=_attentions(export, spec, linears) if options.has_cache_scales else (),
        ignored=_ignored(export, linears),
    )


def _our_linears(spec: ModelSpec) -> Iterator[str]:
    """Yield the canonical names of the weights of GEMMs in layers."""
    for number, layer in enumerate(spec.layers):
        for linear in layer.linears(spec.hidden_size):
            prefix = f"{spec.layer_name(number)}.{linear.part}"
            for each in [f"{prefix}.{expert}" for expert in range(linear.num_experts)] or [prefix]:
                yield from (f"{each}.{piece.name}.weight" for piece in linear.pieces)


def _check_readers(export: HfExport, spec: ModelSpec, linears: Mapping[str, str], options: Options) -> None:
    """Raise InputError if compressed-tensors or transformers does not read such models in this format."""
    if export.family.auto_class != "AutoModelForCausalLM" or len(spec.stacks) > 1:
        raise _refusal(export, "only models that generate text from left to right are quantized")
    if any(len(export.tensors[name].shape) == 3 for name in linears):
        raise _refusal(
            export, "its experts are stacked in one tensor, for which compressed-tensors has no linear layers"
        )
    if any(layer.experts is not None for layer in spec.layers) and options.name not in _EXPERT_FORMATS:
        raise InputError(
            f"{export.path}: transformers does not read experts in --format {options.name}",
            fix=f"use --format with one of {', '.join(_EXPERT_FORMATS)}",
        )
    if any(export.tensors[name].is_transposed for name in linears):
        raise _refusal(export, "its weights are those of Conv1D, which compressed-tensors does not read")


def _by_layer(export: HfExport, spec: ModelSpec) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Return their tensors of each layer, and those of none."""
    names = [spec.layer_name(number) for number in range(len(spec.layers))]
    found: dict[str | None, list[str]] = {name: [] for name in (*names, None)}
    for theirs, one in export.tensors.items():
        ours = one.parts[0].name if one.parts else ""
        found[next((name for name in names if ours.startswith(f"{name}.")), None)].append(theirs)
    return tuple(tuple(found[name]) for name in names), tuple(found[None])


def quantization_config(plan: TensorPlan, options: Options) -> dict[str, Any]:
    """Return the entry `quantization_config` of config.json."""
    numbers = options.format
    group = {
        "targets": ["Linear"],
        "weights": numbers.weights.described(is_dynamic=False),
        "input_activations": None if numbers.inputs is None else numbers.inputs.described(is_dynamic=True),
        "output_activations": None,
        "format": numbers.layout,
    }
    cache = NumberFormat("float", 8, "tensor").described(is_dynamic=False) if plan.attentions else None
    return {
        "quant_method": "compressed-tensors",
        "format": numbers.layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(plan.ignored),
        "kv_cache_scheme": cache,
    }


def _check_sizes(export: HfExport, linears: Mapping[str, str], options: Options) -> None:
    """Raise InputError if inputs do not divide into the groups or blocks of the format."""
    multiple = options.format.multiple
    sizes = {name: export.tensors[name].shape[1] for name in linears}
    wrong = next((name for name, inputs in sizes.items() if inputs % multiple), None)
    if wrong is None:
        return
    common = math.gcd(*sizes.values())
    largest = max(size for size in range(1, min(multiple, common) + 1) if common % size == 0)
    is_block = options.format.weights.strategy == "block"
    raise InputError(
        f"{wrong} has {sizes[wrong]} inputs, which do not divide into {'blocks' if is_block else 'groups'} of {multiple}",
        fix="use --format fp8-channel" if is_block else f"use --group-size {largest}",
    )


def _refusal(export: HfExport, why: str) -> InputError:
    return InputError(
        f"{export.path}: {export.family.architecture} is not quantized: {why}",
        fix="export it without quantization: megatrain convert megatrain-to-hf",
    )


def _attentions(export: HfExport, spec: ModelSpec, linears: Mapping[str, str]) -> tuple[str, ...]:
    """Return the attention modules, whose scales of keys and values are named after them."""
    homes = {ours: theirs for theirs, ours in linears.items()}
    found = []
    for number, layer in enumerate(spec.layers):
        mixer = layer.attention
        if not isinstance(mixer, AttentionSpec) or mixer.latent is not None:
            raise _refusal(
                export,
                "scales of keys and values (--kv-cache-scales) need attention without latents in each layer",
            )
        found.append(homes[f"{spec.layer_name(number)}.attention.proj.weight"].rsplit(".", 2)[0])
    return tuple(found)


def _ignored(export: HfExport, linears: Mapping[str, str]) -> tuple[str, ...]:
    """Return the head, and matrices in layers that no GEMM of a layer is, such as a router's."""
    heads = {theirs for theirs, ours in export.family.modules.items() if ours == "output_layer"}
    heads.add("lm_head")  # its name in transformers; files may have another, such as embed_out
    inner = (
        name.removesuffix(".weight")
        for name, one in export.tensors.items()
        if name not in linears and len(one.shape) == 2 and one.parts and ".layers." in one.parts[0].name
    )
    return (*sorted(heads), *inner)
