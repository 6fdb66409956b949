"""Load the newest intact checkpoint, the same one on all ranks.

candidates, newest first -> manifest -> compare names and shapes with the model -> shards, every chunk is checked
      damaged on any rank -> all ranks try the next older one; skipped ones are reported
                             files of a local checkpoint are first copied again from another node
      of another model    -> all ranks stop: an older one does not fit either
      none is intact      -> NoCheckpointError
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.checkpoint.adaptation import Adaptation
from megatrain.checkpoint.errors import LOAD_FIX, CheckpointError, DamagedError, MismatchError, agree
from megatrain.checkpoint.find import Candidate, check_folder, list_candidates
from megatrain.checkpoint.local.load import OfNode, complete_node, find_replaceable_files
from megatrain.checkpoint.local.nodes import Node, find_node
from megatrain.checkpoint.manifest import OF_TRAINING, Manifest, name_key
from megatrain.checkpoint.parts import read_manifest
from megatrain.checkpoint.reader import CheckpointReader, CheckpointSource, TensorReader
from megatrain.config.errors import NoCheckpointError
from megatrain.config.model_spec.lora import is_adapter
from megatrain.model.gpt import Model
from megatrain.optim.sharded import WEIGHT, LoadTarget, ShardedOptimizer
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.layout import ParamLayout, ParamRegistry

_FIX_OF_ADAPTERS = (
    "merge its adapters with megatrain checkpoint merge-lora, or give --lora-rank and --lora-target-modules"
)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The checkpoint that was loaded, without its tensors."""

    iteration: int
    consumed_train_samples: int
    state: Mapping[str, Any]
    config: Mapping[str, Any]
    path: Path
    skipped: tuple[str, ...]
    """A sentence for each newer checkpoint that was skipped: iteration, reason, lost iterations."""
    copied: tuple[str, ...] = ()
    """Names of files that came from other nodes, since their node lacked them or they were damaged there."""


def load_checkpoint(
    folder: Path,
    optimizer: LoadTarget,
    grid: RankGrid,
    *,
    with_optimizer: bool = True,
    also: Sequence[Path] = (),
    local: Path | None = None,
    adaptation: Adaptation | None = None,
    open_foreign: Callable[[Path], TensorReader | None] = lambda _: None,
) -> Loaded:
    """Load the newest intact checkpoint in `folder` into the optimizer's weights and state; all ranks call it.

    Args:
        folder: the folder, or FOLDER/iter_0000100 for that one alone.
        also: more folders with checkpoints of the run.
        local: one of these, if it is on a disk of each node.
        with_optimizer: also load optimizer state and step count.
        adaptation: how the model differs from the stored one, if the run starts with the weights alone.
        open_foreign: opens a checkpoint that another program wrote; returns None for all others.

    Raises:
        NoCheckpointError: no checkpoint is intact; weights and optimizer state may be overwritten.
        MismatchError: an intact checkpoint is of another model.
    """
    skipped: list[tuple[Candidate, str]] = []
    load = _Load(optimizer, grid, with_optimizer, adaptation)
    for candidate in _agreed_candidates((folder, *also), grid):
        if candidate.problem is not None:
            skipped.append((candidate, f"{candidate.path}: {candidate.problem}"))
            continue
        is_local = local is not None and candidate.path.parent == local
        try:
            manifest, copied = load.of(candidate, open_foreign, local=local if is_local else None)
        except DamagedError as error:
            skipped.append((candidate, error.problems[0].text))
            continue
        optimizer.sync_model_weights()
        return Loaded(
            iteration=manifest.iteration,
            consumed_train_samples=manifest.consumed_train_samples,
            state=manifest.state,
            config=manifest.config,
            path=candidate.path,
            skipped=tuple(
                f"skipped iteration {bad.iteration}: {reason};"
                f" {bad.iteration - manifest.iteration} iterations are lost"
                for bad, reason in skipped
            ),
            copied=tuple(copied),
        )
    raise _nothing_intact(folder, local, skipped)


