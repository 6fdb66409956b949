"""The classes of the bench by their letters, with the number of cases of a full run."""

from __future__ import annotations

from collections.abc import Callable

from faults.case import Cases
from faults.corruptions import corruptions
from faults.crash_states import crash_states
from faults.hostile import hostile_files
from faults.kills import kills
from faults.layouts import layout_pairs
from faults.restarts import JOBS, restarts
from faults.run_time import run_time_faults
from faults.storage import storage_faults

ALL = 1 << 30
CLASSES: dict[str, Callable[..., Cases]] = {
    "T": layout_pairs,
    "K": kills,
    "R": run_time_faults,
    "J": restarts,
    "X": hostile_files,
    "C": corruptions,
    "E": crash_states,
    "S": storage_faults,
}
"""In the order in which they start: those that take longest come first."""
FULL = {"K": 300, "E": 2000, "C": 5000, "S": ALL, "T": ALL, "X": ALL, "R": ALL, "J": len(JOBS)}
TITLES = {
    "K": "kills",
    "E": "crash states",
    "C": "corruptions",
    "S": "storage faults",
    "R": "run-time faults",
    "J": "restarts in the job",
    "T": "pairs of layouts",
    "X": "hostile files",
}
RANDOM, LISTED = "KEC", "SXRJ"
"""Classes whose cases are drawn at random, and listed: several processes share them, by seeds and by parts."""
