"""Saves of a run: at once, or in the background with --async-save.

    begin at iteration 100 ─> training continues ─> a step's report: no rank is writing ─> commit ─> older ones are removed
                                                    or the next save, or the end of the run: wait ─┘

All ranks begin and commit in the same places: whether a rank is still writing is one of the flags of every step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatrain.checkpoint.background import BackgroundWriter
from megatrain.checkpoint.errors import CheckpointError, NotFiniteStateError
from megatrain.checkpoint.local.nodes import Node, copy_groups, find_node
from megatrain.checkpoint.local.save import LocalSave
from megatrain.checkpoint.retention import Retention, remove_older
from megatrain.checkpoint.save import DirectWriter, Save
from megatrain.config import Plan
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.process_groups import make_group
from megatrain.storage.disk import Disk
from megatrain.training.checkpoint_copies import copies_of
from megatrain.training.checkpoints import Progress, local_folder, saved_kinds, state_to_save
from megatrain.training.engine import Engine
from megatrain.training.launch.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class SaveTimes:
    """Size and times of a committed save. docs/metrics.md describes the fields."""

    iteration: int
    folder: str
    bytes: int
    """Size of the files of all ranks."""
    stall_ms: float
    """Time that training waited for it, with `commit_ms`."""
    commit_ms: float
    """Time from the request to commit it, which waits for files that are not written yet, to its commit."""
    duration_ms: float
    """Time from its begin to its commit."""


@dataclass(frozen=True)
class _Pending:
    """A save that is not committed yet."""

    save: Save
    begun_at: float
    stall_before: float
    """`RunSaves.stall_seconds` at its begin."""


@dataclass(frozen=True)
class _LocalStorage:
    """Storage of local checkpoints."""

    node: Node
    copies: RankGroup | None
    """Ranks on other nodes that keep copies of this rank's files, with this rank."""


def saves_in_background(plan: Plan) -> bool:
    """Return whether a run copies its state to host memory to save it."""
    checkpoint = plan.config.checkpoint
    return checkpoint.async_save and checkpoint.save is not None and not plan.config.training.only_evaluates


