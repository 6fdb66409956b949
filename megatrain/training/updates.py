"""What a plan asks for of the optimizer: its rules, what it keeps in fewer bits, the loss scale and the schedules."""

from __future__ import annotations

import dataclasses

import torch

from megatrain.config import Plan
from megatrain.optim.loss_scale import ConstantLossScale, DynamicLossScale, LossScaler
from megatrain.optim.muon import Muon, MuonRule
from megatrain.optim.rules import AdamwRule, SgdRule, UpdateRule
from megatrain.optim.schedule import LearningRate, Schedules, WeightDecay
from megatrain.parallel.buffers import FlatBuffers
from megatrain.parallel.grid import RankGrid


def update_rule_of(plan: Plan) -> UpdateRule:
    """The optimizer's mathematics that a plan asks for, but for matrices that Muon moves."""
    optimizer = plan.config.optimizer
    if optimizer.optimizer == "sgd":
        return SgdRule(momentum=optimizer.sgd_momentum)
    return AdamwRule(beta1=optimizer.adam_beta1, beta2=optimizer.adam_beta2, eps=optimizer.adam_eps)


def muon_of(plan: Plan, buffers: FlatBuffers, grid: RankGrid) -> Muon | None:
    """What moves the matrices of layers, where it is not what moves the rest."""
    optimizer = plan.config.optimizer
    if optimizer.optimizer != "muon":
        return None
    rule = MuonRule(
        momentum=optimizer.muon_momentum,
        is_nesterov=optimizer.muon_nesterov,
        num_steps=optimizer.muon_num_ns_steps,
        coefficients=optimizer.muon_coefficient_type,
        scale_mode=optimizer.muon_scale_mode,
        extra_scale=optimizer.muon_extra_scale_factor,
        splits_qkv=not optimizer.muon_no_split_qkv,
        dtype=torch.bfloat16 if optimizer.muon_fp32_matmul_prec == "medium" else torch.float32,
        has_tf32=optimizer.muon_fp32_matmul_prec == "high",
    )
    return Muon(rule, buffers.shards, grid)


def kept_dtypes_of(plan: Plan) -> dict[str, torch.dtype]:
    """What the optimizer keeps in fewer bits than its main weights."""
    optimizer = plan.config.optimizer
    dtypes = {"exp_avg": optimizer.exp_avg_dtype, "exp_avg_sq": optimizer.exp_avg_sq_dtype}
    return {kind: torch.bfloat16 for kind, dtype in dtypes.items() if dtype == "bf16"}


def offload_fraction_of(plan: Plan) -> float:
    """How much of the optimizer's state is in the host's memory."""
    optimizer = plan.config.optimizer
    return optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0


def loss_scaler_of(plan: Plan) -> LossScaler:
    """Constant where it was given, dynamic for fp16, else none."""
    precision, is_checked = plan.config.precision, plan.config.training.check_for_nan_in_loss_and_grad
    if precision.fp16 and precision.loss_scale is None:
        return DynamicLossScale(
            scale=precision.initial_loss_scale,
            minimum=precision.min_loss_scale,
            window=precision.loss_scale_window,
            hysteresis=precision.hysteresis,
            skips_all=not is_checked,
        )
    return ConstantLossScale(
        precision.loss_scale or 1.0,
        skips_gradients=precision.fp16 and precision.loss_scale is not None,
        skips_all=not is_checked,
    )


def schedules_of(plan: Plan) -> Schedules:
    """The schedules that a plan describes."""
    values = plan.derived.schedule
    rate = LearningRate(
        style=values.lr_decay_style,
        peak=values.lr,
        floor=values.min_lr,
        init=values.lr_warmup_init,
        warmup_samples=values.lr_warmup_samples,
        decay_samples=values.lr_decay_samples,
        wsd_style=values.lr_wsd_decay_style,
        wsd_samples=values.lr_wsd_decay_samples,
    )
    of_kind = {kind: group for group in plan.derived.rate_groups.groups for kind in group.kinds}
    return Schedules(
        lr=rate,
        by_kind={
            kind: dataclasses.replace(rate, peak=group.lr, floor=group.min_lr)
            for kind, group in of_kind.items()
        },
        eps_shares={kind: group.eps_share for kind, group in of_kind.items()},
        weight_decay=WeightDecay(
            style=values.weight_decay_incr_style,
            start=values.start_weight_decay,
            end=values.end_weight_decay,
            increase_samples=values.weight_decay_incr_samples,
        ),
    )
