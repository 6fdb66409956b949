"""Custom layers from a function of the user: `--spec`.

    def my_spec(model: ModelConfig, layers: tuple[LayerSpec, ...]) -> Sequence[LayerSpec]: ...

The function receives the resolved settings of the model and the layers that they describe, and returns as many layers. Every
rank calls it; rank 0's digest of the file is in the plan, and a different digest on any rank is an error. A digest is always
compared before the file is run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import itertools
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from megatrain.config.derive.custom_layers import CustomLayers, LayerFunction, layer_function
from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.experts import ExpertSizes
from megatrain.config.model_spec.layer import LayerSizes
from megatrain.config.schema.model import ModelConfig
from megatrain.kernels.activations import ActivationFunction
from megatrain.model.specs import (
    AttentionSpec,
    ExpertsSpec,
    GptSpec,
    LayerSpec,
    LinearAttentionSpec,
    MlpSpec,
)

_NAMES: Final = "give a file, such as my_layers.py:my_spec, or a module on the Python path (PYTHONPATH)"


def apply_custom_layers(spec: GptSpec, model: ModelConfig) -> GptSpec:
    """Replace the layers of a model by those of --spec, if it is given.

    Raises:
        ConfigError: the function cannot be loaded, or its file differs from the plan's.
    """
    function = layer_function(model.spec)
    if function is None:
        return spec
    digest = digest_of(function)
    if digest != model.spec_digest:
        raise ConfigError(
            f"--spec {function}: this rank's file has digest {digest}, the plan has {model.spec_digest}",
            fix="let all ranks read the same file, and do not change it during the start",
        )
    return dataclasses.replace(spec, layers=load_layers(function, model, spec.layers))


def describe_custom_layers(
    function: LayerFunction, model: ModelConfig, default: tuple[LayerSpec, ...]
) -> CustomLayers:
    """Describe the custom layers for a plan. Raises ConfigError."""
    digest, layers = digest_of(function), load_layers(function, model, default)
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec)]
    has_either = [mixer.softcap is not None or bool(mixer.dropout) for mixer in mixers]
    return CustomLayers(
        digest=digest,
        layers=tuple(map(_sizes, layers)),
        differences=tuple(_differences(layers, default)),
        has_windows=any(mixer.window is not None for mixer in mixers),
        has_sinks=any(mixer.sink != "none" for mixer in mixers),
        softcap_or_dropout="none" if not any(has_either) else "all" if all(has_either) else "some",
    )


def digest_of(function: LayerFunction) -> str:
    """Return the digest of the file with the function, which is not run. Raises ConfigError."""
    try:
        return hashlib.sha256(_file_of(function.module).read_bytes()).hexdigest()[:16]
    except (OSError, ImportError) as error:
        raise ConfigError(
            f"--spec {function}: {function.module} cannot be imported: {type(error).__name__}: {error}",
            fix=_NAMES,
        ) from error


def load_layers(
    function: LayerFunction, model: ModelConfig, default: tuple[LayerSpec, ...]
) -> tuple[LayerSpec, ...]:
    """Load and call the function, and check its result. Raises ConfigError."""
    module = _module(function)
    found = getattr(module, function.function, None)
    if not callable(found):
        raise ConfigError(
            f"--spec {function}: {function.module} has no function {function.function}",
            fix="name a function of that module",
        )
    try:
        layers = found(model, default)
    except Exception as error:
        raise ConfigError(
            f"--spec {function}: {_where(error)}", fix="correct the function at that line"
        ) from error
    _check(function, layers, len(default))
    return tuple(layers)


def _file_of(module: str) -> Path:
    """Return the file of a module. Neither it nor a package that it is in is imported."""
    if module.endswith(".py"):
        return Path(module)
    name, folders, file = "", None, None
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        found = (finder.find_spec(name, folders) for finder in sys.meta_path)
        spec = next((one for one in found if one is not None), None)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
        folders, file = spec.submodule_search_locations, spec.origin
    if file is None:
        raise ImportError(f"{module} has no file")
    return Path(file)


def _module(function: LayerFunction) -> ModuleType:
    try:
        if not function.module.endswith(".py"):
            return importlib.import_module(function.module)
        path = Path(function.module)
        name = f"layers_of_{path.stem}"
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None, "files that end in .py have a loader"
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module
        found.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"--spec {function}: {function.module} cannot be imported: {_where(error)}",
            fix=_NAMES,
        ) from error
    return module


def _where(error: Exception) -> str:
    """Return the error with the file and line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def _check(function: LayerFunction, layers: Any, count: int) -> None:
    is_sequence = isinstance(layers, Sequence) and all(isinstance(layer, LayerSpec) for layer in layers)
    if not is_sequence or len(layers) != count:
        returned = (
            f"{len(layers)} layers"
            if is_sequence
            else f"{type(layers).__name__}, not a sequence of LayerSpec"
        )
        raise ConfigError(
            f"--spec {function} returned {returned}, and --num-layers is {count}",
            fix="return one LayerSpec per layer, such as dataclasses.replace(layer, ...) of each argument layer",
        )
    for activation_fn in {
        mlp.activation_fn for layer in layers for mlp in _mlps(layer) if mlp.activation_fn is not None
    }:
        x = torch.linspace(-3.05, 3.05, 20, dtype=torch.float64)
        derivative = (activation_fn.value(x + 1e-6) - activation_fn.value(x - 1e-6)) / 2e-6
        if not torch.allclose(derivative, activation_fn.derivative(x), rtol=1e-4, atol=1e-6):
            raise ConfigError(
                f"--spec {function}: the derivative of activation function {activation_fn.name} does not match its value",
                fix="correct value or derivative",
            )


