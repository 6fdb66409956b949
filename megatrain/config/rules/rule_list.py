"""The list of all rules: constraints between settings, and between settings and facts, one function per rule.

A rule yields problems. Each has the flag, its value and a value that works. A rule may compute freely: if a value that it
reads is missing or invalid, `resolve` skips the rest of the rule, since that problem is reported elsewhere.
"""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.plan import Draft
from megatrain.config.rules.checkpoint import CHECKPOINT_RULES
from megatrain.config.rules.context_parallel import CONTEXT_PARALLEL_RULES
from megatrain.config.rules.data import DATA_RULES
from megatrain.config.rules.device import DEVICE_RULES
from megatrain.config.rules.experts import EXPERT_RULES
from megatrain.config.rules.latent_attention import LATENT_RULES
from megatrain.config.rules.layers import LAYER_RULES
from megatrain.config.rules.linear_attention import LINEAR_ATTENTION_RULES
from megatrain.config.rules.logging import LOGGING_RULES
from megatrain.config.rules.masked_samples import MASKED_SAMPLE_RULES
from megatrain.config.rules.model import MODEL_RULES
from megatrain.config.rules.parallel import PARALLEL_RULES
from megatrain.config.rules.resume import RESUME_RULES
from megatrain.config.rules.schedule import SCHEDULE_RULES
from megatrain.config.rules.sizes import SIZE_RULES
from megatrain.config.rules.training import TRAINING_RULES
from megatrain.config.rules.unproven import parity_is_required

RULES: Final[tuple[Callable[[Draft], Iterator[Problem]], ...]] = (
    *SIZE_RULES,
    *PARALLEL_RULES,
    *CONTEXT_PARALLEL_RULES,
    *MODEL_RULES,
    *LATENT_RULES,
    *LAYER_RULES,
    *LINEAR_ATTENTION_RULES,
    *EXPERT_RULES,
    *TRAINING_RULES,
    *SCHEDULE_RULES,
    *DATA_RULES,
    *MASKED_SAMPLE_RULES,
    *DEVICE_RULES,
    *LOGGING_RULES,
    *CHECKPOINT_RULES,
    *RESUME_RULES,
    parity_is_required,
)
