"""The run: how long it trains, what it saves, and when it stops."""

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.schema.values import AUTO, REQUIRED, CheckedSection, alone_means, in_range


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(CheckedSection):
    """Training: batch sizes, length, evaluation."""

    micro_batch_size: int = field(default=REQUIRED, metadata=in_range(at_least=1))
    """Samples that a model replica takes through the model at once."""
    global_batch_size: int = field(default=AUTO, metadata=in_range(at_least=1))
    """Samples of an iteration, over all replicas. Left open: one micro-batch for each, or the last of --step-batch-size-schedule."""
    rampup_batch_size: tuple[str, ...] = ()
    """Three numbers: the global batch begins at the first, grows by steps of the second, and reaches --global-batch-size after as many samples as the third says."""
    step_batch_size_schedule: str | None = None
    """Global batches from given numbers of tokens on, such as '0:768 250B:1536 500B:3072'; K, M, B and T are powers of 1000."""
    decrease_batch_size_if_needed: bool = False
    """Round the global batch down to what micro-batches on all replicas fill, instead of refusing it."""
    train_iters: int | None = field(default=None, metadata=in_range(at_least=1))
    """Iterations to train for. This or --train-samples."""
    train_samples: int | None = field(default=None, metadata=in_range(at_least=1))
    """Samples to train on; a last incomplete global batch is left out (with --step-batch-size-schedule it is filled up). This or --train-iters."""
    calculate_per_token_loss: bool = False
    """Each token that counts has the same weight in an iteration. Otherwise each micro-batch has, whatever number of its tokens count."""
    check_for_nan_in_loss_and_grad: bool = True
    """End the run at a loss or gradient that is not finite. Off: such an iteration is skipped and counted."""
    check_for_large_grads: bool = False
    """Tell of a gradient norm of more than 10 times the largest of the first 100 iterations since the start."""
    check_for_spiky_loss: bool = False
    """The same of the loss."""
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
    """Use only operations that give the same bits each time, which some are slower for. On a CPU that is always so."""
    compile: bool = True
    """Compute with kernels that are compiled where they run, by Triton and flash-attn-4, on GPUs. --no-compile: with torch's own operations, which are slower. Not in Megatron-LM."""
    manual_gc: bool = False
    """Collect Python's garbage on all ranks in the same iterations, not when each sees fit."""
    manual_gc_interval: int = field(default=0, metadata=in_range(at_least=0))
    """Iterations between collections with --manual-gc. 0: never."""
    manual_gc_eval: bool = True
    """With --manual-gc, collect before and after an evaluation too."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Compute forward passes twice and keep less: whole layers, or parts of them."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Which layers of a stage --recompute-granularity full computes twice: all, in chunks, or the first ones."""
    recompute_num_layers: int | None = field(default=None, metadata=in_range(at_least=1))
    """Layers of a chunk (uniform), or of a stage (block), that are computed twice."""
    recompute_modules: tuple[str, ...] = ()
    """Parts that --recompute-granularity selective computes twice: core_attn, mlp, layernorm. None named: core_attn."""
    recompute_activations: bool = False
    """The same as --recompute-granularity selective."""
    recompute_norms: bool = AUTO
    """Compute norms before linear layers twice, as --recompute-modules layernorm does. Left open: in wide models on GPUs, where that is nearly free, unless something else is computed twice. Not in Megatron-LM."""
    device: Literal["cpu", "cuda"] = AUTO
    """Where to compute. Left open: on the GPU if there is one."""
    dry_run: Literal["text", "json"] | None = field(default=None, metadata=alone_means("text"))
    """Start nothing: print what the run would be, as text or as one JSON object. Needs no GPU. Not in Megatron-LM."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(CheckedSection):
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
    """Load the weights alone: optimizer state, the schedules' progress and the loss scale start anew."""
    no_save_optim: bool = False
    """Save the weights alone: smaller, and good for --finetune and --no-load-optim, not to go on from."""
    finetune: bool = False
    """Load the weights alone and begin at iteration 0, with data and schedules of this command line."""
    pretrained_checkpoint: str | None = None
    """Folder of a run whose weights this one begins with, as with --finetune, while --load holds no checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig(CheckedSection):
    """Stopping early: planned ends of a job that is one of several."""

    exit_interval: int | None = field(default=None, metadata=in_range(at_least=1))
    """Save and stop at the first iteration that this divides."""
    exit_duration_in_mins: float | None = field(default=None, metadata=in_range(above=0))
    """Save and stop after this many minutes."""
    exit_signal: str = "SIGTERM"
    """A signal that asks for the end, by name or number, beside SIGTERM, SIGINT and SIGUSR1."""
