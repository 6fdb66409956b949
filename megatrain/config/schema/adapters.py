"""Settings of low-rank adapters (LoRA)."""

from dataclasses import dataclass
from typing import Any

from megatrain.config.model_spec.lora import LoraModule
from megatrain.config.schema.needs import conflict, costly, on
from megatrain.config.schema.resume_class import FUNCTION, SHAPE, STEPS
from megatrain.config.schema.setting import ARGS, Section, setting

_FROZEN = ": adapters leave all other weights frozen"
_NEEDS = costly(on("adapters.lora_rank", why=", so that all weights are trained"))


def _is_added(stored: Any, _: Any) -> bool:
    """Adapters that the weights lack are drawn."""
    return stored is None


def _may_differ(_stored: Any, _now: Any) -> bool:
    """Adapters that the weights lack are drawn; `adapters_of_the_weights_are_kept` reports those that the model lacks."""
    return True


@dataclass(frozen=True, kw_only=True)
class AdaptersConfig(Section, on_resume=SHAPE, taken_by=ARGS):
    """Low-rank adapters: trained in place of the weights of the model."""

    lora_rank: int | None = setting(
        None,
        at_least=1,
        adapts=_is_added,
        conflicts=(
            conflict(
                "optimizer.optimizer",
                "muon",
                "adaptive_muon",
                "soap",
                why=_FROZEN,
                fix="use --optimizer adam",
            ),
            conflict("optimizer.optimizer_cpu_offload", why=_FROZEN),
            conflict("precision.fp8_format", why=_FROZEN),
            conflict("precision.fp4_format", why=_FROZEN),
            conflict("precision.qat", why=_FROZEN),
            conflict("model.use_mup", why=", whose rates are of whole matrices"),
            conflict("model.transformer_impl", "transformer_engine", fix="use --transformer-impl local"),
            conflict("parallel.tp_comm_overlap", why=", whose GEMMs are of whole layers"),
        ),
    )
    """Train low-rank adapters of this rank, and nothing else. none: train the model. Not in Megatron-LM."""
    lora_alpha: float = setting(32.0, above=0, on_resume=FUNCTION, needs=_NEEDS)
    """Factor of adapters, divided by --lora-rank. Not in Megatron-LM."""
    lora_dropout: float = setting(0.0, at_least=0, below=1, on_resume=STEPS, needs=_NEEDS)
    """Dropout probability of the inputs of adapters. Not in Megatron-LM."""
    lora_target_modules: tuple[LoraModule, ...] = setting(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), adapts=_may_differ, needs=_NEEDS
    )
    """Linear layers with adapters, by the names of transformers or Megatron-LM. Not in Megatron-LM."""
