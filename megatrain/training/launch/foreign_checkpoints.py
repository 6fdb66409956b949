"""Checkpoints of Megatron-LM and folders of transformers that a run continues, or whose weights it takes, without conversion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatrain.checkpoint.adaptation import Adaptation
from megatrain.checkpoint.errors import DamagedError, MismatchError
from megatrain.checkpoint.find import RELEASE_NAME, Candidate, is_of_megatron, list_candidates
from megatrain.checkpoint.load import Loaded, load_checkpoint, load_foreign_weights
from megatrain.config import StoredRun
from megatrain.config.errors import InputError
from megatrain.config.schema.training import HF_PREFIX
from megatrain.interop.hf.checkpoint import HfCheckpoint
from megatrain.interop.megatron.checkpoint import MegatronCheckpoint
from megatrain.optim.sharded import LoadTarget
from megatrain.parallel.grid import RankGrid


def load_any(
    path: str,
    target: LoadTarget,
    grid: RankGrid,
    *,
    vocab_size: int,
    allows_format_torch: bool,
    adaptation: Adaptation | None,
    with_optimizer: bool = False,
    also: Sequence[Path] = (),
    local: Path | None = None,
) -> Loaded:
    """Load a checkpoint of ours or of Megatron-LM, or the weights that `hf:FOLDER` names; all ranks call it.

    Args:
        vocab_size: rows of the vocabulary that are loaded of what other programs wrote.
        with_optimizer, also, local: see `load_checkpoint`; a folder of transformers has weights alone.

    Raises:
        MegatrainError: see `load_checkpoint` and the readers.
    """

    def open_folder() -> HfCheckpoint:
        try:
            return HfCheckpoint(Path(path.removeprefix(HF_PREFIX)), vocab_size)
        except InputError as error:
            first = error.problems[0]
            raise MismatchError(first.text, fix=first.fix) from error

    def open_foreign(folder: Path) -> MegatronCheckpoint | None:
        if not is_of_megatron(folder):
            return None
        return MegatronCheckpoint(folder, vocab_size, allows_format_torch=allows_format_torch)

    if path.startswith(HF_PREFIX):
        return load_foreign_weights(open_folder, Path(path), target, grid, adaptation=adaptation)
    return load_checkpoint(
        Path(path), target, grid, with_optimizer=with_optimizer, also=also, local=local, adaptation=adaptation,
        open_foreign=open_foreign,
    )  # fmt: skip


def newest_foreign(
    sources: Sequence[Path], *, vocab_size: int | None, allows_format_torch: bool, after: int = -1
) -> tuple[StoredRun | None, list[str]]:
    """Return the newest checkpoint of Megatron-LM whose index is intact, and a sentence for each that is damaged.

    Args:
        after: only checkpoints of later iterations.

    Raises:
        MismatchError: the newest is of a model, or in a form, that is not read.
    """
    reasons = []
    for candidate in foreign_candidates(sources):
        if candidate.iteration <= after:
            break
        try:
            reader = MegatronCheckpoint(candidate.path, vocab_size, allows_format_torch=allows_format_torch)
            manifest = reader.manifest
        except DamagedError as error:
            reasons.append(error.problems[0].text)
            continue
        found = StoredRun.of(
            manifest,
            path=str(candidate.path),
            sources=tuple(map(str, sources)),
            is_of_megatron=True,
            is_start=candidate.path.name == RELEASE_NAME,
        )
        return found, reasons
    return None, reasons


def foreign_candidates(sources: Sequence[Path]) -> list[Candidate]:
    """Return the checkpoints of Megatron-LM in these folders by name, newest first; none of them is opened."""
    found = [one for source in sources for one in list_candidates(source) if is_of_megatron(one.path)]
    return sorted(found, key=lambda candidate: -candidate.iteration)
