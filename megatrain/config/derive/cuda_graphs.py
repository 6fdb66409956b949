"""CUDA graphs of training: used where they are asked for and every kernel of a micro-batch has fixed sizes and arguments."""

from collections.abc import Iterator
from typing import Final

from megatrain.config.derive.attention_features import has_documents
from megatrain.config.derive.custom_layers import layer_function
from megatrain.config.derive.transformer_engine import TRANSFORMER_ENGINE
from megatrain.config.plan import DerivedValue, Draft

WHOLE: Final = ("local", "full_iteration")
"""Kinds of graphs that are one of a whole micro-batch."""


def cuda_graphs(draft: Draft) -> DerivedValue:
    """Decide whether the passes of training are CUDA graphs."""
    kind = draft.config.training.cuda_graph_impl
    if kind not in WHOLE:
        return DerivedValue(False, "without --cuda-graph-impl local")
    reason = next(_obstacles(draft), None)
    return DerivedValue(reason is None, reason or f"--cuda-graph-impl {kind}")


def cuda_graphs_have_no_effect(draft: Draft) -> Iterator[str]:
    """Yield a note if CUDA graphs are asked for and not used, or used later than asked for."""
    kind = draft.config.training.cuda_graph_impl
    if kind == "transformer_engine":
        yield "--cuda-graph-impl transformer_engine has no effect: graphs of single modules are missing; use local"
    elif kind in WHOLE and not draft.derived.cuda_graphs:
        yield f"--cuda-graph-impl {kind} has no effect: {draft.origins['derived.cuda_graphs'].detail}"
    elif draft.derived.cuda_graphs and draft.config.training.cuda_graph_warmup_steps == 0:
        yield "--cuda-graph-warmup-steps 0: kernels are compiled in one iteration before the capture"


def _obstacles(draft: Draft) -> Iterator[str]:
    """Yield why a graph cannot be captured, or would repeat what must differ between micro-batches."""
    config, derived = draft.config, draft.derived
    model, parallel = config.model, config.parallel
    if config.training.device != "cuda":
        yield "a CPU has none"
    if derived.transformer_impl == TRANSFORMER_ENGINE:
        yield "modules of Transformer Engine are not captured"
    if derived.model_parallel_size * parallel.context_parallel_size > 1:
        yield "communication of tensor, context and pipeline ranks is not captured"
    if parallel.data_parallel_sharding_strategy not in ("no_shard", "optim"):
        yield "ZeRO-2 and ZeRO-3 communicate within the passes"
    if config.precision.fp8_format is not None:
        yield "casts of FP8 differ between micro-batches"
    if config.experts.num_experts is not None:
        yield "the sizes of experts' products change"
    if model.mtp_num_layers:
        yield "multi-token prediction is not captured"
    if model.hidden_dropout or model.attention_dropout:
        yield "dropout differs between micro-batches"
    if has_documents(draft):
        yield "the sizes of documents change"
    if layer_function(model.spec) is not None:
        yield "custom layers may wait for the GPU"
