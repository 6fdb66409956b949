"""Training of low-rank adapters (--lora-rank): the layers that have them."""

from __future__ import annotations

from megatrain.config.errors import Problem
from megatrain.config.model_spec.lora import adapted_weights
from megatrain.config.plan import Draft
from megatrain.config.registry import Notes, Problems, note, rule
from megatrain.config.subjects.post_training.quantization import uncovered_part


@rule
def lora_covers_the_layers(draft: Draft) -> Problems:
    adapters, what = draft.config.adapters, uncovered_part(draft)
    if adapters.lora_rank is None:
        return
    if what:
        yield Problem(
            f"--lora-rank {adapters.lora_rank} adapts attention and dense MLPs of GPTs alone, and the model has {what}",
            "remove --lora-rank",
        )
    spec = draft.derived.model_spec
    linears = {linear.weight for layer in spec.all_layers for linear in layer.linears(spec.hidden_size)}
    if (
        not what
        and spec.lora is not None
        and not any(spec.lora.adapts(f".{name}.weight") for name in linears)
    ):
        yield Problem(
            f"--lora-target-modules {' '.join(adapters.lora_target_modules)}: the model has no such layer",
            "use --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2",
        )


@rule
def adapters_of_the_weights_are_kept(draft: Draft) -> Problems:
    stored, now = draft.facts.checkpoint, draft.config.adapters
    before = stored.config.get("adapters", {}) if stored else {}
    if before.get("lora_rank") is None or now.lora_rank is None:
        return
    modules = before["lora_target_modules"]
    if left_out := adapted_weights(modules) - adapted_weights(now.lora_target_modules):
        yield Problem(
            f"--lora-target-modules {' '.join(now.lora_target_modules)} leaves out adapters of the checkpoint:"
            f" {', '.join(sorted(left_out))}",
            f"use --lora-target-modules {' '.join(modules)}, or remove --lora-target-modules",
        )


@note("result")
def base_is_frozen(draft: Draft) -> Notes:
    if draft.config.adapters.lora_rank is not None:
        yield "only adapters are trained (--lora-rank)"
        if draft.facts.checkpoint is None:
            yield "adapters of weights that are drawn, not loaded: give --load FOLDER --finetune, or --load hf:FOLDER"
