"""--profile: torch's profiler over a few iterations of some ranks; a trace file per rank, and the table of rank 0's trace.

iteration ... 10 | 11 | 12 | 13 ...        --profile-step-start 10 --profile-step-end 12 profiles 11 and 12

On a GPU the recording begins one iteration earlier, before which the host waits: the table leaves it out, since its kernels wait for
the host more than those of other iterations.

A run that ends before iteration 12, also by an exception, writes the trace recorded so far and reports that.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import emit_nvtx
from torch.profiler import ProfilerActivity, profile, record_function

from megatrain.config import Plan
from megatrain.config.errors import InputError
from megatrain.training.debugging.trace_summary import FIRST_ITERATION, ITERATIONS, read_trace

_MAX_SYNCHRONIZE_SECONDS = 30.0
"""Timeout of a failed rank that waits for its GPU, which may itself wait for another rank."""


class Profiling:
    """The profiler of one rank.

    Args:
        plan: the plan of the run.
        rank: this rank.
        start: completed iterations when the run starts or resumes.
        waits_after: returns whether the host waits after an iteration anyway, for an evaluation or a save.
    """

    def __init__(
        self, plan: Plan, *, rank: int, start: int, waits_after: Callable[[int], bool] = lambda _: False
    ) -> None:
        self._logging = logging = plan.config.logging
        ranks = sorted(set(logging.profile_ranks or (0,)))
        self._is_profiled_rank = logging.profile and rank in ranks
        self._first, self._last = max(logging.profile_step_start, start) + 1, logging.profile_step_end
        self._is_done = not logging.profile or self._first > self._last
        self._newest = start
        """Number of the newest iteration that has started."""
        self._folder = profile_folder(plan)
        self._file = self._folder / f"rank{rank}.json.gz"
        self._others = [other for other in ranks if other != rank]
        self._device = plan.config.training.device
        self._has_two_threads = plan.config.experts.overlap_moe_expert_parallel_comm
        self._profile: profile | None = None
        self._is_recording = False
        self._has_ranges = logging.nvtx_ranges and self._device == "cuda"
        has_queue = self._device == "cuda" and not self._has_ranges
        earlier = self._first - 1
        self._begin = earlier if has_queue and earlier > start and not waits_after(earlier) else self._first
        """The first iteration that is recorded."""
        self._ranges: emit_nvtx | None = None
        self._history: Path | None = None
        if logging.record_memory_history and self._device == "cuda" and rank in ranks:
            file = Path(logging.memory_snapshot_path)
            self._history = file.with_stem(f"{file.stem}{rank}") if len(ranks) > 1 else file
            torch.cuda.memory._record_memory_history(max_entries=100_000)  # noqa: SLF001 (its only name)

    def start_message(self) -> str | None:
        """Return a message if the run starts after the iterations to profile."""
        if not self._logging.profile or self._first <= self._last:
            return None
        return (
            f"> --profile-step-end {self._last}: nothing is profiled, because the run resumes from iteration "
            f"{self._first - 1}"
        )

    def is_boundary(self, iteration: int) -> bool:
        """Return whether any rank's profiling starts or ends after this iteration."""
        return self._logging.profile and iteration in (self._begin - 1, self._last)

    def before_iteration(self, iteration: int) -> None:
        """Start the profiler if `iteration` is the first one to record, and mark the first one to profile."""
        self._newest = iteration
        if self._is_recording and iteration == self._first:
            with record_function(FIRST_ITERATION):
                return
        if self._is_profiled_rank and iteration == self._begin and self._first <= self._last:
            self._synchronize()
            if self._has_ranges:
                torch.cuda.profiler.start()
                self._ranges = emit_nvtx(record_shapes=self._logging.record_shapes)
                self._ranges.__enter__()
                return
            activities = [ProfilerActivity.CPU]
            if self._device == "cuda":
                activities.append(ProfilerActivity.CUDA)
            config = _ExperimentalConfig(profile_all_threads=self._has_two_threads)
            self._profile = profile(
                activities=activities,
                record_shapes=self._logging.record_shapes,
                with_stack=self._logging.pytorch_profiler_collect_callstack,
                experimental_config=config,
            )
            self._profile.start()
            self._is_recording = True

    def after_iteration(self, iteration: int, *, is_stopping: bool = False) -> str | None:
        """Stop the profiler if `iteration` is the last one to profile, and return the message to print.

        A run that stops also stops the profiler, so that its last checkpoint is not recorded; `at_end` writes the trace.
        """
        if is_stopping or iteration % self._logging.log_interval == 0:
            self._write_history()
        if self._is_done or (iteration < self._last and not is_stopping):
            return None
        self._stop()
        if iteration < self._last:
            return None
        return self._written(f"profiled iterations {self._first} to {self._last}")

    def at_end(self, reason: str | None) -> str | None:
        """Write the trace of a run that ended before the last iteration to profile; return the message to print.

        Args:
            reason: why the run stopped; None: it is done.
        """
        if self._is_done:
            return None
        why = reason or "the run is done"
        if self._newest < self._first:
            self._stop()
            return f"> nothing was profiled: {why} at iteration {self._newest}, and --profile-step-start is {self._first - 1}"
        return self._written(self._cut_short(why))

    def at_failure(self, error: BaseException) -> str | None:
        """Write the trace recorded so far when an exception ends the run; return the message to print."""
        if self._profile is None and self._history is None:
            return None
        self._others = []  # they are terminated, and most write no trace
        try:
            self._write_history()
            if self._profile is None:
                return None
            self._synchronize_with_timeout()
            if self._newest < self._first:
                self._stop()
                return None
            return self._written(self._cut_short(type(error).__name__))
        except Exception as problem:  # noqa: BLE001 (the user has to see `error`)
            return (
                f"> the profile from iteration {self._first} on is lost: {type(problem).__name__}: {problem}"
            )

    def _cut_short(self, why: str) -> str:
        return f"profiling was cut short ({why}), iterations {self._first} to {self._newest} instead of {self._last}"

    def _written(self, message: str) -> str:
        """Write this rank's trace if it has one; return the message, the table and the files of other ranks."""
        self._is_done = True
        lines = [f"> {message}"]
        if self._profile is not None:
            self._stop()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._file))
            self._profile = None
            lines = [f"> {message}: {self._file}", self._table()]
        if self._has_ranges:
            lines = [f"> {message}: as NVTX ranges, for Nsight Systems"]
        elif self._others:
            label = "trace of rank" if len(self._others) == 1 else "traces of ranks"
            ranks = ", ".join(map(str, self._others))
            files = ", ".join(str(self._folder / f"rank{other}.json.gz") for other in self._others)
            lines.append(f"> {label} {ranks}: {files}; `megatrain trace FILE` prints a file's table")
        return "\n".join(lines)

    def _table(self) -> str:
        try:
            return read_trace(self._file).text()
        except InputError as error:  # another format of torch's does not end the run
            return f"WARNING: the trace has no table: {error.problems[0].text}"

    def _stop(self) -> None:
        """Stop the profiler."""
        if self._ranges is not None:
            self._synchronize()
            self._ranges.__exit__(None, None, None)
            self._ranges = None
            torch.cuda.profiler.stop()
        if self._profile is not None and self._is_recording:
            self._is_recording = False
            self._synchronize()
            self._profile.add_metadata_json(ITERATIONS, json.dumps([self._first, self._newest]))
            self._profile.stop()

    def _write_history(self) -> None:
        """Write the newest allocations, if they are recorded."""
        if self._history is not None:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self._history))  # noqa: SLF001 (its only name)

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _synchronize_with_timeout(self) -> None:
        """Wait for the GPU with a timeout: it may wait for a rank that waits for this one."""
        if self._device != "cuda":
            return
        device = torch.cuda.current_device()

        def wait() -> None:
            with contextlib.suppress(Exception):  # the profiler raises it again
                torch.cuda.synchronize(device)

        waiting = threading.Thread(target=wait, name="waiting for the GPU", daemon=True)
        waiting.start()
        waiting.join(_MAX_SYNCHRONIZE_SECONDS)
        if waiting.is_alive():
            raise TimeoutError(f"the GPU was still busy {_MAX_SYNCHRONIZE_SECONDS:.0f} s after the failure")


def profile_folder(plan: Plan) -> Path:
    """Return --profile-dir, else `profile` in the --save folder, else `profile` in the current folder."""
    logging, save = plan.config.logging, plan.config.checkpoint.save
    if logging.profile_dir is not None:
        return Path(logging.profile_dir)
    return Path(save) / "profile" if save is not None else Path("profile")
