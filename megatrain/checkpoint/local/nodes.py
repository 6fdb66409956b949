"""The ranks of a node, and groups of ranks that keep copies of each other's files."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint.errors import CheckpointError, agree
from megatrain.parallel.grid import RankGrid


@dataclass(frozen=True)
class Node:
    """The ranks that share the folder of local checkpoints with this one."""

    rank: int
    ranks: tuple[int, ...]
    num_nodes: int

    @property
    def leader(self) -> int:
        """The rank that creates, commits and removes checkpoints in the folder."""
        return self.ranks[0]

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader


def find_node(folder: Path, grid: RankGrid) -> Node:
    """Return the node of this rank: every rank creates a file in the folder, and looks whose files are there. All ranks call it.

    Raises:
        CheckpointError: on all ranks; the folder of one cannot be written.
    """
    messages, rank = grid.messages, grid.rank
    token = messages.broadcast(secrets.token_hex(4))
    own = folder / f".rank-{token}-{rank}"

    def create() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            own.touch()
        except OSError as error:
            raise CheckpointError(
                f"{folder}: {error.strerror or error}",
                fix="repair the disk of this node, or name another folder with --non-persistent-local-ckpt-dir",
            ) from error

    def look() -> list[int]:
        names = (path.name for path in folder.glob(f".rank-{token}-*"))
        found.extend(sorted(int(name.rpartition("-")[2]) for name in names))
        return found

    found: list[int] = []
    try:
        agree(create, messages)
        num_nodes = agree(look, messages, then=lambda of_ranks: len({ranks[0] for ranks in of_ranks}))
    finally:
        with contextlib.suppress(OSError):  # `create` has reported it
            own.unlink(missing_ok=True)
    return Node(rank, tuple(found), num_nodes)


def copy_groups(num_ranks: int, *, factor: int, jump: int) -> list[list[int]]:
    """Return the groups of `factor` ranks, spaced by `jump`, that keep copies of each other's files."""
    size = factor * jump
    return [
        list(range(start + offset, start + size, jump))
        for start in range(0, num_ranks, size)
        for offset in range(jump)
    ]
