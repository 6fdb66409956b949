"""What --deterministic-mode asks of a run on a GPU (`training/launch/determinism.py` has the list of what could differ)."""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.plan import Draft

_WORKSPACES: Final = (":4096:8", ":16:8")


def cublas_orders_its_sums(draft: Draft) -> Iterator[Problem]:
    given = draft.facts.cublas_workspace
    if _is_asked_for(draft) and given is not None and given not in _WORKSPACES:
        yield Problem(
            f"--deterministic-mode: CUBLAS_WORKSPACE_CONFIG is {given!r}, with which matrix products may give other bits"
            " each time",
            f"unset CUBLAS_WORKSPACE_CONFIG, or set it to {_WORKSPACES[0]}",
        )


def implementation_is_deterministic(draft: Draft) -> Iterator[Problem]:
    implementation = draft.config.model.transformer_impl
    if _is_asked_for(draft) and implementation != "local":
        yield Problem(
            f"--deterministic-mode with --transformer-impl {implementation} is not there yet on a GPU",
            "use --transformer-impl local, or leave --deterministic-mode out",
        )


def _is_asked_for(draft: Draft) -> bool:
    return draft.config.training.deterministic_mode and draft.derived.device == "cuda"


DETERMINISM_RULES: Final[tuple[Callable[[Draft], Iterator[Problem]], ...]] = (
    cublas_orders_its_sums,
    implementation_is_deterministic,
)
