"""Local checkpoints before the plan: rank 0 learns of one that only other nodes have, as after the loss of its own disk.

    each rank: newest iteration in its node's folder ─> rank 0 ─> the manifest of a newer one ─> rank 0's folder, without files

Loading then copies the files, if all are on some node (`checkpoint/local/`). Checkpoints of another run are refused, as they
are on rank 0's node (`stored_run.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatrain.checkpoint.errors import CheckpointError, agree
from megatrain.checkpoint.find import Candidate, newest_valid
from megatrain.checkpoint.local.load import take_manifest
from megatrain.checkpoint.manifest import MANIFEST_NAME
from megatrain.config import Request
from megatrain.config.environment import LaunchEnvironment
from megatrain.config.errors import ConfigError
from megatrain.parallel.messages import Messages
from megatrain.training.launch.stored_run import continues_run_of, of_another_run, save_folder_of

_Found = tuple[int, str]
"""Iteration of a checkpoint and the --save folder of its run; without a checkpoint (-1, "")."""


def share_newest_manifest(request: Request, environment: LaunchEnvironment, store: dist.Store | None) -> None:
    """Copy the manifest of the newest local checkpoint to rank 0's folder, if that lacks it. All ranks call it.

    Raises:
        CheckpointError: on rank 0; its folder has another checkpoint of that name, or cannot be written. On all ranks; the manifest
            cannot be read.
        ConfigError: on rank 0; the folder of another rank has checkpoints of another run.
    """
    kind, folder = (
        request.known(f"checkpoint.non_persistent_{name}") for name in ("ckpt_type", "local_ckpt_dir")
    )
    is_read = kind == "local" and request.known("checkpoint.ckpt_step") is None
    if store is None or not is_read or folder is None:
        return
    messages = Messages(
        environment.rank, environment.world_size, dist.PrefixStore("local checkpoints", store)
    )
    own, described = _newest(Path(folder))
    others: list[str] = []

    def choose(of_ranks: list[_Found]) -> int | None:
        saves = [save for _, save in of_ranks]
        others.extend(
            f"rank {saves.index(save)}: {of_another_run(folder, save)}"
            for save in dict.fromkeys(saves[1:])
            if save and not continues_run_of(request, save)
        )
        return None if others else _rank_of_a_newer_one(of_ranks)

    source = messages.gather_and_broadcast(described, choose)
    if others:
        raise ConfigError(
            others[0],
            fix="remove the folder on that rank's node, or name another with --non-persistent-local-ckpt-dir",
        )
    if source is None:
        return

    def read() -> tuple[str, str] | None:
        if environment.rank != source or own is None:
            return None
        with _as_error_of(folder):
            return own.path.name, (own.path / MANIFEST_NAME).read_text("utf-8")

    name, manifest = agree(read, messages, then=lambda of_ranks: of_ranks[source])
    if environment.rank == 0:
        with _as_error_of(folder):
            take_manifest(Path(folder) / name, manifest.encode())


@contextmanager
def _as_error_of(folder: str) -> Iterator[None]:
    """Raise errors of the operating system as CheckpointError that names the flag."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"--non-persistent-local-ckpt-dir {folder}: {error}",
            fix="repair the disk of this node, or name another folder",
        ) from error


def _newest(folder: Path) -> tuple[Candidate | None, _Found]:
    """Return the newest valid checkpoint of a folder; None: there is none, or the folder cannot be read, which loading reports."""
    try:
        found = newest_valid(folder)
        return found, (-1, "") if found is None else (found.iteration, save_folder_of(found.path))
    except (CheckpointError, OSError):
        return None, (-1, "")


def _rank_of_a_newer_one(found: list[_Found]) -> int | None:
    """Return the first rank with the newest checkpoint, if it is newer than the checkpoint of rank 0."""
    iterations = [iteration for iteration, _ in found]
    newest = max(iterations)
    return iterations.index(newest) if newest > iterations[0] else None
