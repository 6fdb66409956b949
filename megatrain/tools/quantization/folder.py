"""The files of a quantized folder, one a layer, and how far a command that was stopped came.

TARGET.partial/progress.json                        what is quantized, and the layers that are done
/model-00001-of-00005.safetensors     tensors outside of layers; then a file for each layer
TARGET                                              the same folder, renamed when it is complete
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from megatrain.checkpoint.shard_file import ChunkEntry, write_shard_file
from megatrain.checkpoint.tensor_file import bytes_of
from megatrain.config.errors import ConfigError
from megatrain.interop.hf.folder import INDEX_NAME
from megatrain.storage.disk import Disk, write_file
from megatrain.storage.files import replace_file
from megatrain.tools.checkpoint.rewrite import require_absent

_PROGRESS: Final = "progress.json"
_DTYPE_NAMES: Final = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip


class PartialFolder:
    """A folder that is being written.

    Args:
        description: what is quantized, and how: plain data.

    Raises:
        ConfigError: the target exists, or the folder that was begun has another description.
    """

    def __init__(self, target: Path, description: Mapping[str, Any], num_files: int) -> None:
        self.target, self.path = target, target.with_name(f"{target.name}.partial")
        self._description, self._num_files, self._disk = dict(description), num_files, Disk()
        require_absent(target)
        self.done: int | None = None
        """Layers whose files are complete; None: not even the others are."""
        if (self.path / _PROGRESS).is_file():
            stored = json.loads((self.path / _PROGRESS).read_text())
            if stored["description"] != self._description:
                raise ConfigError(
                    f"{self.path} has been begun with other settings, or of another checkpoint",
                    fix=f"repeat them, or remove {self.path}",
                )
            self.done = stored["done"]

    def begin(self) -> None:
        """Create the folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._write_progress()

    def write(
        self, number: int, entries: Iterable[tuple[str, Tensor]], data: Callable[[], Iterator[Tensor]]
    ) -> None:
        """Write the file of this number, from 0.

        Args:
            entries: names, and tensors of the shapes and dtypes, which may have no memory.
            data: yields the tensors, one after the other.
        """
        chunks = [
            ChunkEntry(name, _DTYPE_NAMES[one.dtype], tuple(one.shape), one.numel() * one.dtype.itemsize)
            for name, one in entries
        ]
        path = self.path / self._name(number)
        path.unlink(missing_ok=True)  # of a command that was stopped while it wrote this file
        bytes_ = (bytes_of(one.contiguous()) for one in data())
        write_shard_file(self._disk, path, chunks, bytes_, metadata={"format": "pt"})

    def finish_layer(self, done: int) -> None:
        """Record that the files of this many layers are complete."""
        self.done = done
        self._write_progress()

    def complete(self, others: Mapping[str, bytes]) -> int:
        """Write the index and other files, and give the folder its name. Returns the bytes of the tensors."""
        weight_map: dict[str, str] = {}
        total = 0
        for number in range(self._num_files):
            name = self._name(number)
            with (self.path / name).open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            header.pop("__metadata__")
            weight_map |= dict.fromkeys(header, name)
            total += sum(one["data_offsets"][1] - one["data_offsets"][0] for one in header.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        for name, content in {INDEX_NAME: json.dumps(index, indent=2).encode(), **others}.items():
            (self.path / name).unlink(missing_ok=True)
            write_file(self._disk, self.path / name, content)
        (self.path / _PROGRESS).unlink()
        self._disk.sync_folder(self.path)
        self._disk.rename(self.path, self.target)
        self._disk.sync_folder(self.target.parent)
        return total

    def _name(self, number: int) -> str:
        return f"model-{number + 1:05d}-of-{self._num_files:05d}.safetensors"

    def _write_progress(self) -> None:
        content = {"description": self._description, "done": self.done}
        replace_file(self.path / _PROGRESS, [json.dumps(content, indent=2).encode()])
