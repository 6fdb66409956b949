"""Local checkpoints on several nodes: each node's folder has the files of its own ranks, and the manifest of all.

    save   ranks write to their node's folder -> copies on other nodes (--replication) -> every node has its files and the
           manifest, together they have all files -> every node renames the folder
    load   a manifest that rank 0 has -> to nodes without it -> files that a rank reads and its node lacks -> from a node that has them
           a file does not match its checksums -> it is copied again from a node on which it does -> once more

    iter_0000100/node_files.json   names of the files that the node has

Ranks that see each other's files are on one node, so that storage which several nodes share counts as one.

Source: Megatron-LM and nvidia-resiliency-ext (checkpointing/local/replication), for the flags and the groups of copies.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint.chunks import PlannedChunk
from megatrain.checkpoint.disk import Disk, open_regular_file, read_into, write_file
from megatrain.checkpoint.errors import CheckpointError, DamagedError, agree
from megatrain.checkpoint.find import NODE_FILES_NAME, node_files
from megatrain.checkpoint.manifest import MANIFEST_NAME, Manifest, decode, encode, read_manifest
from megatrain.checkpoint.reader import CheckpointReader, find_damage
from megatrain.checkpoint.save import (
    Save,
    begin_save,
    check_written,
    merge_reports,
    remove_leftovers,
    rename_whole,
)
from megatrain.checkpoint.tensor_file import bytes_of, check_size
from megatrain.optim.sharded import ShardedOptimizer
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.layout import intersect
from megatrain.parallel.messages import Messages

_PIECE_BYTES = 64 << 20
"""Bytes of a file that are sent at once."""


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


class LocalSave(Save):
    """A save in a folder of each node.

    Args:
        node: of this rank.
        copies: ranks that keep copies of each other's files; None: no rank does.
        device: of the copies while they are sent.
        options: as for `Save`.
    """

    def __init__(
        self, folder: Path, *, node: Node, copies: RankGroup | None, device: torch.device, **options: Any
    ) -> None:
        super().__init__(folder, **options)
        self.node, self.copies, self.device = node, copies, device
        self.is_committing = node.is_leader

    def begin(self, plan: Sequence[PlannedChunk], prepare: Callable[[], None] = lambda: None) -> None:
        """Check what this rank writes, and the free space of each node, and create the temporary folders.

        Raises:
            CheckpointError: on all ranks; see `Save.begin`.
        """

        def create(num_bytes: int) -> None:
            if self.is_committing:
                num_bytes *= len(self.node.ranks) * (1 if self.copies is None else self.copies.size)
                with self._sized_errors():
                    begin_save(self.folder, self.temporary, num_bytes, self.disk)

        with self._cleaned_up():
            largest = agree(lambda: self._checked(plan, prepare), self.grid.messages, then=max)
            agree(lambda: create(largest), self.grid.messages)

    def commit(self, written: Callable[[], list[dict[str, Any]]]) -> Path:
        """Commit the files of all nodes and return the folder. Every node has the checkpoint, or none loads it.

        Raises:
            CheckpointError: on all ranks; the files of this save are removed.
        """
        messages, own = self.grid.messages, []

        def write() -> list[dict[str, Any]]:
            with self._sized_errors():
                own.extend(written())
            return own

        def merged(reports: list[Any]) -> str:
            return encode(merge_reports(reports, **self._contents)).decode()

        def count_files(of_ranks: list[list[str]]) -> int:
            files = read_manifest(self.temporary).files
            for name in sorted(set(files) - {name for names in of_ranks for name in names}):
                raise CheckpointError(
                    f"{self.temporary / name}: no node sees the file as it was written",
                    fix="give --non-persistent-local-ckpt-dir a folder on a disk of each node",
                )
            return sum(file.num_bytes for file in files.values())

        with self._cleaned_up():
            text = agree(write, messages, then=merged)
            if self.copies is not None:
                self._copy([(report["name"], report["file"]["num_bytes"]) for report in own])
            self.committed_bytes = agree(lambda: self._describe(text.encode()), messages, then=count_files)
            agree(self._rename, messages)
        if self.is_committing:
            remove_leftovers(self.folder, self.disk)
        return self.final

    def _copy(self, own: Sequence[tuple[str, int]]) -> None:
        """Store the files of the other ranks with copies on this node."""
        assert self.copies is not None
        of_ranks = self.grid.messages.gather_and_broadcast(list(own), list)
        transfers = [
            Transfer(
                name,
                num_bytes,
                source=rank,
                targets=tuple(other for other in self.copies.ranks if other != rank),
            )
            for rank in self.copies.ranks
            for name, num_bytes in of_ranks[rank]
        ]
        errors = [
            send(self.temporary, one, self.copies, self.device, self.grid.rank, self.disk)
            for one in transfers
        ]
        agree(lambda: raise_first(errors), self.grid.messages)

    def _describe(self, manifest: bytes) -> list[str]:
        """Write the manifest and the names of the node's files; return these names."""
        if not self.is_committing:
            return []
        with self._sized_errors():
            write_file(self.disk, self.temporary / MANIFEST_NAME, manifest)
            files = read_manifest(self.temporary).files
            names = [name for name in files if (self.temporary / name).exists()]
            for name in names:
                check_written(self.temporary / name, files[name])
            write_file(self.disk, self.temporary / NODE_FILES_NAME, json.dumps(names).encode())
            self.disk.sync_folder(self.temporary)
        return names

    def _rename(self) -> None:
        if self.is_committing:
            with self._sized_errors():
                rename_whole(self.temporary, self.final, read_manifest(self.temporary), self.disk)


