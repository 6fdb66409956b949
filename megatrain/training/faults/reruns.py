"""Computes a rejected step again, to distinguish a faulty device from a bug or bad data (--rerun-mode, as in Megatron-LM).

    the step is rejected ─> again on the same devices, with the same weights and samples
        accepted ─> transient error of a device: saved, exit code 17
        rejected ─> saved with the suspects, exit code 16 ─> the resumed run computes it on other devices
            accepted ─> persistent error of a suspect, exit code 17
            rejected ─> no device is at fault, exit code 17                 on a suspect ─> exit code 16 again

A step is rejected if its loss or gradient norm is not finite, or by --error-injection-rate. `<save>/rerun.json` has the suspects.
A spike (--check-for-spiky-loss, --check-for-large-grads) is a transient error if its values do not come again; else --on-spike applies.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from megatrain.config.schema.training import ResilienceConfig
from megatrain.parallel.batch import Batch
from megatrain.storage.files import read_regular, replace_file
from megatrain.storage.untrusted_json import integer, list_of, parse_json, record, text
from megatrain.training.engine import Engine
from megatrain.training.faults.bad_steps import NotFiniteError
from megatrain.training.launch.ranks import Ranks

FILE_NAME: Final = "rerun.json"
RESUME_TO_DISAMBIGUATE, FAILED_VALIDATION = 16, 17
"""Exit codes of Megatron-LM."""
_MAX_BYTES: Final = 1 << 20
_RECORD: Final = record({"iteration": integer(1), "devices": list_of(text(max_characters=200))})
_RESUME = "resume from the last checkpoint"


def recompute(engine: Engine, batches: Sequence[Batch], *, first_sample: int) -> dict[str, float]:
    """Return loss and gradient norm of a step with the present weights, which it does not change. Dropout is keyed by samples."""
    losses = engine.accumulate_gradients(batches, first_sample=first_sample)
    norm = engine.optimizer.gradient_norm() / engine.loss_scaler.scale
    engine.buffers.gradients.zero()
    return {"lm loss": losses.lm_loss.item(), "grad norm": norm.item()}


class RejectedResultError(NotFiniteError):
    """A step was rejected and computed again; `exit_code` is Megatron-LM's. Raised on all ranks."""

    def __init__(self, problem: str, *, fix: str, exit_code: int) -> None:
        super().__init__(problem, fix=fix)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Suspects:
    """The devices that computed a rejected step twice with one result."""

    iteration: int
    devices: Sequence[str]


@dataclass(kw_only=True)
class Differences:
    """Relative differences between two computations of each step (--rerun-mode report_stats)."""

    largest: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0

    def add(self, first: dict[str, float], second: dict[str, float]) -> None:
        """Add a step that was computed twice."""
        self.num_steps += 1
        for name, value in first.items():
            scale = max(abs(value), abs(second[name]))
            difference = abs(value - second[name]) / scale if scale else 0.0
            self.largest[name] = max(self.largest.get(name, 0.0), difference)

    def take(self) -> str:
        """Return a line about the steps since the last call."""
        values = ", ".join(f"{name} {value:.3g}" for name, value in self.largest.items())
        line = f"> {self.num_steps} step{' was' if self.num_steps == 1 else 's were'} computed twice; largest relative difference: {values}"
        self.largest, self.num_steps = {}, 0
        return line


