"""The configuration: what a user asks for, what follows from it, and what is wrong with it.

    argv ── parse ──> Request ── resolve (with Facts) ──> Plan ── render_plan, to_yaml ──> people

Nothing here imports torch: `--help` answers at once.
"""

from megatrain.config.command_line import parse
from megatrain.config.data import DataConfig
from megatrain.config.errors import ConfigError, InputError, MegatrainError, NoCheckpointError, Problem
from megatrain.config.facts import Facts, StoredRun
from megatrain.config.help_text import docs_reference
from megatrain.config.logs import LoggingConfig
from megatrain.config.model import ModelConfig
from megatrain.config.optimizer import OptimizerConfig, PrecisionConfig, ScheduleConfig
from megatrain.config.parallel import ParallelConfig
from megatrain.config.plan import Derived, Plan
from megatrain.config.report import render_plan
from megatrain.config.request import Request
from megatrain.config.resolve import resolve
from megatrain.config.tokenizer import TokenizerConfig
from megatrain.config.training import CheckpointConfig, ResilienceConfig, TrainingConfig
from megatrain.config.tree import Config, Origin
from megatrain.config.yaml_file import to_yaml

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "Derived",
    "Facts",
    "InputError",
    "LoggingConfig",
    "MegatrainError",
    "ModelConfig",
    "NoCheckpointError",
    "OptimizerConfig",
    "Origin",
    "ParallelConfig",
    "Plan",
    "PrecisionConfig",
    "Problem",
    "Request",
    "ResilienceConfig",
    "ScheduleConfig",
    "StoredRun",
    "TokenizerConfig",
    "TrainingConfig",
    "docs_reference",
    "parse",
    "render_plan",
    "resolve",
    "to_yaml",
]
