"""A checkpoint of ours in Megatron-LM's format `torch_dist`, one chunk in memory at a time.

canonical tensors ─> their_tensors ─> chunks ─> torch's own writer of distributed checkpoints ─> .metadata, __0_0.distcp
manifest          ─> common_state: iteration, arguments, parameter groups, schedule
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatrain.checkpoint.errors import MismatchError
from megatrain.checkpoint.manifest import DTYPES, Manifest
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.checkpoint.stored_values import stored_section
from megatrain.config.derive.hybrid_pattern import SIDE_BY_SIDE
from megatrain.config.derive.lr_schedule import ScheduleValues
from megatrain.config.schema.data import MASKED_FAMILIES
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.model import NOT_IN_MEGATRON, ModelConfig
from megatrain.interop.megatron.arguments import arguments_of
from megatrain.interop.megatron.names import BIASES, STACKS, STORED_TWICE, FusedRows, Part
from megatrain.interop.megatron.their_tensors import TheirTensor, their_tensors
from megatrain.optim.lr_schedule import LrSchedule
from megatrain.optim.sharded import WEIGHT
from megatrain.parallel.layout import Box, box_shape, whole_box

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_NORMS: Final = ("layernorm", "final_norm", "enorm", "hnorm")
"""Ends of Transformer Engine's norms."""
_SHARDED_BACKEND: Final = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A chunk of one of their tensors, and how its values are read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    read: Callable[[], Tensor]


