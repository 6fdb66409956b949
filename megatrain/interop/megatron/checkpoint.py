"""A checkpoint of Megatron-LM as a reader of canonical tensors: what the rest of the program reads of one of ours.

weight       optimizer.state.fp32_param.NAME, or NAME where the model itself has the precision of the optimizer
exp_avg ..   optimizer.state.exp_avg.NAME
state        counters, schedule and expert biases, from common_state and the arguments in it
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from megatrain.checkpoint.errors import DamagedImportError, MismatchError
from megatrain.checkpoint.manifest import Manifest, StoredKind, StoredTensor
from megatrain.checkpoint.reader import TensorReader
from megatrain.checkpoint.stored_values import check_stored_values
from megatrain.checkpoint.tensor_file import dtype_name
from megatrain.config.derive.vision import is_frozen
from megatrain.interop.foreign_run import rows_to_copy, stored_state
from megatrain.interop.megatron.arguments import layout_of, plan_of, tokenizer_settings
from megatrain.interop.megatron.dcp_folder import DcpFolder
from megatrain.interop.megatron.inert_pickle import fields_of
from megatrain.interop.megatron.names import BIASES, VOCABULARY, FusedRows, Part, family_of, parts_of
from megatrain.interop.megatron.torch_dist import METADATA_NAME, TorchDistFolder
from megatrain.interop.megatron.torch_files import FILE_NAME, TorchFiles
from megatrain.optim.sharded import WEIGHT
from megatrain.parallel.layout import Box, box_shape, whole_box

_STATE: Final = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_BUCKETS: Final = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_MASTER: Final = ("fp32_param", "param")


@dataclass(frozen=True)
class _Source:
    """A canonical tensor in the parameters of Megatron-LM, by kind of state."""

    part: Part
    tensors: Mapping[str, str]


def padding_notes(padded_vocab_size: int, vocab_size: int) -> Iterator[str]:
    """Yield a sentence if rows of padding of the vocabulary's tensors are left out."""
    if padded_vocab_size > vocab_size:
        yield (
            f"{padded_vocab_size - vocab_size} rows of padding are left out of the vocabulary's tensors: Megatron-LM counts them in"
            " the softmax, megatrain does not"
        )


