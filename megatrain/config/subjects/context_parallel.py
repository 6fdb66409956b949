"""Context parallelism: how ranks share keys and values.

Megatron-LM's names     p2p (ring attention), all_gather, a2a (heads for rows), a2a+p2p (both, in two levels)
an addition             a2a+all_gather
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from megatrain.config.derive.vision import length_in_words, sample_length
from megatrain.config.errors import Problem
from megatrain.config.fixes import fewer_ranks, lengths, use
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import Notes, Problems, derives, note, rule, unproven
from megatrain.config.schema.data import MASKED_FAMILIES
from megatrain.config.subjects.attention import (
    all_attention_is_eager,
    fits_gpu_kernels,
    has_documents,
    has_windows,
)

_GPUS_OF_A_HOST: Final = 8
"""Assumed for a plan of ranks that were not started."""


@derives("derived.cp_comm_types")
def cp_comm_types(draft: Draft) -> DerivedValue:
    """Derive the communication: for all layers, or for each. GPU kernels need keys in order for windows and documents."""
    parallel = draft.config.parallel
    if draft.derived.pack_group_sizes:
        return _comm_type_of_packs(draft)
    if parallel.context_parallel_size == 1:
        return DerivedValue((), "--context-parallel-size 1: no communication")
    if draft.config.model.model_family in MASKED_FAMILIES:
        return DerivedValue(("all_gather",), "attention with padding masks needs keys in order")
    if not parallel.cp_comm_type:
        if has_documents(draft):
            return DerivedValue(("all_gather",), "with documents, a ring would balance its ranks badly")
        if has_windows(draft):
            return DerivedValue(("all_gather",), "with windows, a query needs keys of few ranks")
        if reason := _why_not_heads(draft):
            return DerivedValue(("p2p",), f"a ring of keys and values: {reason}")
        return DerivedValue(
            ("a2a",),
            "heads divide over ranks of one host: one attention of whole samples, not a ring of blocks",
        )
    comm_types = tuple(parallel.cp_comm_type)
    if reason := _why_no_ring(draft):
        return DerivedValue(tuple(each.replace("p2p", "all_gather") for each in comm_types), reason)
    return DerivedValue(comm_types, "--cp-comm-type")


def _comm_type_of_packs(draft: Draft) -> DerivedValue:
    """Derive the communication of groups of any size: heads balance the ranks for documents of any length."""
    if given := draft.config.parallel.cp_comm_type:
        return DerivedValue(given[:1], "--cp-comm-type")
    if reason := _why_not_heads(draft):
        return DerivedValue(("all_gather",), f"keys and values of a pack are gathered: {reason}")
    return DerivedValue(
        ("a2a",), "heads divide over the ranks of all groups, which balances packs of any documents"
    )


def _widest_group(draft: Draft) -> int:
    """Return the number of ranks of the largest context group."""
    return max(draft.config.parallel.context_parallel_size, *draft.derived.pack_group_sizes, 1)


def _why_not_heads(draft: Draft) -> str:
    """Return the reason against an exchange of heads by default; empty: none.

    Sent heads are not overlapped: they cost less than a ring's smaller kernels and sums where links are fast.
    """
    parallel = draft.config.parallel
    tp, cp = parallel.tensor_model_parallel_size, _widest_group(draft)
    per_host = draft.facts.ranks_per_node or draft.facts.devices_per_node or _GPUS_OF_A_HOST
    if per_host % (tp * cp):
        return f"{tp * cp} tensor and context ranks are not on one host of {per_host}"
    for layer in draft.derived.model_spec.all_layers:
        attention = layer.attention
        if attention is None or attention.latent is not None or attention.mask != "causal":
            return "not all layers have causal attention with keys and values per query group"
        heads, groups = attention.num_heads // tp, max(1, attention.num_query_groups // tp)
        has_copies = draft.derived.transformer_impl == "local"
        if heads % cp or (groups % cp and (cp % groups or not has_copies)):
            return f"{heads} heads and {groups} query groups per tensor rank do not divide over {cp} ranks"
    return ""


@note("cost")
def ring_is_replaced(draft: Draft) -> Notes:
    """Note that all-gather replaces the ring of --cp-comm-type."""
    given = draft.config.parallel.cp_comm_type
    has_ranks = draft.config.parallel.context_parallel_size > 1
    has_ring = has_ranks and any("p2p" in each for each in given)
    is_masked = draft.config.model.model_family in MASKED_FAMILIES
    if has_ranks and is_masked and {*given} - {*draft.derived.cp_comm_types}:
        yield f"--cp-comm-type {' '.join(given)}: keys and values are all-gathered, as attention with padding masks needs keys in order"
    elif has_ring and (reason := _why_no_ring(draft)):
        yield f"--cp-comm-type {' '.join(given)}: {reason}"


def _why_no_ring(draft: Draft) -> str:
    """Return the reason against a ring; empty: none. GPU kernels take ranges of keys, eager attention any mask."""
    if not fits_gpu_kernels(draft) or all_attention_is_eager(draft):
        return ""
    causes = {"documents": has_documents(draft), "windows": has_windows(draft)}
    found = " and ".join(name for name, is_there in causes.items() if is_there)
    return f"keys and values are all-gathered, as kernels for {found} need keys in order" if found else ""


@rule
def cp_comm_type_is_given_per_layer(draft: Draft) -> Problems:
    comm_types, layers = draft.config.parallel.cp_comm_type, draft.config.model.num_layers
    if comm_types and len(comm_types) not in (1, layers):
        yield Problem(
            f"--cp-comm-type has {len(comm_types)} entries for {layers} layers",
            f"give one for all layers, such as --cp-comm-type {comm_types[0]}, or one for each layer",
        )


@rule
def sequence_divides_over_context_ranks(draft: Draft) -> Problems:
    """Each rank has two chunks, whose rows sequence parallelism divides further."""
    parallel, length = draft.config.parallel, sample_length(draft.config)
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    rows = math.lcm(2, tp) if parallel.sequence_parallel else 2
    if cp > 1 and length % (cp * rows):
        also = f" and --sequence-parallel over --tensor-model-parallel-size {tp}" if rows != 2 else ""
        yield Problem(
            f"{length_in_words(draft.config)} is not a multiple of {cp * rows}: --context-parallel-size {cp} needs two chunks"
            f" per rank{also}",
            use(draft, lengths(draft, cp * rows), fewer_ranks(draft, "parallel.context_parallel_size")),
        )


@rule
def levels_multiply_to_context_ranks(draft: Draft) -> Problems:
    parallel = draft.config.parallel
    cp, sizes = parallel.context_parallel_size, parallel.hierarchical_context_parallel_sizes
    if not any("+" in each for each in draft.derived.cp_comm_types):
        return
    if not are_levels(sizes, cp):
        inner = next((size for size in range(2, cp // 2 + 1) if cp % size == 0), None)
        given = f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}" if sizes else "none"
        yield Problem(
            f"--cp-comm-type {' '.join(parallel.cp_comm_type)} needs two sizes of at least 2 whose product is"
            f" --context-parallel-size {cp}, not {given}",
            "use --cp-comm-type p2p"
            if inner is None
            else f"use --hierarchical-context-parallel-sizes {inner} {cp // inner}",
        )


def are_levels(sizes: tuple[int, ...], cp: int) -> bool:
    """Return whether these sizes are two levels of the context-parallel ranks."""
    return len(sizes) == 2 and min(sizes) > 1 and math.prod(sizes) == cp


@rule
def heads_divide_over_context_ranks(draft: Draft) -> Problems:
    """Each rank gets some heads for all rows, with the keys and values of these heads."""
    for layer, comm_type, ranks, heads, groups in head_exchanges(draft):
        if heads % ranks or (groups % ranks and ranks % groups):
            yield Problem(
                f"--cp-comm-type {comm_type} exchanges heads between {ranks} context-parallel ranks; layer {layer} (from 0)"
                f" has {heads} heads and {groups} query groups per tensor-parallel rank, which do not divide over them",
                f"use --cp-comm-type {'all_gather' if draft.derived.pack_group_sizes else 'p2p'}",
            )
            return


@rule
def heads_with_states_divide_over_context_ranks(draft: Draft) -> Problems:
    """Each rank computes whole samples of some heads of delta nets and Mamba-2."""
    parallel = draft.config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    for groups, heads in undivided_states(draft, cp):
        yield Problem(
            f"--context-parallel-size {cp}: heads of layers with states are exchanged between its ranks, and {heads} heads that share"
            f" {groups} do not divide over --tensor-model-parallel-size {tp} x {cp} ranks",
            f"use --context-parallel-size {math.gcd(heads // tp, max(1, groups // tp), cp)}",
        )


def undivided_states(draft: Draft, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the groups and heads of delta nets and Mamba-2 that do not divide over so many context ranks."""
    tp = draft.config.parallel.tensor_model_parallel_size
    sizes = dict.fromkeys(
        part.exchanged_heads for layer in draft.derived.model_spec.layers for part in layer.parts
    )
    for groups, heads in filter(None, sizes):
        local = max(1, groups // tp)
        if heads // tp % ranks or (local % ranks and ranks % local):
            yield groups, heads


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
    tp, cp = parallel.tensor_model_parallel_size, _widest_group(draft)
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


@unproven("result")
def means_of_context_ranks(draft: Draft) -> Notes:
    parallel = draft.config.parallel
    if parallel.context_parallel_chunk_means and parallel.context_parallel_size > 1:
        yield "--context-parallel-chunk-means makes the loss depend on --context-parallel-size"
