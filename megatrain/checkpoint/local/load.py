"""Bring the files of a local checkpoint to the nodes whose ranks read them."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.checkpoint.errors import DamagedError, agree
from megatrain.checkpoint.find import NODE_FILES_NAME, node_files
from megatrain.checkpoint.local.nodes import Node
from megatrain.checkpoint.local.transfer import Transfer, raise_first, send, send_bytes
from megatrain.checkpoint.manifest import MANIFEST_NAME, Manifest, decode
from megatrain.checkpoint.parts import read_manifest
from megatrain.checkpoint.reader import CheckpointReader, find_damage
from megatrain.checkpoint.tensor_file import check_size
from megatrain.optim.sharded import ShardedOptimizer
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.layout import intersect
from megatrain.parallel.messages import Messages
from megatrain.storage.disk import Disk, write_file
from megatrain.storage.files import replace_file

OfNode = tuple[int, str]
"""Leader of a node, and the name of a file there."""


def complete_node(
    path: Path,
    node: Node,
    optimizer: ShardedOptimizer,
    grid: RankGrid,
    kinds: Sequence[str],
    damaged: Sequence[OfNode] = (),
) -> list[str]:
    """Copy the files that the ranks of a node read from a checkpoint to its folder; all ranks call it. One node's files may be all.

    Args:
        damaged: files that are copied again to these nodes.

    Returns:
        Names of the files that were copied to any node.

    Raises:
        DamagedError: on all ranks; no node has one of these files, or a node has another checkpoint of that name.
    """
    messages, is_first = grid.messages, grid.world.is_first

    of_rank_0: list[bytes] = []

    def read() -> int | None:
        if not is_first or not (_is_divided(path) or node.num_nodes > 1):
            return None
        read_manifest(path)  # raises DamagedError
        of_rank_0.append((path / MANIFEST_NAME).read_bytes())
        return len(of_rank_0[0])

    num_bytes = agree(read, messages, then=lambda answers: answers[0])
    if num_bytes is None:
        return []
    own = of_rank_0[0] if of_rank_0 else None
    text = send_bytes(own, num_bytes, grid.world, optimizer.device, wants=True)
    agree(lambda: take_manifest(path, text) if node.is_leader else None, messages)
    manifest = decode(text)

    def ask() -> tuple[int, list[str], list[str]]:
        damaged_here = {name for leader, name in damaged if leader == node.leader}
        has = _whole(path, manifest, node_files(path, manifest)) - damaged_here
        wants = (files_with(manifest, optimizer, kinds) | damaged_here) - has
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


def find_replaceable_files(path: Path, node: Node, messages: Messages) -> list[OfNode]:
    """Return the files that do not match their checksums on one node and do on another; `complete_node` copies them again.

    All ranks call it, and get the same; the ranks of a node share the reading of its files.
    """

    def listed() -> list[str]:
        return node_files(path, read_manifest(path)) if node.is_leader else []

    def with_copies(of_ranks: list[list[str]]) -> list[str]:
        counts = Counter(name for names in of_ranks for name in names)
        return sorted(name for name, count in counts.items() if count > 1)

    copies: list[str] = agree(listed, messages, then=with_copies)

    def read() -> tuple[int, list[str], list[str]]:
        own = copies[node.ranks.index(node.rank) :: len(node.ranks)]
        with CheckpointReader(path) as reader:
            here = set(own) & set(node_files(path, reader.manifest))
            damaged = {name for name, _ in find_damage(reader, here)}
        return node.leader, sorted(damaged), sorted(here - damaged)

    def replaceable(answers: list[tuple[int, list[str], list[str]]]) -> list[OfNode]:
        intact = {name for _, _, names in answers for name in names}
        return [(leader, name) for leader, damaged, _ in answers for name in damaged if name in intact]

    return agree(read, messages, then=replaceable) if copies else []


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

    A damaged manifest or list of files is replaced. Files that are missing or have another size are taken off the node's list: they
    may be copied from other nodes again.

    Raises:
        DamagedError: the node has another checkpoint under this name.
    """
    disk = Disk()
    if path.is_symlink() or not path.is_dir():
        if path.is_symlink() or path.exists():
            disk.rename(path, path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}"))
        temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
        disk.make_folder(temporary)
        write_file(disk, temporary / NODE_FILES_NAME, b"[]")
        write_file(disk, temporary / MANIFEST_NAME, manifest)
        disk.rename(temporary, path)
        disk.sync_folder(path.parent)
        return
    try:
        own = read_manifest(path)
        listed = node_files(path, own)
    except DamagedError:  # files of another checkpoint would not match their checksums
        own = decode(manifest)
        _write_names(path, _whole(path, own, own.files))
        replace_file(path / MANIFEST_NAME, [manifest])
        return
    if (path / MANIFEST_NAME).read_bytes() != manifest:
        raise DamagedError(f"{path}: the manifest differs between nodes")
    present = _whole(path, own, listed)
    if present != set(listed):
        _write_names(path, present)


def _is_divided(path: Path) -> bool:
    """Return whether a checkpoint may have files on other nodes."""
    return (path / NODE_FILES_NAME).exists()


def _whole(path: Path, manifest: Manifest, names: Iterable[str]) -> set[str]:
    """Return the files that are in the folder, as a whole by their size."""
    found = set()
    for name in names:
        with contextlib.suppress(OSError, DamagedError):
            check_size(path / name, (path / name).lstat().st_size, manifest.files[name].num_bytes)
            found.add(name)
    return found


def _write_names(path: Path, names: Collection[str]) -> None:
    replace_file(path / NODE_FILES_NAME, [json.dumps(sorted(names)).encode()])
