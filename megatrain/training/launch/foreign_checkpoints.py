"""Checkpoints of Megatron-LM that a run continues, or whose weights it takes, without conversion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatrain.checkpoint.errors import DamagedError
from megatrain.checkpoint.find import RELEASE_NAME, Candidate, is_of_megatron, list_candidates
from megatrain.config import StoredRun
from megatrain.interop.megatron.checkpoint import MegatronCheckpoint


def open_foreign(path: Path, vocab_size: int, *, allows_format_torch: bool) -> MegatronCheckpoint | None:
    """Open the checkpoint at `path` if Megatron-LM wrote it, with the rows of `vocab_size` tokens; return None if not.

    Raises:
        DamagedError, MismatchError: see `MegatronCheckpoint`.
    """
    if not is_of_megatron(path):
        return None
    return MegatronCheckpoint(path, vocab_size, allows_format_torch=allows_format_torch)


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
        found = StoredRun.from_state(
            manifest.state,
            path=str(candidate.path),
            iteration=manifest.iteration,
            consumed_train_samples=manifest.consumed_train_samples,
            config=manifest.config,
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
