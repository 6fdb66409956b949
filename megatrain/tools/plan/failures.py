"""Losses of a run to failures and saves, and its best save interval.

    lost = saves a day x wait of a save + failures a day x (detect + restart + computed again: half a save interval)

The best interval is Young's: sqrt(2 x wait of a save x time between failures).

Sources: J. Young, "A first order approximation to the optimum checkpoint interval", 1974; Llama Team, "The Llama 3 Herd of Models",
arXiv:2407.21783, section 3.3.4: 419 unexpected interruptions of 16,384 H100s in 54 days.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from megatrain.config.errors import ConfigError
from megatrain.tools.subcommands import CommandParser
from megatrain.training.restarts.rendezvous import RECORD_NAME

PUBLISHED_RATE: Final = 419 / 54 / 16_384
"""Failures of a GPU a day, with its share of host, network and software."""
SHARE_OF_HANGS: Final = 0.25
"""Failures that end no process: the others wait until a collective times out."""
DEFAULT_RESTART: Final = 330.0
"""Seconds of a restart of all processes."""
_DAY: Final = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Losses of a run, as shares of its time; times in seconds."""

    failures_a_day: float
    step: float
    interval: float
    """Training time between saves."""
    save: float
    """Time that training waits for a save."""
    restart: float
    """Time from the end of the failed ranks to the next step."""
    hang: float
    """Time until a rank that hangs is found."""
    num_restarts: int = 0
    """Measured restarts, whose median is `restart`; 0: there are none."""

    @property
    def seconds(self) -> dict[str, float]:
        """Lost seconds a day, by cause."""
        failures = self.failures_a_day
        return {
            "saves": _DAY / self.interval * self.save,
            "hangs until found": failures * SHARE_OF_HANGS * self.hang,
            "restarts": failures * self.restart,
            "computed again": failures * self.interval / 2,
        }

    @property
    def share(self) -> float:
        return min(sum(self.seconds.values()) / _DAY, 1.0)

    @property
    def best_interval(self) -> float:
        """Interval with the smallest loss, at least a step and at most a day."""
        between = _DAY / self.failures_a_day
        return min(max(math.sqrt(2 * self.save * between), self.step), _DAY)


def add_flags(parser: CommandParser) -> None:
    """Add the flags about failures."""
    parser.add("--failures", "also print what failures and saves cost a day, and the best save interval")
    parser.add(
        "--failures-a-day X",
        f"failures of the whole run a day (default: {PUBLISHED_RATE:.2g} for each GPU)",
        of=float,
        above=0,
    )
    parser.add(
        "--restart-seconds X",
        "time of a restart, from its failure to the next step"
        f" (default: median of {RECORD_NAME} in --save, or {DEFAULT_RESTART:g})",
        of=float,
        above=0,
    )
    parser.add("--hang-seconds X", "time until a hang is found", 600.0, above=0)
    parser.add("--save-seconds X", "time that training waits for a save", 5.0, above=0)


def measured_restarts(save: str | None) -> list[float]:
    """Return the seconds of the restarts that a run has recorded in --save. Raises ConfigError: the record is damaged."""
    path = Path(save or "") / RECORD_NAME
    if save is None or not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8") as lines:
            return [float(json.loads(line)["seconds"]) for line in lines]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is damaged: {error}", fix="remove it, or give --restart-seconds"
        ) from error


def losses(
    arguments: argparse.Namespace, *, num_gpus: int, step: float, save_interval: int | None, save: str | None
) -> Losses:
    """Return the losses at --save-interval, or at the best one if it is not given."""
    restarts = [] if arguments.restart_seconds is not None else measured_restarts(save)
    found = Losses(
        failures_a_day=arguments.failures_a_day or PUBLISHED_RATE * num_gpus,
        step=step,
        interval=step * (save_interval or 1),
        save=arguments.save_seconds,
        restart=statistics.median(restarts) if restarts else arguments.restart_seconds or DEFAULT_RESTART,
        num_restarts=len(restarts),
        hang=arguments.hang_seconds,
    )
    return found if save_interval is not None else replace(found, interval=found.best_interval)


def to_dict(found: Losses) -> dict[str, Any]:
    """Return JSON values."""
    best = replace(found, interval=found.best_interval)
    own = asdict(found) | {"share": found.share, "seconds_a_day": found.seconds}
    return own | {"best_interval": best.interval, "best_share": best.share}


def text(found: Losses) -> Iterator[str]:
    """Yield the lines for the user."""
    best = replace(found, interval=found.best_interval)
    yield (
        f"{found.failures_a_day:.2g} failures a day, a step of {found.step:.2f} s, a save every {found.interval:.0f} s:"
        f" {100 * found.share:.1f} % of the time is lost"
    )
    for cause, seconds in found.seconds.items():
        yield f"  {cause:<18} {seconds / 60:8.1f} min a day  {100 * seconds / _DAY:5.2f} %"
    iterations = max(round(best.interval / best.step), 1)
    yield f"best: a save every {best.interval:.0f} s (--save-interval {iterations}): {100 * best.share:.1f} %"
    if found.num_restarts:
        yield f"a restart takes {found.restart:.1f} s: median of {found.num_restarts} of this run ({RECORD_NAME})"
    yield f"times of {'' if found.num_restarts else 'restart, '}hang and save are those of the flags: measure them"
