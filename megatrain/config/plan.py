"""The plan of a run: a complete configuration and the values derived from it.

Request + Facts  ->  Draft, completed value by value in `resolve`  ->  Plan
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatrain.config.derive.lr_schedule import LRGroups, ScheduleValues
from megatrain.config.facts import DataPhase, Facts
from megatrain.config.model_spec.distillation import DistillationSpec
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.module_precision import ModuleRecipes
from megatrain.config.plan_note import PlanNote
from megatrain.config.schema.quantization import QuantizationFormat
from megatrain.config.schema.tree import Config, Origin
from megatrain.config.schema.values import OPEN, CheckedSection

DType = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class DerivedValue:
    """A derived value, and the reason with its numbers."""

    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class Derived(CheckedSection):
    """Values that are derived from configuration and facts, and are not settings. OPEN until derived."""

    vocab_size: int = OPEN
    """Number of tokens of the tokenizer, before padding."""
    eod_id: int | None = OPEN
    """End-of-document token; None: there is none."""
    model_spec: ModelSpec = OPEN
    """The model as data: its layers, and what feeds and ends them."""
    distillation: DistillationSpec | None = OPEN
    """The teacher and its losses; None: there is no teacher."""
    qat: QuantizationFormat | None = OPEN
    """The format that linear layers are rounded to; None: they are not rounded."""
    kv_copies: int = OPEN
    """Number of tensor-parallel ranks with the same keys and values."""
    master_dtype: DType = OPEN
    """Dtype of master weights, optimizer state and gradient sums."""
    cp_comm_types: tuple[str, ...] = OPEN
    """Communication of keys and values under context parallelism: one entry for all layers, or one per layer."""
    fp8_modules: ModuleRecipes | None = OPEN
    """Recipe of each linear layer; None: that of the flags, in all of `fp8_layers`."""
    fp8_layers: tuple[int, ...] = OPEN
    """Numbers of the layers with linear layers in FP8; those of multi-token prediction follow the others."""
    transformer_impl: Literal["local", "transformer_engine"] = OPEN
    """Implementation of the layers; `local` supplies what Transformer Engine lacks."""
    attention_backend: Literal[
        "flash4", "flash2", "cudnn", "sdpa", "triton", "math", "transformer_engine"
    ] = OPEN
    """Attention kernel."""
    world_size: int = OPEN
    """Number of ranks."""
    data_parallel_size: int = OPEN
    """Ranks that read different samples: ranks / (tp * cp * pp)."""
    pack_group_sizes: tuple[int, ...] = OPEN
    """Sizes of the groups of context ranks of packs, ascending; empty: no documents are packed."""
    expert_tensor_parallel_size: int = OPEN
    """Ranks over which the matrices of an expert are split."""
    startup_timeout_seconds: int = OPEN
    """Time limit of a collective until the end of the first iteration: a rank may wait for another's index or cache."""
    collective_timeout_seconds: int = OPEN
    """Time limit of a collective after the first iteration."""
    num_microbatches: int = OPEN
    """Micro-batches per rank and iteration, at the full global batch."""
    num_eval_microbatches: int = OPEN
    """Micro-batches per rank and evaluation iteration."""
    start_iteration: int = OPEN
    """Iterations of the loaded checkpoint."""
    start_consumed_samples: int = OPEN
    """Training samples consumed by the loaded checkpoint."""
    train_iters: int = OPEN
    """Iterations of the run, those of the checkpoint included."""
    train_samples: int = OPEN
    """Samples consumed at the end of training: whole global batches."""
    requested_train_samples: int = OPEN
    """Training samples that the dataset must provide."""
    requested_valid_samples: int | None = OPEN
    """Validation samples that the dataset must provide; None: one epoch."""
    requested_test_samples: int = OPEN
    """Test samples that the dataset must provide."""
    phase_transitions: tuple[int, ...] = OPEN
    """Iterations of --phase-transition-iterations, ascending."""
    train_start: int = OPEN
    """First training sample of the data that the flags name (--phase-transition-iterations)."""
    train_plan: tuple[int | None, ...] = OPEN
    """Samples of each plan of training data (of its first phase with --data-schedule); plan k is shuffled with --seed + k."""
    later_phases: tuple[DataPhase, ...] = OPEN
    """Phases of --data-schedule, whose plans are shuffled with the seeds that follow."""
    valid_plan: tuple[int | None, ...] = OPEN
    test_plan: tuple[int | None, ...] = OPEN
    lr_decay_samples: int = OPEN
    """Sample at which the decay of the learning rate ends."""
    lr_warmup_samples: float = OPEN
    """Samples of warm-up. A --lr-warmup-fraction is not rounded, as in Megatron-LM."""
    lr_wsd_decay_samples: int | None = OPEN
    """Samples of the decay at the end of WSD; None: the decay is not WSD."""
    schedule: ScheduleValues = OPEN
    """Schedules in effect: those of this run, or of the checkpoint on request."""
    lr_groups: LRGroups = OPEN
    """Learning rate of each kind of parameter."""
    pipeline_chunks: int = OPEN
    """Model chunks of each pipeline rank."""
    mtp_stage: int | None = OPEN
    """Virtual stage of multi-token prediction; None: there is none."""
    pipeline_layers: tuple[int, ...] = OPEN
    """Layers of each virtual stage: pp * chunks."""
    tower_layers: tuple[int, ...] = OPEN
    """Layers of the vision tower of each virtual stage; empty: the first has them all."""
    cublas_workspace: str | None = OPEN
    """CUBLAS_WORKSPACE_CONFIG in training; None: not set."""
    cuda_graphs: bool = OPEN
    """True if the passes of training are CUDA graphs."""
    graphs_in_turn: bool = OPEN
    """True if graphs run two micro-batches in turn where memory is left, to hide the communication of experts."""
    tokens_per_iteration: int = OPEN
    """Tokens of a full global batch."""
    flops_per_iteration: int = OPEN
    """FLOPs of a full global batch by Megatron-LM's formula, without recomputation."""


