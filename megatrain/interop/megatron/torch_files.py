"""The tensors and objects of a checkpoint in the format `torch`, by the names that `torch_dist` would give them.

    mp_rank_01_000/model_optim_rng.pt       tensor rank 1, stage 0: the tensors of that rank; layers count from 0 on each stage
    mp_rank_01_000_002/model_optim_rng.pt   expert rank 2 too

    files of all ranks ─> local tensors ─> boxes of whole tensors ─> the same reader as for `torch_dist`

Proven with files that were cut from recorded `torch_dist` checkpoints, and with a recorded one of a vision-language model. Nothing
is built or run: see `inert_pickle`.
"""

from __future__ import annotations

import io
import itertools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from megatrain.checkpoint.checked_files import open_regular_file
from megatrain.checkpoint.errors import DamagedError, DamagedImportError, MismatchError
from megatrain.checkpoint.manifest import tiling_problem
from megatrain.interop.megatron.archive import (
    NOT_AS_EXPECTED,
    Archive,
    Place,
    dtype_of,
    size_of,
    tensor_record,
)
from megatrain.interop.megatron.inert_pickle import Record, fields_of
from megatrain.interop.megatron.names import GATED, LANGUAGE, STORED_TWICE
from megatrain.parallel.layout import Box, box_shape, intersect, slices_within

