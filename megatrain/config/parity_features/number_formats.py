"""Parity features of number formats other than the dtype of the weights: they change results by rounding."""

from __future__ import annotations

from typing import Final

from megatrain.config.derive.fp8 import fp8_recipes, recipe_of_flags
from megatrain.config.parity_features.feature import REPLICAS, Feature, Option, PlanOrDraft


def _moments(plan: PlanOrDraft) -> set[str]:
    return {plan.config.optimizer.exp_avg_dtype, plan.config.optimizer.exp_avg_sq_dtype}


FP8_RECIPES_WITH_ROWS: Final = ("tensorwise", "delayed", "blockwise", "nvfp4")
"""Recipes whose scales are the same under every layout. Their rows are in fp64, in which a split equals one process."""

FP8_MODULES: Final = """
configs:
  bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
  tensorwise: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {fp8_quantization_recipe: tensorwise}}
  blockwise: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {fp8_quantization_recipe: blockwise}}
matchers:
  projections: {type: glob, enabled: true, pattern: "*.self_attention.*proj", config: bf16}
  mlp: {type: glob, enabled: true, pattern: "decoder.layers.1.mlp.*", config: tensorwise}
  layer: {type: glob, enabled: true, pattern: "decoder.layers.2.*", config: blockwise}
"""
"""The file of a row with --te-precision-config-file; other linear layers have the recipe of the flags."""


def _has_fp8_of_rows(plan: PlanOrDraft) -> bool:
    names = {recipe.name for recipe in fp8_recipes(plan)}
    return recipe_of_flags(plan) is not None and names <= set(FP8_RECIPES_WITH_ROWS)


NUMBER_FORMATS: Final[tuple[Option, ...]] = (
    Option(
        "FP8",
        (
            "precision.fp8_format",
            "precision.fp8_recipe",
            "precision.fp4_format",
            "precision.te_precision_config_file",
        ),
        (
            Feature("nofp8", "", lambda p: recipe_of_flags(p) is None),
            Feature(
                "fp8",
                "--fp8-format hybrid",
                _has_fp8_of_rows,
                rows={
                    "fp8tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
                    "fp8delayed": "--fp8-format hybrid --fp8-amax-history-len 2 --fp8-amax-compute-algo max --fp8-margin 1",
                    "fp8bf16wgrad": "--fp8-format e4m3 --fp8-recipe tensorwise --no-fp8-wgrad",
                    "fp8blockwise": "--fp8-format e4m3 --fp8-recipe blockwise --fp8-block-size 4",
                    "fp8e4m3": "--fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16",
                    "nvfp4": "--fp4-format e2m1",
                    "fp8gather": "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather",
                    "fp8delayedgather": (
                        "--fp8-format hybrid --fp8-amax-history-len 2 --fp8-amax-compute-algo max --fp8-margin 1"
                        " --fp8-param-gather"
                    ),
                    "fp8modules": "--fp8-format hybrid --fp8-block-size 4 --te-precision-config-file fp8_modules.yaml",
                },
            ),
        ),
    ),
    Option(
        "gradient reduction dtype",
        ("precision.grad_reduce_in_bf16",),
        (
            Feature("sumsfp32", "", lambda p: not p.config.precision.grad_reduce_in_bf16),
            Feature(
                "sumsbf16",
                "--grad-reduce-in-bf16",
                lambda p: p.config.precision.grad_reduce_in_bf16,
                needs=REPLICAS,
            ),
        ),
    ),
    Option(
        "moments",
        ("optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype"),
        (
            Feature("momentsfp32", "", lambda p: _moments(p) == {"fp32"}),
            Feature(
                "momentsbf16",
                "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
                lambda p: "bf16" in _moments(p),
                needs=("adam", "muon"),
            ),
        ),
    ),
    Option(
        "Muon matmul precision",
        ("optimizer.muon_fp32_matmul_prec",),
        (
            Feature("muonbf16", "", lambda p: p.config.optimizer.muon_fp32_matmul_prec == "medium"),
            Feature(
                "muonfp32",
                "--muon-fp32-matmul-prec highest",
                lambda p: p.config.optimizer.muon_fp32_matmul_prec in ("high", "highest"),
                needs=("muon",),
                rows={
                    "muontf32": "--muon-fp32-matmul-prec high",
                    "muonfp32": "--muon-fp32-matmul-prec highest",
                },
            ),
        ),
    ),
    Option(
        "router dtype",
        ("experts.moe_router_dtype",),
        (
            Feature("routersdefault", "", lambda p: p.config.experts.moe_router_dtype is None),
            Feature(
                "routershigh",
                "--moe-router-dtype fp32",
                lambda p: p.config.experts.moe_router_dtype in ("fp32", "fp64"),
                needs=("experts",),
                rows={
                    "routersfp32": "--moe-router-dtype fp32",
                    "routersfp64": "--moe-router-dtype fp64",
                },
            ),
        ),
    ),
)
"""fp64 rows leave them out; low-precision rows are compared with a noise level that includes them."""
