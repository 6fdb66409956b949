"""The engine: model, memory, optimizer and executor of one rank, put together. Its `step` is what training is.

    batches ─> executor (forward, backward, buckets reduced beside it) ─> norm ─> optimizer, weights gathered behind it ─> StepReport

Every layout runs this same step; parity checks it, the loop repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.config import Plan
from megatrain.model.gpt import Model, build_model
from megatrain.model.own_layers import with_own_layers
from megatrain.model.recompute import Recompute
from megatrain.model.specs import gpt_spec
from megatrain.optim.measures import num_zero_gradients, parameter_norm
from megatrain.optim.schedule import Rates
from megatrain.optim.sharded import ShardedOptimizer
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.buffers import FlatBuffers
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.data import DataParallel, Transport
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.initialize import InitialWeights
from megatrain.parallel.pipeline.executor import Executor
from megatrain.parallel.pipeline.schedule import forward_only, one_forward_one_backward
from megatrain.training.timers import Timers
from megatrain.training.updates import (
    kept_dtypes_of,
    loss_scaler_of,
    muon_of,
    offload_fraction_of,
    update_rule_of,
)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step did, equal on all ranks."""

    lm_loss: float
    """Sum of the token losses that count over their number, of the whole global batch."""
    z_loss: float | None = None
    """The same of what --z-loss-coeff adds to them, where it is given."""
    grad_norm: float
    """Before clipping, without the loss scale."""
    loss_scale: float
    """What the loss was multiplied with."""
    is_finite: bool
    """False: nothing was updated."""
    params_norm: float | None = None
    """L2 norm of the updated weights, with --log-params-norm."""
    num_zeros: int | None = None
    """Elements of the gradient that are zero, with --log-num-zeros-in-grad."""