class MegatronCheckpoint(TensorReader):
    """Reads boxes of canonical tensors; has the manifest that a checkpoint of ours would have.

    Args:
        path: a folder iter_0000100 with .metadata.
        allows_format_torch: also read pickled files of the format torch, as --allow-pickle asks for.
        vocab_size: rows of the vocabulary's tensors; None: the number of tokens, or all rows if Megatron-LM did not store it.

    Raises:
        DamagedImportError: a file does not hold what it should.
        MismatchError: the checkpoint is of a model, or in a form, that is not read.
    """

    def __init__(
        self, path: Path, vocab_size: int | None = None, *, allows_format_torch: bool = False
    ) -> None:
        self.path = path
        self._folder = _opened(path, allows_format_torch=allows_format_torch)
        try:
            self._common = _mapping(self._folder.object("common_state"))
            self._arguments = _mapping(self._common.get("args"))
        except (AttributeError, TypeError, ValueError) as error:
            raise DamagedImportError(f"{path}: common_state: {str(error)[:300]}") from error
        self.plan = plan_of(self._arguments, family_of(self._folder.tensors), path)
        self.padded_vocab_size: int = self._arguments["padded_vocab_size"]
        stored = self._arguments.get("vocab_size")
        self.vocab_size: int = vocab_size or (stored if isinstance(stored, int) else self.padded_vocab_size)
        self.run_vocab_size = vocab_size
        """--vocab-size of the run that continues; None: the size of its tokenizer."""
        if not 1 <= self.vocab_size <= self.padded_vocab_size:
            raise MismatchError(
                f"{path}: --vocab-size {self.vocab_size}, and its vocabulary has {self.padded_vocab_size} rows",
                fix=f"use --vocab-size {self.padded_vocab_size} or less",
            )
        self.has_buckets = any(map(_BUCKETS.match, self._folder.tensors)) or any(
            path.rglob("distrib_optim.pt")
        )
        """The optimizer's state is stored by buckets, whose order only a model in the same layout knows: it is not read."""
        self._sources: dict[str, _Source] = {}
        for name, source in self._canonical():
            twice = self._sources.get(name)
            tensors = {**twice.tensors, **source.tensors} if twice else source.tensors
            self._sources[name] = _Source(source.part, tensors)
        self._check_kinds()

    @functools.cached_property
    def manifest(self) -> Manifest:
        """Counters, state, configuration and tensors, without files."""
        try:
            manifest = self._manifest()
            values = json.loads(json.dumps({"state": manifest.state, "config": manifest.config}))
            tensors = {name: {"kinds": tensor.kinds} for name, tensor in manifest.tensors.items()}
            check_stored_values({**vars(manifest), **values, "tensors": tensors})
            return dataclasses.replace(manifest, **values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedImportError(
                f"{self.path}: common_state: {type(error).__name__} {str(error)[:300]}"
            ) from error

    def close(self) -> None:
        """Free the chunks in memory; files are open only while they are read."""
        self._folder.close()

    def read_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:  # noqa: ARG002 (as CheckpointReader)
        """Copy a box into `out`, which has the shape of the box and any float dtype."""
        source = self._sources[name]
        stacked = tuple((index, index + 1) for index in source.part.place)
        for own, found in rows_to_copy(source.part.rows, box):
            tensor = source.tensors[kind]
            place = (*stacked, (found.start, found.stop))
            ones = ((0, 1),) * (len(self._folder.tensors[tensor].shape) - len(place) - len(box) + 1)
            values = self._folder.read(tensor, (*place, *ones, *box[1:]))
            out[own].copy_(values.view(-1, *box_shape(box[1:])))

    def _canonical(self) -> Iterator[tuple[str, _Source]]:
        """Yield the source of each canonical tensor.

        Raises:
            MismatchError: a tensor has no counterpart.
        """
        names = sorted(name for name in self._folder.tensors if not _BUCKETS.match(name))
        states: dict[str, dict[str, str]] = {}
        for name in names:
            if match := _STATE.fullmatch(name):
                kind = WEIGHT if match[1] in _MASTER else match[1]
                states.setdefault(match[2], {})[kind] = name
        fused = FusedRows.of(self.plan.config.model)
        for name in names:
            if _STATE.fullmatch(name) or name.endswith(tuple(BIASES)):
                continue
            try:
                parts = list(parts_of(name, self._folder.tensors[name].shape, fused))
            except (KeyError, IndexError, ValueError) as error:
                raise MismatchError(
                    f"{self.path}: the tensor {name} has no counterpart in megatrain",
                    fix="models of this kind are not converted; see docs/models.md",
                ) from error
            for part in parts:
                yield part.name, _Source(part, {WEIGHT: name, **states.get(name, {})})

    def _check_kinds(self) -> None:
        """Check that all tensors have the same kinds of state: else a part of the optimizer's state is lost, or unknown.

        The kind of a weight counts if it is one of the optimizer, and not the model's rounded one. Frozen weights have no state.
        """
        vision = self.plan.config.vision
        kinds = {
            name: frozenset(kind for kind, tensor in source.tensors.items() if _STATE.fullmatch(tensor))
            for name, source in self._sources.items()
            if not is_frozen(name, tower=vision.freeze_vit, language=vision.freeze_lm)
        }
        most = max(kinds.values(), key=len, default=frozenset())
        for name, found in kinds.items():
            if found != most:
                raise MismatchError(
                    f"{self.path}: the optimizer has {', '.join(sorted(found)) or 'nothing'} of {name}, and of others"
                    f" {', '.join(sorted(most))}",
                    fix="restore the checkpoint from a backup; checkpoints of several optimizers (Muon) are not converted",
                )

    def _manifest(self) -> Manifest:
        plan, arguments = self.plan, self._arguments
        schedule, groups = (
            self._common.get("opt_param_scheduler"),
            _param_groups(self._common.get("optimizer")),
        )
        iteration, consumed = self._common["iteration"], arguments["consumed_train_samples"]
        tensors = {
            name: StoredTensor(self._shape(source.part), self._kinds(source))
            for name, source in sorted(self._sources.items())
        }
        has_optimizer = any(len(tensor.kinds) > 1 for tensor in tensors.values())
        config = plan.config.to_dict()
        config["tokenizer"] |= tokenizer_settings(arguments, self.vocab_size)
        config["tokenizer"]["vocab_size"] = self.run_vocab_size or config["tokenizer"]["vocab_size"]
        config["parallel"] |= layout_of(arguments)
        state = stored_state(
            plan,
            consumed_valid_samples=arguments.get("consumed_valid_samples", 0),
            scheduled_samples=schedule["num_steps"] if schedule else consumed,
            expert_biases=self._expert_biases(),
            has_optimizer=has_optimizer,
        )
        return Manifest(
            iteration=iteration,
            consumed_train_samples=consumed,
            optimizer_step_count=max(
                (group["step"] for group in groups if "step" in group), default=iteration
            ),
            state=state,
            config=config,
            files={},
            tensors=tensors,
            checksum=self._folder.checksum,
        )

    def _shape(self, part: Part) -> tuple[int, ...]:
        """Return the shape of a canonical tensor; rows of padding are left out of the vocabulary's."""
        return (self.vocab_size, *part.shape[1:]) if part.name in VOCABULARY else part.shape

    def _kinds(self, source: _Source) -> dict[str, StoredKind]:
        return {
            kind: StoredKind(dtype_name(self._folder.tensors[name].dtype), ())
            for kind, name in source.tensors.items()
        }

    def _expert_biases(self) -> dict[str, list[float]]:
        """Return the biases by canonical name, as the state of a checkpoint has them."""
        found: dict[str, list[float]] = {}
        for name, tensor in self._folder.tensors.items():
            for ending, (ours, sign) in BIASES.items():
                if name.endswith(ending):
                    prefix = name.removesuffix(ending).removesuffix(".transformer_layer")
                    prefix = prefix.replace(".mtp_model_layer.", ".")
                    values = sign * self._folder.read(name, whole_box(tensor.shape))
                    stacked = values.dim() > 1
                    places = [f"{prefix}.{layer}" for layer in range(len(values))] if stacked else [prefix]
                    rows = values if stacked else values[None]
                    found |= {f"{place}{ours}": row.tolist() for place, row in zip(places, rows, strict=True)}
        return found


def _opened(path: Path, *, allows_format_torch: bool) -> TorchDistFolder | DcpFolder | TorchFiles:
    if (path / METADATA_NAME).exists() or not any(path.glob(f"mp_rank_*/{FILE_NAME}")):
        folder = TorchDistFolder(path)
        return DcpFolder(folder) if DcpFolder.is_of(folder) else folder
    if allows_format_torch:
        return TorchFiles(path)
    raise MismatchError(
        f"{path} has the format torch, whose files are pickled as a whole",
        fix="add --allow-pickle to pretrain.py or `megatrain convert megatron-to-megatrain` (no code in it is run), or save it in"
        " Megatron-LM once more with --ckpt-format torch_dist",
    )


def _mapping(value: Any) -> dict[str, Any]:
    """Return a dictionary, a list with one, or the fields of a record as a dictionary."""
    return fields_of(value[0] if isinstance(value, list) and value else value)


def _param_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer, or of a chain of optimizers."""
    if not isinstance(optimizer, dict):
        return []
    groups = optimizer.get("param_groups") or optimizer.get("optimizer", {}).get("param_groups", [])
    for key, value in optimizer.items():
        if isinstance(key, int) or (isinstance(key, str) and key.startswith("chained_")):
            groups = [*groups, *_param_groups(value)]
    return list(groups)
