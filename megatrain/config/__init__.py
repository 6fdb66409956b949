"""The configuration: settings, derived values, and rules.

    argv, YAML ── parse ──> Request ── resolve (with Facts) ──> Plan ── render_plan, to_yaml ──> text

    schema/     settings and their help texts       request.py   the parsed command line
    cli/        parsing, help, printing             facts.py     ranks, devices, tokenizer, checkpoint, data
    subjects/   derived values, rules and notes     plan.py      the resolved configuration
    derive/     parsers of settings                 resolve.py   from Request and Facts to Plan
    megatron/   Megatron-LM's flags                 registry.py  decorators of subjects/; rule_list.py has all that they register

Nothing here imports torch, so that `--help` is fast.
"""

from megatrain.config.cli.command_line import parse
from megatrain.config.cli.help_text import docs_reference
from megatrain.config.cli.render_plan import render_plan
from megatrain.config.cli.yaml_file import to_yaml
from megatrain.config.environment import read_environment
from megatrain.config.errors import ConfigError, InputError, MegatrainError, NoCheckpointError, Problem
from megatrain.config.facts import Facts, StoredRun
from megatrain.config.plan import Derived, Plan
from megatrain.config.request import Request
from megatrain.config.resolve import resolve
from megatrain.config.schema.data import DataConfig
from megatrain.config.schema.logging import LoggingConfig
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.optimizer import OptimizerConfig, PrecisionConfig, ScheduleConfig
from megatrain.config.schema.parallel import ParallelConfig
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.config.schema.training import CheckpointConfig, ResilienceConfig, TrainingConfig
from megatrain.config.schema.tree import Config, Origin

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
    "read_environment",
    "render_plan",
    "resolve",
    "to_yaml",
]
