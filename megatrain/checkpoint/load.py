"""Loading: the newest checkpoint that is whole, on all ranks alike.

candidates, newest first -> manifest -> names and shapes against the model -> shards, every chunk checked
      damaged anywhere  -> all ranks pass on to the next older one, and say what was passed over
      not of this model -> all ranks stop: an older one would not be either
      none is whole     -> NoCheckpointError; a run never goes on from anything else
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.checkpoint.errors import DamagedError, MismatchError, agree
from megatrain.checkpoint.find import Candidate, check_folder, list_candidates
from megatrain.checkpoint.manifest import Manifest
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.config.errors import NoCheckpointError
from megatrain.optim.sharded import WEIGHT, ShardedOptimizer, fill_shards
from megatrain.parallel.buffers import FlatBuffers
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.layout import ParamLayout, ParamRegistry


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a run continues from."""

    iteration: int
    consumed_train_samples: int
    state: Mapping[str, Any]
    config: Mapping[str, Any]
    path: Path
    skipped: tuple[str, ...]
    """Newer checkpoints that were passed over: which, why, and how many iterations that loses."""


def load_checkpoint(
    folder: Path,
    optimizer: ShardedOptimizer,
    grid: RankGrid,
    *,
    with_optimizer: bool = True,
    iteration: int | None = None,
) -> Loaded:
    """Continue from the newest whole checkpoint in `folder`, or from that of `iteration`; called by all ranks.

    Args:
        with_optimizer: whether the moments and the step count are loaded too.

    Raises:
        NoCheckpointError: no checkpoint is whole. Weights and moments may have been overwritten.
        MismatchError: a whole checkpoint is not of this model.
    """
    passed_over: list[tuple[Candidate, str]] = []
    for candidate in _agreed_candidates(folder, iteration, grid):
        try:
            manifest = _load_candidate(candidate, optimizer, grid, with_optimizer=with_optimizer)
        except DamagedError as error:
            passed_over.append((candidate, error.problems[0].text))
            continue
        optimizer.publish_weights()
        return Loaded(
            iteration=manifest.iteration,
            consumed_train_samples=manifest.consumed_train_samples,
            state=manifest.state,
            config=manifest.config,
            path=candidate.path,
            skipped=tuple(
                f"iteration {bad.iteration} was passed over: {reason};"
                f" {bad.iteration - manifest.iteration} iterations are lost"
                for bad, reason in passed_over
            ),
        )
    wanted = "no valid checkpoint" if iteration is None else f"no valid checkpoint of iteration {iteration}"
    reasons = "".join(f"\n  iteration {bad.iteration}: {reason}" for bad, reason in passed_over)
    raise NoCheckpointError(
        f"{folder}: {wanted}" + (reasons or " (there is none at all)"),
        fix="give --load the folder that --save was, or restore it from a backup",
    )


def load_weights_only(path: Path, buffers: FlatBuffers) -> Manifest:
    """Fill a model's weights from the checkpoint in folder `path`, in the model's dtype: for inference.

    The buffers must be cut for a shard group of one rank. Every rank reads for itself.
    """
    assert all(shard.numel == shard.bucket.size for shard in buffers.shards)
    with CheckpointReader(path) as reader:
        check_names(reader, buffers.registry, lambda _: (WEIGHT,))
        fill_shards(buffers.weight_shards, buffers, reader.source("weight"))
        return reader.manifest


def check_names(
    reader: CheckpointReader, registry: ParamRegistry, kinds_of: Callable[[ParamLayout], Sequence[str]]
) -> str:
    """Check that all that this rank's part of the model needs is there, in the right shapes, before anything is read.

    Returns:
        A hexadecimal number with a bit set for each of the checkpoint's tensors, in order, that is needed here.
    """
    bit_of = {name: 1 << number for number, name in enumerate(sorted(reader.manifest.tensors))}
    used = 0
    for entry in registry.entries.values():
        for piece in entry.layout.pieces:
            for kind in kinds_of(entry.layout):
                reader.kind(piece.name, piece.shape, kind)
            used |= bit_of[piece.name]
    return f"{used:x}"


def check_all_used(reader: CheckpointReader, used: Sequence[str]) -> None:
    """A tensor that no rank's part of the model needs means that the model is another one."""
    together = 0
    for bits in used:
        together |= int(bits, 16)
    unused = [
        name for number, name in enumerate(sorted(reader.manifest.tensors)) if not together >> number & 1
    ]
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise MismatchError(
            f"{reader.path}: holds {unused[0]}{more}, which the model lacks",
            fix="load it into the model that it was saved from",
        )


def fill_from(reader: CheckpointReader, optimizer: ShardedOptimizer, *, with_optimizer: bool) -> None:
    """Fill this rank's shards. Afterwards call `publish_weights`."""
    for kind in optimizer.kinds if with_optimizer else (WEIGHT,):
        optimizer.fill(kind, reader.source(kind))
    if with_optimizer:
        optimizer.step_count = reader.manifest.optimizer_step_count


def _agreed_candidates(folder: Path, iteration: int | None, grid: RankGrid) -> list[Candidate]:
    """What rank 0 sees."""

    def listed() -> list[tuple[int, str, str | None]]:
        if not grid.world.is_first:
            return []
        return [
            (candidate.iteration, candidate.path.name, candidate.problem)
            for candidate in list_candidates(folder)
            if iteration in (None, candidate.iteration)
        ]

    found = agree(listed, grid.messages, then=lambda answers: answers[0])
    return [Candidate(number, folder / name, problem) for number, name, problem in found]


def _load_candidate(
    candidate: Candidate,
    optimizer: ShardedOptimizer,
    grid: RankGrid,
    *,
    with_optimizer: bool,
) -> Manifest:
    """Load one checkpoint; what is wrong with it on one rank is raised on all."""
    if candidate.problem is not None:
        raise DamagedError(f"{candidate.path}: {candidate.problem}")
    opened: list[CheckpointReader] = []

    def start() -> tuple[int, str]:
        manifest = check_folder(candidate.path, candidate.iteration) if grid.world.is_first else None
        opened.append(CheckpointReader(candidate.path, manifest))
        used = check_names(
            opened[0],
            optimizer.buffers.registry,
            optimizer.kinds_of if with_optimizer else lambda _: (WEIGHT,),
        )
        return opened[0].manifest.checksum, used

    def judge(answers: list[tuple[int, str]]) -> None:
        if len({checksum for checksum, _ in answers}) > 1:
            raise DamagedError(f"{candidate.path}: not all ranks see the same manifest")
        check_all_used(opened[0], [used for _, used in answers])

    try:
        agree(start, grid.messages, then=judge)
        reader = opened[0]
        agree(lambda: fill_from(reader, optimizer, with_optimizer=with_optimizer), grid.messages)
    finally:
        for reader in opened:
            reader.close()
    return reader.manifest