class Engine:
    """Everything that one rank computes with.

    Args:
        plan: what to build.
        grid: this rank's groups.
        device: where everything lives.
    """

    def __init__(self, plan: Plan, grid: RankGrid, device: torch.device) -> None:
        self.plan = plan
        self.grid = grid
        self.device = device
        self.timers = Timers(plan.config.logging.timing_log_level, device)
        config, derived = plan.config, plan.derived
        dtype, main_dtype = getattr(torch, derived.params_dtype), getattr(torch, derived.main_dtype)
        self.model = build_model_of(plan, grid, device)
        strategy = config.parallel.data_parallel_sharding_strategy
        self.buffers = FlatBuffers(
            self.model.registry,
            shard_group=grid.dp_shard,
            keeps_weights=strategy != "optim_grads_params",
            keeps_gradients=strategy in ("no_shard", "optim"),
            weight_dtype=dtype,
            grad_dtype=main_dtype,
            device=device,
        )
        self.data_parallel = DataParallel(
            self.buffers,
            grid,
            Transport(
                overlaps_gradients=config.parallel.overlap_grad_reduce,
                overlaps_weights=config.parallel.overlap_param_gather,
                grad_dtype=torch.bfloat16 if config.precision.grad_reduce_in_bf16 else None,
            ),
        )
        self.optimizer = ShardedOptimizer(
            self.data_parallel,
            update_rule_of(plan),
            muon=muon_of(plan, self.buffers, grid),
            clip_grad=config.optimizer.clip_grad,
            main_dtype=main_dtype,
            kept_dtypes=kept_dtypes_of(plan),
            offload_fraction=offload_fraction_of(plan),
        )
        self.loss_scaler = loss_scaler_of(plan)
        rows = self.model.tp.sequence_rows(config.data.seq_length)
        self.executor = Executor(
            self.model.segments,
            grid,
            hidden_shape=(rows, config.training.micro_batch_size, config.model.hidden_size),
            dtype=self.model.hidden_dtype,
            device=device,
            hooks=self.data_parallel,
        )

    def initialize(self) -> None:
        """Draw the initial weights."""
        self.optimizer.fill("weight", InitialWeights(self.plan.config.training.seed))
        self.optimizer.publish_weights()

    def step(self, batches: Sequence[Batch], rates: Rates, *, first_sample: int = 0) -> StepReport:
        """One optimizer step over this rank's micro-batches of the global batch, which starts at `first_sample`."""
        logging = self.plan.config.logging
        scale = self.loss_scaler.scale
        with self.timers.time("forward-backward"):
            losses = self.accumulate_gradients(batches, first_sample=first_sample)
        with self.timers.time("optimizer-clip-main-grad"):
            norm = self.optimizer.gradient_norm() / scale
        num_zeros = num_zero_gradients(self.optimizer) if logging.log_num_zeros_in_grad else None
        with self.timers.time("optimizer"):
            self.optimizer.step(
                rates,
                norm=norm,
                gradient_scale=scale,
                is_finite=norm.isfinite() & losses["lm_loss"].isfinite(),
            )
        self.buffers.clear_gradients()
        grad_norm, *told = torch.stack(
            [norm, *losses.values()]
        ).tolist()  # the one place where the host waits
        told_by_name = dict(zip(losses, told, strict=True))
        lm_loss = told_by_name["lm_loss"]
        is_finite = math.isfinite(grad_norm) and math.isfinite(lm_loss)
        if not is_finite:
            self.optimizer.step_count -= 1
        self.loss_scaler.update(is_finite=is_finite)
        return StepReport(
            lm_loss=lm_loss,
            z_loss=told_by_name.get("z_loss"),
            grad_norm=grad_norm,
            loss_scale=scale,
            is_finite=is_finite,
            params_norm=parameter_norm(self.optimizer) if logging.log_params_norm else None,
            num_zeros=num_zeros,
        )

    def accumulate_gradients(self, batches: Sequence[Batch], *, first_sample: int = 0) -> dict[str, Tensor]:
        """Forward and backward of all micro-batches, and the sums over ranks; returns losses a token of the global batch."""
        pp = self.grid.pp
        infos = self.passes(batches, first_sample=first_sample)
        self.executor.run(one_forward_one_backward(pp.rank, pp.size, len(batches)), batches, infos)
        self.data_parallel.finish_gradients()
        names = ["lm_loss", *(["z_loss"] if self.model.spec.z_loss_coeff else [])]
        return dict(zip(names, mean_losses(self._summed(infos, [*names, "tokens"])), strict=True))

    def passes(self, batches: Sequence[Batch], *, first_sample: int) -> list[PassInfo]:
        """What each micro-batch's pass knows, of a global batch that starts at this sample."""
        micro, dp = self.plan.config.training.micro_batch_size, self.grid.dp
        return [
            PassInfo(
                microbatch=number,
                first_sample=first_sample + (number * dp.size + dp.rank) * micro,
                documents=batch.documents,
                loss_scale=share,
            )
            for number, (batch, share) in enumerate(zip(batches, self._loss_shares(batches), strict=True))
        ]

    def _loss_shares(self, batches: Sequence[Batch]) -> list[float | Tensor]:
        """What each micro-batch's mean loss counts in the step's, times the loss scale.

        Plain sums over micro-batches and replicas then give the mean of the micro-batches' means, or, with
        --calculate-per-token-loss, the mean over all tokens that count.
        """
        scale = self.loss_scaler.scale
        if not self.plan.config.training.calculate_per_token_loss:
            return [scale / (len(batches) * self.grid.dp.size)] * len(batches)
        if not self.grid.pp.is_last:
            return [scale] * len(batches)  # only the head, on the last stage, reads it
        tokens = [batch.counts.sum(dtype=torch.float64) for batch in batches]
        total = all_reduce(torch.stack(tokens).sum(), self.grid.dp)
        return [scale * count / total.clamp(min=1) for count in tokens]

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """Sum of the token losses and number of tokens over the batch of all replicas, wide [2]."""
        pp = self.grid.pp
        infos = [
            PassInfo(microbatch=number, documents=batch.documents, is_training=False)
            for number, batch in enumerate(batches)
        ]
        self.executor.run(forward_only(pp.rank, pp.size, len(batches)), batches, infos)
        return self._summed(infos, ["lm_loss", "tokens"])

    def _summed(self, infos: Sequence[PassInfo], names: Sequence[str]) -> Tensor:
        """Named sums over micro-batches and replicas, from the last stage to all: [names] in fp64."""
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        for info in infos:
            if info.sums:
                sums += torch.stack([info.sums[name].double() for name in names])
        return all_reduce(all_reduce(sums, self.grid.dp), self.grid.pp)


def build_model_of(plan: Plan, grid: RankGrid, device: torch.device) -> Model:
    """The model that a plan describes, without memory."""
    config = plan.config
    return build_model(
        with_own_layers(
            gpt_spec(
                config.model,
                config.experts,
                vocab_size=plan.derived.vocab_size,
                does_qk_norm_decay=config.optimizer.apply_wd_to_qk_layernorm,
            ),
            config.model,
        ),
        grid,
        seq_length=config.data.seq_length,
        sequence_parallel=config.parallel.sequence_parallel,
        dtype=getattr(torch, plan.derived.params_dtype),
        device=device,
        seed=config.training.seed,
        # Without memory, as in plans, there is nothing to compute with: Transformer Engine is not even imported.
        implementation="local" if device.type == "meta" else config.model.transformer_impl,
        attention=plan.derived.attention_backend,
        recompute=recompute_of(plan),
    )


def recompute_of(plan: Plan) -> Recompute:
    """What a plan computes twice."""
    training = plan.config.training
    if training.recompute_granularity == "full":
        assert training.recompute_method is not None, "a rule asks for it"
        return Recompute(kind=training.recompute_method, num_layers=training.recompute_num_layers or 1)
    if training.recompute_granularity == "selective" or training.recompute_activations:
        return Recompute(kind="parts", parts=training.recompute_modules or ("core_attn",))
    return Recompute()


def mean_losses(sums: Tensor) -> Tensor:
    """Losses a token from sums of which the last is the number of tokens, as `Engine.evaluate` returns them."""
    return sums[:-1] / sums[-1].clamp(min=1)
