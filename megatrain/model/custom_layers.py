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
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, get_args

import torch

from megatrain.config.derive.custom_layers import LayerFunction, Layers, layer_function
from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.linear import Linear
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.model_spec.part import Part, Role
from megatrain.config.schema.model import ModelConfig
from megatrain.model.parts import MODULES

_NAMES: Final = "give a file, such as my_layers.py:my_spec, or a module on the Python path (PYTHONPATH)"


def apply_custom_layers(spec: ModelSpec, model: ModelConfig) -> ModelSpec:
    """Replace the layers of a stored model by those of --spec, if it is given. Raises ConfigError."""
    function = layer_function(model.spec)
    return (
        spec
        if function is None
        else dataclasses.replace(spec, layers=load_layers(function)(model, spec.layers))
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


def load_layers(function: LayerFunction) -> Layers:
    """Load the function. What is returned calls it, and checks its result. Raises ConfigError, both do."""
    module = _module(function)
    found = getattr(module, function.function, None)
    if not callable(found):
        raise ConfigError(
            f"--spec {function}: {function.module} has no function {function.function}",
            fix="name a function of that module",
        )

    def layers(model: ModelConfig, default: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
        try:
            made = found(model, default)
        except Exception as error:
            raise ConfigError(
                f"--spec {function}: {_where(error)}", fix="correct the function at that line"
            ) from error
        _check(function, made, len(default), model.hidden_size)
        return tuple(made)

    return layers


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


def _check(function: LayerFunction, layers: Any, count: int, hidden_size: int) -> None:
    is_sequence = isinstance(layers, Sequence) and all(isinstance(layer, LayerSpec) for layer in layers)
    if not is_sequence or len(layers) != count:
        returned = (
            f"{len(layers)} layers"
            if is_sequence
            else f"{type(layers).__name__}, not a sequence of LayerSpec"
        )
        raise ConfigError(
            f"--spec {function} returned {returned}, and --num-layers is {count}",
            fix="return one LayerSpec per layer, such as layer.with_part(...) of each argument layer",
        )
    for number, layer in enumerate(layers):
        for problem in _problems(layer, hidden_size):
            raise ConfigError(
                f"--spec {function}: layer {number} (from 0): {problem}",
                fix="docs/extending.md says what a part is",
            )
    for activation_fn in {
        mlp.activation_fn for layer in layers for mlp in layer.mlps if mlp.activation_fn is not None
    }:
        x = torch.linspace(-3.05, 3.05, 20, dtype=torch.float64)
        derivative = (activation_fn.value(x + 1e-6) - activation_fn.value(x - 1e-6)) / 2e-6
        if not torch.allclose(derivative, activation_fn.derivative(x), rtol=1e-4, atol=1e-6):
            raise ConfigError(
                f"--spec {function}: the derivative of activation function {activation_fn.name} does not match its value",
                fix="correct value or derivative",
            )


def _problems(layer: LayerSpec, hidden_size: int) -> Iterator[str]:
    """Yield what is wrong with the parts of a layer."""
    names = [getattr(part, "name", None) for part in layer.parts]
    for part, name in zip(layer.parts, names, strict=True):
        kind = type(part).__name__
        if not isinstance(part, Part):
            yield f"{kind} is no part of a layer: derive it from megatrain.config.model_spec.part.Part"
        elif (
            not dataclasses.is_dataclass(part)
            or getattr(part, "role", None) not in get_args(Role)
            or not name
        ):
            yield f"{kind} must be a frozen dataclass with a class attribute `name`, and `role` of {get_args(Role)}"
        elif names.count(name) > 1:
            yield f"two parts have the name {name}"
        elif type(part).module is None and type(part) not in MODULES:
            yield f"{kind} has no class attribute `module`, the class of its torch module"
        else:
            yield from _problems_of_linears(part, hidden_size)


def _problems_of_linears(part: Part, hidden_size: int) -> Iterator[str]:
    kind = type(part).__name__
    try:
        linears = list(part.linears(hidden_size))
        hash(part)
    except Exception as error:  # noqa: BLE001 (code of the user)
        yield f"{kind}: {_where(error)}"
        return
    for one in linears:
        if not isinstance(one, Linear):
            yield f"{kind}.linears() yields {type(one).__name__}, not Linear"
        elif one.part.split(".")[0] != part.name:
            yield f"{kind}.linears() yields a Linear of part {one.part}, not {part.name}"
