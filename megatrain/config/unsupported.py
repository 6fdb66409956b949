"""What megatrain has not yet, and no table of flags can say. Each is refused by name, with what to use in its place."""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.plan import Draft


def deterministic_mode_is_for_cpus(draft: Draft) -> Iterator[Problem]:
    if draft.config.training.deterministic_mode and draft.derived.device == "cuda":
        yield Problem(
            "--deterministic-mode is not there yet on a GPU",
            "leave it out; on a CPU every run is deterministic",
        )


UNSUPPORTED_RULES: Final[tuple[Callable[[Draft], Iterator[Problem]], ...]] = (deterministic_mode_is_for_cpus,)
