"""Options of NCCL communicators by group: --nccl-communicator-config-path and --high-priority-stream-groups.

    ep: {max_ctas: 16, is_high_priority_stream: true}        names of Megatron-LM's groups ─> options of ours

Groups of the same ranks that are used in turn share a communicator here, which has the options of the first name that is given.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, get_args

from megatrain.config.plain_yaml import load_yaml
from megatrain.config.schema.parallel import NcclGroup

_OPTIONS: Final[Mapping[str, type]] = {
    "min_ctas": int,
    "max_ctas": int,
    "cga_cluster_size": int,
    "net_name": str,
    "is_high_priority_stream": bool,
}
"""Options of a group, and their types."""
_NETWORKS: Final = ("ib", "socket")
_NAMES: Final[Mapping[str, tuple[NcclGroup, ...]]] = {
    "tp": ("tp",),
    "kv": ("tp",),
    "cp": ("cp",),
    "cp_heads": ("hcp", "cp"),
    "cp_ring": ("hcp", "cp"),
    "tp_cp": ("tp_cp",),
    "etp": ("ep_tp",),
    "ep": ("ep",),
    "pp": ("pp",),
    "embedding": ("embd", "pos_embd"),
    "dp": ("dp", "dp_cp", "intra_dp_cp"),
    "replicas": ("dp_cp", "dp", "intra_dp_cp"),
    "dp_shard": ("intra_dp_cp", "dp_cp", "dp"),
    "dp_copies": ("inter_dp_cp",),
    "expert_replicas": ("ep_dp", "intra_ep_dp"),
    "expert_shard": ("intra_ep_dp", "ep_dp"),
    "expert_copies": ("inter_ep_dp",),
}
"""Names of Megatron-LM's groups by the names of ours."""

GroupOptions = Mapping[NcclGroup, Mapping[str, Any]]
"""Options by the names of Megatron-LM's groups."""


def read_group_options(text: str) -> GroupOptions:
    """Return the options of a file.

    Raises:
        ValueError, yaml.YAMLError, RecursionError: it has no such options.
    """
    found = load_yaml(text) or {}
    if not isinstance(found, dict):
        raise ValueError("expected groups and their options")  # noqa: TRY004 (a value of the user)
    for group, options in found.items():
        if group not in get_args(NcclGroup):
            raise ValueError(f"group {group} is none of {', '.join(get_args(NcclGroup))}")
        for name, value in (options or {}).items():
            if name not in _OPTIONS:
                raise ValueError(f"{group}: option {name} is none of {', '.join(_OPTIONS)}")
            if type(value) is not _OPTIONS[name] or (
                name == "net_name" and str(value).lower() not in _NETWORKS
            ):
                expected = " or ".join(_NETWORKS) if name == "net_name" else _OPTIONS[name].__name__
                raise ValueError(f"{group}: {name} is {value}, and {expected} is expected")
    return {group: options or {} for group, options in found.items()}


def group_options(text: str | None, high_priority: Collection[NcclGroup]) -> GroupOptions:
    """Return the options of the file with this text, and of the groups whose communication has a stream of high priority."""
    found = dict(read_group_options(text)) if text is not None else {}
    for name in high_priority:
        found[name] = {**found.get(name, {}), "is_high_priority_stream": True}
    return found


def options_of(name: str, options: GroupOptions) -> Mapping[str, Any]:
    """Return the options of one of our groups; channels between stages are named `pp_...`."""
    names: tuple[NcclGroup, ...] = ("pp",) if name.startswith("pp_") else _NAMES.get(name, ())
    return next((options[one] for one in names if one in options), {})


def set_options(target: Any, options: Mapping[str, Any]) -> Any:
    """Set options of a `ProcessGroupNCCL.Options`, and return it."""
    for name, value in options.items():
        setattr(target if name == "is_high_priority_stream" else target.config, name, value)
    return target
