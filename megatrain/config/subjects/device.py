"""The device: GPUs, compilation, --deterministic-mode (`training/launch/ranks.py`), dtypes, CUDA graphs.

CUDA graphs are used where every kernel of a micro-batch has fixed sizes and arguments, and steps are faster
with them (`parallel/pipeline/graph_trial.py`) or they are asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from megatrain.config.derive.custom_layers import layer_function
from megatrain.config.environment import DETERMINISTIC_WORKSPACES, NO_WORKSPACE
from megatrain.config.errors import Problem
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import Notes, Problems, derives, note, rule, unproven
from megatrain.config.subjects.attention import has_documents
from megatrain.config.subjects.experts import experts_are_split
from megatrain.config.subjects.transformer_engine import TRANSFORMER_ENGINE

_SMALLEST_WEIGHT: Final = 2**20
_FEWEST_TOKENS: Final = 2048
"""Elements of a weight on a rank, and tokens of a GEMM, for which cuBLAS was measured to be as fast without a workspace (H200)."""
TRIED: Final = ("auto", "transformer_engine")
"""Kinds with which graphs stay if steps are faster with them; all kinds record a whole micro-batch, or a pass of a pipeline stage."""
_HOPPER: Final = 9
_MOST_GRAPHS: Final = 32
_DIVISOR: Final = 8
"""Divisor of the widths of experts that one bf16 kernel computes: see `kernels/moe/grouped_gemm.py`."""
_ONE_KERNEL_ARCHITECTURES: Final = (9, 10)
"""Major compute capabilities on which `F.grouped_mm` is one kernel; on others the host reads the sizes (pytorch issue 169970)."""


@derives("training.device")
def device(draft: Draft) -> DerivedValue:
    name = draft.facts.device_name if draft.facts.device == "cuda" else None
    if draft.facts.device == "cuda" and name is None and draft.config.training.dry_run is not None:
        return DerivedValue("cuda", "assumed for a dry run")
    return DerivedValue(draft.facts.device, f"the device found{f', {name}' if name else ''}")


@rule
def device_is_available(draft: Draft) -> Problems:
    if draft.config.training.device == "cuda" and draft.facts.device != "cuda":
        yield Problem(
            "--device cuda requires a GPU, and none was found", "use --device cpu, or check `nvidia-smi`"
        )


@rule
def each_rank_has_a_gpu(draft: Draft) -> Problems:
    ranks, gpus = draft.facts.ranks_per_node, draft.facts.devices_per_node
    if draft.config.training.device == "cuda" and ranks is not None and gpus is not None and ranks > gpus:
        yield Problem(
            f"{ranks} ranks were started on a node with {gpus} visible GPUs",
            f"use torchrun --nproc-per-node {gpus}, or make more GPUs visible (CUDA_VISIBLE_DEVICES); without torchrun, where each"
            " rank sees a GPU of its own, set LOCAL_RANK=0 and LOCAL_WORLD_SIZE=1 next to RANK and WORLD_SIZE",
        )


@rule
def kernels_can_be_compiled(draft: Draft) -> Problems:
    """A dry run does not need the compiler; without a GPU, `device_is_available` reports the problem."""
    training = draft.config.training
    if (
        draft.config.training.device == draft.facts.device == "cuda"
        and training.compile
        and not (draft.facts.has_triton or training.dry_run)
    ):
        yield Problem(
            "compiling GPU kernels requires Triton, which is not installed",
            "install the triton version that this torch requires, or use --no-compile, which is slower",
        )


@rule
def cublas_is_deterministic(draft: Draft) -> Problems:
    given, training = draft.facts.cublas_workspace, draft.config.training
    is_deterministic = training.deterministic_mode and training.device == "cuda"
    if is_deterministic and given is not None and given not in DETERMINISTIC_WORKSPACES:
        yield Problem(
            f"--deterministic-mode: CUBLAS_WORKSPACE_CONFIG is {given!r}, with which GEMMs may be nondeterministic",
            f"unset CUBLAS_WORKSPACE_CONFIG, or set it to {DETERMINISTIC_WORKSPACES[0]}",
        )


@derives("derived.cublas_workspace")
def cublas_workspace(draft: Draft) -> DerivedValue:
    """Decide the workspace of GEMMs. Without one cuBLAS takes kernels that start without clearing a counter."""
    given, training = draft.facts.cublas_workspace, draft.config.training
    if given is not None:
        return DerivedValue(given, "CUBLAS_WORKSPACE_CONFIG")
    if training.device == "cuda" and training.deterministic_mode:
        return DerivedValue(DETERMINISTIC_WORKSPACES[0], "--deterministic-mode")
    reason = next(_why_gemms_keep_the_workspace(draft), None)
    return DerivedValue(
        None if reason else NO_WORKSPACE, reason or "large GEMMs start earlier without a workspace"
    )


def _why_gemms_keep_the_workspace(draft: Draft) -> Iterator[str]:
    """Yield why GEMMs may be slower without a workspace, in which others sum over parts of the tokens, or were not measured."""
    config, spec, derived = draft.config, draft.derived.model_spec, draft.derived
    if config.training.device != "cuda":
        yield "a CPU has none"
    if (draft.facts.device_capability or (9, 0))[0] != _HOPPER:
        yield "it was measured on Hopper"
    if config.precision.params_dtype not in ("bfloat16", "float16") or derived.fp8_layers:
        yield "it was measured in 16 bits"
    if derived.transformer_impl == TRANSFORMER_ENGINE:
        yield "GEMMs of Transformer Engine have their own"
    if config.optimizer.has_matrices or layer_function(config.model.spec) is not None:
        yield "GEMMs of the optimizer, or of custom layers, may be small"
    if spec.vision is not None or spec.lora is not None or config.experts.num_experts is not None:
        yield "GEMMs of towers, adapters and routers are small"
    tp = config.parallel.tensor_model_parallel_size
    if derived.world_size > tp or (tp > 1 and not config.parallel.tp_comm_overlap):
        yield "concurrently with collectives it is no faster"
    yield from _small_gemms(draft)


def _small_gemms(draft: Draft) -> Iterator[str]:
    config, spec = draft.config, draft.derived.model_spec
    tp = config.parallel.tensor_model_parallel_size
    if config.data.pack_documents or config.data.seq_length_schedule is not None:
        yield "samples have several lengths"
    length = min(config.data.seq_length, config.model.decoder_seq_length or config.data.seq_length)
    if (tokens := config.training.micro_batch_size * length // tp) < _FEWEST_TOKENS:
        yield f"GEMMs have {tokens:,} tokens"
    linears = [one for layer in spec.all_layers for one in layer.linears(spec.hidden_size)]
    sizes = [one.inputs * sum(piece.size for piece in one.pieces) / tp for one in linears]
    if (smallest := min([*sizes, spec.padded_vocab_size * spec.hidden_size / tp])) < _SMALLEST_WEIGHT:
        yield f"the smallest weight has {smallest:,.0f} elements"


@derives("precision.params_dtype")
def params_dtype(draft: Draft) -> DerivedValue:
    if draft.config.precision.bf16:
        return DerivedValue("bfloat16", "--bf16")
    if draft.config.precision.fp16:
        return DerivedValue("float16", "--fp16")
    return DerivedValue("float32", "without --bf16 and --fp16")


@derives("derived.master_dtype")
def master_dtype(draft: Draft) -> DerivedValue:
    weights = draft.config.precision.params_dtype
    return DerivedValue("float64" if weights == "float64" else "float32", f"for {weights} weights")


@rule
def dtypes_agree(draft: Draft) -> Problems:
    precision = draft.config.precision
    if precision.bf16 and precision.fp16:
        yield Problem("--bf16 and --fp16 contradict each other", "remove one of them")
        return
    for flag, is_on, dtype in (("--bf16", precision.bf16, "bfloat16"), ("--fp16", precision.fp16, "float16")):
        if is_on and precision.params_dtype != dtype:
            yield Problem(
                f"{flag} and --params-dtype {precision.params_dtype} contradict each other",
                "remove one of them",
            )
        if not is_on and precision.params_dtype == dtype:
            yield Problem(f"--params-dtype {dtype} requires {flag}", f"add {flag}")


@note("cost")
def float32_by_default(draft: Draft) -> Notes:
    is_float32 = draft.config.precision.params_dtype == "float32"
    if is_float32 and draft.config.training.device == "cuda" and not draft.is_given("precision.params_dtype"):
        yield "--params-dtype float32 by default, as in Megatron-LM; --bf16 is several times faster on a GPU"


@rule
def bf16_reduction_requires_bf16_weights(draft: Draft) -> Problems:
    precision = draft.config.precision
    if precision.grad_reduce_in_bf16 and precision.params_dtype != "bfloat16":
        yield Problem(
            f"--grad-reduce-in-bf16 requires bf16 weights, and they are {precision.params_dtype}: gradients would be less"
            " precise than the weights that they update",
            "add --bf16, or remove --grad-reduce-in-bf16",
        )


@rule
def loss_scale_is_in_range(draft: Draft) -> Problems:
    precision = draft.config.precision
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield Problem(
            f"--min-loss-scale {precision.min_loss_scale:g} is above --initial-loss-scale"
            f" {precision.initial_loss_scale:g}",
            f"use --min-loss-scale {precision.initial_loss_scale:g} or less",
        )


@derives("derived.cuda_graphs")
def cuda_graphs(draft: Draft) -> DerivedValue:
    """Decide whether the passes of training are CUDA graphs."""
    kind = draft.config.training.cuda_graph_impl
    if kind in TRIED:
        reason = next(itertools.chain(_obstacles(draft), _obstacles_of_a_choice(draft)), None)
        return DerivedValue(reason is None, reason or "if steps are faster with them, which is tried")
    reason = f"--cuda-graph-impl {kind}" if kind == "none" else next(_obstacles(draft), None)
    return DerivedValue(reason is None, reason or f"--cuda-graph-impl {kind}")


@derives("derived.graphs_in_turn")
def graphs_in_turn(draft: Draft) -> DerivedValue:
    """Decide whether graphs run passes as --overlap-moe-expert-parallel-comm does, which costs the host nothing there."""
    reason = next(_why_graphs_take_no_turns(draft), None)
    return DerivedValue(reason is None, reason or "passes of two micro-batches hide the sends of tokens")


def _why_graphs_take_no_turns(draft: Draft) -> Iterator[str]:
    config, count = draft.config, draft.derived.num_microbatches
    if not draft.derived.cuda_graphs or config.training.cuda_graph_impl not in TRIED:
        yield "no graphs are tried"
    if draft.is_given("experts.overlap_moe_expert_parallel_comm"):
        yield "a flag decides about --overlap-moe-expert-parallel-comm"
    if config.parallel.expert_model_parallel_size == 1 or not experts_are_split(draft):
        yield "experts are on one rank"
    if config.parallel.pipeline_model_parallel_size > 1 or config.experts.moe_shared_expert_overlap:
        yield "pipeline stages and shared experts overlap in other ways"
    if not 1 < count <= _MOST_GRAPHS:
        yield f"each of {count} micro-batches would have a graph"


@note("cost")
def cuda_graphs_have_no_effect(draft: Draft) -> Notes:
    """Yield a note if CUDA graphs are asked for and not used, or used later than asked for."""
    kind = draft.config.training.cuda_graph_impl
    if kind in ("auto", "none"):
        return
    if not draft.derived.cuda_graphs:
        yield f"--cuda-graph-impl {kind} has no effect: {draft.origins['derived.cuda_graphs'].detail}"
    elif draft.config.training.cuda_graph_warmup_steps == 0:
        yield "--cuda-graph-warmup-steps 0: kernels are compiled in one iteration before the capture"


@note("nothing")
def graphs_of_modules_are_of_micro_batches(draft: Draft) -> Notes:
    kind = draft.config.training.cuda_graph_impl
    if draft.derived.cuda_graphs and kind == "transformer_engine":
        yield f"--cuda-graph-impl {kind} runs as auto: a graph has the whole micro-batch, and stays if steps are faster with it"


@unproven("nothing")
def graphs_of_passes(draft: Draft) -> Notes:
    if draft.derived.cuda_graphs and draft.config.training.cuda_graph_impl not in TRIED:
        yield "--cuda-graph-impl launches the same kernels, weight gradients partly in another order: compared on GPUs only (tests/gpu)"


def _obstacles_of_a_choice(draft: Draft) -> Iterator[str]:
    """Yield why a run must not depend on measured times, or was not measured."""
    if draft.derived.transformer_impl == TRANSFORMER_ENGINE:
        yield "modules of Transformer Engine are recorded with --cuda-graph-impl local only"
    if draft.config.training.deterministic_mode:
        yield "--deterministic-mode: what was measured decides nothing"
    if draft.config.training.require_parity:
        yield "--require-parity: graphs are compared with eager steps on GPUs only"


def _obstacles(draft: Draft) -> Iterator[str]:
    """Yield why a graph cannot be captured, or would repeat what must differ between micro-batches."""
    config, derived = draft.config, draft.derived
    if config.training.device != "cuda":
        yield "a CPU has none"
    if derived.transformer_impl == TRANSFORMER_ENGINE and derived.fp8_layers:
        yield "FP8 modules of Transformer Engine are not captured; --transformer-impl local is"
    if config.data.pack_documents:
        yield (
            "rows, documents and ranks change from pack to pack, and a graph has one size;"
            " without --pack-documents samples have --seq-length tokens"
        )
    elif has_documents(draft):
        yield "the sizes of documents change"
    if layer_function(config.model.spec) is not None:
        yield "custom layers may wait for the GPU"
    if config.data.seq_length_schedule is not None:
        yield "the length of --seq-length-schedule changes"
    if derived.distillation is not None:
        yield "the host keeps or reads the outputs of a teacher"
    if config.training.loss is not None:
        yield "the function of --loss may wait for the GPU"
    if config.training.offloads_activations:
        yield "activations are offloaded to host memory"
    if config.parallel.data_parallel_sharding_strategy not in ("no_shard", "optim"):
        yield "ZeRO-2 and ZeRO-3 communicate within the passes"
    if config.experts.num_experts is not None:
        yield from _obstacles_of_experts(draft)


def _obstacles_of_experts(draft: Draft) -> Iterator[str]:
    experts, parallel = draft.config.experts, draft.config.parallel
    if not draft.config.precision.bf16 or any(width % _DIVISOR for width in _widths_of_experts(draft)):
        yield f"the host reads the sizes of experts; with --bf16 and widths that are multiples of {_DIVISOR} it does not"
    capability = draft.facts.device_capability
    if capability is not None and capability[0] not in _ONE_KERNEL_ARCHITECTURES:
        yield "torch's grouped products wait for the host on this GPU"
    if parallel.expert_model_parallel_size > 1 and experts.sends_by_alltoall:
        yield "the host reads the counts of an all-to-all; --moe-alltoall-as-allgather has none"
    if experts.moe_shared_expert_overlap:
        yield "the memory of --moe-shared-expert-overlap is shared by two streams"
    if "global_aux_loss" in experts.moe_router_load_balancing_type:
        yield "global_aux_loss sums the loads of earlier micro-batches"


def _widths_of_experts(draft: Draft) -> Iterator[float]:
    for layer in draft.derived.model_spec.all_layers:
        if layer.experts is not None:
            yield layer.experts.latent_size or draft.config.model.hidden_size
            yield layer.experts.ffn_hidden_size / draft.derived.expert_tensor_parallel_size
