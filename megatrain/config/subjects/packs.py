"""Packs: micro-batches of whole documents (--pack-documents), on groups of context ranks that differ from pack to pack.

dp_balanced, first_fit     all groups have --context-parallel-size ranks
default_dynamic_cp         groups of 1, 2, 4 ... ranks of dp and cp, from --min-dynamic-context-parallel-size on
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.fixes import multiples, use
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import Notes, Problems, derives, rule, unproven
from megatrain.config.schema.parallel import DYNAMIC
from megatrain.config.schema.tree import Config
from megatrain.config.subjects.context_parallel import undivided_states

_LIMIT: Final = "parallel.max_seqlen_per_dp_cp_rank"
_GPU_ROWS: Final = 64
"""Rows of a pack on a GPU are a multiple of this: kernels compute blocks of them."""
_FP8_ROWS: Final = 128
"""The same of a rank's rows in FP8, whose scales belong to blocks."""


def row_multiple(config: Config) -> int:
    """Return a divisor of the rows of a pack on each rank: two chunks, divided further by sequence parallelism."""
    parallel, is_gpu = config.parallel, config.training.device == "cuda"
    tp = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    if config.precision.fp8_format and is_gpu:
        return _FP8_ROWS * tp
    return math.lcm(2, tp, _GPU_ROWS if is_gpu else 1)


def num_domain_ranks(draft: Draft) -> int:
    """Return the number of ranks of dp and cp, which share the documents of a global batch."""
    return draft.derived.data_parallel_size * draft.config.parallel.context_parallel_size


def flags_of_packs(config: Config) -> list[str]:
    """Return --pack-documents and, if given, the flag that needs it; empty: samples are not packed."""
    if not config.data.pack_documents:
        return []
    return ["--pack-documents", *["--dynamic-context-parallel"] * config.parallel.dynamic_context_parallel]


def without_depths(draft: Draft) -> str:
    """Return the fix that removes multi-token prediction, where a flag or the pattern of a hybrid asks for it."""
    model, removed = draft.config.model, "remove --mtp-num-layers"
    layers, sign, _ = (model.hybrid_layer_pattern or "").partition("/")
    if model.model_family != "hybrid" or not sign:
        return removed
    return f"use --hybrid-layer-pattern {layers}{f', and {removed}' if draft.is_given('model.mtp_num_layers') else ''}"


@derives("parallel.sequence_packing_scheduler")
def sequence_packing_scheduler(draft: Draft) -> DerivedValue:
    if not draft.config.data.pack_documents:
        return DerivedValue(None, "without --pack-documents")
    if draft.config.parallel.dynamic_context_parallel:
        return DerivedValue(DYNAMIC, "--dynamic-context-parallel")
    return DerivedValue("dp_balanced", "groups of one size")


@derives("derived.pack_group_sizes")
def pack_group_sizes(draft: Draft) -> DerivedValue:
    parallel = draft.config.parallel
    if not draft.config.data.pack_documents:
        return DerivedValue((), "without --pack-documents")
    if parallel.sequence_packing_scheduler != DYNAMIC:
        return DerivedValue(
            (parallel.context_parallel_size,), f"{parallel.sequence_packing_scheduler}: one size"
        )
    ranks, smallest = num_domain_ranks(draft), parallel.min_dynamic_context_parallel_size
    powers = [2**power for power in range(ranks.bit_length()) if ranks % 2**power == 0]
    powers = [size for size in powers if not any(undivided_states(draft, size))]
    sizes = tuple(size for size in powers if size >= smallest) or (powers[-1],)
    return DerivedValue(
        sizes, f"powers of two that divide the {ranks} ranks of dp and cp, and heads with states"
    )


