"""Activations in host memory: the layers and modules that are offloaded."""

from megatrain.config.errors import Problem
from megatrain.config.plan import Draft
from megatrain.config.registry import Notes, Problems, note, rule

_OF_EXPERTS = ("expert_fc1", "moe_act")


@rule
def offloading_is_possible(draft: Draft) -> Problems:
    training, layers = draft.config.training, draft.config.model.num_layers
    if training.cpu_offloading_num_layers > layers:
        yield Problem(
            f"--cpu-offloading-num-layers {training.cpu_offloading_num_layers} exceeds --num-layers {layers}",
            f"use --cpu-offloading-num-layers {layers} or less",
        )
    modules = training.offload_modules
    if training.fine_grained_activation_offloading and not modules:
        yield Problem(
            "--fine-grained-activation-offloading requires --offload-modules",
            "add --offload-modules core_attn, or other modules",
        )
    if "attn_proj" in modules and "core_attn" not in modules:
        yield Problem(
            "--offload-modules attn_proj frees nothing without core_attn: core attention saves its output, which is the"
            " input of the projection",
            f"use --offload-modules core_attn {' '.join(modules)}",
        )
    if "layer_input" in modules and training.recompute_granularity != "full":
        yield Problem(
            "--offload-modules layer_input requires --recompute-granularity full: other layers save more than their inputs",
            "add --recompute-granularity full --recompute-method uniform --recompute-num-layers 1, or remove layer_input",
        )


@note("nothing")
def offloaded_modules_of_experts(draft: Draft) -> Notes:
    names = [name for name in draft.config.training.offload_modules if name in _OF_EXPERTS]
    if names and draft.config.experts.num_experts is None:
        yield f"--offload-modules {' '.join(names)} has no effect without --num-experts"
