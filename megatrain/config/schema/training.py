"""Settings of the run: training, checkpoints, early exit."""

from dataclasses import dataclass
from typing import Final, Literal

from megatrain.config.schema.model import NOT_IN_MEGATRON, ModelConfig
from megatrain.config.schema.needs import (
    NCCL,
    Need,
    conflict,
    contains,
    differs,
    either,
    none_of,
    off,
    on,
    one_of,
)
from megatrain.config.schema.resume_class import LOSS, ORDER, SAFE, SILENT, STEPS
from megatrain.config.schema.setting import EVALUATION, Section, setting
from megatrain.config.schema.values import AUTO, REQUIRED

_SELECTIVE = conflict("training.recompute_granularity", "full", why=", since it is selective")
_OFFLOADS = on("training.cpu_offloading_num_layers", "training.fine_grained_activation_offloading")
OffloadedModule = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "layer_input"
]
_OTHER_PASSES = differs("training.eval_micro_batch_size", "training.micro_batch_size")
_EVALUATED_AS_TRAINED = tuple(
    conflict(path, *values, when=_OTHER_PASSES, why=why)
    for path, values, why in (
        ("data.dataloader_type", ["cyclic"], ", whose order depends on the micro-batch size"),
        ("data.pack_documents", [], ", whose micro-batches are packs"),
        ("model.model_family", ["vlm"], ", whose images are sent in micro-batches of one size"),
        ("distillation.export_kd_teacher_load", [], ", whose passes have --micro-batch-size samples"),
    )
)
RecomputedModule = Literal["core_attn", "mlp", "layernorm", "mla_up_proj", "moe", "shared_experts", "moe_act"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section, on_resume=SAFE):
    """Training: batch sizes, length, evaluation, recomputation."""

    micro_batch_size: int = setting(
        REQUIRED,
        at_least=1,
        unit="samples",
        example="1 always works; larger ones use the device better",
        taken_by=EVALUATION,
        on_resume=STEPS,
    )
    """Samples per forward pass of a model replica."""
    global_batch_size: int = setting(AUTO, at_least=1, unit="samples", taken_by=EVALUATION, on_resume=STEPS)
    """Samples per iteration over all replicas. auto: one micro-batch per replica, or the last entry of --step-batch-size-schedule."""
    rampup_batch_size: tuple[str, ...] = setting((), taken_by=EVALUATION, on_resume=STEPS)
    """Batch size ramp: start size, increment, and number of samples over which the global batch grows to --global-batch-size."""
    step_batch_size_schedule: str | None = setting(
        None,
        joins_words=True,
        taken_by=EVALUATION,
        conflicts=tuple(
            conflict(f"training.{other}", why=": both set the batch size")
            for other in ("rampup_batch_size", "decrease_batch_size_if_needed")
        ),
        on_resume=STEPS,
    )
    """Global batch sizes from given numbers of tokens on, such as '0:768 250B:1536 500B:3072'; K, M, B and T are powers of 1000."""
    decrease_batch_size_if_needed: bool = setting(False, taken_by=EVALUATION, on_resume=STEPS)
    """Round the global batch down to a multiple of micro-batch size * data-parallel size. Off: an error."""
    train_iters: int | None = setting(None, at_least=1, taken_by=EVALUATION)
    """Iterations of training. Give this or --train-samples."""
    train_samples: int | None = setting(
        None,
        at_least=1,
        taken_by=EVALUATION,
        conflicts=conflict("training.train_iters", why=": both set the length of training"),
    )
    """Samples of training; an incomplete last global batch is dropped (with --step-batch-size-schedule: filled up). Give this or --train-iters."""
    loss: str | None = setting(None, on_resume=LOSS, may_move=True)
    """Function of each token's cross-entropy that is trained in its place: file.py:function or module:function (docs/extending.md). Not in Megatron-LM."""
    loss_digest: str | None = setting(AUTO, on_resume=STEPS)
    """Digest of the file of --loss. auto: computed from the file."""
    calculate_per_token_loss: bool = setting(
        False,
        taken_by=EVALUATION,
        conflicts=conflict("parallel.context_parallel_chunk_means", why=", which averages chunk means"),
        on_resume=STEPS,
    )
    """Average the loss over all unmasked tokens of an iteration. Off: over its micro-batches, each a mean over its tokens."""
    check_for_nan_in_loss_and_grad: bool = True
    """Stop at a non-finite loss or gradient. Off: skip and count the iteration."""
    check_for_large_grads: bool = False
    """Warn of a gradient norm above 10 times the largest of the first 100 iterations since start."""
    check_for_spiky_loss: bool = False
    """Warn of a loss above 10 times the largest of the first 100 iterations since start."""
    check_weight_hash_across_dp_replicas_interval: int | None = setting(None, at_least=1)
    """Iterations between comparisons of the weights that several ranks hold; a difference ends the run and names the rank. none: never."""
    iterations_to_skip: tuple[int, ...] = setting((), on_resume=STEPS)
    """Iterations whose samples are passed over without training, as the number of iterations before each: 0 is the first."""
    seed: int = setting(1234, at_least=0, on_resume=ORDER, taken_by=EVALUATION)
    """Random seed of initial weights and sample order."""
    eval_interval: int | None = setting(None, at_least=1, taken_by=EVALUATION)
    """Iterations between evaluations. none: one evaluation, at the end."""
    eval_iters: int = setting(100, at_least=0, taken_by=EVALUATION)
    """Global batches per evaluation. 0: no evaluation."""
    eval_global_batch_size: int = setting(AUTO, at_least=1, unit="samples", taken_by=EVALUATION)
    """Samples per evaluation iteration. auto: --global-batch-size."""
    eval_micro_batch_size: int = setting(
        AUTO, at_least=1, unit="samples", taken_by=EVALUATION, conflicts=_EVALUATED_AS_TRAINED
    )
    """Samples per rank and pass in evaluation, which needs less memory than training. auto: --micro-batch-size."""
    start_eval_at_iter: int | None = setting(None, at_least=0, taken_by=EVALUATION)
    """First iteration at which to evaluate."""
    skip_train: bool = False
    """Only evaluate on validation and test data."""
    eval_only: bool = False
    """Only evaluate the checkpoint of --load, on the samples of its last evaluation, with all its settings that are not given: model, tokenizer, data, batch sizes, precision. Not in Megatron-LM."""
    eval_at_start: bool = False
    """Also evaluate before the first iteration, on the samples of the first evaluation. Not in Megatron-LM."""
    eval_with_ema: bool = setting(
        False,
        taken_by=EVALUATION,
        needs=on("optimizer.ema_decay"),
        conflicts=(
            *(
                conflict(
                    path,
                    why=": the run loads the weights alone",
                    fix="add --no-eval-with-ema, or --load a checkpoint of megatrain checkpoint average --ema",
                )
                for path in ("training.eval_only", "training.skip_train")
            ),
            conflict(
                "precision.fp8_param_gather",
                when=one_of("precision.fp8_recipe", "delayed"),
                why=": delayed scales follow from all weights that are sent",
                fix="remove --fp8-param-gather, or use --fp8-recipe tensorwise",
            ),
        ),
    )
    """Evaluate the average of --ema-decay in place of the weights. Not in Megatron-LM."""
    eval_tasks: tuple[str, ...] = setting(
        (),
        conflicts=(
            conflict("model.model_family", "bert", "t5", "vlm", why=", which does not continue text"),
            conflict("data.pack_documents", why=", whose micro-batches are packs"),
        ),
    )
    """Files of tasks that the model is scored on while it trains, multiple choice and cloze, or folders of them: JSON lines, or the YAML of lm-evaluation-harness (docs/training.md). Not in Megatron-LM."""
    eval_tasks_interval: int | None = setting(None, at_least=1, needs=on("training.eval_tasks"))
    """Iterations between scores of --eval-tasks. none: at each evaluation. Not in Megatron-LM."""
    eval_tasks_limit: int | None = setting(None, at_least=1, needs=on("training.eval_tasks"))
    """Documents of each task of --eval-tasks that are read, from the first. none: all. Not in Megatron-LM."""
    deterministic_mode: bool = False
    """Use only deterministic operations, although some are slower. Always so on a CPU."""
    require_parity: bool = False
    """Treat settings whose result is not proven equal under every layout as errors. Off: as notes. Not in Megatron-LM."""
    cuda_graph_impl: Literal["auto", "none", "local", "full_iteration", "transformer_engine"] = "auto"
    """CUDA graphs of a micro-batch's passes, launched at once: for models whose kernels end before the host has launched the next ones, such as small ones and those with many small experts. local, full_iteration: one graph of the whole micro-batch, or with pipeline ranks one of each pass; not where the host reads counts of experts. auto: local where steps are faster with graphs than without, which is tried after the warm-up if a fifth of the memory is left; a line of the log has the times. transformer_engine: as auto."""
    cuda_graph_warmup_steps: int = setting(
        3,
        at_least=0,
        needs=one_of("training.cuda_graph_impl", "auto", "local", "full_iteration", "transformer_engine"),
    )
    """Iterations of a start before CUDA graphs are captured: kernels are compiled in them. 0 counts as 1; with auto, fewer than 3 count as 3."""
    compile: bool = True
    """On GPUs, use kernels that Triton and flash-attn-4 compile at run time. --no-compile: torch's own operations, which are slower. Not in Megatron-LM."""
    manual_gc: bool = False
    """Run Python's garbage collection on all ranks in the same iterations."""
    manual_gc_interval: int = setting(0, at_least=0, needs=on("training.manual_gc"))
    """Iterations between garbage collections with --manual-gc. 0: none."""
    manual_gc_eval: bool = setting(True, needs=on("training.manual_gc"))
    """With --manual-gc, also collect before and after an evaluation."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Activation recomputation: whole layers (full), or parts of them (selective)."""
    recompute_method: Literal["uniform", "block"] | None = setting(
        None, needs=one_of("training.recompute_granularity", "full")
    )
    """Layers that --recompute-granularity full recomputes: all, in chunks (uniform), or the first of a stage (block)."""
    recompute_num_layers: int | None = setting(
        None, at_least=1, needs=one_of("training.recompute_granularity", "full")
    )
    """Layers per chunk (uniform), or recomputed layers per stage (block)."""
    recompute_modules: tuple[RecomputedModule, ...] = setting(
        (),
        needs=either(
            one_of("training.recompute_granularity", "selective"),
            on("training.recompute_activations"),
            words="unless --recompute-granularity is selective",
        ),
    )
    """Modules that --recompute-granularity selective recomputes: core_attn, mlp, layernorm; moe (router, experts and shared expert), shared_experts and moe_act in layers with experts. Default: core_attn."""
    recompute_activations: bool = setting(False, conflicts=_SELECTIVE)
    """Alias of --recompute-granularity selective."""
    moe_layer_recompute: bool = setting(False, needs=on("experts.num_experts"), conflicts=_SELECTIVE)
    """Alias of --recompute-granularity selective with moe among --recompute-modules."""
    recompute_norms: bool = setting(
        AUTO,
        needs=(
            none_of("training.recompute_granularity", "full", why=", which recomputes norms anyway"),
            none_of("model.norm_position", "post", why=", since no norm precedes a linear layer"),
        ),
    )
    """Recompute norms that precede linear layers, as --recompute-modules layernorm does. auto: on GPUs for wide models, where the cost is small, unless something else is recomputed. Not in Megatron-LM."""
    recompute_mlp_act: bool = setting(
        AUTO, needs=off("precision.fp8_format", words="with {}, whose layers save its input")
    )
    """Recompute the activation of MLPs and shared experts instead of saving its result. auto: on GPUs for wide models, where the cost is small. Not in Megatron-LM."""
    mlp_chunks_for_training: int = setting(AUTO, at_least=1)
    """Chunks of a dense MLP's tokens, computed one after the other and again in the backward pass: wide tensors of one chunk are in memory at a time. auto: recomputed MLPs of at least 32,768 tokens on a rank have chunks of 16,384 or more; other ones are computed whole."""
    cpu_offloading_num_layers: int = setting(0, at_least=0)
    """Layers of each pipeline rank (more than it has: all), spread evenly over it, whose activations are copied to pinned host memory and back before their backward pass, concurrently with computation (docs/training.md)."""
    fine_grained_activation_offloading: bool = setting(
        False, conflicts=conflict("training.cpu_offloading_num_layers", why=", which offloads whole layers")
    )
    """Copy what --offload-modules names to pinned host memory, in every layer, and back before its backward pass."""
    offload_modules: tuple[OffloadedModule, ...] = setting(
        (), needs=on("training.fine_grained_activation_offloading")
    )
    """Modules whose inputs are offloaded: attn_norm, qkv_linear, core_attn, attn_proj (with core_attn), mlp_norm; expert_fc1 and moe_act in layers with experts; layer_input with --recompute-granularity full."""
    min_offloaded_tensor_size: int = setting(1 << 20, at_least=0, unit="elements", needs=_OFFLOADS)
    """Smallest tensor that is offloaded."""
    device: Literal["cpu", "cuda"] = AUTO
    """Device. auto: cuda if there is a GPU, else cpu."""
    dry_run: Literal["text", "json"] | None = setting(None, alone="text", on_resume=SILENT)
    """Print the plan of the run without starting it, as text or as one JSON object. Needs no GPU. Not in Megatron-LM."""

    assume_gpu: Literal["a100", "h100", "h800", "h200", "b200"] | None = setting(
        None, on_resume=SILENT, needs=on("training.dry_run")
    )
    """GPU that --dry-run plans for: its memory, and the formats that it multiplies. none: this host's GPU, or an H100 where it has none. Not in Megatron-LM."""

    @property
    def recomputes_layers(self) -> bool:
        """Layers or parts of them are recomputed."""
        return self.recompute_granularity is not None or self.recompute_activations

    @property
    def offloads_activations(self) -> bool:
        """Activations are copied to host memory."""
        return self.cpu_offloading_num_layers > 0 or self.fine_grained_activation_offloading

    @property
    def only_evaluates(self) -> bool:
        """The run evaluates and does not train."""
        return self.skip_train or self.eval_only


