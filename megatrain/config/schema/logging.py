"""Settings of logs: terminal, `metrics.jsonl`, TensorBoard, trackers, profiles."""

from dataclasses import dataclass
from typing import Literal

from megatrain.config.schema.needs import LOGITS_CONFLICTS, on, one_of
from megatrain.config.schema.resume_class import SAFE
from megatrain.config.schema.setting import Section, setting
from megatrain.config.schema.values import AUTO

_CUDA = one_of("training.device", "cuda")
_TENSORBOARD = on(
    "logging.tensorboard_dir", "logging.wandb_project", "logging.mlflow_experiment", "logging.comet_project"
)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section, on_resume=SAFE):
    """Logging: contents and destinations."""

    log_interval: int = setting(100, at_least=1)
    """Iterations between log lines. Loss, time and speed are means over the interval."""
    metrics_file: str | None = None
    """File with a JSON object for each iteration and evaluation. Default: `metrics.jsonl` in --save."""
    on_log_failure: Literal["stop", "warn"] = "stop"
    """Reaction to a `metrics.jsonl` or TensorBoard file that cannot be written, as on a full disk: save and stop with an error, or warn and continue without that log. The same holds for standard output, without an error: exit code 75. Not in Megatron-LM."""
    print_config: Literal["short", "full"] = "short"
    """Configuration printed at start: given and derived values (short), or every setting (full). Not in Megatron-LM."""
    log_throughput: bool = False
    """Add TFLOP/s per GPU to the log line and TensorBoard; `metrics.jsonl` always has it. No effect on a CPU."""
    log_params_norm: bool = False
    """Log the L2 norm of all weights."""
    log_num_zeros_in_grad: bool = False
    """Log the number of gradient elements that are zero, without padding."""
    log_max_attention_logit: bool = setting(False, conflicts=LOGITS_CONFLICTS)
    """Log the largest attention logit of each iteration, as --qk-clip does. Costs the scores once more."""
    timing_log_level: int = setting(0, at_least=0, at_most=2)
    """Timed parts of an iteration. 0: none; 1: passes and optimizer; 2: also batches and gradient norm. Above 0, each part ends with a GPU synchronization, which costs speed."""
    timing_log_option: Literal["max", "minmax", "all"] = setting(
        "minmax", needs=on("logging.timing_log_level")
    )
    """Times over ranks: the maximum, minimum and maximum, or all."""
    log_straggler: bool = False
    """After each log line, print the slowest and the fastest ranks by the time of their forward and backward passes."""
    straggler_minmax_count: int = setting(1, at_least=1, needs=on("logging.log_straggler"))
    """Number of slowest and of fastest ranks that --log-straggler prints."""
    log_energy: bool = setting(
        False, needs=one_of("training.device", "cuda", words="on a CPU, whose energy is not measured")
    )
    """After each log line, print the energy and the power of the GPUs; `metrics.jsonl` has that of rank 0's GPU. Requires the package nvidia-ml-py. No effect on a CPU."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard event files. Requires the package tensorboard."""
    moe_per_layer_logging: bool = setting(False, needs=(on("experts.num_experts"), _TENSORBOARD))
    """In TensorBoard and trackers (W&B, MLflow, Comet), also log the losses and the maximum load of the router of each layer with experts."""
    tensorboard_log_interval: int = setting(1, at_least=1, needs=_TENSORBOARD)
    """Iterations between points in TensorBoard and trackers."""
    tensorboard_queue_size: int = setting(1000, at_least=1, needs=on("logging.tensorboard_dir"))
    """Events buffered in memory before TensorBoard writes them; it also writes every two minutes."""
    log_timers_to_tensorboard: bool = setting(False, needs=_TENSORBOARD)
    """Send the time of iterations and, with --timing-log-level, of their parts to TensorBoard and trackers (W&B, MLflow, Comet)."""
    log_memory_to_tensorboard: bool = setting(False, needs=_TENSORBOARD)
    """Send the GPU memory in use to TensorBoard and trackers (W&B, MLflow, Comet)."""
    log_validation_ppl_to_tensorboard: bool = setting(False, needs=_TENSORBOARD)
    """Send the perplexity of evaluations to TensorBoard and trackers (W&B, MLflow, Comet)."""
    log_loss_scale_to_tensorboard: bool = True
    """Send the loss scale to TensorBoard and trackers (W&B, MLflow, Comet)."""
    log_world_size_to_tensorboard: bool = setting(False, needs=_TENSORBOARD)
    """Send the number of ranks to TensorBoard and trackers (W&B, MLflow, Comet)."""
    callbacks: str | None = None
    """Class whose methods are called at the start, after each iteration, evaluation and save, and at the end: file.py:Class or module:Class (docs/extending.md). Not in Megatron-LM."""
    callbacks_digest: str | None = AUTO
    """Digest of the file of --callbacks. auto: computed from the file."""
    profile: bool = False
    """Profile a few iterations: a trace file per rank, and a table of GPU time."""
    profile_step_start: int = setting(10, at_least=0, needs=on("logging.profile"))
    """Iteration after which --profile starts; the first ones are slower than the rest."""
    profile_step_end: int = setting(12, at_least=1, needs=on("logging.profile"))
    """Last iteration of --profile."""
    profile_ranks: tuple[int, ...] = setting((), needs=on("logging.profile", "logging.record_memory_history"))
    """Ranks for which --profile writes a trace, and --record-memory-history a file. Default: rank 0."""
    profile_dir: str | None = setting(None, needs=on("logging.profile"))
    """Folder for the traces of --profile. Default: `profile` in --save, else in the current folder."""
    record_shapes: bool = setting(False, needs=on("logging.profile"))
    """Have the shapes of operands in the traces of --profile."""
    pytorch_profiler_collect_callstack: bool = setting(False, needs=on("logging.profile"))
    """Have the Python stack of each operation in the traces of --profile. It slows the profiled iterations."""
    nvtx_ranges: bool = setting(False, needs=(on("logging.profile"), _CUDA))
    """Mark the parts of the iterations of --profile as NVTX ranges between cudaProfilerStart and cudaProfilerStop, for `nsys profile --capture-range=cudaProfilerApi`, in place of torch's profiler."""
    record_memory_history: bool = setting(False, needs=_CUDA)
    """Record the allocations of the GPUs of --profile-ranks, and write them each --log-interval and at a failure, for https://pytorch.org/memory_viz."""
    memory_snapshot_path: str = setting("snapshot.pickle", needs=on("logging.record_memory_history"))
    """File of --record-memory-history; of several ranks, each has its number before the ending."""
    wandb_project: str | None = None
    """W&B project. Requires the package wandb; WANDB_MODE=offline stores the run on disk."""
    wandb_exp_name: str | None = setting(None, needs=on("logging.wandb_project"))
    """Name of the W&B run. Default: chosen by W&B."""
    wandb_save_dir: str | None = setting(None, needs=on("logging.wandb_project"))
    """Folder for W&B files. Default: `wandb` in --save, else in the current folder."""
    wandb_entity: str | None = setting(None, needs=on("logging.wandb_project"))
    """W&B user or team of the project."""
    mlflow_experiment: str | None = None
    """MLflow experiment. Requires the package mlflow (or mlflow-skinny), which reads MLFLOW_TRACKING_URI. Not in Megatron-LM."""
    mlflow_run_name: str | None = setting(None, needs=on("logging.mlflow_experiment"))
    """Name of the MLflow run. Default: chosen by MLflow."""
    comet_project: str | None = None
    """Comet project. Requires the package comet_ml, which reads COMET_API_KEY. Not in Megatron-LM."""
    comet_experiment_name: str | None = setting(None, needs=on("logging.comet_project"))
    """Name of the Comet experiment. Default: chosen by Comet."""
    comet_workspace: str | None = setting(None, needs=on("logging.comet_project"))
    """Comet workspace of the project. Default: that of the key."""
