"""A save in a folder of each node: all nodes commit it, or none loads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint.chunks import PlannedChunk
from megatrain.checkpoint.errors import CheckpointError, agree
from megatrain.checkpoint.find import NODE_FILES_NAME
from megatrain.checkpoint.local.nodes import Node
from megatrain.checkpoint.local.transfer import Transfer, raise_first, send, send_bytes
from megatrain.checkpoint.manifest import MANIFEST_NAME, Manifest, encode
from megatrain.checkpoint.save import (
    Save,
    begin_save,
    check_written,
    merge_reports,
    remove_leftovers,
    rename_whole,
)
from megatrain.parallel.grid import RankGroup
from megatrain.storage.disk import write_file


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
        messages, own, of_rank_0 = self.grid.messages, list[dict[str, Any]](), list[tuple[Manifest, bytes]]()

        def write() -> list[dict[str, Any]]:
            with self._sized_errors():
                own.extend(written())
            return own

        def merged(reports: list[Any]) -> int:
            manifest = merge_reports(reports, **self._contents)
            text = encode(manifest)
            of_rank_0.append((manifest, text))
            return len(text)

        def count_files(of_ranks: list[list[str]]) -> int:
            files = of_rank_0[0][0].files
            for name in sorted(set(files) - {name for names in of_ranks for name in names}):
                raise CheckpointError(
                    f"{self.temporary / name}: no node sees the file as it was written",
                    fix="give --non-persistent-local-ckpt-dir a folder on a disk of each node",
                )
            return sum(file.num_bytes for file in files.values())

        with self._cleaned_up():
            num_bytes = agree(write, messages, then=merged)
            # Not through the store of all ranks: it would have to send it once to each of them.
            text = send_bytes(
                of_rank_0[0][1] if of_rank_0 else None,
                num_bytes,
                self.grid.world,
                self.device,
                wants=self.is_committing,
            )
            sizes = {report["name"]: report["file"]["num_bytes"] for report in own}
            if self.copies is not None:
                sizes |= self._copy(list(sizes.items()))
            agree(lambda: self._check(sizes), messages)
            self.committed_bytes = agree(lambda: self._describe(text), messages, then=count_files)
            agree(self._rename, messages)
        if self.is_committing:
            remove_leftovers(self.folder, self.disk)
        return self.final

    def _copy(self, own: Sequence[tuple[str, int]]) -> dict[str, int]:
        """Store the files of the other ranks with copies on this node; return their sizes."""
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
        return {one.name: one.num_bytes for one in transfers if self.grid.rank in one.targets}

    def _check(self, sizes: Mapping[str, int]) -> None:
        """Check the files that this rank has written here, its own and its copies of others."""
        for name, num_bytes in sizes.items():
            if (self.temporary / name).exists():  # else rank 0 finds that no node has it
                check_written(self.temporary / name, num_bytes)

    def _describe(self, manifest: bytes) -> list[str]:
        """Write the manifest and the names of the node's files; return these names."""
        if not self.is_committing:
            return []
        with self._sized_errors():
            write_file(self.disk, self.temporary / MANIFEST_NAME, manifest)
            names = sorted(path.name for path in self.temporary.glob("*.safetensors"))
            write_file(self.disk, self.temporary / NODE_FILES_NAME, json.dumps(names).encode())
            self.disk.sync_folder(self.temporary)
        return names

    def _rename(self) -> None:
        if self.is_committing:
            with self._sized_errors():
                rename_whole(self.temporary, self.final, self.iteration, self.disk)
