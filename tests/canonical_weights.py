"""Whole tensors by canonical name: the source of a model's weights, and what a checkpoint has of them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatrain.checkpoint.find import newest_valid
from megatrain.checkpoint.manifest import DTYPES
from megatrain.checkpoint.parts import read_manifest
from megatrain.checkpoint.reader import CheckpointReader, TensorReader
from megatrain.config.schema.model import ModelConfig
from megatrain.interop.megatron.names import FusedRows, parts_of
from megatrain.kernels.quantization.packing import unpack
from megatrain.kernels.quantization.rounding import dequantize
from megatrain.parallel.layout import BoxRange, ParamLayout
from megatrain.tools.quantization.plan import format_of


class CopiedWeights:
    """Weights of another program; a `TensorSource`. `unused` has the names that no box was copied from."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.unused = set(weights)

    def fill(self, out: Tensor, layout: ParamLayout, box: BoxRange) -> None:
        whole = self.weights[box.piece.name]
        assert whole.shape == box.piece.shape, box.piece.name
        out.copy_(whole[tuple(slice(*edge) for edge in box.box)])
        self.unused.discard(box.piece.name)


def canonical(parameters: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return Megatron-LM's parameters as canonical tensors."""
    fused = FusedRows.of(model)
    return {
        part.name: torch.cat([tensor[part.place][rows] for rows in part.rows]).view(part.shape)
        for theirs, tensor in parameters.items()
        for part in parts_of(theirs, tuple(tensor.shape), fused)
    }


def hash_tensors(path: Path, kind: str = "weight") -> dict[str, str]:
    """Return the SHA-256 of each tensor's data of this kind, in row-major order: independent of the layout that wrote it.

    One tensor is in memory at a time.
    """
    hashes: dict[str, str] = {}
    with CheckpointReader(path) as reader:
        for name, tensor in sorted(reader.manifest.tensors.items()):
            if kind not in tensor.kinds:
                continue
            stored = tensor.kinds[kind]
            values = reader.values(name, tensor.shape, kind=kind, dtype=DTYPES[stored.dtype])
            hashes[name] = hashlib.sha256(values.view(-1).view(torch.uint8).numpy().data).hexdigest()
    return hashes


def stored_values(reader: TensorReader) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint in fp32, by KIND/NAME."""
    return {
        f"{kind}/{name}": reader.values(name, tensor.shape, kind=kind)
        for name, tensor in reader.manifest.tensors.items()
        for kind in tensor.kinds
    }


def assert_same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that tensors have the same names and bits."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def check_damage(
    folder: Path,
    copy: Path,
    read: Callable[[Path], TensorReader],
    files: Sequence[str],
    error: type[Exception],
    *,
    num_faults: int,
    end: Callable[[Path], int] = lambda file: file.stat().st_size,
) -> None:
    """Check that reading a copy with a flipped bit or a cut file is an error, or gives the same tensors.

    Args:
        files: names of the files that are damaged.
        end: the bytes of a file whose bits are flipped.
    """
    expected, generator, found = stored_values(read(folder)), random.Random(0), 0
    for number in range(num_faults):
        shutil.copytree(folder, copy)
        file = copy / generator.choice(files)
        if number % 10 == 0:
            os.truncate(file, generator.randrange(file.stat().st_size))
        else:
            data = bytearray(file.read_bytes())
            data[generator.randrange(end(file))] ^= 1 << generator.randrange(8)
            file.write_bytes(data)
        try:
            same = stored_values(read(copy))
        except error:
            found += 1
        else:
            assert_same_tensors(same, expected)
        shutil.rmtree(copy)
    assert found > num_faults / 2


def amaxes(folder: Path) -> dict[str, float]:
    """Return the newest amaxes of the last checkpoint, by name."""
    newest = newest_valid(folder)
    assert newest is not None
    history = read_manifest(newest.path).state["amax_history"]
    return {name: entries[0][1] for name, entries in history.items()}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder of transformers."""
    return {
        name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()
    }


def dequantized(folder: Path, name: str, target: Path, *, group_size: int = 16) -> Path:
    """Write a folder of `megatrain quantize` again with weights that are not quantized, without compressed-tensors."""
    stored, found = tensors_of(folder), {}
    numbers = format_of(name, group_size if name == "int4" else None, "rtn").weights
    for key, one in stored.items():
        if key.endswith("weight_packed"):
            key = key.removesuffix("_packed")
            columns = int(stored[f"{key}_shape"][1])
            values = unpack(one, numbers.num_bits, columns)
        elif f"{key}_scale" in stored:
            values = one
        elif key.endswith(("weight_scale", "weight_shape")):
            continue
        else:
            found[key] = one
            continue
        found[key] = dequantize(values.float(), stored[f"{key}_scale"].float(), numbers)
    target.mkdir()
    save_file(found, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (target / "config.json").write_text(json.dumps(config))
    return target