@dataclass(frozen=True)
class Transfer:
    """A file that goes from the folder of one rank to those of others."""

    name: str
    num_bytes: int
    source: int
    targets: tuple[int, ...]


def send(
    folder: Path, transfer: Transfer, group: RankGroup, device: torch.device, rank: int, disk: Disk
) -> OSError | CheckpointError | None:
    """Send a file to the ranks that want it; all ranks of the group call it. An error is returned: the other ranks continue."""
    path, error = folder / transfer.name, None
    partial = path.with_name(f"{path.name}.part-{rank}")
    pieces = _pieces(path if rank == transfer.source else None, transfer.num_bytes, group, device)
    try:
        if rank in transfer.targets:
            partial.unlink(missing_ok=True)
            with disk.create(partial) as file:
                for piece in pieces:
                    disk.write(file, piece)
                disk.sync(file)
            disk.rename(partial, path)
    except (OSError, CheckpointError) as found:
        error = found
    try:
        for _ in pieces:  # the ranks that want nothing, and those that failed
            pass
    except (OSError, CheckpointError) as found:
        error = error or found
    return error


def _pieces(
    path: Path | None, num_bytes: int, group: RankGroup, device: torch.device
) -> Iterator[memoryview]:
    """Yield the pieces of a file, from the one rank with a path; that rank raises its error after the last piece."""
    error: OSError | CheckpointError | None = None
    for start in range(0, num_bytes, _PIECE_BYTES):
        piece = torch.zeros(min(_PIECE_BYTES, num_bytes - start), dtype=torch.uint8)
        if path is not None and error is None:
            try:
                with open_regular_file(path) as file:
                    read_into(file, bytes_of(piece), start, path)
            except (OSError, CheckpointError) as found:
                error = found
        yield bytes_of(all_reduce(piece.to(device), group, "max").cpu())
    if error is not None:
        raise error


def raise_first(errors: Sequence[Exception | None]) -> None:
    """Raise the first error, if there is one."""
    for error in filter(None, errors):
        raise error


def complete_node(
    path: Path, node: Node, optimizer: ShardedOptimizer, grid: RankGrid, kinds: Sequence[str]
) -> list[str]:
    """Copy the files that the ranks of a node read from a checkpoint to its folder; all ranks call it. One node's files may be all.

    Returns:
        Names of the files that were copied to any node.
    Raises:
        DamagedError: on all ranks; no node has one of these files, or a node has another checkpoint of that name.
    """
    messages, is_first = grid.messages, grid.world.is_first

    def read() -> str | None:
        if not is_first or not (_is_divided(path) or node.num_nodes > 1):
            return None
        read_manifest(path)  # raises DamagedError
        return (path / MANIFEST_NAME).read_text("utf-8")

    text = agree(read, messages, then=lambda answers: answers[0])
    if text is None:
        return []
    agree(lambda: take_manifest(path, text.encode()) if node.is_leader else None, messages)
    manifest = decode(text.encode())

    def ask() -> tuple[int, list[str], list[str]]:
        has = _present(path, manifest)
        wants = files_with(manifest, optimizer, kinds) - has
        return node.leader, sorted(wants), sorted(has) if node.is_leader else []

    def plan(answers: list[Any]) -> list[Any]:
        return [vars(one) for one in planned_transfers(path, manifest.files, answers)]

    transfers = [
        Transfer(**{**one, "targets": tuple(one["targets"])}) for one in agree(ask, messages, then=plan)
    ]
    errors = [send(path, one, grid.world, optimizer.device, grid.rank, Disk()) for one in transfers]
    agree(lambda: raise_first(errors), messages)
    new = [one.name for one in transfers if grid.rank in one.targets]
    agree(
        lambda: _write_names(path, {*node_files(path, manifest), *new}) if new else None,
        messages,
    )
    return [one.name for one in transfers]