def _nothing_intact(
    folder: Path, local: Path | None, skipped: Sequence[tuple[Candidate, str]]
) -> NoCheckpointError:
    reasons = "".join(f"\n  iteration {bad.iteration}: {reason}" for bad, reason in skipped)
    return NoCheckpointError(
        f"{folder}: no valid checkpoint" + (reasons or " (the folder has no checkpoints)"),
        fix="set --load to the folder that --save named, or restore a checkpoint from a backup"
        + ("" if local is None else f"; to start anew, remove {local} on all nodes"),
    )


@dataclass
class _Load:
    """Loads checkpoints into the optimizer of this rank; all ranks call it alike."""

    optimizer: LoadTarget
    grid: RankGrid
    with_optimizer: bool
    adaptation: Adaptation | None
    node: Node | None = None
    """The ranks of this node, once a local checkpoint is loaded."""

    def of(
        self, candidate: Candidate, open_foreign: Callable[[Path], TensorReader | None], local: Path | None
    ) -> tuple[Manifest, list[str]]:
        """Load a candidate, which is in the folder `local` of each node or in a shared one; return names of copied files too."""

        def open_reader() -> TensorReader:
            foreign = open_foreign(candidate.path)
            if foreign is not None:
                return foreign
            is_first = self.grid.world.is_first
            manifest = check_folder(candidate.path, candidate.iteration) if is_first else None
            # An adaptation asks which tensors there are.
            return CheckpointReader(
                candidate.path, manifest, rank=self.grid.rank if self.adaptation is None else None
            )

        if local is None:
            return self.opened(open_reader), []
        with _as_damaged():
            self.node = self.node or find_node(local, self.grid)
        copied = self._completed(candidate.path, self.node)
        try:
            return self.opened(open_reader), copied
        except DamagedError:
            with _as_damaged():
                many = self.node.num_nodes > 1
                damaged = many and find_replaceable_files(candidate.path, self.node, self.grid.messages)
                if not damaged:
                    raise
            copied += self._completed(candidate.path, self.node, damaged)
            return self.opened(open_reader), copied

    def _completed(self, path: Path, node: Node, damaged: Sequence[OfNode] = ()) -> list[str]:
        """Copy files of a local checkpoint from other nodes: those that a node lacks, or that are damaged there. Return their names."""
        assert isinstance(self.optimizer, ShardedOptimizer), "a run has local checkpoints"
        kinds = self.optimizer.kinds if self.with_optimizer else (WEIGHT,)
        with _as_damaged():
            return complete_node(path, node, self.optimizer, self.grid, kinds, damaged)

    def opened(self, open_reader: Callable[[], TensorReader]) -> Manifest:
        """Load what a function opens on each rank; an error on one rank is raised on all."""
        opened: list[TensorReader] = []
        optimizer, messages = self.optimizer, self.grid.messages
        kinds_of = optimizer.kinds_of if self.with_optimizer else lambda _: (WEIGHT,)

        def start() -> tuple[int, str]:
            opened.append(open_reader())
            used = check_names(opened[0], optimizer.buffers.registry, kinds_of, self.adaptation)
            return opened[0].manifest.checksum, used

        def judge(answers: list[tuple[int, str]]) -> None:
            if len({checksum for checksum, _ in answers}) > 1:
                raise DamagedError(f"{opened[0].path}: the manifest differs between ranks")
            check_no_unused_tensors(opened[0], [used for _, used in answers], self.adaptation)

        def fill() -> None:
            load_shards(opened[0], optimizer, with_optimizer=self.with_optimizer, adaptation=self.adaptation)

        try:
            agree(start, messages, then=judge)
            agree(fill, messages)
        finally:
            for reader in opened:
                reader.close()
        return opened[0].manifest


@contextmanager
def _as_damaged() -> Iterator[None]:
    """Raise errors of a node's disk, which all ranks have, as DamagedError: the next older checkpoint is tried."""
    try:
        yield
    except (DamagedError, MismatchError):
        raise
    except CheckpointError as error:
        raise DamagedError(error.problems[0].text) from error


def load_foreign_weights(
    open_reader: Callable[[], TensorReader],
    path: Path,
    optimizer: LoadTarget,
    grid: RankGrid,
    *,
    adaptation: Adaptation | None = None,
) -> Loaded:
    """Load weights of another program; all ranks call it, and each reads its boxes alone.

    Raises:
        MismatchError: they are of another model.
    """
    manifest = _Load(optimizer, grid, False, adaptation).opened(open_reader)
    optimizer.sync_model_weights()
    return Loaded(
        iteration=0,
        consumed_train_samples=0,
        state=manifest.state,
        config=manifest.config,
        path=path,
        skipped=(),
    )


