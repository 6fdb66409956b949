"""The run: how long it trains, what it saves, and when it stops."""

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.values import AUTO, REQUIRED, in_range


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Training: batch sizes, length, evaluation."""

    micro_batch_size: int = field(default=REQUIRED, metadata=in_range(at_least=1))
    """Samples that a model replica takes through the model at once."""
    global_batch_size: int = field(default=AUTO, metadata=in_range(at_least=1))
    """Samples of an iteration, over all replicas. Left open: one micro-batch for each."""
    train_iters: int | None = field(default=None, metadata=in_range(at_least=1))
    """Iterations to train for. This or --train-samples."""
    train_samples: int | None = field(default=None, metadata=in_range(at_least=1))
    """Samples to train on; a last incomplete global batch is left out. This or --train-iters."""
    seed: int = field(default=1234, metadata=in_range(at_least=0))
    """Seed of initial weights and of the order of samples."""
    eval_interval: int | None = field(default=None, metadata=in_range(at_least=1))
    """Iterations between evaluations. Left out: one evaluation, at the end."""
    eval_iters: int = field(default=100, metadata=in_range(at_least=0))
    """Global batches of an evaluation. 0: no evaluation."""
    eval_global_batch_size: int = field(default=AUTO, metadata=in_range(at_least=1))
    """Samples of an iteration of an evaluation. Left open: as --global-batch-size."""
    start_eval_at_iter: int | None = field(default=None, metadata=in_range(at_least=0))
    """Do not evaluate before this iteration."""
    skip_train: bool = False
    """Evaluate on validation and test data, and end."""
    eval_at_start: bool = False
    """Evaluate once before the first iteration, on the samples that the first evaluation reads. Not in Megatron-LM."""
    deterministic_mode: bool = False
    """Use only operations that give the same bits each time. On a CPU that is always so; not there yet on a GPU."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Compute forward passes twice and keep less: whole layers, or parts of them."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Which layers of a stage --recompute-granularity full computes twice: all, in chunks, or the first ones."""
    recompute_num_layers: int | None = field(default=None, metadata=in_range(at_least=1))
    """Layers of a chunk (uniform), or of a stage (block), that are computed twice."""
    recompute_modules: tuple[str, ...] = ()
    """Parts that --recompute-granularity selective computes twice: core_attn, mlp. None named: core_attn."""
    recompute_activations: bool = False
    """The same as --recompute-granularity selective."""
    device: Literal["cpu", "cuda"] = AUTO
    """Where to compute. Left open: on the GPU if there is one."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: where a run is saved and what it starts from."""

    save: str | None = None
    """Folder to save checkpoints in."""
    load: str | None = None
    """Folder to load the latest valid checkpoint from. It is an error if there is none."""
    save_interval: int | None = field(default=None, metadata=in_range(at_least=1))
    """Iterations between checkpoints. Left out: one checkpoint, at the end."""
    exit_on_missing_checkpoint: bool = False
    """Stop if --load holds no checkpoint. This is what happens anyway, unless --load-or-start is given."""
    load_or_start: bool = False
    """Start from initial weights if --load holds no checkpoint, as Megatron-LM does."""
    no_load_optim: bool = False
    """Load the weights alone: optimizer state starts from zero."""


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    """Stopping early: planned ends of a job that is one of several."""

    exit_interval: int | None = field(default=None, metadata=in_range(at_least=1))
    """Save and stop at the first iteration that this divides."""
    exit_duration_in_mins: float | None = field(default=None, metadata=in_range(above=0))
    """Save and stop after this many minutes."""
