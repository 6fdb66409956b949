"""The rounding of one layer: scaled for AWQ where that is asked for, rounded tensor by tensor, and what the rest of the model sees of it.

ChangedTensors   a checkpoint some of whose tensors have changed: an export and the model of a calibration read it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from megatrain.checkpoint.manifest import DTYPES, Manifest, StoredKind
from megatrain.checkpoint.reader import TensorReader
from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.experts import ExpertsSpec
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.model_spec.part import Part
from megatrain.config.schema.quantization import SCALE_PREFIX, NumberFormat
from megatrain.interop.foreign_run import rows_to_copy
from megatrain.interop.hf.export import HfExport
from megatrain.interop.hf.tensors import TheirTensor
from megatrain.kernels.quantization.awq import channel_scales, clipped_scales
from megatrain.kernels.quantization.gptq import gptq
from megatrain.kernels.quantization.packing import pack
from megatrain.kernels.quantization.rounding import dequantize, quantize, scales_for, scales_of
from megatrain.parallel.layout import Box, whole_box
from megatrain.tools.quantization.calibration import InputStatistics, LayerStatistics
from megatrain.tools.quantization.plan import Options, TensorPlan

_CACHE: Final = NumberFormat("float", 8, "tensor")


class ChangedTensors(TensorReader):
    """A reader with some tensors changed."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader, self.path = reader, reader.path
        self.changed: dict[str, Tensor] = {}
        """Whole tensors on the CPU, by canonical name."""

    @property
    def manifest(self) -> Manifest:
        return self._reader.manifest

    def kind(self, name: str, shape: tuple[int, ...], kind: str) -> StoredKind:
        return self._reader.kind(name, shape, kind)

    def read_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:
        if name in self.changed:
            out.copy_(self.changed[name][tuple(slice(*edge) for edge in box)])
        else:
            self._reader.read_box(out, kind=kind, name=name, shape=shape, box=box)

    def whole(self, name: str) -> Tensor:
        """Return a tensor, fp32."""
        return self.values(name, self.manifest.tensors[name].shape)


@dataclass(frozen=True)
class LayerRounding:
    """Rounds layers of an export.

    Args:
        tensors: what the export reads; the rounded values of a layer become its tensors.
    """

    export: HfExport
    tensors: ChangedTensors
    plan: TensorPlan
    options: Options

    def files_tensors(self, layer: int, statistics: LayerStatistics | None) -> dict[str, Tensor]:
        """Return all tensors of a layer as its file has them."""
        if self.options.method == "awq":
            assert statistics is not None
            self._scale_channels(layer, statistics)
        found: dict[str, Tensor] = {}
        for name in self.plan.layers[layer]:
            ours = self.plan.linears.get(name)
            if ours is None:
                found[name] = self.plain(name)
                continue
            inputs = None if statistics is None else statistics.inputs[ours]
            found |= self._rounded(name, inputs)
        if self.plan.attentions:
            assert statistics is not None
            for kind, largest in (("k", statistics.largest_key), ("v", statistics.largest_value)):
                scale = scales_for(torch.tensor([largest]), _CACHE, torch.float32)
                found[f"{self.plan.attentions[layer]}.{kind}_scale"] = scale.to(self.options.dtype)
        return found

    def plain(self, name: str) -> Tensor:
        """Return a tensor that is not quantized."""
        wanted = next(key for key, dtype in DTYPES.items() if dtype == self.options.dtype)
        return self._read(name).to(DTYPES[self.export.dtype_of(name, wanted)])

    def _read(self, name: str) -> Tensor:
        return self.export.values(name, self.export.tensors[name].shape)

    def _rounded(self, name: str, inputs: InputStatistics | None) -> dict[str, Tensor]:
        """Return the tensors of a quantized weight; the weight that they stand for becomes the layer's."""
        numbers, dtype = self.options.format.weights, self.options.dtype
        # As the model computes with it: a scale of the weights before this rounding could differ.
        weight = self._read(name).to(dtype).float().to(self.options.device)
        if self.options.method == "awq":
            assert inputs is not None
            scales = clipped_scales(weight, inputs.hessian, numbers, dtype)
        else:
            scales = scales_of(weight, numbers, dtype)
            if self.options.keeps_scales:
                kept = self._kept_scales(self.export.tensors[name], scales.shape).to(scales)
                scales = torch.where(kept == 0, scales, kept)  # 0: there was no pass of training
        if self.options.method == "gptq":
            assert inputs is not None
            values = gptq(weight, inputs.hessian, scales, numbers)
        else:
            values = quantize(weight, scales, numbers)
        whole = dequantize(values, scales, numbers).cpu()
        self.tensors.changed |= dict(_pieces(self.export.tensors[name], whole))
        return self._stored(name, values.cpu(), scales.cpu())

    def _kept_scales(self, theirs: TheirTensor, shape: torch.Size) -> Tensor:
        """Return the scales that training with --qat has kept for a weight, fp32 in its rows."""
        found = torch.empty(shape)
        for part in theirs.parts:
            own_shape = (part.shape[0], shape[1])
            scales = self.tensors.whole(f"{SCALE_PREFIX}{part.name}")
            for own, rows in rows_to_copy(part.rows, whole_box(own_shape)):
                found[rows.start : rows.stop : rows.step] = scales[own]
        return found

    def _stored(self, name: str, values: Tensor, scales: Tensor) -> dict[str, Tensor]:
        layout, numbers = self.options.format.layout, self.options.format.weights
        scale = {f"{name}_scale": scales.to(self.options.dtype)}
        if layout == "pack-quantized":
            packed = pack(values, numbers.num_bits)
            return {f"{name}_packed": packed, **scale, f"{name}_shape": torch.tensor(values.shape)}
        return {name: values.to(torch.int8 if numbers.kind == "int" else torch.float8_e4m3fn), **scale}

    def _scale_channels(self, layer: int, statistics: LayerStatistics) -> None:
        """Scale the inputs of linear layers whose layer before can divide its outputs by the scales."""
        for readers, writers, offset in _foldable(self.plan.spec, layer, self.tensors):
            inputs, device = statistics.inputs[readers[0]], self.options.device
            weights = [self.tensors.whole(name).to(device) for name in readers]
            s = channel_scales(weights, inputs.hessian, inputs.mean_abs, self.options.format.weights)
            inputs.scale_channels(s)
            for name, weight in zip(readers, weights, strict=True):
                self.tensors.changed[name] = (weight * s).cpu()
            for name in writers:
                old = self.tensors.whole(name) + offset
                self.tensors.changed[name] = old / s.cpu().view(-1, *[1] * (old.dim() - 1)) - offset


