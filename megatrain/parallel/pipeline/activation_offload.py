"""Copies the activations of segments to host memory after their forward pass, and back before their backward pass.

    compute          F0 | F1 | F2 | F3 ...   B3 | B2 | B1 | B0
    device to host        F0 | F1 | F2
    host to device                                B2 | B1 | B0       one pass ahead

Tensors that autograd saves are recorded by storage: views of one storage are copied once. A storage that something else
holds too, such as a weight or a RoPE table, stays on the device, where a copy would free nothing. The memory of a
segment is freed once the next offloaded segment has run, and only after its copy: the compute stream waits for it, so that
memory does not depend on how far the host is ahead. On a CPU the same steps run one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatrain.kernels.host_copy import HostBuffers
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.pipeline.actions import ActionKind
from megatrain.parallel.pipeline.segments import Segment, SegmentHooks, SegmentPass

_PASSES_AHEAD = 4
"""Passes before an offloaded backward pass at which its activations are copied back, at the earliest."""
_ALONE = 2
"""Uses of a storage that one tensor holds: the tensor, and the object that is asked."""


class ActivationOffload(SegmentHooks):
    """Hooks of an executor, which call others, and the segments whose activations are offloaded.

    Args:
        hooks: called first.
        min_numel: tensors with fewer elements stay on the device.
    """

    def __init__(self, hooks: SegmentHooks, device: torch.device, min_numel: int) -> None:
        super().__init__(hooks)
        self.buffers = HostBuffers(device)
        self._min_numel, self._device = max(min_numel, 1), device
        has_streams = device.type == "cuda"
        self._to_host = torch.cuda.Stream(device) if has_streams else None
        self._to_device = torch.cuda.Stream(device) if has_streams else None
        self._waiting: dict[int, deque[_Group]] = {}
        """By segment: the groups between forward and backward pass, in the order of the micro-batches."""
        self._passes: Sequence[SegmentPass] = ()
        self._num_begun = 0
        self._open: _Group | None = None
        self._newest: _Group | None = None
        """The group whose device memory is freed when another one is copied."""

    def segment(self, number: int, segment: Segment, *, is_whole: bool) -> Segment:
        """Return a segment that offloads its activations: all with `is_whole`, else those that are saved in `saving`."""
        self._waiting[number] = deque()

        def run(hidden: Tensor | None, batch: Batch, info: PassInfo) -> Tensor:
            if not info.is_training:
                return segment(hidden, batch, info)
            self._open = group = _Group()
            self._waiting[number].append(group)
            leaf, hidden = hidden, None if hidden is None else hidden.view_as(hidden)
            with self.saving() if is_whole else nullcontext():
                output = segment(hidden, batch, info)
            if leaf is not None:  # it only receives a gradient from now on, and holds no memory for it
                leaf.data = leaf.new_empty(()).expand(leaf.shape)
            return output

        return run

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors that autograd saves in a forward pass of training are offloaded."""
        group = self._open
        if group is None:
            return nullcontext()

        def pack(x: Tensor) -> Tensor | _View:
            if type(x) is not Tensor or x.numel() < self._min_numel:  # weights are no plain tensors
                return x
            key = x.untyped_storage().data_ptr()
            storage = group.storages[key] = group.storages.get(key) or _Storage(x, self.buffers)
            return _View(storage, x.dtype, x.shape, x.stride(), int(x.storage_offset()))

        return saved_tensors_hooks(pack, self._unpack)

    def on_schedule(self, passes: Sequence[SegmentPass]) -> None:
        super().on_schedule(passes)
        self._passes, self._num_begun = passes, 0
        self._open = self._newest = None
        for groups in self._waiting.values():
            groups.clear()

    def before(self, segment_pass: SegmentPass) -> None:
        super().before(segment_pass)
        self._num_begun += 1
        if segment_pass.kind is ActionKind.BACKWARD and segment_pass.segment in self._waiting:
            group = self._waiting[segment_pass.segment].popleft()
            self._load(group)
            group.storages = {}  # autograd's views hold them, and release them one by one
        ahead = self._passes[self._num_begun : self._num_begun + _PASSES_AHEAD]
        numbers = (one.segment for one in ahead if one.kind is ActionKind.BACKWARD)
        number = next((number for number in numbers if number in self._waiting), None)
        if number is not None and self._waiting[number]:
            self._load(self._waiting[number][0])

    def after(self, segment_pass: SegmentPass) -> None:
        super().after(segment_pass)
        group, self._open = self._open, None
        if segment_pass.kind is ActionKind.FORWARD and group is not None:
            self._copy_to_host(group)

    def _copy_to_host(self, group: _Group) -> None:
        """Begin to copy a group, and free the memory of the group before it."""
        alone = [one for one in group.storages.values() if one.is_alone()]
        if not alone:
            return
        if self._to_host is not None:
            self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._to_host):
            for storage in alone:
                assert storage.on_device is not None
                storage.on_host = self.buffers.take(storage.num_bytes, self._to_host)
                storage.on_host[: storage.num_bytes].copy_(storage.on_device, non_blocking=True)
        if self._to_host is not None:
            group.copied = self._to_host.record_event()
        previous, self._newest = self._newest, group
        if previous is not None:
            if previous.copied is not None:
                torch.cuda.current_stream(self._device).wait_event(previous.copied)
            for storage in previous.storages.values():
                if storage.on_host is not None and not storage.is_read:
                    storage.on_device = None

    def _load(self, group: _Group) -> None:
        """Begin to copy back what a group has in host memory alone."""
        missing = [one for one in group.storages.values() if one.on_device is None]
        if not missing:
            return
        if self._to_device is not None:
            self._to_device.wait_stream(torch.cuda.current_stream(self._device))
        for storage in missing:
            assert storage.on_host is not None
            storage.on_device = torch.empty(storage.num_bytes, dtype=torch.uint8, device=self._device)
            with torch.cuda.stream(self._to_device):
                storage.on_device.copy_(storage.on_host[: storage.num_bytes], non_blocking=True)
            if self._to_device is not None:
                storage.loaded = self._to_device.record_event()

    def _unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        storage = saved.storage
        self._load(_Group({0: storage}))  # if its pass is not the one that was expected
        storage.is_read = True
        assert storage.on_device is not None
        if storage.loaded is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(storage.loaded)
            storage.on_device.record_stream(stream)
        return storage.on_device.view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)


