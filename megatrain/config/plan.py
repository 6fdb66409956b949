"""A run once everything about it is decided: the configuration without gaps, and the numbers that follow from it.

Request + Facts  ->  Draft, filled in step by step  ->  Plan
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatrain.config.derive.layer_sizes import LayerTable
from megatrain.config.derive.lr_schedule import LRGroups, ScheduleValues
from megatrain.config.facts import Facts
from megatrain.config.schema.tree import Config, Origin
from megatrain.config.schema.values import INVALID, CheckedSection

DType = Literal["float32", "bfloat16", "float16", "float64"]

Activation = Literal["swiglu", "geglu_tanh", "quick_geglu", "gelu", "gelu_tanh", "squared_relu"]
"""What stands between the MLP's two layers."""


@dataclass(frozen=True)
class DerivedValue:
    """A derived value, and the reason with its numbers."""

    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class Derived(CheckedSection):
    """What follows from configuration and facts, and is no setting itself or is wanted in one place."""

    world_size: int = INVALID
    activation: Activation = INVALID
    layer_table: LayerTable = INVALID
    """The sizes of each layer."""
    attention_scale: float | None = INVALID
    """Factor of attention's scores; None: 1 / sqrt(kv channels)."""
    attention_backend: Literal["flash4", "flash2", "cudnn", "sdpa", "math", "transformer_engine"] = INVALID
    """The kernel of attention."""
    cp_comm_types: tuple[str, ...] = INVALID
    """How context ranks share keys and values: one way for all layers, or one for each."""
    matrix_init_std: float = INVALID
    """Standard deviation of initial matrices, before what the depth asks for."""
    model_parallel_size: int = INVALID
    """Ranks that hold one model replica: tp * pp."""
    kv_copies: int = INVALID
    """How many tensor ranks hold the same keys and values."""
    data_parallel_size: int = INVALID
    """Ranks that read different samples: ranks / (tp * cp * pp)."""
    expert_tensor_parallel_size: int = INVALID
    """Ranks that split the matrices of each expert, where there are experts."""
    startup_timeout_seconds: int = INVALID
    """That a collective may take until the first iteration has ended: a rank may wait for another's index or cache."""
    collective_timeout_seconds: int = INVALID
    """The same from then on."""
    num_microbatches: int = INVALID
    """Micro-batches that each rank runs in an iteration, once the batch has its full size."""
    num_eval_microbatches: int = INVALID
    """The same in an evaluation."""
    train_iters: int = INVALID
    train_samples: int = INVALID
    """Samples that training has read at its end: whole global batches."""
    requested_train_samples: int = INVALID
    """Samples that training asks for."""
    requested_valid_samples: int | None = INVALID
    """None: all of one epoch."""
    requested_test_samples: int = INVALID
    train_plan: tuple[int | None, ...] = INVALID
    """Samples that the training order is made for, plan by plan; plan k is shuffled with --seed + k."""
    valid_plan: tuple[int | None, ...] = INVALID
    test_plan: tuple[int | None, ...] = INVALID
    lr_decay_samples: int = INVALID
    lr_warmup_samples: float = INVALID
    """A fraction of the decay is not rounded, as in Megatron-LM."""
    lr_wsd_decay_samples: int | None = INVALID
    """None: the decay is not WSD."""
    schedule: ScheduleValues = INVALID
    """The schedules that are followed: of the command line, or of the checkpoint where that is asked for."""
    lr_groups: LRGroups = INVALID
    """Learning rate of each kind of parameter."""
    vocab_size: int = INVALID
    """Tokens of the tokenizer, before padding."""
    eod_id: int | None = INVALID
    """The end-of-document token, if there is one."""
    master_dtype: DType = INVALID
    """Number format of the optimizer's copies of weights, of its state and of gradient sums."""
    tokens_per_iteration: int = INVALID
    """Of a full batch."""
    flops_per_iteration: int = INVALID
    """By Megatron-LM's formula, of a full batch; recomputation is not counted."""
    start_iteration: int = INVALID
    """Iterations done by the checkpoint that is loaded."""
    start_consumed_samples: int = INVALID


def continues_optimizer(config: Config, facts: Facts) -> bool:
    """Whether the optimizer, its schedules and the loss scale go on where the checkpoint has them."""
    is_continued = facts.checkpoint is not None and not facts.checkpoint.is_start
    return is_continued and not (config.checkpoint.no_load_optim or config.training.skip_train)


@dataclass(frozen=True)
class Draft:
    """A plan in the making. What is not derived yet, or cannot be, is INVALID."""

    config: Config
    derived: Derived
    facts: Facts
    origins: Mapping[str, Origin]

    @property
    def continues_optimizer(self) -> bool:
        """See the function of this name."""
        return continues_optimizer(self.config, self.facts)

    def is_default(self, path: str) -> bool:
        return self.origins[path].kind == "default"

    def is_given(self, path: str) -> bool:
        return self.origins[path].kind in ("flag", "yaml")


@dataclass(frozen=True)
class Plan:
    """What a run is built from. Nothing in it is open."""

    config: Config
    derived: Derived
    origins: Mapping[str, Origin]
    """Of `model.num_layers` and of `derived.num_microbatches` alike."""
    notes: tuple[str, ...]
    """What a user should hear about, though nothing is wrong."""