def continues_optimizer(config: Config, facts: Facts) -> bool:
    """Return whether optimizer, schedules and loss scale resume from the checkpoint."""
    stored = facts.checkpoint
    if stored is None or stored.is_start or config.training.only_evaluates:
        return False
    return not config.checkpoint.no_load_optim or "no_load_optim" in stored.started


@dataclass(frozen=True)
class Draft:
    """An incomplete plan. Derivations and rules read it; reading a value that is not derived raises UnresolvedError."""

    config: Config
    derived: Derived
    facts: Facts
    origins: Mapping[str, Origin]
    breaks: Callable[[Mapping[str, Any]], int] = lambda _: 0
    """Count the rules that the run would break further with these values, by path, the rule that asks included (`fixes.py`)."""
    is_same_model: Callable[[Mapping[str, Any]], bool] = lambda _: False
    """Return whether the model would be the same with these values, by path."""

    @property
    def continues_optimizer(self) -> bool:
        """See the function of this name."""
        return continues_optimizer(self.config, self.facts)

    def get(self, path: str) -> Any:
        """Return the value at a path such as `model.num_layers` or `derived.num_microbatches`."""
        section, name = path.split(".")
        return getattr(self.derived, name) if section == "derived" else self.config.get(path)

    def is_default(self, path: str) -> bool:
        return self.origins[path].kind == "default"

    def is_given(self, path: str) -> bool:
        return self.origins[path].is_given

    def is_given_or_stored(self, path: str) -> bool:
        return self.origins[path].is_given_or_stored


@dataclass(frozen=True)
class Plan:
    """The complete description of a run. No value in it is open."""

    config: Config
    derived: Derived
    origins: Mapping[str, Origin]
    """Origin of each value, by path such as `model.num_layers` or `derived.num_microbatches`."""
    notes: tuple[PlanNote, ...]
    """Notes for the user; none is an error."""

    @property
    def decoder_stage(self) -> int | None:
        """Virtual stage with the first layer of a decoder after an encoder; None: the model has one stack."""
        return self.derived.model_spec.decoder_stage(self.derived.pipeline_layers)

    @property
    def later_embedding_stage(self) -> int | None:
        """Virtual stage after the first that embeds tokens, for multi-token prediction or a decoder; None: there is none."""
        return self.derived.mtp_stage if self.derived.mtp_stage is not None else self.decoder_stage
