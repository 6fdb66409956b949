"""Calls of the user's class: `--callbacks file.py:Class`.

    start ─> on_start ─> [ on_iteration ─> on_evaluation? ─> on_save? ] ... ─> on_end

All ranks make the same calls. The values are the fields of `metrics.jsonl`; changing them changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from megatrain.config import Plan
from megatrain.config.errors import ConfigError
from megatrain.config.user_function import user_function
from megatrain.parallel.grid import RankGrid
from megatrain.training.launch.ranks import Ranks

_METHODS: Final = ("on_start", "on_iteration", "on_evaluation", "on_save", "on_end")


@dataclass(frozen=True)
class RunInfo:
    """The run, as the class gets it when it is created."""

    plan: Plan
    """Settings (`plan.config`) and derived values."""
    grid: RankGrid
    """This rank, and its rank within each group, such as `grid.tp.rank`."""

    @property
    def rank(self) -> int:
        """Rank among all."""
        return self.grid.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.grid.world.size


class RunCallbacks:
    """The object of the user's class; without --callbacks no method is called.

    Raises:
        ConfigError: it cannot be created, or has a method that is never called.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._function, self._object = user_function(ranks.plan.config, "logging.callbacks"), None
        if self._function is None:
            return
        made = self._function.load(ranks.plan.config.logging.callbacks_digest)
        try:
            self._object = made(RunInfo(ranks.plan, ranks.grid))
        except Exception as error:
            raise self._function.failure(error) from error
        found = [name for name in dir(self._object) if name.startswith("on_")]
        unknown = [name for name in found if name not in _METHODS]
        if unknown or not found:
            raise ConfigError(
                f"--callbacks {self._function} has "
                + (f"{', '.join(unknown)}, which is never called" if unknown else "no method that is called"),
                fix=f"define methods of these names: {', '.join(_METHODS)}",
            )

    def call(self, name: str, *arguments: Any) -> None:
        """Call a method of the user, if there is one. Raises ConfigError with the line of an error in it."""
        method = getattr(self._object, name, None)
        if self._function is None or method is None:
            return
        try:
            method(*arguments)
        except Exception as error:
            raise self._function.failure(error) from error
