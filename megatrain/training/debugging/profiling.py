"""--profile: torch's profiler over a few iterations of some ranks; a trace file a rank, and a table of the first.

iteration ... 10 | 11 | 12 | 13 ...        --profile-step-start 10 --profile-step-end 12 profiles 11 and 12

A run that ends before iteration 12, in order or by an exception, writes what was recorded until then, and says so.
"""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatrain.config import Plan
from megatrain.training.debugging.trace_summary import ITERATIONS, read_trace

_SECONDS_TO_REST = 30.0
"""Longest that a failed rank waits for its GPU, which may itself wait for another rank's."""


class Profiling:
    """When this rank profiles, and where to.

    Args:
        plan: what was asked for.
        rank: this rank.
        start: the iteration after which this run begins.
    """

    def __init__(self, plan: Plan, *, rank: int, start: int) -> None:
        logging = plan.config.logging
        ranks = sorted(set(logging.profile_ranks or (0,)))
        self._is_on = logging.profile and rank in ranks
        self._first, self._last = max(logging.profile_step_start, start) + 1, logging.profile_step_end
        self._is_asked_for = logging.profile
        self._is_over = not logging.profile or self._first > self._last
        self._begun = start
        """The newest iteration that has begun."""
        self._folder = profile_folder(plan)
        self._file = self._folder / f"rank{rank}.json.gz"
        self._others = [other for other in ranks if other != rank]
        self._device = plan.config.training.device
        self._profile: profile | None = None
        self._is_recording = False

    def note(self) -> str | None:
        """What to say when the run begins: that it begins behind the iterations to profile."""
        if not self._is_asked_for or self._first <= self._last:
            return None
        return (
            f"> --profile-step-end {self._last}: nothing is profiled, as the run goes on from iteration "
            f"{self._first - 1}"
        )

    def is_border(self, iteration: int) -> bool:
        """Whether profiling, of any rank, begins behind this iteration or ends with it."""
        return self._is_asked_for and iteration in (self._first - 1, self._last)

    def before_iteration(self, iteration: int) -> None:
        """Begin, if `iteration` is the first one to profile."""
        self._begun = iteration
        if self._is_on and iteration == self._first <= self._last:
            self._wait()
            activities = [ProfilerActivity.CPU]
            if self._device == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
            self._is_recording = True

    def after_iteration(self, iteration: int, *, is_stopping: bool = False) -> str | None:
        """End, if `iteration` is the last one; what there is to say then.

        A run that stops records no further, so that its checkpoint is no part of the step; `at_end` writes the trace.
        """
        if self._is_over or (iteration < self._last and not is_stopping):
            return None
        self._stop()
        if iteration < self._last:
            return None
        return self._written(f"profiled iterations {self._first} to {self._last}")

    def at_end(self, reason: str | None) -> str | None:
        """What there is to say of a run that has ended in order, by `reason` or as it was done, with profiling undone."""
        if self._is_over:
            return None
        why = reason or "the run is done"
        if self._begun < self._first:
            return f"> nothing was profiled: {why} at iteration {self._begun}, and --profile-step-start is {self._first - 1}"
        return self._written(self._cut_short(why))

    def at_failure(self, error: BaseException) -> str | None:
        """Write what this rank has recorded when an exception ends its run; what there is to say then."""
        if self._profile is None:
            return None
        self._others = []  # whoever failed ends them, and most write nothing
        try:
            self._rest()
            return self._written(self._cut_short(type(error).__name__))
        except Exception as problem:  # noqa: BLE001 (`error` is what the user has to see)
            return (
                f"> the profile from iteration {self._first} on is lost: {type(problem).__name__}: {problem}"
            )

    def _cut_short(self, why: str) -> str:
        return f"profiling was cut short ({why}), iterations {self._first} to {self._begun} instead of {self._last}"

    def _written(self, what: str) -> str:
        """Write this rank's trace, if it has one; its table, and where those of the others are."""
        self._is_over = True
        lines = [f"> {what}"]
        if self._profile is not None:
            self._stop()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._file))
            self._profile = None
            lines = [f"> {what}: {self._file}", read_trace(self._file).text()]
        if self._others:
            one_or_more = "trace of rank" if len(self._others) == 1 else "traces of ranks"
            ranks = ", ".join(map(str, self._others))
            files = ", ".join(str(self._folder / f"rank{other}.json.gz") for other in self._others)
            lines.append(f"> {one_or_more} {ranks}: {files}; `megatrain trace FILE` prints a file's table")
        return "\n".join(lines)

    def _stop(self) -> None:
        """Record no further."""
        if self._profile is not None and self._is_recording:
            self._is_recording = False
            self._wait()
            self._profile.add_metadata_json(ITERATIONS, json.dumps([self._first, self._begun]))
            self._profile.stop()

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _rest(self) -> None:
        """Wait for the GPU, though not for ever: it may wait for a rank that waits for this one."""
        if self._device != "cuda":
            return
        device = torch.cuda.current_device()

        def wait() -> None:
            with contextlib.suppress(Exception):  # it comes again where the profiler waits
                torch.cuda.synchronize(device)

        waiting = threading.Thread(target=wait, name="waiting for the GPU", daemon=True)
        waiting.start()
        waiting.join(_SECONDS_TO_REST)
        if waiting.is_alive():
            raise TimeoutError(f"the GPU was still busy {_SECONDS_TO_REST:.0f} s after the failure")


def profile_folder(plan: Plan) -> Path:
    """Where the traces go: --profile-dir, else beside the checkpoints, else into the current folder."""
    logging, save = plan.config.logging, plan.config.checkpoint.save
    if logging.profile_dir is not None:
        return Path(logging.profile_dir)
    return Path(save) / "profile" if save is not None else Path("profile")
