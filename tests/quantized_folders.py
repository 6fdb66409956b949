"""Folders of `megatrain quantize`, read without compressed-tensors."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from megatrain.kernels.quantization.packing import unpack
from megatrain.kernels.quantization.rounding import dequantize
from megatrain.tools.quantization.plan import format_of


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {
        name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()
    }


def dequantized(folder: Path, name: str, target: Path, *, group_size: int = 16) -> Path:
    """Write the folder again with weights that are not quantized."""
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
