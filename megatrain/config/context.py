"""Context parallelism: how ranks share keys and values, and what must hold for them to share a sample.

Megatron-LM's names     p2p (a ring), all_gather, a2a (heads for rows), a2a+p2p (both, in two levels)
"""

import math
from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.plan import Answer, Draft

Problems = Iterator[Problem]


def context_communication(draft: Draft) -> Answer:
    parallel = draft.config.parallel
    if parallel.context_parallel_size == 1:
        return Answer((), "--context-parallel-size 1: there is nothing to share")
    if parallel.cp_comm_type:
        return Answer(parallel.cp_comm_type, "--cp-comm-type")
    return Answer(("all_gather",), "each context rank gathers the keys and values of whole samples")


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


def communication_is_said_for_each_layer(draft: Draft) -> Problems:
    types, layers = draft.config.parallel.cp_comm_type, draft.config.model.num_layers
    if types and len(types) not in (1, layers):
        yield Problem(
            f"--cp-comm-type names {len(types)} ways for {layers} layers",
            f"name one for all layers, such as --cp-comm-type {types[0]}, or one for each",
        )


def chunk_means_are_means(draft: Draft) -> Problems:
    if draft.config.parallel.context_parallel_chunk_means and draft.config.training.calculate_per_token_loss:
        yield Problem(
            "--context-parallel-chunk-means takes means of chunks, and --calculate-per-token-loss one over all tokens",
            "leave one of them out",
        )


CONTEXT_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    sequence_divides_over_context_ranks,
    communication_is_said_for_each_layer,
    chunk_means_are_means,
)
