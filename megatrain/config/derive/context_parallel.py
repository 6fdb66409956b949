"""Context parallelism: how ranks share keys and values.

Megatron-LM's names     p2p (ring attention), all_gather, a2a (heads for rows), a2a+p2p (both, in two levels)
an addition             a2a+all_gather
"""

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from megatrain.config.derive.attention_features import (
    all_attention_is_eager,
    fits_gpu_kernels,
    has_documents,
    has_windows,
)
from megatrain.config.plan import DerivedValue, Draft

CP_COMM_TYPES: Final = ("p2p", "all_gather", "a2a", "a2a+p2p", "a2a+all_gather")


def cp_comm_types(draft: Draft) -> DerivedValue:
    """Derive the communication: for all layers, or for each. GPU kernels need keys in order for windows and documents."""
    parallel = draft.config.parallel
    if parallel.context_parallel_size == 1:
        return DerivedValue((), "--context-parallel-size 1: no communication")
    if not parallel.cp_comm_type:
        if has_documents(draft):
            return DerivedValue(("all_gather",), "with documents, a ring would balance its ranks badly")
        if has_windows(draft):
            return DerivedValue(("all_gather",), "with windows, a query needs keys of few ranks")
        return DerivedValue(("p2p",), "a ring overlaps communication of keys and values with computation")
    comm_types = tuple(parallel.cp_comm_type)
    if reason := _why_no_ring(draft):
        return DerivedValue(tuple(each.replace("p2p", "all_gather") for each in comm_types), reason)
    return DerivedValue(comm_types, "--cp-comm-type")


def ring_is_replaced(draft: Draft) -> Iterator[str]:
    """Note that all-gather replaces the ring of --cp-comm-type."""
    given = draft.config.parallel.cp_comm_type
    has_ring = draft.config.parallel.context_parallel_size > 1 and any("p2p" in each for each in given)
    if has_ring and (reason := _why_no_ring(draft)):
        yield f"--cp-comm-type {' '.join(given)}: {reason}"


def _why_no_ring(draft: Draft) -> str:
    """Return the reason against a ring; empty: none. GPU kernels take ranges of keys, eager attention any mask."""
    if not fits_gpu_kernels(draft) or all_attention_is_eager(draft):
        return ""
    causes = {"documents": has_documents(draft), "windows": has_windows(draft)}
    found = " and ".join(name for name, is_there in causes.items() if is_there)
    return f"keys and values are all-gathered, as kernels for {found} need keys in order" if found else ""


def are_levels(sizes: tuple[int, ...], cp: int) -> bool:
    """Return whether these sizes are two levels of the context-parallel ranks."""
    return len(sizes) == 2 and min(sizes) > 1 and math.prod(sizes) == cp


class HeadExchange(NamedTuple):
    """A layer whose heads are exchanged between context-parallel ranks."""

    layer: int
    """Number from 0."""
    comm_type: str
    ranks: int
    """Number of ranks that exchange heads."""
    heads: int
    """Query heads of a tensor-parallel rank."""
    groups: int
    """Key and value heads of a tensor-parallel rank."""


def head_exchanges(draft: Draft) -> Iterator[HeadExchange]:
    """Iterate over the layers whose communication exchanges heads."""
    parallel = draft.config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    sizes = parallel.hierarchical_context_parallel_sizes
    inner = sizes[0] if are_levels(sizes, cp) else 1
    comm_types, layers = draft.derived.cp_comm_types, draft.derived.model_spec.layers
    for number, layer in enumerate(layers):
        comm_type = (
            comm_types[number] if len(comm_types) == len(layers) else comm_types[0] if comm_types else ""
        )
        if "a2a" in comm_type and layer.attention is not None:
            ranks = cp if comm_type == "a2a" else inner
            groups = max(1, layer.attention.num_query_groups // tp)
            yield HeadExchange(number, comm_type, ranks, layer.attention.num_heads // tp, groups)