HF_PREFIX: Final = "hf:"
"""Start of a path of --load or --pretrained-checkpoint that names a folder of transformers."""

_NOT_HELD: Final = ", which Megatron-LM's format does not hold"
_LAYERS: Final = "model.heterogeneous_layers_config_encoded_json"
_HAS_LINEAR: Final = Need(
    "",
    (_LAYERS,),
    lambda value_of: '"replace_with_linear":true' in "".join((value_of(_LAYERS) or "").split()),
)
_NOT_COPIED: Final = (
    conflict(_LAYERS, when=_HAS_LINEAR, why=" with replace_with_linear, which is not converted"),
    conflict("optimizer.optimizer", when=none_of("optimizer.optimizer", "adam"), why=_NOT_HELD),
    conflict("model.model_family", "vlm", why=_NOT_HELD),
    conflict("model.spec", why=_NOT_HELD),
    conflict("model.hybrid_layer_pattern", when=contains("model.hybrid_layer_pattern", "P"), why=_NOT_HELD),
    *(
        conflict(f"model.{name}", when=none_of(f"model.{name}", getattr(ModelConfig, name)), why=_NOT_HELD)
        for name in NOT_IN_MEGATRON
    ),
)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section, on_resume=SAFE):
    """Checkpoints: saving and loading."""

    save: str | None = None
    """Folder for checkpoints."""
    load: str | None = setting(None, on_resume=SILENT)
    """Folder from which to load the latest valid checkpoint, or FOLDER/iter_0000100 for that one. A missing checkpoint is an error. hf:FOLDER: start with the weights of a folder of transformers."""
    ckpt_step: int | None = setting(
        None, at_least=1, on_resume=SILENT, needs=on("checkpoint.load", "checkpoint.pretrained_checkpoint")
    )
    """Load the checkpoint of this iteration. none: the newest valid one."""
    also_save: Literal["torch_dist"] | None = setting(
        None, needs=on("checkpoint.save"), conflicts=_NOT_COPIED
    )
    """Also copy each checkpoint to `torch_dist` in --save, in Megatron-LM's format of this name; a process of its own does it while the run trains. Not in Megatron-LM."""
    save_hf_interval: int | None = setting(
        None,
        at_least=1,
        needs=on("checkpoint.save_interval"),
        multiple_of="checkpoint.save_interval",
        conflicts=(conflict("model.spec", why=", which transformers does not have"),),
    )
    """Also write the checkpoints of multiples of this many iterations, and the last one, as folders of transformers to `hf` in --save, without optimizer; a process of its own does it while the run trains. Not in Megatron-LM."""
    save_interval: int | None = setting(None, at_least=1, needs=on("checkpoint.save"))
    """Iterations between checkpoints. none: one checkpoint, at the end."""
    save_retain_interval: int | None = setting(
        None, at_least=1, needs=on("checkpoint.save_interval"), multiple_of="checkpoint.save_interval"
    )
    """Keep the checkpoints at multiples of this many iterations and the newest two; each save removes the third newest otherwise. none: all are kept."""
    keep_last: int | None = setting(None, at_least=2, needs=on("checkpoint.save_interval"))
    """Keep this many of the newest checkpoints, and those of --save-retain-interval; each save removes all others. none: all are kept. Not in Megatron-LM."""
    non_persistent_save_interval: int | None = setting(None, at_least=1, needs=on("checkpoint.save"))
    """Iterations between non-persistent checkpoints. Only the newest is kept. --load resumes from the newer of both."""
    non_persistent_ckpt_type: Literal["global", "local"] | None = setting(None, needs=on("checkpoint.save"))
    """Storage of non-persistent checkpoints. global: a folder that all nodes share. local: a folder on a disk of each node."""
    non_persistent_global_ckpt_dir: str | None = setting(
        None, needs=one_of("checkpoint.non_persistent_ckpt_type", "global")
    )
    """Folder of global non-persistent checkpoints. none: `non_persistent` in --save."""
    non_persistent_local_ckpt_dir: str | None = setting(
        None, needs=one_of("checkpoint.non_persistent_ckpt_type", "local")
    )
    """Folder of local non-persistent checkpoints, such as one on a fast disk of the node."""
    replication: bool = setting(False, needs=one_of("checkpoint.non_persistent_ckpt_type", "local"))
    """Keep copies of each rank's local checkpoint on other nodes, so that a run resumes from them after a disk is lost."""
    replication_jump: int | None = setting(None, at_least=1, needs=on("checkpoint.replication"))
    """Distance between the ranks that keep copies of each other's local checkpoint: the number of ranks per node."""
    replication_factor: int = setting(2, at_least=2, needs=on("checkpoint.replication"))
    """Number of nodes that have each rank's local checkpoint."""
    async_save: bool = setting(False, needs=on("checkpoint.save"))
    """Save in the background: training waits for a copy of the state to host memory, not for the disk."""
    async_ckpt_cpu_priority: int = setting(10, at_least=0, at_most=19, needs=on("checkpoint.async_save"))
    """Nice value of the processes that write for --async-save; 19 is the lowest priority."""
    async_ckpt_io_priority: int = setting(3, at_least=0, at_most=3, needs=on("checkpoint.async_save"))
    """I/O scheduling class of these processes, as of ionice: 0 none, 1 realtime, 2 best effort, 3 only while the disk is idle."""
    verify_saves: bool = setting(False, needs=on("checkpoint.save"))
    """Read every file of a checkpoint from the disk again before the checkpoint counts. Not in Megatron-LM."""
    on_save_failure: Literal["stop", "warn"] = setting("stop", needs=on("checkpoint.save"))
    """After a save that fails: stop the run, or warn and train on; a run whose last save failed never exits with 0. Not in Megatron-LM."""
    exit_on_missing_checkpoint: bool = setting(False, on_resume=SILENT, needs=on("checkpoint.load"))
    """Exit if --load has no checkpoint. This is always so without --load-or-start."""
    load_or_start: bool = setting(
        False,
        on_resume=SILENT,
        needs=on("checkpoint.load"),
        conflicts=conflict("checkpoint.exit_on_missing_checkpoint"),
    )
    """Start from initial weights if --load has no checkpoint, as Megatron-LM does."""
    no_load_optim: bool = setting(False, on_resume=SILENT, needs=on("checkpoint.load"))
    """Load only weights; optimizer state, schedules and loss scale start from scratch. With --save in the folder of --load, at the first start only."""
    no_save_optim: bool = setting(False, needs=on("checkpoint.save"))
    """Save only weights: smaller checkpoints, for --finetune and --no-load-optim, not to resume."""
    finetune: bool = setting(False, on_resume=SILENT, needs=on("checkpoint.load"))
    """Load only weights and start at iteration 0, with the data and schedules of this command line. With --save in the folder of --load, at the first start only."""
    pretrained_checkpoint: str | None = setting(None, on_resume=SILENT)
    """Folder of a checkpoint whose weights are loaded, as with --finetune, while --load has no checkpoint. hf:FOLDER: a folder of transformers."""
    from_hf: str | None = setting(None, on_resume=SILENT)
    """Folder of transformers from whose config.json the settings of the model are taken, and its tokenizer, where they are not given. Not in Megatron-LM."""
    allow_pickle: bool = setting(
        False, on_resume=SILENT, needs=on("checkpoint.load", "checkpoint.pretrained_checkpoint")
    )
    """Also load checkpoints of Megatron-LM in the format torch (mp_rank_*), whose files are pickled; no code in them is run. Not in Megatron-LM."""
    use_checkpoint_args: bool = setting(
        False, on_resume=SILENT, needs=on("checkpoint.load", "checkpoint.pretrained_checkpoint")
    )
    """Take the settings of the model, the sequence length and the tokenizer from the checkpoint, where they are not given."""
    use_mp_args_from_checkpoint_args: bool = setting(
        False, on_resume=SILENT, needs=on("checkpoint.use_checkpoint_args")
    )
    """With --use-checkpoint-args: take the parallel layout from the checkpoint too, where it is not given."""

    @property
    def non_persistent_folder(self) -> str | None:
        """Folder of non-persistent checkpoints; None: there are none."""
        return non_persistent_folder(
            self.save,
            self.non_persistent_ckpt_type,
            self.non_persistent_global_ckpt_dir,
            self.non_persistent_local_ckpt_dir,
        )


