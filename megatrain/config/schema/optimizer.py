"""How weights move: the optimizer, the schedule of its learning rate, and the number formats."""

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.schema.values import AUTO, REQUIRED, CheckedSection, in_range


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(CheckedSection):
    """Optimizer: AdamW, SGD or Muon, and gradient clipping."""

    optimizer: Literal["adam", "sgd", "muon"] = "adam"
    """The optimizer; adam decouples weight decay from the gradient (AdamW), sgd has momentum; muon moves the matrices of layers, and adam all else."""
    lr: float = field(default=REQUIRED, metadata=in_range(above=0, at_most=1e30))
    """Learning rate once warm-up ends."""
    weight_decay: float = field(default=0.01, metadata=in_range(at_least=0))
    """Share of a weight that a step at learning rate 1 takes away; biases and norms do not decay."""
    apply_wd_to_qk_layernorm: bool = False
    """Let weight decay apply to the norms of queries and keys (--qk-layernorm) too."""
    decoupled_lr: float | None = field(default=None, metadata=in_range(above=0, at_most=1e30))
    """Learning rate of the embedding and the output layer. Left out: --lr, as of all else."""
    decoupled_min_lr: float | None = field(default=None, metadata=in_range(at_least=0))
    """Their learning rate once the decay has ended. Left out: --min-lr."""
    adam_beta1: float = field(default=0.9, metadata=in_range(at_least=0, below=1))
    """Decay of Adam's mean of gradients."""
    adam_beta2: float = field(default=0.999, metadata=in_range(at_least=0, below=1))
    """Decay of Adam's mean of squared gradients."""
    adam_eps: float = field(default=1e-8, metadata=in_range(above=0))
    """Added to the root of Adam's mean of squared gradients."""
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format in which Adam's mean of gradients is kept; arithmetic is fp32, bf16 is rounded to the nearest."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format in which Adam's mean of squared gradients is kept."""
    optimizer_cpu_offload: bool = False
    """Keep master weights and what the optimizer keeps beside them in the host's memory, where the CPU updates them, while gradients and new weights travel beside it."""
    optimizer_offload_fraction: float = field(default=1.0, metadata=in_range(at_least=0, at_most=1))
    """With --optimizer-cpu-offload: fraction of a rank's elements, at the least, for which this holds; whole buckets (layers) are taken from the last one on."""
    sgd_momentum: float = field(default=0.9, metadata=in_range(at_least=0, below=1))
    """Decay of SGD's sum of gradients."""
    muon_momentum: float = field(default=0.9, metadata=in_range(at_least=0, below=1))
    """Decay of Muon's mean of gradients."""
    muon_nesterov: bool = False
    """Muon looks ahead: it makes the mean of the next step orthogonal, as if that had the same gradient."""
    muon_no_split_qkv: bool = False
    """To Muon, queries, keys and values of a layer are one matrix. Left out: one each."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """How long Muon's steps are for a matrix of m outputs and n inputs, in learning rates: the root of max(m, n), of m / n, or of max(1, m / n)."""
    muon_extra_scale_factor: float = field(default=1.0, metadata=in_range(above=0))
    """Another factor on Muon's steps; 0.2 with spectral gives them the size of Adam's."""
    muon_num_ns_steps: int = field(default=5, metadata=in_range(at_least=1, at_most=99))
    """Newton-Schulz steps that make a matrix orthogonal."""
    muon_coefficient_type: Literal["simple", "quintic", "polar_express"] = "quintic"
    """Coefficients of these steps; simple is what `torch.optim.Muon` has."""
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = "medium"
    """Arithmetic of these steps: bfloat16, float32 with factors rounded to TF32, or float32."""
    clip_grad: float = field(default=1.0, metadata=in_range(at_least=0))
    """Largest norm of all gradients together; larger ones are scaled down to it. 0: no clipping."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(CheckedSection):
    """Schedules: a linear warm-up to --lr, then a decay to --min-lr; weight decay that may increase. The first step runs at --lr-warmup-init."""

    min_lr: float = field(default=0.0, metadata=in_range(at_least=0))
    """Learning rate once the decay has ended."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay. WSD: constant until a decay at the end, whose shape --lr-wsd-decay-style gives."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the decay at the end of WSD."""
    lr_wsd_decay_iters: int | None = field(default=None, metadata=in_range(at_least=1))
    """Iterations of the decay at the end of WSD."""
    lr_wsd_decay_samples: int | None = field(default=None, metadata=in_range(at_least=1))
    """Samples of the decay at the end of WSD."""
    lr_decay_iters: int | None = field(default=None, metadata=in_range(at_least=1))
    """Iteration at which the decay ends. Left out: the end of training."""
    lr_decay_samples: int | None = field(default=None, metadata=in_range(at_least=1))
    """Sample at which the decay ends. Left out: the end of training."""
    lr_warmup_iters: int = field(default=0, metadata=in_range(at_least=0))
    """Iterations of warm-up."""
    lr_warmup_samples: int = field(default=0, metadata=in_range(at_least=0))
    """Samples of warm-up."""
    lr_warmup_fraction: float | None = field(default=None, metadata=in_range(at_least=0, below=1))
    """Share of the time until the decay ends that warm-up takes."""
    lr_warmup_init: float = field(default=0.0, metadata=in_range(at_least=0))
    """Learning rate at which warm-up starts."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay moves from --start-weight-decay to --end-weight-decay over the run. constant: it is --weight-decay."""
    start_weight_decay: float | None = field(default=None, metadata=in_range(at_least=0))
    """Weight decay of the first step, where it increases."""
    end_weight_decay: float | None = field(default=None, metadata=in_range(at_least=0))
    """Weight decay at the end of training, where it increases."""
    override_opt_param_scheduler: bool = False
    """On resume, schedules are those of this command line, not of the checkpoint."""
    use_checkpoint_opt_param_scheduler: bool = False
    """On resume, schedules are those of the checkpoint, whatever this command line says."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(CheckedSection):
    """Precision: number formats of weights and arithmetic."""

    bf16: bool = False
    """Keep and multiply weights in bfloat16; the optimizer keeps float32 copies."""
    fp16: bool = False
    """Keep and multiply weights in float16, with a loss scale; the optimizer keeps float32 copies."""
    grad_reduce_in_bf16: bool = False
    """Sums of gradients over replicas travel in bfloat16, with --bf16; micro-batches are still added up in float32, as they are not in Megatron-LM."""
    params_dtype: Literal["float32", "bfloat16", "float16", "float64"] = AUTO
    """Number format of weights. Left open: bfloat16 with --bf16, float16 with --fp16, else float32."""
    loss_scale: float | None = field(default=None, metadata=in_range(above=0))
    """What the loss is multiplied with, so that small gradients survive. Left out: a dynamic scale with --fp16, else 1."""
    initial_loss_scale: float = field(default=2.0**32, metadata=in_range(above=0))
    """Dynamic loss scale of the first step."""
    min_loss_scale: float = field(default=1.0, metadata=in_range(above=0))
    """Smallest dynamic loss scale."""
    loss_scale_window: float = field(default=1000.0, metadata=in_range(above=0))
    """Steps with finite gradients in a row after which the dynamic loss scale doubles."""
    hysteresis: int = field(default=2, metadata=in_range(at_least=1))
    """Steps with gradients that are not finite before the dynamic loss scale halves."""
