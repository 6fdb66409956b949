"""Settings of the optimizer, its schedules, and precision."""

from dataclasses import dataclass
from typing import Literal

from megatrain.config.schema.lr_decay import LrDecay, read_by
from megatrain.config.schema.needs import LOGITS_CONFLICTS, Need, conflict, none_of, off, on, one_of
from megatrain.config.schema.resume_class import OPTIMIZER_STATE, SAFE, SCHEDULE, SILENT, STEPS
from megatrain.config.schema.setting import EVALUATION, Section, setting
from megatrain.config.schema.values import AUTO, REQUIRED

_RULE = ("optimizer.optimizer", "optimizer.muon_scalar_optimizer")
_MUONS = ("muon", "adaptive_muon")
_MUON = one_of("optimizer.optimizer", *_MUONS)
_OF_MATRICES = (*_MUONS, "soap")
_SOAP = one_of("optimizer.optimizer", "soap")
_ADAPTIVE = one_of("optimizer.optimizer", "adaptive_muon")
_MOMENTS = none_of("optimizer.optimizer", "sgd", why=", which has no such state")
_ADAM = Need("unless {} or {} is adam", _RULE, lambda value_of: _of_elements(*map(value_of, _RULE)) == "adam")
_LION = Need("unless {} or {} is lion", _RULE, lambda value_of: _of_elements(*map(value_of, _RULE)) == "lion")
_NORMED = ", after which their weights' scale has no effect"
_DYNAMIC_SCALE = (on("precision.fp16"), off("precision.loss_scale"))
_WARMUP = ": both set the length of warm-up"
_DELAYED = (on("precision.fp8_format"), one_of("precision.fp8_recipe", "delayed"))
_NUMBERS = ": both decide the numbers of linear layers"
_OWN_SCALES = conflict(
    "precision.fp16",
    why=": quantized gradients have scales of their own",
    fix="use --bf16 in place of --fp16",
)

WeightDecayStyle = Literal["constant", "linear", "cosine"]
"""Schedules of weight decay."""


