"""Options of NCCL communicators: --nccl-communicator-config-path and --high-priority-stream-groups, by Megatron-LM's names of groups.

Groups of the same ranks that are used in turn share a communicator, which has the options of each of its names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from megatrain.config.plain_yaml import load_yaml
from megatrain.config.schema.parallel import NCCL_GROUPS

_TYPES: Final = {
    "min_ctas": int, "max_ctas": int, "cga_cluster_size": int, "net_name": str, "is_high_priority_stream": bool,
}  # fmt: skip
GroupOptions = Mapping[str, Mapping[str, Any]]
"""Options by Megatron-LM's names of groups."""


def read_group_options(text: str) -> GroupOptions:
    """Return the options of a file.

    Raises:
        ValueError, yaml.YAMLError, RecursionError: it has no such options.
    """
    found = load_yaml(text)
    if not isinstance(found, dict) or not all(isinstance(options, dict) for options in found.values()):
        raise ValueError("expected groups and their options")
    for group, options in found.items():
        wrong = [f"{name}: {value}" for name, value in options.items() if type(value) is not _TYPES.get(name)]
        if group not in NCCL_GROUPS or wrong:
            raise ValueError(
                f"{' '.join((str(group), *wrong))} is none of {', '.join((wrong and _TYPES) or NCCL_GROUPS)}"
            )
    return found


def group_options(text: str | None, high_priority: Collection[str]) -> GroupOptions:
    """Return the options of the file with this text, and of the groups whose communication has a stream of high priority."""
    found = {} if text is None else dict(read_group_options(text))
    for name in high_priority:
        found[name] = {**found.get(name, {}), "is_high_priority_stream": True}
    return found


def options_of(name: str, options: GroupOptions) -> dict[str, Any]:
    """Return the options of one of our groups; channels between stages are named `pp_...`."""
    name = "pp" if name.startswith("pp_") else name
    chosen = [values for theirs, values in options.items() if name in NCCL_GROUPS[theirs].split()]
    return {key: value for values in chosen for key, value in values.items()}
