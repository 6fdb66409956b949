"""A disk whose operations kill processes: in a rank, and in the writer process, which does not import torch.

The plan of a kill is a string, so that it can be passed to the program of the writer process.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

from megatrain.checkpoint.writer_process import serve
from megatrain.storage.disk import Disk


@dataclass(frozen=True, kw_only=True)
class KillPlan:
    """A moment of the save of an iteration, and what is killed then."""

    iteration: int
    """0: the delay begins with the run, which may still be loading."""
    rank: int = 0
    """The rank whose disk, or whose writer process, reaches the moment."""
    in_writer: bool
    """The moment is one of the writer process, not of the rank."""
    targets: tuple[str, ...]
    """`rank`, `writer` or `job`, killed in this order."""
    operation: str | None = None
    """Name of a disk operation; None: a time after the first operation of the save."""
    occurrence: int = 1
    """Number of the operation among those of this name."""
    place: str = "before"
    """before, inside or after the operation."""
    delay_seconds: float = 0.0
    errno: int | None = None
    """The operation raises this error, and nothing is killed."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> KillPlan:
        return cls(**json.loads(text))


class KillingDisk(Disk):
    """Kills processes as planned.

    Args:
        kill: kills a target by its name.
        count: number of operations so far, shared by the disks of a process: one item.
    """

    def __init__(self, plan: KillPlan | None, kill: Callable[[str], None], count: list[int]) -> None:
        self.plan, self._kill, self._count = plan, kill, count

    def make_folder(self, path: Path) -> None:
        self._around("make_folder", path, lambda: super(KillingDisk, self).make_folder(path))

    def create(self, path: Path) -> FileIO:
        made: list[FileIO] = []
        self._around("create", path, lambda: made.append(super(KillingDisk, self).create(path)))
        return made[0]

    def write(self, file: FileIO, data: bytes | memoryview) -> None:
        half = memoryview(data).cast("B")[: len(memoryview(data).cast("B")) // 2]
        self._around(
            "write",
            Path(str(file.name)),
            lambda: super(KillingDisk, self).write(file, data),
            lambda: super(KillingDisk, self).write(file, half),
        )

    def sync(self, file: FileIO) -> None:
        self._around("sync", Path(str(file.name)), lambda: super(KillingDisk, self).sync(file))

    def sync_folder(self, path: Path) -> None:
        self._around("sync_folder", path, lambda: super(KillingDisk, self).sync_folder(path))

    def rename(self, source: Path, target: Path) -> None:
        self._around("rename", target, lambda: super(KillingDisk, self).rename(source, target))

    def remove(self, path: Path) -> None:
        inner = sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else []
        self._around(
            "remove",
            path,
            lambda: super(KillingDisk, self).remove(path),
            lambda: [super(KillingDisk, self).remove(one) for one in inner[: len(inner) // 2 + 1]],
        )

    def _around(
        self, name: str, path: Path, work: Callable[[], object], half: Callable[[], object] = lambda: None
    ) -> None:
        if not self._is_now(name, path):
            work()
            return
        assert self.plan is not None
        if self.plan.place == "inside":
            half()
        elif self.plan.place == "after":
            work()
        if self.plan.errno is not None:
            raise OSError(self.plan.errno, os.strerror(self.plan.errno))
        self._kill_all()
        if self.plan.place != "after":
            work()  # another process was killed

    def _is_now(self, name: str, path: Path) -> bool:
        """Count the operations of the save since its first one; return whether this is the planned one."""
        plan = self.plan
        if plan is None or (not self._count[0] and f"iter_{plan.iteration:07d}" not in str(path)):
            return False
        if plan.operation is None:
            if not self._count[0]:
                self._count[0] = 1
                timer = threading.Timer(plan.delay_seconds, self._kill_all)
                timer.daemon = True
                timer.start()
            return False
        self._count[0] = max(self._count[0], 1) + (name == plan.operation)
        return name == plan.operation and self._count[0] == plan.occurrence + 1

    def _kill_all(self) -> None:
        assert self.plan is not None
        for target in self.plan.targets:
            self._kill(target)


def serve_killing(plan_text: str, pid_file: str) -> None:
    """Run the writer process on a killing disk; write its id to a file."""
    Path(pid_file).write_text(str(os.getpid()))
    plan = KillPlan.from_text(plan_text) if plan_text else None

    def kill(target: str) -> None:
        if target == "job":
            os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)
        else:
            os.kill(os.getppid() if target == "rank" else os.getpid(), signal.SIGKILL)

    serve(KillingDisk(plan, kill, [0]))
