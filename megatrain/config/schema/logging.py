"""What a run shows, and where: the terminal, `metrics.jsonl`, TensorBoard, W&B."""

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.schema.values import CheckedSection, in_range


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(CheckedSection):
    """Logging: what is said about the run, and where."""

    log_interval: int = field(default=100, metadata=in_range(at_least=1))
    """Iterations between log lines, whose loss, time and speed are means over them."""
    metrics_file: str | None = None
    """File that gets a JSON object for each iteration and each evaluation. Left out: `metrics.jsonl` in --save."""
    print_config: Literal["short", "full"] = "short"
    """What is printed of the configuration at start: what was given and derived, or every setting. Not in Megatron-LM."""
    log_throughput: bool = False
    """Put TFLOP/s a GPU into the log line and TensorBoard. `metrics.jsonl` has it anyway. Nothing on a CPU."""
    log_params_norm: bool = False
    """Also show the L2 norm of all weights, each counted once."""
    log_num_zeros_in_grad: bool = False
    """Also show how many elements of the gradient are zero, each counted once and without the padding."""
    timing_log_level: int = field(default=0, metadata=in_range(at_least=0, at_most=2))
    """Parts of an iteration that are timed. 0: none, 1: passes and optimizer, 2: also batches and gradient norm.
    Above 0, a GPU is waited for at the borders of these parts, which costs speed."""
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """How the ranks' times are told: the longest, also the shortest, or each."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard's event files. Needs the package tensorboard."""
    tensorboard_log_interval: int = field(default=1, metadata=in_range(at_least=1))
    """Iterations between points of the curves in TensorBoard and W&B."""
    tensorboard_queue_size: int = field(default=1000, metadata=in_range(at_least=1))
    """Events that wait in memory for TensorBoard before they are written; they are written every two minutes anyway."""
    log_timers_to_tensorboard: bool = False
    """Also send the times of an iteration and, with --timing-log-level, of its parts."""
    log_memory_to_tensorboard: bool = False
    """Also send how much memory of the GPU is used."""
    log_validation_ppl_to_tensorboard: bool = False
    """Also send the perplexities of evaluations."""
    log_loss_scale_to_tensorboard: bool = True
    """Also send the loss scale."""
    log_world_size_to_tensorboard: bool = False
    """Also send the number of ranks."""
    profile: bool = False
    """Profile a few iterations: a trace file a rank, and a table of where the GPU's time went."""
    profile_step_start: int = field(default=10, metadata=in_range(at_least=0))
    """Iteration after which --profile begins; the first ones are slower than all others."""
    profile_step_end: int = field(default=12, metadata=in_range(at_least=1))
    """The last iteration that --profile takes in."""
    profile_ranks: tuple[int, ...] = ()
    """Ranks that --profile writes a trace for. None named: rank 0."""
    profile_dir: str | None = None
    """Folder for the traces of --profile. Left out: `profile` in --save, else in the current folder."""
    wandb_project: str | None = None
    """W&B project to send the curves to. Needs the package wandb; WANDB_MODE=offline keeps them on the disk."""
    wandb_exp_name: str | None = None
    """Name of the run there. Left out: W&B makes one up."""
    wandb_save_dir: str | None = None
    """Folder for W&B's own files. Left out: `wandb` in --save, else in the current folder."""
    wandb_entity: str | None = None
    """User or team that the project belongs to."""