def restore_expert_biases(model: Model, biases: Mapping[str, Any], path: Path) -> None:
    """Copy the expert biases of the checkpoint at `path` to the model's routers.

    Raises:
        MismatchError: the checkpoint has other routers, or none.
    """
    try:
        model.expert_biases.restore(biases)
    except ValueError as error:
        raise MismatchError(f"{path}: {error}", fix=LOAD_FIX) from error


def check_names(
    reader: TensorReader,
    registry: ParamRegistry,
    kinds_of: Callable[[ParamLayout], Sequence[str]],
    adaptation: Adaptation | None = None,
) -> str:
    """Check that the checkpoint has all tensors of this rank's part of the model, in the right shapes.

    Returns:
        Bit set of the checkpoint's tensors that are used, in the order of their names, as a hexadecimal number.
    """
    bit_of = {name: 1 << number for number, name in enumerate(_stored_names(reader.manifest))}
    used = 0
    for entry in registry.entries.values():
        pieces = entry.layout.pieces
        tensors = reader.manifest.tensors
        stored = pieces if adaptation is None else [adaptation.stored(piece, tensors) for piece in pieces]
        for piece in filter(None, stored):
            for kind in kinds_of(entry.layout):
                reader.kind(piece.name, piece.shape, kind)
            used |= bit_of[name_key(piece.name) if reader.manifest.parts else piece.name]
    return f"{used:x}"


def _stored_names(manifest: Manifest) -> list[str]:
    """Return the names of all tensors in order; of a manifest in parts, their keys."""
    keys = set[str]().union(*(part.name_keys for part in manifest.parts.values()))
    return sorted(keys if manifest.parts else manifest.tensors)


def check_no_unused_tensors(
    reader: TensorReader, used: Sequence[str], adaptation: Adaptation | None = None
) -> None:
    """Raise MismatchError if no rank uses one of the checkpoint's tensors: it is of another model."""
    together = 0
    for bits in used:
        together |= int(bits, 16)
    names = _stored_names(reader.manifest)
    unused = [name for number, name in enumerate(names) if not together >> number & 1]
    if unused and reader.manifest.parts:
        keys = set(unused)
        unused = sorted(name for name in read_manifest(reader.path).tensors if name_key(name) in keys)
    unused = unused if adaptation is None else adaptation.unused(unused)
    unused = [name for name in unused if not name.startswith(OF_TRAINING)]
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise MismatchError(
            f"{reader.path}: has the tensor {unused[0]}{more}, which the model lacks",
            fix=_FIX_OF_ADAPTERS if is_adapter(unused[0]) else LOAD_FIX,
        )


def load_shards(
    reader: TensorReader,
    optimizer: LoadTarget,
    *,
    with_optimizer: bool,
    adaptation: Adaptation | None = None,
) -> None:
    """Load this rank's shards. Call it before `sync_model_weights`."""
    assert adaptation is None or not with_optimizer
    for kind in optimizer.kinds if with_optimizer else (WEIGHT,):
        source = CheckpointSource(reader, kind)
        optimizer.fill(kind, source if adaptation is None else adaptation.source(source))
    reader.finish()
    if with_optimizer:
        optimizer.step_count = reader.manifest.optimizer_step_count


def _agreed_candidates(folders: Sequence[Path], grid: RankGrid) -> list[Candidate]:
    """Return the candidates that rank 0 sees, newest first, on all ranks."""

    def listed() -> list[tuple[int, str, str | None]]:
        if not grid.world.is_first:
            return []
        return [
            (candidate.iteration, str(candidate.path), candidate.problem)
            for folder in folders
            for candidate in list_candidates(folder)
        ]

    found = agree(listed, grid.messages, then=lambda answers: answers[0])
    candidates = [Candidate(number, Path(path), problem) for number, path, problem in found]
    return sorted(candidates, key=lambda candidate: -candidate.iteration)