def _of_elements(optimizer: str, of_others: str) -> str:
    """Return the optimizer of parameters other than matrices of layers."""
    return of_others if optimizer in _MUONS else "adam" if optimizer == "soap" else optimizer


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, on_resume=STEPS, taken_by=EVALUATION):
    """Optimizer: AdamW, SGD, Lion, Muon or SOAP, and gradient clipping."""

    optimizer: Literal["adam", "sgd", "lion", "muon", "adaptive_muon", "soap"] = setting(
        "adam",
        on_resume=OPTIMIZER_STATE,
        conflicts=conflict(
            "model.use_mup",
            of=("soap",),
            why=", which has no rule for SOAP's rates",
            fix="use --optimizer adam or muon",
        ),
    )
    """Optimizer. adam: AdamW; sgd: SGD with momentum; lion: Lion; muon: Muon for matrices of layers, --muon-scalar-optimizer for other parameters; adaptive_muon: the same with updates divided by the root of their mean square (AdaMuon); soap: Adam in the eigenbasis of Shampoo's covariances for these matrices, AdamW for other parameters."""
    lr: float = setting(
        REQUIRED, above=0, at_most=1e30, example="3e-4 is a common start for small models", on_resume=SCHEDULE
    )
    """Learning rate at the end of warm-up."""
    weight_decay: float = setting(0.01, at_least=0, on_resume=SCHEDULE)
    """Weight decay coefficient; biases and norms have none."""
    apply_wd_to_qk_layernorm: bool = setting(
        False,
        needs=on("model.qk_layernorm"),
        conflicts=conflict(
            "model.multi_latent_attention",
            when=on("model.qk_layernorm"),
            why=": norms of latents have no weight decay",
        ),
    )
    """Apply weight decay to the norms of --qk-layernorm."""
    decoupled_lr: float | None = setting(None, above=0, at_most=1e30, on_resume=SCHEDULE)
    """Learning rate of embedding and output layer. none: --lr."""
    decoupled_min_lr: float | None = setting(
        None, at_least=0, on_resume=SCHEDULE, needs=on("optimizer.decoupled_lr")
    )
    """Minimum learning rate of embedding and output layer. none: --min-lr."""
    adam_beta1: float = setting(0.9, at_least=0, below=1, needs=_ADAM)
    """Decay rate of Adam's first moment."""
    adam_beta2: float = setting(0.999, at_least=0, below=1, needs=_ADAM)
    """Decay rate of Adam's second moment."""
    adam_eps: float = setting(1e-8, above=0, needs=_ADAM)
    """Epsilon in the denominator of Adam's update."""
    exp_avg_dtype: Literal["fp32", "bf16"] = setting("fp32", needs=_MOMENTS, on_resume=SAFE)
    """Storage dtype of the first moment of Adam or Lion. Arithmetic is fp32; bf16 is rounded to nearest."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = setting("fp32", needs=_ADAM, on_resume=SAFE)
    """Storage dtype of Adam's second moment."""
    optimizer_cpu_offload: bool = setting(
        False,
        conflicts=conflict(
            "optimizer.optimizer",
            *_OF_MATRICES,
            why=", whose GEMMs are too slow on a CPU",
            fix="remove --optimizer-cpu-offload, or use --optimizer adam",
        ),
        on_resume=SAFE,
    )
    """Keep master weights and optimizer state in host memory and update them on the CPU; transfers overlap with the updates."""
    optimizer_offload_fraction: float = setting(
        1.0, at_least=0, at_most=1, needs=on("optimizer.optimizer_cpu_offload"), on_resume=SAFE
    )
    """With --optimizer-cpu-offload: minimum fraction of a rank's elements to offload; whole buckets (layers), starting with the last."""
    sgd_momentum: float = setting(0.9, at_least=0, below=1, needs=one_of("optimizer.optimizer", "sgd"))
    """Momentum of SGD."""
    lion_beta1: float = setting(0.95, at_least=0, below=1, needs=_LION)
    """Weight of Lion's momentum in a step, whose sign moves the weights."""
    lion_beta2: float = setting(0.98, at_least=0, below=1, needs=_LION)
    """Decay rate of Lion's momentum."""
    muon_scalar_optimizer: Literal["adam", "lion"] = setting("adam", on_resume=OPTIMIZER_STATE, needs=_MUON)
    """Optimizer of parameters that are not matrices of layers, with Muon."""
    muon_momentum: float = setting(0.9, at_least=0, below=1, needs=_MUON)
    """Momentum of Muon."""
    muon_nesterov: bool = setting(False, needs=_MUON)
    """Use Nesterov momentum in Muon."""
    muon_no_split_qkv: bool = setting(False, needs=_MUON)
    """Orthogonalize the fused QKV weight as one matrix. Off: queries, keys and values separately."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = setting("spectral", needs=_MUON)
    """Scale of Muon's update for m outputs and n inputs: sqrt(max(m, n)) (spectral), sqrt(m / n) (unit_rms_norm), or sqrt(max(1, m / n)) (shape_scaling)."""
    muon_extra_scale_factor: float = setting(1.0, above=0, needs=_MUON)
    """Additional factor of Muon's update; 0.2 with spectral matches the update size of Adam."""
    muon_num_ns_steps: int = setting(5, at_least=1, at_most=99, needs=_MUON)
    """Newton-Schulz iterations of Muon."""
    muon_coefficient_type: Literal["simple", "quintic", "polar_express"] = setting("quintic", needs=_MUON)
    """Newton-Schulz coefficients; simple is that of `torch.optim.Muon`."""
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = setting(
        "medium", needs=_MUON, on_resume=SAFE
    )
    """Arithmetic of the Newton-Schulz iterations: bfloat16 (medium), TF32 (high), or float32 (highest)."""
    adaptive_muon_beta2: float = setting(0.95, at_least=0, below=1, needs=_ADAPTIVE)
    """Decay rate of the mean square of adaptive Muon's updates."""
    adaptive_muon_eps: float = setting(1e-8, above=0, needs=_ADAPTIVE)
    """Epsilon in the denominator of adaptive Muon's update."""
    soap_shampoo_beta: float = setting(0.95, at_least=0, below=1, needs=_SOAP)
    """Decay rate of SOAP's covariances of gradients; moments have --adam-beta1 and --adam-beta2."""
    soap_precondition_frequency: int = setting(10, at_least=1, needs=_SOAP)
    """Iterations between updates of SOAP's eigenbases; the first ones update them each time."""
    soap_max_preconditioner_dim: int = setting(10_000, at_least=0, needs=_SOAP, on_resume=OPTIMIZER_STATE)
    """Largest side of a matrix with an eigenbasis; larger ones keep the identity. Not in Megatron-LM."""
    qk_clip: bool = setting(
        False,
        conflicts=(
            conflict("model.qk_layernorm", when=off("model.multi_latent_attention"), why=_NORMED),
            conflict("model.qk_l2_norm", why=_NORMED),
            conflict("adapters.lora_rank", why=", which does not train the projections of queries and keys"),
            *LOGITS_CONFLICTS,
        ),
    )
    """QK-Clip (Kimi K2): after each update, scale the projections of queries and keys of heads whose largest attention logit exceeds a threshold. Costs the scores once more."""
    qk_clip_alpha: float = setting(0.5, at_least=0, at_most=1, needs=on("optimizer.qk_clip"))
    """Exponent of the factor of queries; that of keys is 1 minus it."""
    qk_clip_threshold: float = setting(100.0, above=0, needs=on("optimizer.qk_clip"))
    """Attention logit above which --qk-clip scales."""
    ema_decay: float = setting(0.0, at_least=0, below=1, on_resume=OPTIMIZER_STATE)
    """Keep an exponential moving average of the master weights with this decay per iteration: one more state of each trained parameter, sharded and saved with the others. 0: none. Not in Megatron-LM."""
    clip_grad: float = setting(1.0, at_least=0)
    """Clip the global gradient norm to this value. 0: no clipping."""

    @property
    def has_matrices(self) -> bool:
        """The optimizer updates whole matrices of layers."""
        return self.optimizer in _OF_MATRICES

    @property
    def of_elements(self) -> str:
        """The optimizer of parameters other than these."""
        return _of_elements(self.optimizer, self.muon_scalar_optimizer)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(LrDecay):
    """Schedules: linear warm-up from --lr-warmup-init to --lr, then decay to --min-lr; constant or increasing weight decay."""

    min_lr: float = setting(0.0, at_least=0)
    """Learning rate at the end of the decay."""
    lr_wsd_decay_iters: int | None = setting(
        None,
        at_least=1,
        needs=read_by("lr_wsd_decay_iters"),
        conflicts=conflict("schedule.lr_wsd_decay_samples", why=": both set the length of the decay"),
    )
    """Length of the final decay of WSD, in iterations."""
    lr_decay_iters: int | None = setting(None, at_least=1)
    """Iteration at which the decay ends. none: end of training."""
    lr_decay_samples: int | None = setting(
        None, at_least=1, conflicts=conflict("schedule.lr_decay_iters", why=": both set the end of the decay")
    )
    """Sample at which the decay ends. none: end of training."""
    lr_warmup_iters: int = setting(
        0, at_least=0, conflicts=conflict("schedule.lr_warmup_samples", why=_WARMUP)
    )
    """Length of warm-up, in iterations."""
    lr_warmup_samples: int = setting(0, at_least=0)
    """Length of warm-up, in samples."""
    lr_warmup_fraction: float | None = setting(
        None,
        at_least=0,
        below=1,
        conflicts=(
            conflict("schedule.lr_warmup_iters", why=_WARMUP),
            conflict("schedule.lr_warmup_samples", why=_WARMUP),
        ),
    )
    """Length of warm-up, as a fraction of the samples until the decay ends."""
    lr_warmup_init: float = setting(0.0, at_least=0)
    """Learning rate at the start of warm-up."""
    weight_decay_incr_style: WeightDecayStyle = "constant"
    """Change from --start-weight-decay to --end-weight-decay over training. constant: --weight-decay."""
    start_weight_decay: float | None = setting(
        None, at_least=0, needs=none_of("schedule.weight_decay_incr_style", "constant")
    )
    """Weight decay at the start of training, unless it is constant."""
    end_weight_decay: float | None = setting(
        None, at_least=0, needs=none_of("schedule.weight_decay_incr_style", "constant")
    )
    """Weight decay at the end of training, unless it is constant."""
    override_opt_param_scheduler: bool = setting(False, on_resume=SILENT, needs=on("checkpoint.load"))
    """On resume, use the schedules of this command line instead of those of the checkpoint."""
    use_checkpoint_opt_param_scheduler: bool = setting(
        False,
        on_resume=SILENT,
        needs=on("checkpoint.load"),
        conflicts=conflict("schedule.override_opt_param_scheduler"),
    )
    """On resume, use the schedules of the checkpoint instead of those of this command line."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section, on_resume=SAFE, taken_by=EVALUATION):
    """Precision: dtypes of weights and arithmetic."""

    bf16: bool = False
    """Train in bfloat16, with float32 master weights."""
    fp16: bool = False
    """Train in float16 with loss scaling, with float32 master weights."""
    grad_reduce_in_bf16: bool = False
    """With --bf16: reduce gradients over replicas in bfloat16. Unlike in Megatron-LM, micro-batches are still accumulated in float32."""
    params_dtype: Literal["float32", "bfloat16", "float16", "float64"] = AUTO
    """Dtype of weights. auto: bfloat16 with --bf16, float16 with --fp16, else float32."""
    fp8_format: Literal["e4m3", "hybrid"] | None = setting(None, conflicts=_OWN_SCALES)
    """Compute the linear layers of attention, MLPs and experts in FP8. e4m3: all tensors in E4M3. hybrid: gradients in E5M2."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = setting(
        "delayed", needs=on("precision.fp8_format")
    )
    """Scales of FP8 tensors. tensorwise: from the largest value of the tensor. delayed: from those of earlier iterations. blockwise: from the largest values of blocks. mxfp8: from those of blocks of 32 values, weights too; on GPUs Blackwell with --transformer-impl transformer_engine only."""
    fp8_block_size: int = setting(128, at_least=1)
    """With --fp8-recipe blockwise: elements per block of inputs and gradients, and rows and columns per block of weights. GPUs support 128 only."""
    fp8_margin: int = setting(0, at_least=0, needs=_DELAYED)
    """With --fp8-recipe delayed: powers of two that scales leave free above the largest value."""
    fp8_amax_history_len: int = setting(1, at_least=1, needs=_DELAYED)
    """With --fp8-recipe delayed: iterations whose largest values are kept."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = setting("most_recent", needs=_DELAYED)
    """With --fp8-recipe delayed: the largest value that decides a scale: that of the last iteration, or the maximum of those kept."""
    fp8_wgrad: bool = setting(True, needs=on("precision.fp8_format", "precision.fp4_format"))
    """Compute weight gradients in FP8. Off: in the dtype of the weights, from inputs that are saved in it."""
    fp4_format: Literal["e2m1"] | None = setting(
        None,
        conflicts=(
            _OWN_SCALES,
            conflict("precision.fp8_format", why=_NUMBERS),
            conflict("model.multi_latent_attention"),
            conflict("experts.num_experts"),
        ),
    )
    """Compute the linear layers of attention and MLPs with values of 4 bits. On CPUs only, which emulate it."""
    fp4_recipe: Literal["nvfp4"] = "nvfp4"
    """Scales and rounding with --fp4-format: see docs/training.md."""
    fp8_param_gather: bool = False
    """All-gather the weights of FP8 linear layers as codes of one byte, with delayed and tensorwise scales: less communication, the same results bit for bit."""
    first_last_layers_bf16: bool = setting(False, needs=on("precision.fp8_format", "precision.fp4_format"))
    """With --fp8-format: compute the first and last layers in the dtype of the weights."""
    num_layers_at_start_in_bf16: int = setting(1, at_least=0, needs=on("precision.first_last_layers_bf16"))
    """Number of first layers for --first-last-layers-bf16."""
    num_layers_at_end_in_bf16: int = setting(1, at_least=0, needs=on("precision.first_last_layers_bf16"))
    """Number of last layers for --first-last-layers-bf16. Layers of multi-token prediction do not count."""
    te_precision_config_file: str | None = setting(
        None, on_resume=SILENT, needs=on("precision.fp8_format", "precision.fp4_format")
    )
    """With --fp8-format: YAML file in Megatron-LM's format with the FP8 recipe of each linear layer, by patterns of module names; see docs/training.md."""
    te_precision_config_digest: str | None = AUTO
    """Expected digest of that file; other contents are an error. auto: that of the file, which checkpoints store. Not in Megatron-LM."""
    qat: Literal["fp8-channel", "int8", "int8-weights", "int4"] | None = setting(
        None,
        conflicts=(
            conflict("precision.fp8_format", why=_NUMBERS),
            conflict("precision.fp4_format", why=_NUMBERS),
            conflict("model.transformer_impl", "transformer_engine", fix="use --transformer-impl local"),
            conflict("optimizer.optimizer_cpu_offload", why=": passes do not set scales on the host"),
        ),
        on_resume=STEPS,
    )
    """Round the weights of linear layers, and their inputs where the format has them, in each forward pass as megatrain quantize --format does, with the gradients of what is not rounded. Not in Megatron-LM."""
    qat_group_size: int = setting(128, at_least=1, needs=one_of("precision.qat", "int4"), on_resume=STEPS)
    """With --qat int4: inputs of a group of weights that share a scale. Not in Megatron-LM."""
    loss_scale: float | None = setting(None, above=0)
    """Static loss scale. none: a dynamic scale with --fp16, else 1."""
    initial_loss_scale: float = setting(2.0**32, above=0, needs=_DYNAMIC_SCALE)
    """Initial dynamic loss scale."""
    min_loss_scale: float = setting(1.0, above=0, needs=_DYNAMIC_SCALE)
    """Minimum dynamic loss scale."""
    loss_scale_window: float = setting(1000.0, above=0, needs=_DYNAMIC_SCALE)
    """Consecutive steps with finite gradients before the dynamic loss scale doubles."""
    hysteresis: int = setting(2, at_least=1, needs=_DYNAMIC_SCALE)
    """Steps with non-finite gradients before the dynamic loss scale halves."""
