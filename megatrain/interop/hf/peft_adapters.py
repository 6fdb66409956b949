"""Adapters (--lora-rank) in the format of peft: adapter_config.json and adapter_model.safetensors.

decoder.layers.0.attention.q.lora_a.weight  <->  base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight

B has the rows of its weight in their order. Source: peft 0.21, tuners/lora and utils/save_and_load.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from megatrain.checkpoint.manifest import Manifest, StoredKind, StoredTensor
from megatrain.checkpoint.reader import TensorReader
from megatrain.config.errors import ConfigError, InputError
from megatrain.config.model_spec.lora import adapter_names, modules_with
from megatrain.data.tokenizers.files import read_json
from megatrain.interop.hf.checkpoint import HfCheckpoint
from megatrain.interop.hf.export import HfExport
from megatrain.interop.hf.tensors import TheirTensor
from megatrain.interop.hf.tokenizer_files import json_bytes
from megatrain.optim.sharded import WEIGHT
from megatrain.parallel.layout import Box

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_AS_HERE: Final = {
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Settings of peft that change what adapters compute, with the values that they have here."""


def peft_files(reader: TensorReader, base: str | None) -> dict[str, bytes]:
    """Return names and contents of the files of a checkpoint's adapters.

    Args:
        base: name or folder of the model that they adapt, for peft.

    Raises:
        ConfigError: it has no adapters.
        InputError: the family of transformers has no single tensor for an adapted weight.
    """
    adapters = reader.manifest.config.get("adapters", {})
    if not adapters.get("lora_rank"):
        raise ConfigError(f"{reader.path} has no adapters", fix="export the weights with megatrain-to-hf")
    homes = {part.name: theirs for theirs in HfExport(reader).tensors.values() for part in theirs.parts}
    tensors: dict[str, Tensor] = {}
    for name, stored in reader.manifest.tensors.items():
        a, b = adapter_names(name)
        if a not in reader.manifest.tensors:
            continue
        theirs = homes[name]
        _require_one_part(theirs, reader.path)
        module = _PREFIX + theirs.name.removesuffix(".weight")
        rank: int = adapters["lora_rank"]
        tensors[module + _A] = reader.values(a, (rank, stored.shape[1]))
        values = reader.values(b, (stored.shape[0], rank))
        tensors[module + _B] = torch.empty_like(values)
        tensors[module + _B][_rows(theirs)] = values
    modules = {
        key.removesuffix(_A).split(".", 4)[-1].partition(".")[2] for key in tensors if key.endswith(_A)
    }
    config = _AS_HERE | {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters["lora_rank"],
        "lora_alpha": adapters["lora_alpha"],
        "lora_dropout": adapters.get("lora_dropout", 0.0),
        "target_modules": sorted(modules),
        "fan_in_fan_out": any(
            homes[name].is_transposed for name in homes if adapter_names(name)[0] in reader.manifest.tensors
        ),
        "inference_mode": True,
    }
    return {CONFIG: json_bytes(config), TENSORS: save(tensors, metadata={"format": "pt"})}


