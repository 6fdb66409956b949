"""--profile: torch's profiler over a few iterations of some ranks; a trace file a rank, and a table of the first.

iteration ... 10 | 11 | 12 | 13 ...        --profile-step-start 10 --profile-step-end 12 profiles 11 and 12
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatrain.config import Plan
from megatrain.training.trace_summary import summarize


class Profiling:
    """When this rank profiles, and where to.

    Args:
        plan: what was asked for.
        rank: this rank.
        start: the iteration after which this run begins.
    """

    def __init__(self, plan: Plan, *, rank: int, start: int) -> None:
        logging = plan.config.logging
        ranks = logging.profile_ranks or (0,)
        self._is_asked_for = logging.profile
        self._is_on = logging.profile and rank in ranks
        self._first, self._last = max(logging.profile_step_start, start) + 1, logging.profile_step_end
        self._file = profile_folder(plan) / f"rank{rank}.json.gz"
        self._device = plan.derived.device
        self._profile: profile | None = None

    def is_border(self, iteration: int) -> bool:
        """Whether profiling, of any rank, begins behind this iteration or ends with it."""
        return self._is_asked_for and iteration in (self._first - 1, self._last)

    def before_iteration(self, iteration: int) -> None:
        """Begin, if `iteration` is the first one to profile."""
        if self._is_on and iteration == self._first <= self._last:
            self._wait()
            activities = [ProfilerActivity.CPU]
            if self._device == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def after_iteration(self, iteration: int) -> str | None:
        """End, if `iteration` is the last one; what there is to say then."""
        if self._profile is None or iteration < self._last:
            return None
        self._wait()
        self._profile.stop()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._file))
        self._profile = None
        with gzip.open(self._file) as file:
            summary = summarize(json.load(file)["traceEvents"], num_steps=self._last - self._first + 1)
        return f"> profiled iterations {self._first} to {self._last}: {self._file}\n{summary.text()}"

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def profile_folder(plan: Plan) -> Path:
    """Where the traces go: --profile-dir, else beside the checkpoints, else into the current folder."""
    logging, save = plan.config.logging, plan.config.checkpoint.save
    if logging.profile_dir is not None:
        return Path(logging.profile_dir)
    return Path(save) / "profile" if save is not None else Path("profile")