def forget_damaged_files(path: Path, node: Node, messages: Messages) -> bool:
    """Take files that do not match their checksums off the list of their node, if they do on another: they can be copied again.

    All ranks call it; those of a node share the reading of its files.

    Returns:
        Whether there is such a file.
    """

    def read() -> tuple[int, list[str], list[str]]:
        with CheckpointReader(path) as reader:
            names = sorted(node_files(path, reader.manifest))
            own = names[node.ranks.index(node.rank) :: len(node.ranks)]
            damaged = {name for name, _ in find_damage(reader, own)}
        return node.leader, sorted(damaged), sorted(set(own) - damaged)

    def replaceable(answers: list[tuple[int, list[str], list[str]]]) -> list[tuple[int, str]]:
        intact = {name for _, _, names in answers for name in names}
        return [(leader, name) for leader, damaged, _ in answers for name in damaged if name in intact]

    found = agree(read, messages, then=replaceable)
    here = {name for leader, name in found if leader == node.leader}

    def forget() -> None:
        if here and node.is_leader:
            _write_names(path, set(node_files(path, read_manifest(path))) - here)

    agree(forget, messages)
    return bool(found)


def planned_transfers(path: Path, files: Mapping[str, Any], answers: Sequence[Any]) -> Iterator[Transfer]:
    """Yield the transfers that give each node what its ranks want.

    Args:
        answers: of each rank: the leader of its node, the files that it wants, and, of a leader, those that the node has.

    Raises:
        DamagedError: no node has a file.
    """
    sources: dict[str, int] = {}
    targets: dict[str, set[int]] = {}
    for rank, (leader, wants, has) in enumerate(answers):
        for name in has:
            sources.setdefault(name, rank)
        for name in wants:
            targets.setdefault(name, set()).add(leader)
    for name in sorted(targets):
        if name not in sources:
            raise DamagedError(f"{path / name}: no node has the file, nor a copy of it")
        yield Transfer(name, files[name].num_bytes, sources[name], tuple(sorted(targets[name])))


def files_with(manifest: Manifest, optimizer: ShardedOptimizer, kinds: Sequence[str]) -> set[str]:
    """Return the files that have what this rank owns."""
    found: set[str] = set()
    for kind in kinds:
        for _, box, _ in optimizer.owned(kind):
            stored = manifest.tensors.get(box.piece.name)
            for chunk in stored.kinds[kind].chunks if stored is not None and kind in stored.kinds else ():
                if intersect(chunk.box, box.box):
                    found.add(chunk.file)
    return found


def take_manifest(path: Path, manifest: bytes) -> None:
    """Create the checkpoint of another node on one that lacks it, without files.

    A checkpoint of this name with a damaged manifest is replaced, and files that are missing or have another size are taken off
    the node's list: they may be copied from other nodes again.

    Raises:
        DamagedError: the node has another one under this name.
    """
    disk = Disk()
    try:
        own = read_manifest(path)
        listed = set(node_files(path, own))
    except DamagedError:
        if path.exists():
            disk.rename(path, path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}"))
    else:
        if (path / MANIFEST_NAME).read_bytes() != manifest:
            raise DamagedError(f"{path}: the manifest differs between nodes")
        present = _present(path, own)
        if present != listed:
            _write_names(path, present)
        return
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    disk.make_folder(temporary)
    write_file(disk, temporary / NODE_FILES_NAME, b"[]")
    write_file(disk, temporary / MANIFEST_NAME, manifest)
    disk.rename(temporary, path)
    disk.sync_folder(path.parent)


def _is_divided(path: Path) -> bool:
    """Return whether a checkpoint may have files on other nodes."""
    return (path / NODE_FILES_NAME).exists()


def _present(path: Path, manifest: Manifest) -> set[str]:
    """Return the files that the node has, as a whole by their size."""
    found = set()
    for name in node_files(path, manifest):
        with contextlib.suppress(OSError, DamagedError):
            check_size(path / name, (path / name).lstat().st_size, manifest.files[name])
            found.add(name)
    return found


def _write_names(path: Path, names: Collection[str]) -> None:
    temporary = path / f"{NODE_FILES_NAME}.new"
    temporary.unlink(missing_ok=True)
    write_file(Disk(), temporary, json.dumps(sorted(names)).encode())
    temporary.replace(path / NODE_FILES_NAME)
