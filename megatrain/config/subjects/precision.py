"""Dtypes of weights and gradients, and the loss scale."""

from __future__ import annotations

from megatrain.config.errors import Problem
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import Notes, Problems, derives, note, rule


@derives("precision.params_dtype")
def params_dtype(draft: Draft) -> DerivedValue:
    if draft.config.precision.bf16:
        return DerivedValue("bfloat16", "--bf16")
    if draft.config.precision.fp16:
        return DerivedValue("float16", "--fp16")
    return DerivedValue("float32", "without --bf16 and --fp16")


@derives("derived.master_dtype")
def master_dtype(draft: Draft) -> DerivedValue:
    weights = draft.config.precision.params_dtype
    return DerivedValue("float64" if weights == "float64" else "float32", f"for {weights} weights")


@rule
def dtypes_agree(draft: Draft) -> Problems:
    precision = draft.config.precision
    if precision.bf16 and precision.fp16:
        yield Problem("--bf16 and --fp16 contradict each other", "remove one of them")
        return
    for flag, is_on, dtype in (("--bf16", precision.bf16, "bfloat16"), ("--fp16", precision.fp16, "float16")):
        if is_on and precision.params_dtype != dtype:
            yield Problem(
                f"{flag} and --params-dtype {precision.params_dtype} contradict each other",
                "remove one of them",
            )
        if not is_on and precision.params_dtype == dtype:
            yield Problem(f"--params-dtype {dtype} requires {flag}", f"add {flag}")


@note
def float32_by_default(draft: Draft) -> Notes:
    is_float32 = draft.config.precision.params_dtype == "float32"
    if is_float32 and draft.config.training.device == "cuda" and not draft.is_given("precision.params_dtype"):
        yield "--params-dtype float32 by default, as in Megatron-LM; --bf16 is several times faster on a GPU"


@rule
def bf16_reduction_requires_bf16_weights(draft: Draft) -> Problems:
    precision = draft.config.precision
    if precision.grad_reduce_in_bf16 and precision.params_dtype != "bfloat16":
        yield Problem(
            f"--grad-reduce-in-bf16 requires bf16 weights, and they are {precision.params_dtype}: gradients would be less"
            " precise than the weights that they update",
            "add --bf16, or remove --grad-reduce-in-bf16",
        )


@rule
def loss_scale_is_in_range(draft: Draft) -> Problems:
    precision = draft.config.precision
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield Problem(
            f"--min-loss-scale {precision.min_loss_scale:g} is above --initial-loss-scale"
            f" {precision.initial_loss_scale:g}",
            f"use --min-loss-scale {precision.initial_loss_scale:g} or less",
        )