def non_persistent_folder(
    save: str | None, kind: str | None, global_folder: str | None, local_folder: str | None
) -> str | None:
    """Return the folder of non-persistent checkpoints from the settings of `CheckpointConfig`; None: there are none."""
    if kind == "local":
        return local_folder
    if kind is None or global_folder is not None or save is None:
        return global_folder if kind is not None else None
    return f"{save}/non_persistent"


_RECORDER = on("resilience.flight_recorder_dump_path")
_RESTART = on("resilience.inprocess_restart")


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig(Section, on_resume=SAFE):
    """Early exit: planned ends of a job."""

    exit_interval: int | None = setting(None, at_least=1)
    """Save and exit at the first iteration divisible by this."""
    exit_duration_in_mins: float | None = setting(None, above=0)
    """Save and exit after the iteration in which this many minutes have passed since the program started."""
    flight_recorder_dump_path: str | None = setting(None, needs=NCCL)
    """Folder in which each rank writes its newest NCCL collectives after one has timed out (PyTorch's flight recorder; `torchfrtrace` names the ranks that did not join). none: nothing is recorded."""
    flight_recorder_trace_buffer_size: int = setting(2000, at_least=1, needs=_RECORDER)
    """Collectives that a rank keeps for --flight-recorder-dump-path."""
    flight_recorder_include_stack_trace: bool = setting(False, needs=_RECORDER)
    """Also write the Python stack of each rank's collectives."""
    flight_recorder_include_only_active: bool = setting(True, needs=_RECORDER)
    """Write only collectives that have not completed."""
    flight_recorder_dump_on_timeout: bool = setting(True, needs=_RECORDER)
    """Write after a timeout."""
    flight_recorder_extra_dump_on_exec: bool = setting(True, needs=_RECORDER)
    """Also write when an exception ends a rank."""
    exit_signal: str = "SIGTERM"
    """Additional signal, by name or number, that ends the run; SIGTERM, SIGINT and SIGUSR1 always do, and SIGHUP unless it is ignored."""
    on_nan: tuple[str, ...] = ("stop",)
    """Response to a loss or gradient that is infinite or NaN: stop; skip (the step updates nothing); or rewind N: load the newest checkpoint of at least N iterations before, and pass over the samples of the bad iteration. Not in Megatron-LM."""
    on_spike: tuple[str, ...] = setting(("warn",), on_resume=STEPS)
    """Response to a spike that --check-for-spiky-loss or --check-for-large-grads finds: warn; stop; skip; or rewind N, as for --on-nan. Not in Megatron-LM."""
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = "disabled"
    """validate_results: compute a step that is not finite again, first on the same devices, then, in the resumed run, on others; exit with code 16 (resume on other devices) or 17 (decided: transient or persistent error of a device, or none). A spike that --check-for-spiky-loss or --check-for-large-grads finds is computed again on the same devices. report_stats: compute each step twice and print the largest differences."""
    error_injection_rate: int = setting(0, at_least=0)
    """Reject one step in this many, at random, to try --rerun-mode validate_results; 0: none."""
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = setting(
        "transient_error", needs=on("resilience.error_injection_rate")
    )
    """Behaviour of the steps that --error-injection-rate rejects: transient_error (right when computed again), persistent_error (right on other devices), correct_result (the same everywhere)."""
    inprocess_restart: bool = False
    """Keep healthy processes after a failure: they form new process groups with the processes that replace the lost ones, and continue from the last checkpoint. A supervisor starts each process."""
    inprocess_active_world_size: int | None = setting(None, at_least=1, needs=_RESTART)
    """Ranks that train; the other processes of the job are spares. none: all processes train."""
    inprocess_max_iterations: int | None = setting(None, at_least=0, needs=_RESTART)
    """Restarts within the job; none: any number, but not three in a row before an iteration."""
    inprocess_soft_timeout: float = setting(120.0, above=0, needs=_RESTART)
    """Seconds without progress of a training step or an evaluation after which a rank counts as hanging."""
    inprocess_hard_timeout: float = setting(90.0, above=0, needs=_RESTART)
    """Seconds in which a process must leave its groups after a failure; otherwise it is replaced."""
    inprocess_barrier_timeout: float = setting(120.0, above=0, needs=_RESTART)
    """Seconds from a failure in which all ranks must be there again; otherwise the job ends. After half of them a spare replaces a lost process whose host is alive."""
    exit_file: str | None = None
    """Save and exit once this file exists; rank 0 looks for it. A run does not start while it exists. Not in Megatron-LM."""