class Reruns:
    """The diagnosis of rejected steps. All ranks make the same calls.

    Args:
        ranks: this process among its peers.
        resilience: settings of the run.
        seed: of the iterations with an injected error.
        save: folder of `rerun.json`; None: the run has no --save.
        start: iteration of the checkpoint that was loaded.
        passed_over: iterations that are not computed.

    Raises:
        RejectedResultError: a suspect of the step before is part of this run.
    """

    def __init__(
        self,
        ranks: Ranks,
        resilience: ResilienceConfig,
        *,
        seed: int,
        save: Path | None,
        start: int,
        passed_over: Collection[int] = (),
    ) -> None:
        self.ranks, self.seed, self.start, self.passed_over = ranks, seed, start, passed_over
        self.rate, self.injected_type = resilience.error_injection_rate, resilience.error_injection_type
        self.validates = resilience.rerun_mode == "validate_results"
        self.reports = resilience.rerun_mode == "report_stats"
        self.differences = Differences()
        self._file = save / FILE_NAME if save is not None else None
        self.suspects = self._resumed() if self.validates and self._file is not None else None

    def injects(self, iteration: int) -> bool:
        """Return whether this iteration is rejected by --error-injection-rate; never the first one after a start."""
        if not self.rate:
            return False
        if self.suspects is not None and iteration == self.suspects.iteration:
            return self.injected_type == "correct_result"  # else other devices compute it right
        if iteration == self.start + 1:
            return False
        return random.Random(f"{self.seed} {iteration}").randrange(self.rate) == 0  # noqa: S311

    def is_rejected_again(self, iteration: int, *, is_finite: bool) -> bool:
        """Return whether the second computation on the same devices is rejected too."""
        return not is_finite or (self.injects(iteration) and self.injected_type != "transient_error")

    def diagnose(
        self, iteration: int, *, is_rejected_again: bool, culprits: Sequence[int]
    ) -> RejectedResultError:
        """Return the error of a rejected step, and record or forget the suspects.

        Args:
            culprits: the ranks that were the first with a value that is not finite; none: all are suspects.
        """
        where = self._devices(culprits)
        if not is_rejected_again:
            self._write(None)
            return RejectedResultError(
                f"iteration {iteration}: transient error: computed again on the same devices, the step has another result; suspects: {_listed(where)}",
                fix=f"{_RESUME}, and test these devices if it happens again",
                exit_code=FAILED_VALIDATION,
            )
        if self.suspects is not None and self.suspects.iteration == iteration:
            self._write(None)
            return RejectedResultError(
                f"iteration {iteration}: the result is the same on other devices: the data or the program is the cause, no device",
                fix=f"inspect the samples, or pass over them with --iterations-to-skip {iteration - 1}",
                exit_code=FAILED_VALIDATION,
            )
        if self._file is None:
            return RejectedResultError(
                f"iteration {iteration}: the step has the same result when it is computed again on the same devices",
                fix="add --save, so that it can be computed on other devices",
                exit_code=FAILED_VALIDATION,
            )
        self._write(Suspects(iteration=iteration, devices=where))
        return RejectedResultError(
            f"iteration {iteration}: the step has the same result when it is computed again on the same devices; suspects: {_listed(where)}",
            fix=f"{_RESUME} without these devices, to distinguish their fault from one of the data or the program; or pass over"
            f" the step with --iterations-to-skip {iteration - 1}",
            exit_code=RESUME_TO_DISAMBIGUATE,
        )

    def check_accepted(self, iteration: int) -> None:
        """Act on an accepted step: the suspects are guilty if they computed it before.

        Raises:
            RejectedResultError: they are.
        """
        suspects = self.suspects
        if suspects is None or suspects.iteration != iteration:
            return
        self._write(None)
        raise RejectedResultError(
            f"iteration {iteration}: persistent error: the step is right on other devices; suspects: {_listed(suspects.devices)}",
            fix=f"leave out these devices, and {_RESUME}",
            exit_code=FAILED_VALIDATION,
        )

    def _resumed(self) -> Suspects | None:
        """Return the suspects of the run that this one continues, if this run is to compute their step."""
        stored = self.ranks.grid.messages.broadcast(self._read() if self.ranks.is_main else None)
        if stored is None:
            return None
        suspects = Suspects(**stored)
        if suspects.iteration <= self.start or suspects.iteration in self.passed_over:
            self._write(None)
            return None
        present = sorted(set(self._devices(())) & set(suspects.devices))
        if present:
            raise RejectedResultError(
                f"iteration {suspects.iteration} must be computed on other devices: this run has {_listed(present)}",
                fix="start it without these devices, or with --rerun-mode disabled",
                exit_code=RESUME_TO_DISAMBIGUATE,
            )
        self.ranks.console.print(
            f"> iteration {suspects.iteration} is computed again, without {_listed(suspects.devices)}"
        )
        return suspects

    def _read(self) -> Any:
        """Return the content of the file; None: there is none, or it is damaged."""
        assert self._file is not None
        try:
            stored = parse_json(read_regular(self._file, max_bytes=_MAX_BYTES), max_bytes=_MAX_BYTES)
            _RECORD(stored, FILE_NAME)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self.ranks.console.print(f"> WARNING: {self._file} is ignored: {error}")
            return None
        return stored

    def _write(self, suspects: Suspects | None) -> None:
        """Store suspects, or remove the file."""
        if self._file is None or not self.ranks.is_main:
            return
        if suspects is None:
            self._file.unlink(missing_ok=True)
        else:
            replace_file(self._file, [json.dumps(asdict(suspects)).encode()])

    def _devices(self, ranks: Sequence[int]) -> list[str]:
        """Return the devices of these ranks, or of all; all ranks call it."""

        def chosen(devices: list[str]) -> list[str]:
            return sorted({devices[rank] for rank in ranks or range(len(devices))})

        found: list[str] = self.ranks.grid.messages.gather_and_broadcast(
            device_name(self.ranks.device), chosen
        )
        return found


def device_name(device: torch.device) -> str:
    """Return a name that a device keeps in every job: host and GPU."""
    host = socket.gethostname()
    if device.type != "cuda":
        return f"{host} cpu"
    return f"{host} GPU-{torch.cuda.get_device_properties(device).uuid}"


def _listed(devices: Sequence[str]) -> str:
    shown = ", ".join(devices[:8])
    return shown + (f" and {len(devices) - 8} more" if len(devices) > 8 else "")