class RunSaves:
    """The checkpoints that a run saves. All ranks make the same calls, except for `is_writing`.

    Args:
        plan: the plan of the run after it has resumed.
        progress: position of the run.
        on_commit: called after each commit.
    """

    def __init__(
        self,
        ranks: Ranks,
        plan: Plan,
        engine: Engine,
        progress: Progress,
        *,
        on_commit: Callable[[SaveTimes], None] = lambda _: None,
    ) -> None:
        self.ranks, self.plan, self.engine, self.progress = ranks, plan, engine, progress
        self.on_commit = on_commit
        self.failure: str | None = None
        """The reason why the last save failed; None: it did not."""
        self.stall_seconds = 0.0
        """Time that training waited for saves so far."""
        self._writer: DirectWriter | BackgroundWriter = DirectWriter(
            engine.optimizer,
            ranks.grid,
            saved_kinds(plan, engine),
            verifies=plan.config.checkpoint.verify_saves,
        )
        self._pending: _Pending | None = None
        self._remover = ThreadPoolExecutor(1, "remove-checkpoints")
        self._removal: Future[list[str]] | None = None
        """Removal of older checkpoints: training does not wait for the deletion of a file of each rank."""
        self._copies = copies_of(plan)
        self._intact = {progress.loaded.resolve()} if progress.loaded is not None else set[Path]()
        """Checkpoints that this run wrote or loaded."""

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Save in the background inside the context, with --async-save. A save that is pending at its end is abandoned.

        The removal of older checkpoints ends with the context in any case.
        """
        try:
            with self._with_writer():
                yield
            self._copy(waits=self.progress.iteration >= self.plan.derived.train_iters)
        finally:
            self._end_removal()
            for copies in self._copies:
                copies.abandon()

    @contextlib.contextmanager
    def _with_writer(self) -> Iterator[None]:
        checkpoint, direct = self.plan.config.checkpoint, self._writer
        if not saves_in_background(self.plan):
            yield
            return
        with self.ranks.phases.phase("allocating host memory for --async-save"):
            background = BackgroundWriter(
                self.engine.optimizer,
                self.ranks.grid,
                direct.kinds,
                verifies=checkpoint.verify_saves,
                cpu_priority=checkpoint.async_ckpt_cpu_priority,
                io_priority=checkpoint.async_ckpt_io_priority,
            )
        self._writer = background
        try:
            yield
        finally:
            self._writer, self._pending = direct, None
            background.close()

    @property
    def is_writing(self) -> bool:
        """This rank is still writing files of a save."""
        return not self._writer.is_ready

    def save(self, folder: Path) -> None:
        """Save this iteration in `folder`, and return once it is committed or has failed.

        Raises:
            CheckpointError: it failed, unless --on-save-failure is warn.
        """
        self.begin(folder)
        self.finish()

    def begin(self, folder: Path) -> None:
        """Begin to save this iteration in `folder`, after a pending save is committed; in the background, return before it is written.

        Raises:
            CheckpointError: see `save`.
        """
        self._commit()
        self._end_removal()
        begun_at, stall = time.perf_counter(), self.stall_seconds
        with self._stalling("saving a checkpoint"), self._failing_by_policy():
            save = self._new_save(
                folder,
                iteration=self.progress.iteration,
                consumed_train_samples=self.progress.consumed_train_samples,
                optimizer_step_count=self.engine.optimizer.step_count,
                grid=self.ranks.grid,
                state=state_to_save(self.ranks, self.plan, self.engine, self.progress),
                config=self.plan.config.to_dict(),
            )
            self._writer.begin(save)
            self._pending = _Pending(save, begun_at, stall)
            if self._writer.is_in_background:
                self.ranks.console.print(f"> saving iteration {save.iteration} in the background")
        if not self._writer.is_in_background:
            self._commit()

    def _new_save(self, folder: Path, **options: Any) -> Save:
        """Return a save in a shared folder, or in the folders of several nodes."""
        if folder != local_folder(self.plan.config.checkpoint) or self._local.node.num_nodes == 1:
            return Save(folder, **options)
        return LocalSave(
            folder, node=self._local.node, copies=self._local.copies, device=self.ranks.device, **options
        )

    @cached_property
    def _local(self) -> _LocalStorage:
        """The node of this rank and the ranks with copies, found at the first local save; all ranks do it together."""
        checkpoint, grid = self.plan.config.checkpoint, self.ranks.grid
        folder, jump = local_folder(checkpoint), checkpoint.replication_jump
        assert folder is not None
        node = find_node(folder, grid)
        if not checkpoint.replication or jump is None or node.num_nodes == 1:
            return _LocalStorage(node, None)
        lists = copy_groups(grid.world.size, factor=checkpoint.replication_factor, jump=jump)
        own = next(ranks for ranks in lists if grid.rank in ranks)
        if any(rank in node.ranks for rank in own if rank != grid.rank):
            self.ranks.console.print(
                f"> WARNING: --replication-jump {jump}: ranks {own} are not all on different nodes"
            )
        handle = make_group("copies of local checkpoints", lists)
        return _LocalStorage(node, RankGroup("copies", tuple(own), own.index(grid.rank), handle))

    def commit_if_written(self, *, is_any_rank_writing: bool) -> None:
        """Commit the pending save, if there is one and no rank is writing its files.

        Raises:
            CheckpointError: see `save`.
        """
        if not is_any_rank_writing:
            self._commit()

    def finish(self) -> None:
        """Commit the pending save, if there is one, once its files are written, and end the removal of older ones.

        Raises:
            CheckpointError: see `save`.
        """
        self._commit()
        self._end_removal()

    def _commit(self) -> None:
        if self._pending is None:
            return
        if self.is_writing:
            iteration = self._pending.save.iteration
            self.ranks.console.print(f"> waiting until iteration {iteration} is written")
        pending, self._pending = self._pending, None
        save = pending.save
        with self._failing_by_policy():
            start = time.perf_counter()
            with self._stalling("committing a checkpoint"):
                path = self._writer.commit()
            end = time.perf_counter()
            times = SaveTimes(
                iteration=save.iteration,
                folder=str(save.folder),
                bytes=save.committed_bytes,
                stall_ms=1000 * (self.stall_seconds - pending.stall_before),
                commit_ms=1000 * (end - start),
                duration_ms=1000 * (end - pending.begun_at),
            )
            self.failure = None
            self.ranks.console.print(
                f"> committed iteration {save.iteration} to {path}: saved in {times.duration_ms / 1000:.1f} s,"
                f" training waited {times.stall_ms / 1000:.1f} s"
            )
            self._intact.add(path.resolve())
            self._remove_older(save)
            for copies in self._copies:
                if save.is_committing and save.folder == copies.save and copies.takes(save.iteration):
                    copies.add(path)
            self._copy(waits=False)
            self.on_commit(times)

    def _remove_older(self, save: Save) -> None:
        """Begin to remove the checkpoints that are not kept after this one; rank 0 does it, and a rank of each node with local ones."""
        checkpoint = self.plan.config.checkpoint
        rule = Retention(keep_last=checkpoint.keep_last, retain_interval=checkpoint.save_retain_interval)
        frequent = checkpoint.non_persistent_folder
        if frequent is not None and save.folder == Path(frequent):
            rule = Retention(keep_last=1)
        if save.is_committing:
            self._end_removal()
            self._removal = self._remover.submit(
                remove_older, save.folder, save.iteration, rule, Disk(), intact=set(self._intact)
            )

    def _copy(self, *, waits: bool) -> None:
        """Begin the next copy for other programs, or wait for the last one, and print those that failed."""
        for copies in self._copies:
            with self._stalling(f"copying a checkpoint to {copies.folder}"):
                for line in copies.advance(waits=waits):
                    self.ranks.console.print(line)

    def _end_removal(self) -> None:
        """Wait for the removal of older checkpoints, if there is one, and print what it did."""
        removal, self._removal = self._removal, None
        for line in removal.result() if removal is not None else ():
            self.ranks.console.print(f"> {line}")

    @contextlib.contextmanager
    def _stalling(self, what: str) -> Iterator[None]:
        """Count the time in which training waits."""
        start = time.perf_counter()
        try:
            with self.ranks.phases.heartbeat(what):
                yield
        finally:
            self.stall_seconds += time.perf_counter() - start

    @contextlib.contextmanager
    def _failing_by_policy(self) -> Iterator[None]:
        """Remember a save that fails, on all ranks, and raise its error unless --on-save-failure is warn.

        State that is not finite always ends the run: it would never be saved again.
        """
        try:
            yield
        except CheckpointError as error:
            self.failure = error.problems[0].text
            is_fatal = isinstance(error, NotFiniteStateError)
            if is_fatal or self.plan.config.checkpoint.on_save_failure == "stop":
                raise
            self.ranks.console.print(
                f"> WARNING: {self.failure}; training continues (--on-save-failure warn), and the next save tries again"
            )
