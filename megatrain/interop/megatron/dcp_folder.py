"""The tensors and objects of a checkpoint of Megatron-LM's FSDP, by the names that `torch_dist` would give them.

    torch_dcp        model.decoder.layers.0.mlp.linear_fc1.weight               written by torch.distributed.checkpoint alone
    fsdp_dtensor     model.module.decoder.layers.0.mlp.linear_fc1.weight_w      gate of a gated MLP
                     model.module.decoder.layers.0.mlp.linear_fc1.weight_v      its other half
    args, iteration, opt_param_scheduler.num_steps                              objects, one by one

The state of the optimizer is not read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from megatrain.checkpoint.errors import DamagedImportError, MismatchError
from megatrain.interop.megatron.torch_dist import TorchDistFolder
from megatrain.parallel.layout import Box, box_shape

_MODEL: Final = re.compile(r"model\.(?:module\.)*(.+)")
_SCHEDULE: Final = "opt_param_scheduler."


@dataclass(frozen=True)
class _Tensor:
    """A tensor whose rows one or two stored tensors hold, in this order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: tuple[str, ...]


class DcpFolder:
    """As `TorchDistFolder`, for weights that torch.distributed.checkpoint wrote.

    Raises:
        DamagedImportError: a half of an MLP is missing.
        MismatchError: stages of a pipeline, which all count their layers from 0.
    """

    def __init__(self, folder: TorchDistFolder) -> None:
        self._folder, self.path, self.checksum = folder, folder.path, folder.checksum
        fields = getattr(self.object("args"), "state", None)
        stages = fields.get("pipeline_model_parallel_size", 1) if isinstance(fields, dict) else 1
        if stages != 1:
            raise MismatchError(
                f"{self.path} has {str(stages)[:20]} stages of a pipeline, whose layers have the same names",
                fix="save it in Megatron-LM with --pipeline-model-parallel-size 1, or with --ckpt-format torch_dist",
            )
        self.tensors = {
            match[1].removesuffix("_w"): self._joined(match[0])
            for match in map(_MODEL.fullmatch, folder.tensors)
            if match is not None and not match[1].endswith("_v")
        }

    @classmethod
    def is_of(cls, folder: TorchDistFolder) -> bool:
        """Return whether an index has the names of such a checkpoint."""
        return "args" in folder.object_names and any(map(_MODEL.fullmatch, folder.tensors))

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor."""
        tensor, first = self.tensors[name], 0
        out = torch.empty(box_shape(box), dtype=tensor.dtype)
        for stored in tensor.stored:
            rows = self._folder.tensors[stored].shape[0]
            low, high = max(box[0][0], first), min(box[0][1], first + rows)
            if low < high:
                values = self._folder.read(stored, ((low - first, high - first), *box[1:]))
                out[low - box[0][0] : high - box[0][0]] = values
            first += rows
        return out

    def object(self, name: str) -> Any:
        """Return an object; `common_state` is put together from several."""
        if name != "common_state":
            return self._folder.object(name)
        schedule = [one for one in self._folder.object_names if one.startswith(_SCHEDULE)]
        values = {one.removeprefix(_SCHEDULE): self._folder.object(one) for one in schedule}
        state = {one: self._folder.object(one) for one in ("args", "iteration")}
        return {**state, "opt_param_scheduler": values}

    def close(self) -> None:
        """Free the chunks in memory."""
        self._folder.close()

    def _joined(self, stored: str) -> _Tensor:
        names = (stored, f"{stored[:-2]}_v") if stored.endswith("_w") else (stored,)
        first, last = (self._folder.tensors.get(name) for name in (stored, names[-1]))
        if first is None or last is None or not first.shape or first.shape != last.shape:
            raise DamagedImportError(
                f"{self.path}: {names[-1]} is missing, or has another shape than {stored}"
            )
        return _Tensor((len(names) * first.shape[0], *first.shape[1:]), first.dtype, names)
