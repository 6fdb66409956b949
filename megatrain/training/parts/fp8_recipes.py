"""Builders of the FP8 tensors of a model's linear layers, from a plan."""

from __future__ import annotations

import torch

from megatrain.config import Plan
from megatrain.config.module_precision import Recipe
from megatrain.config.subjects.fp8 import MXFP8_BLOCK, gathers_codes, recipe_of_flags
from megatrain.config.subjects.post_training.distillation import recipe_of_teacher
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.fp8.amax_history import AmaxHistory
from megatrain.parallel.fp8.scaling import Fp8Recipe, Fp8Recipes
from megatrain.parallel.grid import RankGrid


def fp8_recipes(plan: Plan, grid: RankGrid, device: torch.device) -> Fp8Recipes | None:
    """Return the builders of the model; None without --fp8-format and --fp4-format."""
    default, modules = recipe_of_flags(plan), plan.derived.fp8_modules
    if default is None:
        return None
    history, gathers = _history(plan, grid, device), gathers_codes(plan)

    def build(recipe: Recipe) -> Fp8Recipe:
        return _build(recipe, plan, grid, device, history, gathers_weights=gathers)

    return Fp8Recipes(
        default=build(default),
        layers=frozenset(plan.derived.fp8_layers),
        by_weight=None
        if modules is None
        else {name: recipe and build(recipe) for name, recipe in modules.by_weight.items()},
        history=history,
    )


def fp8_recipes_of_teacher(
    plan: Plan, grid: RankGrid, device: torch.device, num_layers: int
) -> Fp8Recipes | None:
    """Return the builders of a teacher, for all of its layers; None without --kd-teacher-fp8."""
    recipe = recipe_of_teacher(plan)
    if recipe is None:
        return None
    history = _history(plan, grid, device)
    default = _build(recipe, plan, grid, device, history, gathers_weights=False)
    return Fp8Recipes(default=default, layers=range(num_layers), by_weight=None, history=history)


def _history(plan: Plan, grid: RankGrid, device: torch.device) -> AmaxHistory:
    precision = plan.config.precision
    return AmaxHistory(
        precision.fp8_amax_history_len,
        precision.fp8_amax_compute_algo,
        precision.fp8_margin,
        (grid.tp_cp, grid.dp),
        device,
    )


def _build(
    recipe: Recipe,
    plan: Plan,
    grid: RankGrid,
    device: torch.device,
    history: AmaxHistory,
    *,
    gathers_weights: bool,
) -> Fp8Recipe:
    precision = plan.config.precision
    # Plans build `local`, which only emulates mxfp8.
    is_planned_for_library = device.type == "meta" and recipe.name == "mxfp8"
    name = "tensorwise" if is_planned_for_library else recipe.name
    return Fp8Recipe(
        name=name,
        format=recipe.format,
        # Ranks with different packs cast in different numbers of passes.
        tokens=grid.tp if plan.derived.pack_group_sizes else grid.tp_cp,
        tp=grid.tp,
        has_fp8_wgrad=precision.fp8_wgrad,
        keeps_weights=plan.config.parallel.data_parallel_sharding_strategy != "optim_grads_params",
        history=history if name == "delayed" else None,
        block={"blockwise": precision.fp8_block_size, "mxfp8": MXFP8_BLOCK}.get(name),
        gathers_weights=gathers_weights,
        casts_before_dispatch=plan.config.experts.moe_fp8_dispatch,
        cp=ContextParallel(grid.cp),
        seed=plan.config.training.seed,
    )