def _foldable(
    spec: ModelSpec, layer: int, tensors: ChangedTensors
) -> Iterator[tuple[list[str], list[str], float]]:
    """Yield weights that have the same inputs, tensors of the layer before whose rows make these inputs, and what their values lack."""
    prefix, described = spec.layer_name(layer), spec.layers[layer]

    def existing(*names: str) -> list[str]:
        return [name for name in (f"{prefix}.{one}" for one in names) if name in tensors.manifest.tensors]

    offset = 1.0 if spec.norm.is_stored_minus_one else 0.0
    for part in described.parts:
        is_dense = isinstance(part, MlpSpec) or (isinstance(part, AttentionSpec) and part.latent is None)
        norm = existing(f"{part.name}.norm.weight", f"{part.name}.norm.bias")
        # A bias has no offset, so that a LayerNorm that is stored minus 1 is left as it is.
        if is_dense and described.norm_position == "pre" and norm and (len(norm) == 1 or not offset):
            first = next(iter(part.linears(spec.hidden_size)))
            yield existing(*(f"{part.name}.{piece.name}.weight" for piece in first.pieces)), norm, offset
        if isinstance(part, AttentionSpec) and is_dense and part.num_heads == part.num_query_groups:
            yield existing("attention.proj.weight"), existing("attention.v.weight", "attention.v.bias"), 0.0
        for name, mlp in _mlps(part):
            if mlp.is_gated and mlp.clamp is None and not mlp.offset:
                yield existing(f"{name}.down.weight"), existing(f"{name}.up.weight", f"{name}.up.bias"), 0.0


def _mlps(part: Part) -> Iterator[tuple[str, MlpSpec]]:
    """Yield the MLPs of a part with their names below the layer: one, or each expert's."""
    if isinstance(part, MlpSpec):
        yield "mlp", part
    if isinstance(part, ExpertsSpec):
        yield from ((f"mlp.experts.{number}", part.expert) for number in range(part.num_experts))
        if part.shared is not None:
            yield "mlp.shared", part.shared


def _pieces(theirs: TheirTensor, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield our tensors in one of theirs, whole."""
    for part in theirs.parts:
        out = torch.empty(part.shape)
        for own, found in rows_to_copy(part.rows, whole_box(part.shape)):
            out[own] = whole[found.start : found.stop : found.step]
        yield part.name, out
