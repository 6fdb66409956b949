"""`megatrain checkpoint inspect | diff`: what checkpoints contain. One chunk of each checkpoint is in memory at a time."""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.checkpoint.manifest import Manifest
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.config.errors import ConfigError
from megatrain.config.schema.tree import settings
from megatrain.tools.checkpoint.source import Progress, TensorPart, opened, parts_of, size_text

_MAX_SHOWN = 100
"""Characters shown of a value."""


@dataclass
class Statistics:
    """Sums over the values of a tensor, in fp64."""

    sum_of_squares: float = 0.0
    largest: float = 0.0
    """Largest absolute value of the finite ones."""
    num_not_finite: int = 0

    def add(self, values: Tensor) -> None:
        """Add a chunk."""
        wide = values.double()
        finite = wide[wide.isfinite()]
        self.num_not_finite += wide.numel() - finite.numel()
        self.sum_of_squares += float(finite.square().sum())
        self.largest = max(self.largest, float(finite.abs().max()) if finite.numel() else 0.0)


def inspect(arguments: argparse.Namespace) -> None:
    """Print state, configuration and tensors."""
    with opened(arguments.path) as reader:
        manifest, pattern = reader.manifest, arguments.tensors
        names = [name for name in sorted(manifest.tensors) if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise ConfigError(
                f"--tensors {pattern}: no tensor of {reader.path} has such a name",
                fix=f"use * for any characters; the first name is {min(manifest.tensors)}",
            )
        numbers = _statistics(reader, set(names)) if arguments.norms else {}
        described = dict(_description(reader.path, manifest))
        tensors = [_row(name, manifest, numbers) for name in names]
    if arguments.json:
        print(
            json.dumps({**described, "config": manifest.config, "state": manifest.state, "tensors": tensors})
        )
        return
    for name, value in described.items():
        print(f"{name:<24}{value}")
    print("state")
    for name, value in sorted(manifest.state.items()):
        print(f"  {name:<28}{_shortened(value)}")
    print("config, apart from defaults")
    for section, changed in _changed_settings(manifest.config).items():
        print(f"  {section:<14}{', '.join(changed)}")
    print("tensors")
    for row in tensors:
        print("  " + _row_text(row))


def diff(arguments: argparse.Namespace) -> int:
    """Name the tensors that differ, with their largest differences.

    Returns 1 if there are differences.
    """
    with opened(arguments.first) as first, opened(arguments.second) as second:
        own = {kind for tensor in first.manifest.tensors.values() for kind in tensor.kinds}
        kinds = own if arguments.all else {"weight"}
        lines = list(_structural_differences(first.manifest, second.manifest, kinds))
        found = sorted(_differences(first, second, kinds), key=lambda one: -one.relative)
        print(f"{first.path} (iteration {first.manifest.iteration})")
        print(f"{second.path} (iteration {second.manifest.iteration})")
    different = [one for one in found if one.num_different]
    for line in lines:
        print(f"  {line}")
    if different:
        width = max(len(one.label) for one in different)
        print(f"  {'tensor':<{width}}  {'different':>12}  {'largest absolute':>16}  {'relative':>10}")
    for one in different:
        print(
            f"  {one.label:<{width}}  {one.num_different:>12}  {one.absolute:>16.3e}  {one.relative:>10.3e}"
        )
    print(f"{len(found) - len(different)} of {len(found)} tensors are equal in every bit")
    return 1 if different or lines else 0


@dataclass
class Difference:
    """The difference of one kind of state of a tensor."""

    label: str
    num_different: int = 0
    """Elements that are not equal in every bit."""
    absolute: float = 0.0
    """Largest absolute difference; infinite if one side is not finite."""
    largest: float = 0.0
    """Largest absolute value of the first checkpoint."""

    @property
    def relative(self) -> float:
        """Largest absolute difference by the largest value."""
        if self.absolute == 0.0:
            return 0.0
        return self.absolute / self.largest if self.largest else math.inf

    def add(self, first: Tensor, second: Tensor) -> None:
        """Add a chunk of both checkpoints."""
        own, other = first.double(), second.double()
        is_equal = (own == other) | (own.isnan() & other.isnan())
        self.num_different += int((~is_equal).sum())
        gap = torch.where(is_equal, 0.0, (own - other).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        self.absolute = max(self.absolute, float(gap.max()))
        self.largest = max(self.largest, float(own.abs().nan_to_num(nan=0.0, posinf=0.0).max()))


def _differences(first: CheckpointReader, second: CheckpointReader, kinds: set[str]) -> Iterator[Difference]:
    parts = [
        part for part in parts_of(first.manifest) if part.kind in kinds and _is_in(part, second.manifest)
    ]
    found: dict[str, Difference] = {}
    with Progress("comparing", sum(part.num_bytes for part in parts)) as progress:
        for part in parts:
            label = part.name if part.kind == "weight" else f"{part.name} ({part.kind})"
            found.setdefault(label, Difference(label)).add(part.read(first), part.read(second))
            progress.add(part.num_bytes)
    yield from found.values()


def _structural_differences(first: Manifest, second: Manifest, kinds: set[str]) -> Iterator[str]:
    for name in sorted({*first.tensors, *second.tensors}):
        if name not in second.tensors or name not in first.tensors:
            yield f"{name}: only in the {'first' if name in first.tensors else 'second'}"
        elif first.tensors[name].shape != second.tensors[name].shape:
            shapes = [list(manifest.tensors[name].shape) for manifest in (first, second)]
            yield f"{name}: shape {shapes[0]} in the first, {shapes[1]} in the second"
        else:
            for kind in sorted(kinds):
                has = [kind in manifest.tensors[name].kinds for manifest in (first, second)]
                if has[0] != has[1]:
                    yield f"{name} ({kind}): only in the {'first' if has[0] else 'second'}"


def _changed_settings(config: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the settings that differ from their defaults, by section."""
    found: dict[str, list[str]] = {}
    for setting in settings():
        value = config.get(setting.section, {}).get(setting.name)
        as_default = list(setting.default) if isinstance(setting.default, tuple) else setting.default
        if value is not None and value != as_default:
            text = setting.flag if value is True else f"{setting.flag} {_shortened(value)}"
            found.setdefault(setting.section, []).append(text)
    return found


def _is_in(part: TensorPart, manifest: Manifest) -> bool:
    other = manifest.tensors.get(part.name)
    return other is not None and other.shape == part.shape and part.kind in other.kinds


def _statistics(reader: CheckpointReader, names: set[str]) -> dict[tuple[str, str], Statistics]:
    parts = [part for part in parts_of(reader.manifest) if part.name in names]
    numbers: dict[tuple[str, str], Statistics] = {}
    with Progress("reading", sum(part.num_bytes for part in parts)) as progress:
        for part in parts:
            numbers.setdefault((part.name, part.kind), Statistics()).add(part.read(reader))
            progress.add(part.num_bytes)
    return numbers


def _description(path: Path, manifest: Manifest) -> Iterator[tuple[str, Any]]:
    yield "checkpoint", str(path)
    yield "iteration", manifest.iteration
    yield "consumed_train_samples", manifest.consumed_train_samples
    yield "optimizer_step_count", manifest.optimizer_step_count
    yield "parameters", sum(math.prod(tensor.shape) for tensor in manifest.model_tensors.values())
    yield "size", size_text(sum(file.num_bytes for file in manifest.files.values()))
    yield "files", len(manifest.files)


def _row(name: str, manifest: Manifest, numbers: dict[tuple[str, str], Statistics]) -> dict[str, Any]:
    tensor = manifest.tensors[name]
    kinds: dict[str, Any] = {}
    for kind, stored in sorted(tensor.kinds.items(), key=lambda one: one[0] != "weight"):
        kinds[kind] = {"dtype": stored.dtype}
        if (name, kind) in numbers:
            found = numbers[name, kind]
            kinds[kind] |= {
                "norm": math.sqrt(found.sum_of_squares),
                "largest": found.largest,
                "not_finite": found.num_not_finite,
            }
    return {"name": name, "shape": list(tensor.shape), "kinds": kinds}


def _row_text(row: dict[str, Any]) -> str:
    head = f"{row['name']:<48} {row['shape']!s:<16}"
    kinds = row["kinds"]
    if not any("norm" in values for values in kinds.values()):
        return f"{head} " + ", ".join(f"{kind} {values['dtype']}" for kind, values in kinds.items())
    lines = [
        f"    {kind:<12} {values['dtype']:<5} norm {values['norm']:<12.6g} largest {values['largest']:<12.6g}"
        f" not finite {values['not_finite']}"
        for kind, values in kinds.items()
    ]
    return "\n".join([head.rstrip(), *lines])


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"
