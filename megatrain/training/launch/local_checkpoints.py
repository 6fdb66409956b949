"""Local checkpoints before the plan: rank 0 learns of one that only other nodes have, as after the loss of its own disk.

    each rank: newest iteration in its node's folder ─> rank 0 ─> the manifest of a newer one ─> rank 0's folder, without files

Loading then copies the files, if all are on some node (`checkpoint/local.py`).
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megatrain.checkpoint.errors import CheckpointError
from megatrain.checkpoint.find import newest_valid
from megatrain.checkpoint.local import take_manifest
from megatrain.checkpoint.manifest import MANIFEST_NAME
from megatrain.config import Request
from megatrain.config.environment import LaunchEnvironment
from megatrain.parallel.messages import Messages


def share_newest_manifest(request: Request, environment: LaunchEnvironment, store: dist.Store | None) -> None:
    """Copy the manifest of the newest local checkpoint to rank 0's folder, if that lacks it. All ranks call it.

    Raises:
        CheckpointError: on rank 0; its folder has another checkpoint of that name, or cannot be written.
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
    own = _newest(Path(folder))
    source = messages.gather_and_broadcast(own.name if own else "", _rank_of_a_newer_one)
    if source is None:
        return
    is_source = environment.rank == source
    found = messages.gather(
        (own.name, (own / MANIFEST_NAME).read_text("utf-8")) if is_source and own else None
    )
    if found:
        name, manifest = found[source]
        try:
            take_manifest(Path(folder) / name, manifest.encode())
        except OSError as error:
            raise CheckpointError(
                f"--non-persistent-local-ckpt-dir {folder}: {error}",
                fix="repair the disk of this node, or name another folder",
            ) from error


def _newest(folder: Path) -> Path | None:
    """Return the newest valid checkpoint of a folder; None: there is none, or the folder cannot be read, which loading reports."""
    try:
        found = newest_valid(folder)
    except CheckpointError:
        return None
    return None if found is None else found.path


def _rank_of_a_newer_one(names: list[str]) -> int | None:
    """Return the first rank with the newest checkpoint, if it is newer than that of rank 0."""
    newest = max(names, key=_order)
    return names.index(newest) if _order(newest) > _order(names[0]) else None


def _order(name: str) -> tuple[int, str]:
    """Return a key that orders the names of checkpoints by iteration: they have leading zeros, and more digits after iteration 9,999,999."""
    return len(name), name