@dataclass(eq=False)
class _Group:
    """Storages that one forward pass of a segment saves."""

    storages: dict[int, _Storage] = field(default_factory=dict)
    """By address."""
    copied: torch.cuda.Event | None = None
    """Recorded after the copy to the host."""


class _Storage:
    """Memory of saved tensors: on the device, in host memory, or both."""

    def __init__(self, x: Tensor, buffers: HostBuffers) -> None:
        numel = x.untyped_storage().nbytes() // x.element_size()
        self.on_device: Tensor | None = x.detach().as_strided((numel,), (1,), 0).view(torch.uint8)
        self.num_bytes = self.on_device.numel()
        self.buffers = buffers
        self.on_host: Tensor | None = None
        self.loaded: torch.cuda.Event | None = None
        """Recorded after the copy back to the device."""
        self.is_read = False
        """A backward pass reads, and may overwrite, the memory on the device."""

    def is_alone(self) -> bool:
        """Return whether nothing else holds the memory on the device."""
        assert self.on_device is not None
        return torch._C._storage_Use_Count(self.on_device.untyped_storage()._cdata) == _ALONE  # noqa: SLF001 (no public access)

    def __del__(self) -> None:
        if self.on_host is not None:
            self.buffers.give_back(self.on_host, self.loaded)


class _View(NamedTuple):
    """A saved tensor: its place in a storage."""

    storage: _Storage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