def _lacking(model: ModelConfig, experts: ExpertsConfig) -> Iterator[str]:
    """Yield the properties of a model that Megatron-LM lacks."""
    if model.spec:
        yield "custom layers (--spec)"
    if SIDE_BY_SIDE in (model.hybrid_layer_pattern or ""):
        yield "layers with Mamba-2 and attention side by side (P)"
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        if field.name in NOT_IN_MEGATRON and value != field.default:
            yield f"{field.name} {value}"
    best, score = experts.moe_router_group_topk, experts.moe_router_group_score_topk
    if best and score not in (None, experts.moe_router_topk // best):
        yield f"scores of expert groups by {score} experts"
    if model.model_family == "vlm":
        yield "a vision tower"
    if model.model_family in MASKED_FAMILIES and experts.num_experts:
        yield f"a {model.model_family} with experts (--num-experts {experts.num_experts}), whose layers are dense there,"


class MegatronExport:
    """Their tensors and objects, read from a checkpoint of ours.

    Raises:
        MismatchError: Megatron-LM has no such model or optimizer, or the exporter does not know its names.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader, self._manifest = reader, reader.manifest
        model: ModelConfig = stored_section(reader.path, self._manifest.config, "model", ModelConfig)
        self._experts: ExpertsConfig = stored_section(
            reader.path, self._manifest.config, "experts", ExpertsConfig
        )
        for words in _lacking(model, self._experts):
            raise _unknown(reader.path, words)
        self._family = model.model_family
        self._is_fused = model.experimental_attention_variant is not None or self._family == "hybrid"
        """Its modules there are Transformer Engine's."""
        self._is_stacked = self._experts.moe_layer_freq == "1" and not self._is_fused
        self._params_dtype = _dtype(self._manifest.config["precision"])
        shapes = {name: tensor.shape for name, tensor in self._manifest.model_tensors.items()}
        vocab_size = shapes["embedding.word_embeddings.weight"][0]
        self.padded_vocab_size = max(model.padded_vocab_size or 0, vocab_size)
        try:
            self.tensors = their_tensors(
                shapes,
                FusedRows.of(model),
                is_latent=model.multi_latent_attention,
                is_hybrid=self._family == "hybrid",
                is_uniform=self._is_stacked,
                padded_vocab_size=self.padded_vocab_size,
            )
        except KeyError as error:
            raise _unknown(reader.path, f"the tensors of {error}") from error
        self._chunks = [chunk for chunks in (self._of_parameters(), self._of_biases()) for chunk in chunks]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors."""
        return sum(math.prod(box_shape(chunk.box)) * chunk.dtype.itemsize for chunk in self._chunks)

    def write(self, path: Path, progress: Callable[[int], None] = lambda _: None) -> None:
        """Write the files of the checkpoint into the folder `path`; `progress` gets the bytes of each chunk."""
        objects = {"common_state/shard_0_1": self.common_state(), **self._extra_states()}
        planner = _Planner(objects, self._chunks, progress)
        writer = FileSystemWriter(path, sync_files=True)
        writer.set_up_storage_writer(is_coordinator=True)
        plans, metadata = create_default_global_save_plan(
            [SavePlan(planner.items())], rewrite_index_hints=False
        )
        (plan,) = writer.prepare_global_plan(plans)
        written = writer.write_data(plan, planner)
        written.wait()
        writer.finish(metadata, [written.value()])
        (path / "metadata.json").write_text(json.dumps(_SHARDED_BACKEND))

    def common_state(self) -> dict[str, Any]:
        """Return the state that is not sharded: iteration, arguments, parameter groups, schedule."""
        manifest = self._manifest
        state: dict[str, Any] = {
            "args": Namespace(**arguments_of(manifest, self.padded_vocab_size)),
            "checkpoint_version": 3.0,
            "iteration": manifest.iteration,
        }
        if manifest.state["has_optimizer"]:
            schedule = ScheduleValues(**manifest.state["schedule"])
            if schedule.function is not None:
                raise _unknown(self._reader.path, f"its schedule {schedule.lr_decay_style}")
            state["optimizer"] = {"param_groups": _param_groups(manifest, schedule)}
            state["opt_param_scheduler"] = _scheduler(manifest, schedule)
        state["content_metadata"] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        return state

    def _of_parameters(self) -> Iterator[_Chunk]:
        for tensor in self.tensors:
            first = self._manifest.tensors[tensor.parts[0].name]
            names = self._names(tensor.name)
            for kind, stored in first.kinds.items():
                if kind == WEIGHT:
                    for name in names:
                        yield from self._of_tensor(tensor, name, kind, self._params_dtype)
                elif kind not in _MOMENTS:
                    raise _unknown(self._reader.path, f"the optimizer's {kind}")
                if kind != WEIGHT or (len(first.kinds) > 1 and DTYPES[stored.dtype] != self._params_dtype):
                    theirs = "fp32_param" if kind == WEIGHT else kind
                    name = f"optimizer.state.{theirs}.{names[-1]}"
                    yield from self._of_tensor(tensor, name, kind, DTYPES[stored.dtype])

    def _names(self, name: str) -> tuple[str, ...]:
        """Return the names under which a weight is stored; the last one also has the optimizer's state."""
        for first, second in STORED_TWICE.items() if self._family == "t5" else ():
            if name.startswith((first, second)):
                kind = name.rpartition(".")[2]
                return f"{first}{kind}", f"{second}{kind}"
        return (name,)

    def _of_tensor(self, tensor: TheirTensor, name: str, kind: str, dtype: torch.dtype) -> Iterator[_Chunk]:
        for box, parts in tensor.chunks():

            def read(box: Box = box, parts: tuple[Part, ...] = parts) -> Tensor:
                return self._read(box, parts, tensor.num_stacked, kind, dtype)

            yield _Chunk(name, tensor.shape, dtype, box, read)

    def _read(
        self, box: Box, parts: tuple[Part, ...], num_stacked: int, kind: str, dtype: torch.dtype
    ) -> Tensor:
        """Return the values of a chunk; rows of padding are zero."""
        out = torch.zeros(box_shape(box), dtype=dtype)
        first, last = box[num_stacked]
        rows = out.view(last - first, *self._manifest.tensors[parts[0].name].shape[1:])
        for part in parts:
            shape = self._manifest.tensors[part.name].shape
            is_whole = len(parts) == 1 and shape == rows.shape
            values = rows if is_whole else torch.empty(shape, dtype=dtype)
            self._reader.read_box(values, kind=kind, name=part.name, shape=shape, box=whole_box(shape))
            start = 0
            for piece in () if is_whole else part.rows:
                given = values[start : start + piece.stop - piece.start]
                rows[piece.start - first : piece.start - first + len(given)] = given
                start += len(given)
        return out

    def _of_biases(self) -> Iterator[_Chunk]:
        """Yield the biases of experts, which are state of the run here and tensors there."""
        is_stacked = self._is_stacked
        biases: dict[str, list[list[float]]] = {}
        for name, values in self._manifest.state["expert_biases"].items():
            ours = next(one for one in BIASES.values() if name.endswith(one[0]))
            theirs = next(one for one, found in BIASES.items() if found == ours)
            layer = name.removesuffix(ours[0])
            if layer.startswith("mtp."):
                depth, inner, rest = layer.partition(".layers.")[2].partition(".")
                of_hybrid = f"mtp.layers.{depth}.mtp_model_layer.{rest}"
                layer = of_hybrid if inner else f"{layer}.transformer_layer"
            elif is_stacked:
                layer = layer.rpartition(".")[0]
            biases.setdefault(layer + theirs, []).append([ours[1] * value for value in values])
        for name, rows in biases.items():
            stacked = is_stacked and name.startswith("decoder.")
            for layer, row in enumerate(rows):
                values = torch.tensor([row] if stacked else row)
                box: Box = ((layer, layer + 1), (0, len(row))) if stacked else ((0, len(row)),)
                shape = (len(rows), len(row)) if stacked else (len(row),)
                yield _Chunk(name, shape, torch.float32, box, lambda values=values: values)  # type: ignore[misc]

    def _extra_states(self) -> dict[str, Any]:
        """Return the empty extra states of modules, which Megatron-LM expects."""
        found: dict[str, Any] = {key: None for tensor in self.tensors for key in tensor.extra_states()}
        modules = {name.rpartition(".")[0] for tensor in self.tensors for name in self._names(tensor.name)}
        for module in modules:
            key, (stack, _, last) = f"{module}._extra_state/shard_0_1", module.rpartition(".")
            if self._is_fused and last.endswith(_NORMS):
                found[key] = None
            elif last == "final_layernorm" and stack in STACKS and self._experts.num_experts is None:
                found[key] = torch.empty(0, dtype=torch.uint8)
            elif last == "output_layer" and self._family != "gpt":
                found[key] = None
        return found


class _Planner(DefaultSavePlanner):
    """Resolves data when the writer asks for it."""

    def __init__(
        self, objects: dict[str, Any], chunks: list[_Chunk], progress: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._objects, self._progress = objects, progress
        self._chunks = {
            MetadataIndex(chunk.name, torch.Size(start for start, _ in chunk.box)): chunk for chunk in chunks
        }

    def items(self) -> list[WriteItem]:
        """Return what is to be written."""
        items = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._objects]
        for index, chunk in self._chunks.items():
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(
                    torch.Size(start for start, _ in chunk.box), torch.Size(box_shape(chunk.box))
                ),
                properties=TensorProperties(dtype=chunk.dtype),
                size=torch.Size(chunk.shape),
            )
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the values of a chunk, or an archive of an object."""
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save([self._objects[write_item.index.fqn]], data)
            return data
        values = self._chunks[write_item.index].read()
        self._progress(values.nbytes)
        return values


def _param_groups(manifest: Manifest, schedule: ScheduleValues) -> list[dict[str, Any]]:
    """Return the groups of parameters with and without weight decay."""
    optimizer = manifest.config["optimizer"]
    common = {
        "is_expert_parallel": False,
        "default_config": True,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": schedule.lr,
        "min_lr": schedule.min_lr,
        "lr": LrSchedule.of(schedule).at(manifest.state["scheduled_samples"]),
        "bias_correction": True,
        "betas": (optimizer["adam_beta1"], optimizer["adam_beta2"]),
        "eps": optimizer["adam_eps"],
        "step": manifest.optimizer_step_count,
    }
    decay = schedule.start_weight_decay
    return [{**common, "wd_mult": factor, "weight_decay": factor * decay} for factor in (1.0, 0.0)]


def _scheduler(manifest: Manifest, schedule: ScheduleValues) -> dict[str, Any]:
    return {
        "max_lr": schedule.lr,
        "min_lr": schedule.min_lr,
        "lr_warmup_steps": schedule.lr_warmup_samples,
        "num_steps": manifest.state["scheduled_samples"],
        "lr_decay_style": schedule.lr_decay_style,
        "lr_decay_steps": schedule.lr_decay_samples,
        "start_wd": schedule.start_weight_decay,
        "end_wd": schedule.end_weight_decay,
        "wd_incr_style": schedule.weight_decay_incr_style,
        "wd_incr_steps": schedule.weight_decay_incr_samples,
    }


def _dtype(precision: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if precision["bf16"] else torch.float16 if precision["fp16"] else torch.float32


def _unknown(path: Path, what: str) -> MismatchError:
    return MismatchError(
        f"{path}: {what} cannot be written for Megatron-LM",
        fix=f"export the weights alone: megatrain checkpoint export-weights {path} TARGET",
    )
