"""How weights move: the optimizer, the schedule of its learning rate, and the number formats."""

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.values import AUTO, REQUIRED, in_range


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer: AdamW and gradient clipping."""

    optimizer: Literal["adam"] = "adam"
    """The optimizer; adam decouples weight decay from the gradient (AdamW)."""
    lr: float = field(default=REQUIRED, metadata=in_range(above=0))
    """Learning rate once warm-up ends."""
    weight_decay: float = field(default=0.01, metadata=in_range(at_least=0))
    """Share of a weight that a step at learning rate 1 takes away; biases and norms do not decay."""
    adam_beta1: float = field(default=0.9, metadata=in_range(at_least=0, below=1))
    """Decay of Adam's mean of gradients."""
    adam_beta2: float = field(default=0.999, metadata=in_range(at_least=0, below=1))
    """Decay of Adam's mean of squared gradients."""
    adam_eps: float = field(default=1e-8, metadata=in_range(above=0))
    """Added to the root of Adam's mean of squared gradients."""
    clip_grad: float = field(default=1.0, metadata=in_range(at_least=0))
    """Largest norm of all gradients together; larger ones are scaled down to it. 0: no clipping."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning-rate schedule: a linear warm-up to --lr, then a decay to --min-lr. The first step runs at --lr-warmup-init."""

    min_lr: float = field(default=0.0, metadata=in_range(at_least=0))
    """Learning rate once the decay has ended."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the decay."""
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


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision: number formats of weights and arithmetic."""

    bf16: bool = False
    """Keep and multiply weights in bfloat16; the optimizer keeps float32 copies."""
    params_dtype: Literal["float32", "bfloat16", "float64"] = AUTO
    """Number format of weights. Left open: bfloat16 with --bf16, else float32."""