def _mlps(layer: LayerSpec) -> list[MlpSpec]:
    """Return the MLPs of a layer: its own, or those of its experts."""
    if not isinstance(layer.mlp, ExpertsSpec):
        return [] if layer.mlp is None else [layer.mlp]
    return [layer.mlp.expert, *([] if layer.mlp.shared is None else [layer.mlp.shared])]


def _sizes(layer: LayerSpec) -> LayerSizes:
    mlp = layer.mlp
    mixer = layer.mixer if isinstance(layer.mixer, AttentionSpec) else None
    linear = layer.mixer if isinstance(layer.mixer, LinearAttentionSpec) else None
    return LayerSizes(
        num_heads=mixer.num_heads if mixer else 0,
        num_query_groups=mixer.num_query_groups if mixer else 0,
        head_channels=mixer.head_channels if mixer else 0,
        latent=mixer.latent if mixer else None,
        has_output_gate=mixer is not None and mixer.has_output_gate,
        linear=None if linear is None else linear.sizes,
        ffn_hidden_size=mlp.ffn_hidden_size if isinstance(mlp, MlpSpec) else 0,
        is_gated=any(one.is_gated for one in _mlps(layer)),
        experts=_expert_sizes(mlp) if isinstance(mlp, ExpertsSpec) else None,
    )


def _expert_sizes(experts: ExpertsSpec) -> ExpertSizes:
    return ExpertSizes(
        num_experts=experts.router.num_experts,
        top_k=experts.router.top_k,
        ffn_hidden_size=experts.expert.ffn_hidden_size,
        shared_ffn_hidden_size=0 if experts.shared is None else experts.shared.ffn_hidden_size,
        latent_size=experts.latent_size or 0,
    )


def _differences(layers: Sequence[LayerSpec], default: Sequence[LayerSpec]) -> Iterator[str]:
    """Yield a line for each run of consecutive layers with the same differences."""
    texts = [", ".join(_changes(layer, other, "")) for layer, other in zip(layers, default, strict=True)]
    first = 0
    for text, run in itertools.groupby(texts):
        last = first + len(list(run)) - 1
        if text:
            yield f"{f'layer {first}' if first == last else f'layers {first} to {last}'}: {text}"
        first = last + 1


def _changes(one: Any, other: Any, path: str) -> Iterator[str]:
    is_part = dataclasses.is_dataclass(one) and not isinstance(one, ActivationFunction)
    if is_part and type(one) is type(other):
        for field in dataclasses.fields(one):
            yield from _changes(
                getattr(one, field.name), getattr(other, field.name), f"{path}.{field.name}".lstrip(".")
            )
    elif one != other:
        yield f"{path} {_shown(one)}, by the flags {_shown(other)}"


def _shown(value: Any) -> str:
    if isinstance(value, ActivationFunction):
        return f"{value.name} (without a fused kernel)"
    if dataclasses.is_dataclass(value):
        return type(value).__name__
    return "none" if value is None else str(value)
