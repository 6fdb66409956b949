"""Rules of context parallelism."""

import math
from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.derive.context_parallel import CP_COMM_TYPES, are_levels, head_exchanges
from megatrain.config.errors import Problem
from megatrain.config.fixes import use
from megatrain.config.plan import Draft
from megatrain.config.rules.sizes import lengths

Problems = Iterator[Problem]


def sequence_divides_over_context_ranks(draft: Draft) -> Problems:
    """Each rank has two chunks, whose rows sequence parallelism divides further."""
    parallel, length = draft.config.parallel, draft.config.data.seq_length
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    rows = math.lcm(2, tp) if parallel.sequence_parallel else 2
    if cp > 1 and length % (cp * rows):
        also = f" and --sequence-parallel over --tensor-model-parallel-size {tp}" if rows != 2 else ""
        yield Problem(
            f"--seq-length {length} is not a multiple of {cp * rows}: --context-parallel-size {cp} needs two chunks"
            f" per rank{also}",
            use(draft, lengths(draft, cp * rows)),
        )


def cp_comm_type_is_known(draft: Draft) -> Problems:
    for comm_type in dict.fromkeys(draft.config.parallel.cp_comm_type):
        if comm_type not in CP_COMM_TYPES:
            yield Problem(
                f"--cp-comm-type {comm_type} is none of {', '.join(CP_COMM_TYPES)}", "use --cp-comm-type p2p"
            )


def cp_comm_type_is_given_per_layer(draft: Draft) -> Problems:
    comm_types, layers = draft.config.parallel.cp_comm_type, draft.config.model.num_layers
    if comm_types and len(comm_types) not in (1, layers):
        yield Problem(
            f"--cp-comm-type has {len(comm_types)} entries for {layers} layers",
            f"give one for all layers, such as --cp-comm-type {comm_types[0]}, or one for each layer",
        )


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


def heads_divide_over_context_ranks(draft: Draft) -> Problems:
    """Each rank gets some heads for all rows, with the keys and values of these heads."""
    for layer, comm_type, ranks, heads, groups in head_exchanges(draft):
        if heads % ranks or (groups % ranks and ranks % groups):
            yield Problem(
                f"--cp-comm-type {comm_type} exchanges heads between {ranks} context-parallel ranks; layer {layer} (from 0)"
                f" has {heads} heads and {groups} query groups per tensor-parallel rank, which do not divide over them",
                "use --cp-comm-type p2p",
            )
            return


def chunk_means_exclude_per_token_loss(draft: Draft) -> Problems:
    if draft.config.parallel.context_parallel_chunk_means and draft.config.training.calculate_per_token_loss:
        yield Problem(
            "--context-parallel-chunk-means averages chunk means, and --calculate-per-token-loss averages all tokens",
            "leave one of them out",
        )


CONTEXT_PARALLEL_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    sequence_divides_over_context_ranks,
    cp_comm_type_is_known,
    cp_comm_type_is_given_per_layer,
    levels_multiply_to_context_ranks,
    heads_divide_over_context_ranks,
    chunk_means_exclude_per_token_loss,
)
