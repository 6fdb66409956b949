"""Context parallelism: how ranks share keys and values, and what must hold for them to share a sample.

Megatron-LM's names     p2p (a ring), all_gather, a2a (heads for rows), a2a+p2p (both, in two levels)
another one             a2a+all_gather
"""

import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from megatrain.config.derive.eager_attention import all_is_written_out, is_for_gpu_kernels
from megatrain.config.derive.patterns import PatternError, layers_with, window_of
from megatrain.config.errors import Problem
from megatrain.config.plan import Answer, Draft
from megatrain.config.schema.values import UnresolvedError

Problems = Iterator[Problem]

WAYS: Final = ("p2p", "all_gather", "a2a", "a2a+p2p", "a2a+all_gather")


def context_communication(draft: Draft) -> Answer:
    """What a ring cannot do is gathered: kernels of GPUs take windows and documents where keys lie in order."""
    parallel = draft.config.parallel
    if parallel.context_parallel_size == 1:
        return Answer((), "--context-parallel-size 1: there is nothing to share")
    if not parallel.cp_comm_type:
        if has_documents(draft):
            return Answer(("all_gather",), "documents leave some ranks of a ring with more work than others")
        if have_windows(draft):
            return Answer(("all_gather",), "windows see keys of few ranks")
        return Answer(("p2p",), "keys and values travel around a ring while others are computed with")
    ways = tuple(parallel.cp_comm_type)
    if why := _why_no_ring(draft):
        return Answer(tuple(way.replace("p2p", "all_gather") for way in ways), why)
    return Answer(ways, "--cp-comm-type")


def has_documents(draft: Draft) -> bool:
    """Whether attention stays inside of documents."""
    data = draft.config.data
    return data.reset_attention_mask or data.dataloader_inter_document_masking


def have_windows(draft: Draft) -> bool:
    """Whether the attention of some layers sees near keys alone."""
    own, model = draft.facts.custom_layers, draft.config.model
    if own is not None:
        return own.have_windows
    try:
        has_window = layers_with(model.window_attn_skip_freq, model.num_layers, one_means=True)
        return window_of(model.window_size) is not None and any(has_window)
    except PatternError as error:  # a rule tells it
        raise UnresolvedError from error


def rings_are_gathered(draft: Draft) -> Iterator[str]:
    """A note, where a ring was asked for that cannot be had."""
    asked = draft.config.parallel.cp_comm_type
    has_ring = draft.config.parallel.context_parallel_size > 1 and any("p2p" in way for way in asked)
    if has_ring and (why := _why_no_ring(draft)):
        yield f"--cp-comm-type {' '.join(asked)}: {why}"


def _why_no_ring(draft: Draft) -> str:
    """Kernels of GPUs are told runs of keys, not masks; those that are written out take any."""
    if not is_for_gpu_kernels(draft) or all_is_written_out(draft):
        return ""
    causes = {"documents": has_documents(draft), "windows": have_windows(draft)}
    found = " and ".join(name for name, is_there in causes.items() if is_there)
    return (
        f"keys and values are gathered, as kernels for {found} need keys that lie in order" if found else ""
    )


def sequence_divides_over_context_ranks(draft: Draft) -> Problems:
    """Into two chunks a rank, whose rows are divided further under sequence parallelism."""
    parallel, length = draft.config.parallel, draft.config.data.seq_length
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    rows = math.lcm(2, tp) if parallel.sequence_parallel else 2
    if cp > 1 and length % (cp * rows):
        also = f" and --sequence-parallel over --tensor-model-parallel-size {tp}" if rows != 2 else ""
        yield Problem(
            f"--seq-length {length} is no multiple of {cp * rows}, as two chunks for each of --context-parallel-size {cp}{also}"
            " need",
            f"use --seq-length {-(-length // (cp * rows)) * cp * rows}",
        )


def communication_is_known(draft: Draft) -> Problems:
    for way in dict.fromkeys(draft.config.parallel.cp_comm_type):
        if way not in WAYS:
            yield Problem(f"--cp-comm-type {way} is none of {', '.join(WAYS)}", "use --cp-comm-type p2p")


def communication_is_said_for_each_layer(draft: Draft) -> Problems:
    types, layers = draft.config.parallel.cp_comm_type, draft.config.model.num_layers
    if types and len(types) not in (1, layers):
        yield Problem(
            f"--cp-comm-type names {len(types)} ways for {layers} layers",
            f"name one for all layers, such as --cp-comm-type {types[0]}, or one for each",
        )


def levels_make_up_the_context_ranks(draft: Draft) -> Problems:
    parallel = draft.config.parallel
    cp, sizes = parallel.context_parallel_size, parallel.hierarchical_context_parallel_sizes
    if not any("+" in way for way in draft.derived.context_communication):
        return
    if not _are_levels(sizes, cp):
        heads = next((size for size in range(2, cp // 2 + 1) if cp % size == 0), None)
        given = f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}" if sizes else "none"
        yield Problem(
            f"--cp-comm-type {' '.join(draft.config.parallel.cp_comm_type)} takes two sizes of at least 2 whose product is"
            f" --context-parallel-size {cp}, not {given}",
            "use --cp-comm-type p2p"
            if heads is None
            else f"use --hierarchical-context-parallel-sizes {heads} {cp // heads}",
        )


def _are_levels(sizes: tuple[int, ...], cp: int) -> bool:
    return len(sizes) == 2 and min(sizes) > 1 and math.prod(sizes) == cp


class Exchange(NamedTuple):
    """A layer whose heads context ranks exchange."""

    layer: int
    """From 0."""
    way: str
    ranks: int
    heads: int
    """That a tensor rank has."""
    groups: int
    """Of queries, that a tensor rank has keys and values of."""


def exchanges(draft: Draft) -> Iterator[Exchange]:
    """The layers with a way that exchanges heads."""
    parallel = draft.config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    sizes = parallel.hierarchical_context_parallel_sizes
    neighbours = sizes[0] if _are_levels(sizes, cp) else 1
    ways, layers = draft.derived.context_communication, draft.derived.layer_table.layers
    for number, layer in enumerate(layers):
        way = ways[number] if len(ways) == len(layers) else ways[0] if ways else ""
        if "a2a" in way and layer.num_heads:
            ranks = cp if way == "a2a" else neighbours
            yield Exchange(number, way, ranks, layer.num_heads // tp, max(1, layer.num_query_groups // tp))


def heads_divide_over_exchanging_ranks(draft: Draft) -> Problems:
    """Each rank has as many heads for all rows, and the keys and values of these heads."""
    for layer, way, ranks, heads, groups in exchanges(draft):
        if heads % ranks or (groups % ranks and ranks % groups):
            yield Problem(
                f"--cp-comm-type {way} exchanges heads between {ranks} context ranks, over which the {heads} heads and"
                f" {groups} query groups that a tensor rank has of layer {layer} (from 0) do not divide",
                "use --cp-comm-type p2p",
            )
            return


def chunk_means_are_means(draft: Draft) -> Problems:
    if draft.config.parallel.context_parallel_chunk_means and draft.config.training.calculate_per_token_loss:
        yield Problem(
            "--context-parallel-chunk-means takes means of chunks, and --calculate-per-token-loss one over all tokens",
            "leave one of them out",
        )


CONTEXT_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    sequence_divides_over_context_ranks,
    communication_is_known,
    communication_is_said_for_each_layer,
    levels_make_up_the_context_ranks,
    heads_divide_over_exchanging_ranks,
    chunk_means_are_means,
)
