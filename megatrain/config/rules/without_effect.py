"""Notes about given settings that have no effect in this combination, as in Megatron-LM.

Most follow from what each setting says that it needs (`schema/needs.py`); the others have a function each.
"""

from collections.abc import Iterator

from megatrain.config.derive.fp8 import scale_blocks, why_no_codes_are_gathered
from megatrain.config.plan import Draft
from megatrain.config.rules.model import EXPERT_MODULES
from megatrain.config.schema.needs import Need
from megatrain.config.schema.optimizer import PrecisionConfig
from megatrain.config.schema.tree import flag_of, settings


def settings_without_effect(draft: Draft) -> Iterator[str]:
    """Yield one note per need that is not met, about the settings that are given and not at their defaults."""
    idle: dict[str, list[str]] = {}
    for setting in settings():
        value = draft.config.get(setting.path)
        if not draft.is_given(setting.path) or value in (setting.default, None, False):
            continue
        for need in setting.needs:
            if not need.holds(draft.get):
                idle.setdefault(reason_of(need), []).append(f"{setting.flag}{_value(value)}")
    for reason, flags in idle.items():
        yield f"{', '.join(flags)} {'have' if len(flags) > 1 else 'has'} no effect {reason}"


def reason_of(need: Need) -> str:
    """Return the end of a note about a need that is not met."""
    return need.words.format(*map(flag_of, need.paths))


def modules_without_effect(draft: Draft) -> Iterator[str]:
    """Name the parts that the model is asked to recompute and does not have."""
    modules, model = draft.config.training.recompute_modules, draft.config.model
    names = [name for name in modules if name in EXPERT_MODULES]
    if names and draft.config.experts.num_experts is None:
        yield f"--recompute-modules {' '.join(names)} has no effect without --num-experts"
    if "mla_up_proj" in modules and not model.multi_latent_attention:
        yield "--recompute-modules mla_up_proj has no effect without --multi-latent-attention"
    if "layernorm" in modules and model.norm_position == "post":
        yield "--recompute-modules layernorm has no effect with --norm-position post, since no norm precedes a linear layer"


def block_size_without_effect(draft: Draft) -> Iterator[str]:
    precision = draft.config.precision
    has_blocks = precision.fp8_recipe == "blockwise" or "blockwise" in scale_blocks(draft)
    if precision.fp8_block_size != PrecisionConfig.fp8_block_size and not has_blocks:
        yield f"--fp8-block-size {precision.fp8_block_size} has no effect without --fp8-recipe blockwise"


def param_gather_without_effect(draft: Draft) -> Iterator[str]:
    reason = why_no_codes_are_gathered(draft)
    if draft.config.precision.fp8_param_gather and reason:
        yield f"--fp8-param-gather has no effect {reason}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return ""
    return " " + (" ".join(map(str, value)) if isinstance(value, tuple) else str(value))