class PeftCheckpoint(TensorReader):
    """A folder of transformers with the adapters of a folder of peft, at iteration 0.

    Raises:
        InputError: the folder is none of peft, or its adapters are of another kind or model.
    """

    def __init__(self, path: Path, base: HfCheckpoint) -> None:
        self.path, self.base = path, base
        config = read_json(path / CONFIG) if (path / CONFIG).is_file() else None
        if not isinstance(config, dict) or not (path / TENSORS).is_file():
            raise InputError(
                f"{path}: has no {CONFIG} and {TENSORS}",
                fix="name a folder that save_pretrained of peft wrote",
            )
        self._check(config)
        try:
            stored = load_file(path / TENSORS)
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{path / TENSORS}: cannot be read: {error}", fix="copy the folder again"
            ) from error
        self._tensors = self._ours(stored, config["r"])
        names = sorted({name.replace(".lora_a.", ".") for name in self._tensors if ".lora_a." in name})
        modules = modules_with(names)
        missing = [
            name
            for name in base.manifest.tensors
            if modules_with([name])
            and modules_with([name])[0] in modules
            and adapter_names(name)[0] not in self._tensors
        ]
        if missing:
            raise InputError(
                f"{path}: {missing[0]} and {len(missing) - 1} more have no adapter, as the same weights of other layers do",
                fix="adapt these linear layers in all layers",
            )
        self._settings = {
            "lora_rank": config["r"],
            "lora_alpha": float(config["lora_alpha"]),
            "lora_dropout": float(config.get("lora_dropout") or 0.0),
            "lora_target_modules": list(modules),
        }

    @property
    def flags(self) -> list[str]:
        """Flags with which a run trains these adapters on."""
        rank, alpha, dropout, modules = self._settings.values()
        return [
            "--lora-rank",
            str(rank),
            "--lora-alpha",
            f"{alpha:g}",
            "--lora-dropout",
            f"{dropout:g}",
            "--lora-target-modules",
            *modules,
        ]

    @property
    def manifest(self) -> Manifest:
        known = self.base.manifest
        added = {
            name: StoredTensor(tuple(x.shape), {WEIGHT: StoredKind("F32", ())})
            for name, x in self._tensors.items()
        }
        adapters = {**known.config["adapters"], **self._settings}
        return replace(
            known, tensors={**known.tensors, **added}, config={**known.config, "adapters": adapters}
        )

    def read_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:
        if name in self._tensors:
            out.copy_(self._tensors[name][tuple(slice(*edge) for edge in box)])
        else:
            self.base.read_box(out, kind=kind, name=name, shape=shape, box=box)

    def _check(self, config: Mapping[str, Any]) -> None:
        rank, alpha = config.get("r"), config.get("lora_alpha")
        is_lora = (
            config.get("peft_type") == "LORA"
            and type(rank) is int
            and rank > 0
            and isinstance(alpha, int | float)
            and alpha > 0
        )
        if not is_lora:
            raise InputError(
                f"{self.path / CONFIG}: peft_type {config.get('peft_type')} with r {rank} and lora_alpha {alpha} is no LoRA",
                fix="use adapters of peft_type LORA",
            )
        for name, value in _AS_HERE.items():
            if config.get(name, value) not in (value, None, [], {}):
                raise InputError(
                    f"{self.path / CONFIG}: {name} {config[name]} is not supported",
                    fix=f"train the adapters with {name} {value}, or merge them with peft and convert the model",
                )

    def _ours(self, stored: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Return A and B by our names."""
        shapes = {name: one.shape for name, one in self.base.manifest.tensors.items()}
        names = {theirs.name: (ours, theirs) for ours, theirs in self.base.homes.items()}
        found: dict[str, Tensor] = {}
        for key, values in stored.items():
            ending = key[-len(_A) :]
            ours, theirs = names.get(key.removeprefix(_PREFIX).removesuffix(ending) + ".weight", (None, None))
            if ending not in (_A, _B) or ours is None or theirs is None:
                raise InputError(
                    f"{self.path / TENSORS}: {key[:200]!r} adapts no linear layer of {self.base.path}",
                    fix="name the model that the adapters were trained on with --base",
                )
            _require_one_part(theirs, self.path)
            expected = (rank, shapes[ours][1]) if ending == _A else (shapes[ours][0], rank)
            if tuple(values.shape) != expected:
                raise InputError(
                    f"{self.path / TENSORS}: {key} has shape {list(values.shape)}, not {list(expected)}",
                    fix="name the model that the adapters were trained on with --base",
                )
            a, b = adapter_names(ours)
            found[a if ending == _A else b] = (
                values.float() if ending == _A else values.float()[_rows(theirs)]
            )
        return found


def _require_one_part(theirs: TheirTensor, path: Path) -> None:
    if len(theirs.parts) != 1:
        names = ", ".join(part.name for part in theirs.parts)
        raise InputError(
            f"{path}: {theirs.name} of transformers holds {names}, which have an adapter each here",
            fix="merge the adapters: megatrain checkpoint merge-lora, or peft's merge_and_unload",
        )


def _rows(theirs: TheirTensor) -> Tensor:
    """Return the rows of their weight, in the order of ours."""
    (part,) = theirs.parts
    return torch.cat([torch.arange(part.shape[0])[rows] for rows in part.rows])
