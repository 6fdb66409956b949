"""Settings of parallelism. The data-parallel size follows from the number of ranks."""

from dataclasses import dataclass
from typing import Final, Literal

from megatrain.config.schema.needs import NCCL, above, conflict, costly, off, on, one_of
from megatrain.config.schema.pipeline_schedules import PIPELINE_SCHEDULES
from megatrain.config.schema.resume_class import SAFE, SILENT, STEPS
from megatrain.config.schema.setting import LAYOUT, Section, setting
from megatrain.config.schema.values import AUTO

_PIPELINE = above("parallel.pipeline_model_parallel_size", 1)
_TENSOR = above("parallel.tensor_model_parallel_size", 1)
_CONTEXT = above("parallel.context_parallel_size", 1)
_PACKS = on("data.pack_documents")
NCCL_GROUPS: Final = {
    "tp": "tp kv", "cp": "cp cp_heads cp_ring", "hcp": "cp_heads cp_ring", "tp_cp": "tp_cp", "pp": "pp", "embd": "embedding",
    "dp": "dp", "dp_cp": "dp replicas", "intra_dp_cp": "dp replicas dp_shard", "inter_dp_cp": "dp_copies", "ep": "ep ep_host ep_peers",
    "ep_tp": "etp", "ep_dp": "expert_replicas expert_shard", "intra_ep_dp": "expert_shard", "inter_ep_dp": "expert_copies",
    "pos_embd": "", "mp": "", "tp_dp": "", "tp_dp_cp": "", "tp_ep_mp": "", "tp_ep_pp": "",
}  # fmt: skip
NcclGroup = Literal[
    "tp", "cp", "hcp", "tp_cp", "pp", "embd", "dp", "dp_cp", "intra_dp_cp", "inter_dp_cp", "ep", "ep_tp", "ep_dp", "intra_ep_dp",
    "inter_ep_dp", "pos_embd", "mp", "tp_dp", "tp_dp_cp", "tp_ep_mp", "tp_ep_pp",
]  # fmt: skip
"""Groups of Megatron-LM, and ours that correspond to them."""
DYNAMIC: Final = "default_dynamic_cp"
"""The scheduler whose groups differ from pack to pack."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section, on_resume=SAFE):
    """Parallelism: distribution of model and optimizer over ranks."""

    tensor_model_parallel_size: int = setting(1, at_least=1, taken_by=LAYOUT)
    """Tensor-parallel size (tp): ranks over which the matrices of each layer are split."""
    pipeline_model_parallel_size: int = setting(1, at_least=1, taken_by=LAYOUT)
    """Pipeline-parallel size (pp): number of stages."""
    pipeline_schedule: str = setting(
        AUTO, choices={name: traits.shape for name, traits in PIPELINE_SCHEDULES.items()}, needs=_PIPELINE
    )
    """Pipeline schedule. auto: interleaved with several model chunks per rank; on 2 to 8 pipeline ranks of GPUs, if no flag sets the stages, zb-h1 or on four zb-v, with layers balanced by FLOPs (as with a given schedule other than 1f1b); else 1f1b. Not in Megatron-LM."""
    num_virtual_stages_per_pipeline_rank: int | None = setting(
        None, at_least=1, needs=_PIPELINE, taken_by=LAYOUT
    )
    """Model chunks per pipeline rank (virtual stages)."""
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None, at_least=1, needs=_PIPELINE, taken_by=LAYOUT
    )
    """Layers per model chunk, instead of --num-virtual-stages-per-pipeline-rank."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = setting(None, at_least=1, needs=_PIPELINE)
    """Micro-batches that one model chunk computes before the next. none: --pipeline-model-parallel-size."""
    decoder_first_pipeline_num_layers: int | None = setting(None, at_least=0, needs=_PIPELINE)
    """Layers of the first pipeline rank; the other ranks share the rest equally."""
    decoder_last_pipeline_num_layers: int | None = setting(None, at_least=0, needs=_PIPELINE)
    """Layers of the last pipeline rank."""
    account_for_embedding_in_pipeline_split: bool = setting(False, needs=_PIPELINE)
    """Count the embedding as a layer when layers are split into stages."""
    account_for_loss_in_pipeline_split: bool = setting(False, needs=_PIPELINE)
    """Count the output layer as a layer when layers are split into stages."""
    pipeline_model_parallel_layout: str | None = setting(None, needs=_PIPELINE)
    """Layers of each virtual stage, such as Ett|(tt|)*3tL: E embedding, t layer, L loss, | between stages, *N repetition. auto: balanced by FLOPs, head included."""
    overlap_p2p_communication: bool = setting(True, needs=_PIPELINE)
    """Overlap communication between pipeline stages with computation: post each receive before the pass that precedes the one that needs it. Off: begin to receive when the message is needed."""
    context_parallel_size: int = setting(1, at_least=1, taken_by=LAYOUT)
    """Context-parallel size (cp): ranks over which each sequence is split."""
    cp_comm_type: tuple[Literal["p2p", "all_gather", "a2a", "a2a+p2p", "a2a+all_gather"], ...] = setting(
        (), needs=_CONTEXT
    )
    """Context-parallel communication, for all layers or one per layer: p2p (ring attention), all_gather (of keys and values), a2a (exchanges heads for sequence parts), a2a+p2p or a2a+all_gather (a2a within groups of adjacent ranks, the other between groups). Default: all_gather with windows or documents; a2a where heads and query groups divide over ranks of one host; else p2p."""
    hierarchical_context_parallel_sizes: tuple[int, ...] = setting(
        (),
        needs=(
            _CONTEXT,
            one_of(
                "derived.cp_comm_types", "a2a+p2p", "a2a+all_gather", words="without --cp-comm-type a2a+p2p"
            ),
        ),
    )
    """For --cp-comm-type a2a+p2p and a2a+all_gather: number of ranks per a2a group, and number of groups."""
    context_parallel_chunk_means: bool = setting(False, needs=_CONTEXT, on_resume=STEPS)
    """Average the loss per context-parallel rank first, as Megatron-LM does: with a loss mask, the result depends on the split of samples. Not in Megatron-LM."""
    dynamic_context_parallel: bool = False
    """With --pack-documents: each pack is on as many context ranks as its documents need: groups of 1, 2, 4 ... of the ranks of dp and cp."""
    min_dynamic_context_parallel_size: int = setting(
        1, at_least=1, needs=one_of("parallel.sequence_packing_scheduler", DYNAMIC)
    )
    """Smallest group of --dynamic-context-parallel, a power of two."""
    max_seqlen_per_dp_cp_rank: int | None = setting(AUTO, at_least=1, unit="tokens", needs=_PACKS)
    """Most tokens of a pack on a rank of dp and cp. auto: so many that the largest group holds --seq-length."""
    sequence_packing_scheduler: Literal["default_dynamic_cp", "dp_balanced", "first_fit"] | None = setting(
        AUTO, needs=_PACKS
    )
    """Distribution of the documents of a global batch over ranks. default_dynamic_cp: that of --dynamic-context-parallel; dp_balanced: groups of --context-parallel-size ranks with balanced times; first_fit: the same groups, filled in order (not in Megatron-LM). auto: default_dynamic_cp with --dynamic-context-parallel, else dp_balanced."""
    expert_model_parallel_size: int = setting(1, at_least=1, taken_by=LAYOUT)
    """Expert-parallel size (ep): ranks over which the experts of a layer are distributed."""
    expert_tensor_parallel_size: int | None = setting(
        None, at_least=1, needs=on("experts.num_experts"), taken_by=LAYOUT
    )
    """Expert-tensor-parallel size (etp): ranks over which the matrices of each expert are split. none: --tensor-model-parallel-size."""
    use_tp_pp_dp_mapping: bool = False
    """Number ranks in the order tp-pp-dp instead of tp-dp-pp, so that pipeline stages are closer together than replicas."""
    sequence_parallel: bool = setting(AUTO, needs=_TENSOR, taken_by=LAYOUT)
    """Split norms and the residual stream along the sequence over the tensor-parallel ranks. auto: on where --tp-comm-overlap is. Off by default in Megatron-LM."""
    tp_comm_overlap: bool = setting(
        AUTO,
        needs=(
            on("parallel.sequence_parallel"),
            _TENSOR,
            one_of("training.device", "cuda", words="on a CPU: communication and products take turns there"),
            costly(
                off(
                    "precision.fp8_format",
                    words="in linear layers of {}, which wait for their communication: those in bf16 overlap it, and a smaller"
                    " --tensor-model-parallel-size has less of it",
                )
            ),
        ),
        conflicts=conflict(
            "experts.moe_shared_expert_overlap", why=": layers on two streams would use the same peer memory"
        ),
    )
    """With --sequence-parallel on GPUs: overlap the all-gather before a GEMM, and the reduce-scatter after it, with the product: copy engines write into the memory of the other GPUs, which must be on one host. Without it only the backward pass of column-parallel layers overlaps them. Linear layers of Transformer Engine are then those of local. auto: on with 2 to 4 tensor ranks on GPUs that NVLink connects, unless messages are small."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks (ZeRO-1). Off by default in Megatron-LM."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = AUTO
    """State sharded over the data-parallel ranks: none, optimizer state (optim, ZeRO-1), also gradients (optim_grads, ZeRO-2), also weights (optim_grads_params, ZeRO-3). auto: optim, or as --use-megatron-fsdp and --no-use-distributed-optimizer ask. Tied embeddings are not sharded in ZeRO-2 and 3. Megatron-LM reads it only with --use-megatron-fsdp."""
    use_megatron_fsdp: bool = False
    """Shard weights, gradients and optimizer state: --data-parallel-sharding-strategy is optim_grads_params unless given."""
    num_distributed_optimizer_instances: int = setting(1, at_least=1)
    """Number of groups of adjacent data-parallel ranks; state is sharded within each group, and gradients are also reduced between groups (HSDP)."""
    overlap_grad_reduce: bool = True
    """Overlap gradient reduction with the backward pass. Off: reduce after it."""
    overlap_param_gather: bool = True
    """Overlap the all-gather of updated weights with the optimizer and the next forward pass. Off: wait for each layer before the next update."""
    nccl_communicator_config_path: str | None = setting(None, needs=NCCL)
    """YAML file with options of NCCL communicators by group of Megatron-LM: `ep: {min_ctas: 1, max_ctas: 16, cga_cluster_size: 2, net_name: IB, is_high_priority_stream: true}`."""
    high_priority_stream_groups: tuple[NcclGroup, ...] = setting((), needs=NCCL)
    """Groups whose NCCL kernels run on streams of high priority, so that other kernels delay them less."""
    distributed_backend: Literal["nccl", "gloo"] = setting(
        AUTO,
        conflicts=conflict(
            "training.device",
            "cuda",
            of=("gloo",),
            fix="use --distributed-backend nccl, or --device cpu",
        ),
    )
    """Backend of collectives. auto: nccl on GPUs, gloo on CPUs."""
    distributed_timeout_minutes: int = setting(10, at_least=1)
    """Timeout of a collective in minutes; at least 60 until the first iteration has ended."""
    distributed_timeout_seconds_after_init: int | None = setting(None, at_least=1)
    """Timeout of a collective in seconds after the first iteration. none: --distributed-timeout-minutes."""
    world_size: int | None = setting(None, at_least=1, on_resume=SILENT)
    """Number of ranks for --dry-run. none: the launched ranks, or the fewest that hold the model."""
