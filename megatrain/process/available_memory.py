"""Host memory that can still be allocated: of the machine, of the control groups of this process, and of its own limits.

/proc/meminfo   control groups 1 and 2 (containers, jobs of Slurm)  ─> available_bytes    the processes of a host share it
RLIMIT_AS, RLIMIT_DATA (ulimit -v, ulimit -d)                       ─> process_bytes      of this process alone
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_OWN_GROUPS: Final = Path("/proc/self/cgroup")
_ROOT: Final = Path("/sys/fs/cgroup")
_V1_UNLIMITED: Final = 1 << 60
"""Version 1 writes a limit near the largest number where there is none."""


def available_bytes() -> int:
    """Return the host memory that can still be allocated: of the machine, or of this control group or one above it if that is less."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    found = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min([found, *(left for group in control_groups() if (left := group.bytes_left()) is not None)])


def process_bytes() -> int | None:
    """Return the bytes that the limits of this process still allow; None: it has no limits."""
    held = _status_bytes()
    limits = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
    left = [
        resource.getrlimit(limit)[0] - held[name]
        for limit, name in limits
        if resource.getrlimit(limit)[0] != resource.RLIM_INFINITY
    ]
    return max(0, min(left)) if left else None


def held_bytes() -> int:
    """Return the host memory that this process holds (its resident set)."""
    return _status_bytes()["VmRSS"]


def _status_bytes() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith(" kB")}


@dataclass(frozen=True)
class ControlGroup:
    """A folder of a control group, and the names of its files."""

    folder: Path
    limit: str = "memory.max"
    used: str = "memory.current"
    prefix: str = ""
    """Prefix of the keys in `memory.stat` that count the groups below too."""

    def bytes_left(self) -> int | None:
        """Return the memory that the group can still allocate, with its page cache; None: it has no limit."""
        try:
            limit = (self.folder / self.limit).read_text(encoding="ascii").strip()
            used = int((self.folder / self.used).read_text(encoding="ascii"))
            lines = (self.folder / "memory.stat").read_text(encoding="ascii").splitlines()
        except OSError:  # the root, or without a controller of memory
            return None
        if limit == "max" or int(limit) >= _V1_UNLIMITED:
            return None
        statistics = dict(line.split() for line in lines)
        cache = (int(statistics.get(f"{self.prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        return max(0, int(limit) - used + sum(cache))


def control_groups(own: Path = _OWN_GROUPS, root: Path = _ROOT) -> Iterator[ControlGroup]:
    """Yield the control group of this process and those above it; a job of Slurm has a limit in one of these."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:  # no control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for folder in _and_above(root, path):
                yield ControlGroup(folder)
        elif "memory" in controllers.split(","):
            for folder in _and_above(root / "memory", path):
                yield ControlGroup(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _and_above(root: Path, path: str) -> Iterator[Path]:
    group = root / path.strip("/")
    yield from (group, *(above for above in group.parents if above.is_relative_to(root)))