FILE_NAME: Final = "model_optim_rng.pt"
_FOLDER: Final = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?")
_MAX_FILE_BYTES: Final = 1 << 42
_MAX_RANKS: Final = 1 << 14
_BY_ROWS: Final = re.compile(
    r"(word_embeddings|output_layer|linear_qkv|linear_q|linear_kv|linear_fc1|linear_q_proj|linear_q_up_proj|linear_kv_up_proj"
    r"|eh_proj)\.(weight|bias)\d*"
)
"""Column-parallel layers and vocabularies: tensor ranks hold rows."""
_BY_COLUMNS: Final = re.compile(r"(linear_proj|linear_fc2)\.weight\d*")
_EXPERT: Final = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc[12]\.(?:weight|bias))(\d*)")
_MODEL: Final = re.compile(r"model\d*")
_LAYER: Final = re.compile(r"((?:en|de)coder\.layers)\.(\d+)\.")
_BUFFERS: Final = (".expert_bias", ".qb_beta", ".local_tokens_per_expert")
"""Tensors of the model that the optimizer does not have."""
_UNEVEN: Final = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Arguments that divide layers unevenly over stages."""
_WITH_OTHER_ROWS: Final = (
    "multi_latent_attention",
    "experimental_attention_variant",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
)
"""Arguments of models whose parameters tensor ranks hold in pieces that are not joined here."""
_FROZEN: Final = {"freeze_LM": LANGUAGE, "freeze_ViT": "vision_model."}
"""Arguments by which the optimizer has no parameters of a part, and the beginning of their names."""


@dataclass(frozen=True)
class _Source:
    """Rows of a tensor in the file of a rank: the values of a box."""

    place: Place
    record: Record
    rows: slice
    num_stacked: int


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Mapping[Box, _Source]


@dataclass(frozen=True)
class _Local:
    """A tensor of one rank, by its whole name."""

    name: str
    record: Record
    size: tuple[int, ...]
    expert: int | None
    place: Place
    tp_rank: int


@dataclass(frozen=True)
class _Sizes:
    tp: int
    pp: int
    ep: int
    num_layers: int
    num_experts: int
    is_gated: bool
    is_tied: bool
    frozen: tuple[str, ...]
    """Beginnings of the names of parameters that the optimizer does not have."""


class TorchFiles:
    """As `TorchDistFolder`, for the files of all ranks.

    Raises:
        DamagedImportError: a file is missing or does not hold what it should.
        MismatchError: the layout is one that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.checksum = path, 0
        self._states: dict[tuple[int, int, int], tuple[Place, dict[str, Any]]] = {}
        self._cached: tuple[Any, Tensor] | None = None
        try:
            found = sorted(self._files())
            first = self._state(found[0][1])
            self._common = {name: first[name] for name in first if not _MODEL.fullmatch(name)}
            self._sizes = _sizes_of(path, fields_of(first.get("args")))
            self._open_all(found)
            self.tensors: dict[str, _Tensor] = dict(self._whole_tensors())
        except NOT_AS_EXPECTED as error:
            raise DamagedImportError(f"{path}: {type(error).__name__}: {str(error)[:300]}") from error

    def object(self, name: str) -> Any:
        """Return the state that is not tensors of the model."""
        assert name == "common_state"
        return self._common

    def close(self) -> None:
        """Free the tensor in memory."""
        self._cached = None

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor."""
        tensor = self.tensors[name]
        out = torch.empty(box_shape(box), dtype=tensor.dtype)
        for chunk, source in tensor.chunks.items():
            common = intersect(chunk, box)
            if common is not None:
                values = self._values(source)[source.rows]
                values = values.view(*[1] * source.num_stacked, *values.shape)
                out[slices_within(common, box)] = values[slices_within(common, chunk)]
        return out

    def _values(self, source: _Source) -> Tensor:
        key = (source.place.file, id(source.record))
        if self._cached is None or self._cached[0] != key:
            self._cached = None
            with Archive(self.path / source.place.file, source.place, max_bytes=_MAX_FILE_BYTES) as archive:
                try:
                    self._cached = (key, archive.rebuilt(source.record))
                except NOT_AS_EXPECTED as error:
                    raise DamagedImportError(f"{archive.where}: {str(error)[:300]}") from error
        return self._cached[1]

    def _files(self) -> Iterator[tuple[tuple[int, ...], Place]]:
        for folder in self.path.iterdir():
            match = _FOLDER.fullmatch(folder.name)
            if match is None:
                continue
            name = f"{folder.name}/{FILE_NAME}"
            try:
                with open_regular_file(self.path / name) as file:
                    size = file.seek(0, io.SEEK_END)
            except DamagedError as error:
                raise DamagedImportError(error.problems[0].text) from error
            yield tuple(int(number) for number in match.groups() if number), Place(name, 0, size)

    def _state(self, place: Place) -> dict[str, Any]:
        with Archive(self.path / place.file, place, max_bytes=_MAX_FILE_BYTES) as archive:
            self.checksum = zlib.crc32(archive.member("data.pkl"), self.checksum)
            state = archive.load()
        if not isinstance(state, dict):
            raise DamagedImportError(f"{self.path / place.file}: has no state of a model")
        return state

    def _open_all(self, found: Sequence[tuple[tuple[int, ...], Place]]) -> None:
        """Read the structure of all files; each rank must be there once."""
        sizes = self._sizes
        for numbers, place in found:
            tp, *others = numbers
            pp = others.pop(0) if sizes.pp > 1 else 0
            ep = others.pop(0) if sizes.ep > 1 else 0
            if others or (tp, pp, ep) in self._states:
                raise DamagedImportError(f"{self.path / place.file}: not a rank of the run")
            self._states[tp, pp, ep] = (place, self._state(place))
        wanted = itertools.product(range(sizes.tp), range(sizes.pp), range(sizes.ep))
        missing = next((rank for rank in wanted if rank not in self._states), None)
        if missing or len(self._states) > sizes.tp * sizes.pp * sizes.ep:
            tp, pp, ep = missing or max(self._states)
            raise DamagedImportError(
                f"{self.path}: {'has no' if missing else 'has a superfluous'} file of tensor rank {tp}, stage {pp}, expert rank {ep}"
            )

    def _whole_tensors(self) -> Iterator[tuple[str, _Tensor]]:
        of_name: dict[str, list[_Local]] = {}
        for (tp, pp, ep), (place, state) in sorted(self._states.items()):
            for local in self._local_tensors(state, place, tp, pp, ep):
                of_name.setdefault(local.name, []).append(local)
        for name, found in of_name.items():
            yield name, self._joined(name, found)

    def _local_tensors(
        self, state: Mapping[str, Any], place: Place, tp: int, pp: int, ep: int
    ) -> Iterator[_Local]:
        """Yield the tensors of a rank, under their whole names; those that all expert ranks hold only for the first of them."""
        sizes = self._sizes
        keys = sorted((key for key in state if _MODEL.fullmatch(key)), key=lambda key: (len(key), key))
        per_chunk = sizes.num_layers // (sizes.pp * len(keys))
        found: list[_Local] = []
        for number, key in enumerate(keys):
            first = (number * sizes.pp + pp) * per_chunk
            for name, value in fields_of(state[key]).items():
                record = tensor_record(value)
                if record is None:
                    continue
                match = _LAYER.match(name)
                whole = f"{match[1]}.{int(match[2]) + first}.{name[match.end() :]}" if match else name
                expert, index = _EXPERT.search(whole), None
                if expert:
                    index = int(expert[1] or expert[3]) + ep * (sizes.num_experts // sizes.ep)
                    whole = f"{whole[: expert.start()]}mlp.experts.experts.{expert[2]}"
                found.append(_Local(whole, record, size_of(record), index, place, tp))
        trained = _trained(found, sizes.frozen)
        moments = _states_of(state.get("optimizer"), trained) if len(keys) == 1 else ()
        for local in (*found, *moments):
            is_copy = local.name.endswith("output_layer.weight") and sizes.is_tied
            is_copy &= LANGUAGE not in local.name  # its head is never tied
            if not (is_copy or (ep and local.expert is None)):
                yield local

    def _joined(self, name: str, found: Sequence[_Local]) -> _Tensor:
        """Return the whole tensor of the parts that the ranks hold."""
        size, tp = found[0].size, self._sizes.tp
        dim = 0 if _BY_ROWS.search(name) else 1 if _BY_COLUMNS.search(name) else None
        shape = tuple(n * tp if number == dim else n for number, n in enumerate(size))
        num_pieces = 2 if dim == 0 and self._sizes.is_gated and "linear_fc1" in name else 1  # gate and up
        chunks: dict[Box, _Source] = {}
        for local in found:
            if local.size != size:
                raise ValueError(f"{name} has sizes {list(size)} and {list(local.size)}")
            if dim is not None or local.tp_rank == 0:
                chunks |= _chunks_of(local, shape, dim, num_pieces)
        whole = shape if found[0].expert is None else (self._sizes.num_experts, *shape)
        if problem := tiling_problem(whole, list(chunks)):
            raise ValueError(f"{name}: {problem}")
        return _Tensor(whole, dtype_of(found[0].record), chunks)


def _chunks_of(
    local: _Local, shape: tuple[int, ...], dim: int | None, num_pieces: int
) -> Iterator[tuple[Box, _Source]]:
    """Yield the boxes of a whole tensor that a rank holds.

    Args:
        shape: of the whole tensor, or of one expert's.
        dim: dimension that is split over tensor ranks; None: all hold the same.
        num_pieces: equal ranges of rows that are split one by one.
    """
    stacked: Box = () if local.expert is None else ((local.expert, local.expert + 1),)
    length = local.size[0] // num_pieces
    for piece in range(num_pieces):
        box = [(0, size) for size in local.size]
        start = piece * shape[0] // num_pieces + (local.tp_rank * length if dim == 0 else 0)
        box[0] = (start, start + length)
        if dim == 1:
            box[1] = (local.tp_rank * local.size[1], (local.tp_rank + 1) * local.size[1])
        rows = slice(piece * length, (piece + 1) * length)
        yield (*stacked, *box), _Source(local.place, local.record, rows, len(stacked))


def _sizes_of(path: Path, arguments: Mapping[str, Any]) -> _Sizes:
    """Return the layout of the run.

    Raises:
        MismatchError: layers are not divided evenly over the stages, or ranks hold parts that are not known.
    """
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    tp, pp, ep = (arguments.get(name) or 1 for name in names)
    num_layers, chunks = arguments["num_layers"], arguments.get("virtual_pipeline_model_parallel_size") or 1
    if not all(isinstance(n, int) and 1 <= n <= _MAX_RANKS for n in (tp, pp, ep, num_layers, chunks)):
        raise ValueError(f"{tp}, {pp}, {ep} are not sizes of a layout")
    uneven = list(_not_read(arguments, tp, pp * chunks))
    if uneven:
        raise MismatchError(
            f"{path}: the format torch is not read with {', '.join(uneven)} in this layout",
            fix="save it in Megatron-LM once more with --ckpt-format torch_dist",
        )
    return _Sizes(
        tp,
        pp,
        ep,
        num_layers,
        arguments.get("num_experts") or 0,
        any(arguments.get(name) for name in GATED),
        not arguments.get("untie_embeddings_and_output_weights"),
        tuple(prefix for name, prefix in _FROZEN.items() if arguments.get(name)),
    )


def _not_read(arguments: Mapping[str, Any], tp: int, num_stages: int) -> Iterator[str]:
    """Yield what makes the parts that ranks hold others than those that are known."""
    yield from (name for name in _UNEVEN if arguments.get(name))
    if arguments["num_layers"] % num_stages:
        yield f"num_layers {arguments['num_layers']}"
    if (arguments.get("expert_tensor_parallel_size") or tp) != tp:
        yield "expert_tensor_parallel_size"
    if tp > 1:
        yield from (name for name in _WITH_OTHER_ROWS if arguments.get(name))
    groups = arguments.get("num_query_groups") or arguments.get("num_attention_heads") or tp
    if groups % tp:
        yield f"num_query_groups {groups}"


def _states_of(optimizer: Any, trained: Sequence[_Local]) -> Iterator[_Local]:
    """Yield the optimizer's state of each trained parameter of a rank, and its master weight if there is one.

    torch numbers parameters by groups: in a group in the order of the model, matrices apart from biases and norms. Nothing is
    yielded if the numbers of parameters do not fit, as for optimizers of several parts: the checkpoint then has weights alone.
    """
    if not isinstance(optimizer, dict):
        return
    masters = optimizer.get("fp32_from_fp16_params")
    inner = optimizer.get("optimizer", optimizer)
    groups, states = inner.get("param_groups"), inner.get("state")
    if not isinstance(groups, list) or not isinstance(states, dict):
        return
    of_groups = [_members(group, groups, trained) for group in groups]
    if [len(group["params"]) for group in groups] != list(map(len, of_groups)):
        return
    for number, (group, members) in enumerate(zip(groups, of_groups, strict=True)):
        for place, (key, parameter) in enumerate(zip(group["params"], members, strict=True)):
            kinds = dict(states[key])
            if masters is not None:
                kinds["fp32_param"] = masters[number][place]
            for kind, value in kinds.items():
                record = tensor_record(value)
                if record is None or kind == "step":
                    continue
                if size_of(record) != parameter.size:
                    raise ValueError(f"{kind} of {parameter.name} has size {list(size_of(record))}")
                yield replace(parameter, name=f"optimizer.state.{kind}.{parameter.name}", record=record)


def _trained(parameters: Sequence[_Local], frozen: tuple[str, ...]) -> list[_Local]:
    """Return the parameters that the optimizer has; of one with two names in the model the first."""
    found = {one.name for one in parameters}
    twice = {
        name.replace(first, second)
        for first, second in STORED_TWICE.items()
        for name in found
        if name.startswith(first)
    }
    return [
        one
        for one in parameters
        if not one.name.endswith(_BUFFERS) and not one.name.startswith(frozen) and one.name not in twice
    ]


def _members(
    group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], trained: Sequence[_Local]
) -> list[_Local]:
    """Return the parameters of a group: with or without weight decay, and of experts or not if groups differ in that."""
    is_split = any(one.get("is_expert_parallel") for one in groups)
    of_experts = bool(group.get("is_expert_parallel"))
    return [
        one
        for one in trained
        if (len(one.size) == 1 or one.name.endswith(".bias")) == (group["wd_mult"] == 0)
        and (not is_split or (one.expert is not None) == of_experts)
    ]