@derives("parallel.max_seqlen_per_dp_cp_rank")
def max_seqlen_per_dp_cp_rank(draft: Draft) -> DerivedValue:
    sizes, length = draft.derived.pack_group_sizes, draft.config.data.seq_length
    if not sizes:
        return DerivedValue(None, "without --pack-documents")
    multiple = row_multiple(draft.config)
    rows = -(-length // (sizes[-1] * multiple)) * multiple
    return DerivedValue(rows, f"--seq-length {length} on {sizes[-1]} ranks, in multiples of {multiple}")


@rule
def longest_document_fits_a_group(draft: Draft) -> Problems:
    sizes, length = draft.derived.pack_group_sizes, draft.config.data.seq_length
    rows, multiple = draft.config.parallel.max_seqlen_per_dp_cp_rank, row_multiple(draft.config)
    if not sizes or rows is None:
        return
    needed = -(-length // sizes[-1])
    if rows % multiple or rows < needed:
        reason = (
            f"is not a multiple of {multiple}"
            if rows % multiple
            else f"on {sizes[-1]} ranks is less than a document of --seq-length {length}"
        )
        yield Problem(
            f"--max-seqlen-per-dp-cp-rank {rows} {reason}",
            use(draft, multiples(_LIMIT, max(rows, needed), multiple)),
        )


@rule
def dynamic_context_parallelism_has_packs(draft: Draft) -> Problems:
    parallel = draft.config.parallel
    if parallel.dynamic_context_parallel and not draft.config.data.pack_documents:
        yield Problem(
            "--dynamic-context-parallel chooses the ranks of each pack of documents, and samples are not packed",
            "add --pack-documents, or remove --dynamic-context-parallel",
        )
    elif parallel.dynamic_context_parallel and parallel.sequence_packing_scheduler != DYNAMIC:
        yield Problem(
            f"--dynamic-context-parallel and --sequence-packing-scheduler {parallel.sequence_packing_scheduler}, whose groups"
            " have one size, contradict each other",
            f"use --sequence-packing-scheduler {DYNAMIC}",
        )


@rule
def smallest_group_fits_the_ranks(draft: Draft) -> Problems:
    parallel, sizes = draft.config.parallel, draft.derived.pack_group_sizes
    smallest = parallel.min_dynamic_context_parallel_size
    if sizes and parallel.sequence_packing_scheduler == DYNAMIC and sizes[0] != smallest:
        yield Problem(
            f"--min-dynamic-context-parallel-size {smallest} is not a power of two that divides the"
            f" {num_domain_ranks(draft)} ranks of dp and cp, and heads with states",
            f"use --min-dynamic-context-parallel-size {sizes[0]}",
        )


@rule
def batch_has_documents_for_all_ranks(draft: Draft) -> Problems:
    sizes, batch = draft.derived.pack_group_sizes, draft.config.training.global_batch_size
    if not sizes:
        return
    groups = num_domain_ranks(draft) // sizes[0]
    if batch < groups:
        yield Problem(
            f"--global-batch-size {batch} has fewer documents than there are groups of {sizes[0]} ranks, {groups}",
            use(draft, multiples("training.global_batch_size", groups, draft.derived.data_parallel_size)),
        )


@rule
def packs_are_supported(draft: Draft) -> Problems:
    """Refuse what reads whole samples of one length, or groups of ranks that do not change."""
    if not draft.config.data.pack_documents:
        return
    for what, fix in _obstacles(draft):
        yield Problem(f"--pack-documents is not supported with {what}", fix)


@unproven("result")
def quantities_of_packs(draft: Draft) -> Notes:
    """Note what is defined over a pack, whose documents depend on the number of ranks."""
    config = draft.config
    if not config.data.pack_documents:
        return
    if config.precision.fp8_format:
        yield f"--fp8-format {config.precision.fp8_format} with --pack-documents: scales are those of a pack's rows on a rank"
    if draft.derived.model_spec.routers and "aux_loss" in config.experts.moe_router_load_balancing_type:
        yield "--moe-router-load-balancing-type aux_loss with --pack-documents: loads are those of a pack; seq_aux_loss is that of a document"


def _obstacles(draft: Draft) -> Iterator[tuple[str, str]]:
    """Yield what packs are not supported with, and the remedies."""
    config, remove = draft.config, f"remove {' and '.join(flags_of_packs(draft.config))}"
    model, parallel, training = config.model, config.parallel, config.training
    micro, schedule, comm_types = training.micro_batch_size, parallel.pipeline_schedule, parallel.cp_comm_type
    experts, whole = config.experts, {"sinkhorn", "quantile_balancing", "global_aux_loss"}
    of_batches = [
        one for one in experts.moe_router_load_balancing_type if experts.num_experts and one in whole
    ]
    is_ring = len(comm_types) > 1 or not {*comm_types} <= {"a2a", "all_gather"}
    dropout = f"--attention-dropout {model.attention_dropout}, whose mask is keyed by places in a pack"
    table = (
        (micro > 1, f"--micro-batch-size {micro}", "use --micro-batch-size 1: a micro-batch is one pack"),
        (not training.calculate_per_token_loss, "means of micro-batches, which differ in size",
         "add --calculate-per-token-loss"),
        (schedule != "1f1b", f"--pipeline-schedule {schedule}, whose order depends on the number of micro-batches",
         "use --pipeline-schedule 1f1b"),
        (model.model_family not in ("gpt", "hybrid"), f"--model-family {model.model_family}", remove),
        (experts.moe_expert_capacity_factor, "--moe-expert-capacity-factor, whose dropped tokens depend on a pack",
         "remove --moe-expert-capacity-factor"),
        (of_batches, f"--moe-router-load-balancing-type {' '.join(of_batches)}, which balances whole micro-batches",
         "use --moe-router-load-balancing-type seq_aux_loss, aux_loss or none"),
        (experts.overlap_moe_expert_parallel_comm, "--overlap-moe-expert-parallel-comm, which runs passes of two packs in turn",
         "remove --overlap-moe-expert-parallel-comm"),
        (model.mtp_num_layers, f"--mtp-num-layers {model.mtp_num_layers}", without_depths(draft)),
        (model.attention_dropout, dropout, "use --attention-dropout 0"),
        (draft.derived.transformer_impl != "local", "--transformer-impl transformer_engine", "use --transformer-impl local"),
        (config.precision.fp4_format, f"--fp4-format {config.precision.fp4_format}", "remove --fp4-format"),
        (config.distillation.export_kd_teacher_load, "--export-kd-teacher-load", remove),
        (is_ring, f"--cp-comm-type {' '.join(comm_types)}", "use --cp-comm-type a2a or all_gather"),
    )  # fmt: skip
    yield from ((what, fix) for is_there, what, fix in table if is_there)
