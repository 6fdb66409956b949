"""The engine: model, memory, optimizer and executor of one rank, put together. Its `step` is what training is.

    batches ─> executor (forward, backward, buckets reduced beside it) ─> norm ─> optimizer, weights gathered behind it ─> StepReport

Every layout runs this same step; parity checks it, the loop repeats it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megatrain.config import Plan
from megatrain.kernels.fused.launching import compile_kernels
from megatrain.model.custom_layers import with_own_layers
from megatrain.model.gpt import Model, build_model
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
from megatrain.training.routers import Routers
from megatrain.training.step_report import StepReport, StepUnderway, Told
from megatrain.training.timers import Timers
from megatrain.training.updates import (
    kept_dtypes_of,
    loss_scaler_of,
    muon_of,
    offload_fraction_of,
    update_rule_of,
)


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
        compile_kernels(are_wanted=config.training.compile)
        dtype, main_dtype = getattr(torch, derived.params_dtype), getattr(torch, derived.main_dtype)
        self.model = build_model_of(plan, grid, device)
        strategy = config.parallel.data_parallel_sharding_strategy
        self.buffers = FlatBuffers(
            self.model.registry,
            grid=grid,
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
        self.routers = Routers(self.model, grid, device)
        self._were_good: Tensor | None = None
        """Whether all steps until now were finite, where one that is not ends the run."""
        rows = self.model.tp.sequence_rows(config.data.seq_length // self.model.cp.size)
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

    @property
    def num_ahead(self) -> int:
        """Steps that may begin before the report of one is read. 0: the next step depends on it, or it is there at once."""
        is_waited_for = self.loss_scaler.may_skip or self.timers.level > 0
        return int(self.device.type == "cuda" and not is_waited_for)

    def step(self, batches: Sequence[Batch], rates: Rates, *, first_sample: int = 0) -> StepReport:
        """One optimizer step over this replica's micro-batches of the global batch, which starts at `first_sample`."""
        return self.begin_step(batches, rates, first_sample=first_sample).read()

    def begin_step(
        self,
        batches: Sequence[Batch],
        rates: Rates,
        *,
        first_sample: int = 0,
        flags: Callable[[], Sequence[int]] = tuple,
    ) -> StepUnderway:
        """As `step`; the host does not wait for its end. At most `num_ahead` others are begun before it is read.

        Args:
            flags: numbers of this rank, asked for at the end of the step; the report has the largest of all ranks.
        """
        logging = self.plan.config.logging
        scale = self.loss_scaler.scale
        with self.timers.time("forward-backward"):
            losses = self.accumulate_gradients(batches, first_sample=first_sample)
        with self.timers.time("optimizer-clip-main-grad"):
            norm = self.optimizer.gradient_norm() / scale
        told = {"grad_norm": norm, **losses}
        if logging.log_num_zeros_in_grad:
            told["num_zeros"] = num_zero_gradients(self.optimizer)
        is_good = self._is_good(norm, losses)
        with self.timers.time("optimizer"):
            self.optimizer.step(rates, norm=norm, gradient_scale=scale, is_finite=is_good)
        of_routers = self.routers.follow_step(is_good)
        self.buffers.clear_gradients()
        if logging.log_params_norm:
            told["params_norm"] = parameter_norm(self.optimizer)
        told |= {f"router {name}": value for name, value in of_routers.items()}
        told |= {f"flag {place}": flag for place, flag in enumerate(self._largest(flags()))}
        return StepUnderway(Told(told), functools.partial(self._conclude, scale))

    def _is_good(self, norm: Tensor, losses: dict[str, Tensor]) -> Tensor:
        """Whether the step may update: one truth value, on the device.

        Where a step that is not finite ends the run, no later one updates, as the host may hear of it only then.
        """
        is_good = norm.isfinite() & losses["lm_loss"].isfinite()
        if not self.loss_scaler.may_skip:
            is_good = self._were_good = is_good if self._were_good is None else is_good & self._were_good
        return is_good

    def _largest(self, flags: Sequence[int]) -> Sequence[Tensor]:
        """The largest of each of these numbers over all ranks. The device hears only of those that are not 0."""
        if not flags:
            return ()
        numbers = torch.zeros(len(flags), device=self.device)
        for place, flag in enumerate(flags):
            if flag:
                numbers[place] = flag
        return all_reduce(numbers, self.grid.world, "max").unbind()

    def _conclude(self, scale: float, told: Mapping[str, float]) -> StepReport:
        """What a step did, of the numbers that it told; the host's own state follows it."""
        is_finite = math.isfinite(told["grad_norm"]) and math.isfinite(told["lm_loss"])
        if not is_finite:
            self.optimizer.step_count -= 1
        self.loss_scaler.update(is_finite=is_finite)
        num_zeros = told.get("num_zeros")
        of_routers = {name.removeprefix("router "): told[name] for name in told if name.startswith("router ")}
        return StepReport(
            lm_loss=told["lm_loss"],
            z_loss=told.get("z_loss"),
            grad_norm=told["grad_norm"],
            loss_scale=scale,
            is_finite=is_finite,
            params_norm=told.get("params_norm"),
            num_zeros=None if num_zeros is None else int(num_zeros),
            routers=self.routers.report(of_routers),
            flags=tuple(int(value) for name, value in told.items() if name.startswith("flag ")),
        )

    def accumulate_gradients(self, batches: Sequence[Batch], *, first_sample: int = 0) -> dict[str, Tensor]:
        """Forward and backward of all micro-batches, and the sums over ranks; returns losses a token of the global batch."""
        pp, own = self.grid.pp, self.own_parts(batches)
        infos = self.passes(own, first_sample=first_sample)
        self.executor.run(one_forward_one_backward(pp.rank, pp.size, len(own)), own, infos)
        self.data_parallel.finish_gradients()
        self.routers.collect(infos)
        names = ["lm_loss", *(["z_loss"] if self.model.spec.z_loss_coeff else [])]
        return dict(zip(names, mean_losses(self._summed(infos, [*names, "tokens"])), strict=True))

    def own_parts(self, batches: Sequence[Batch]) -> list[Batch]:
        """What this rank computes with of its replica's micro-batches: its rows of each sample."""
        has_chunk_means = self.plan.config.parallel.context_parallel_chunk_means
        return [self.model.cp.own_part(batch, has_chunk_means=has_chunk_means) for batch in batches]

    def passes(self, batches: Sequence[Batch], *, first_sample: int) -> list[PassInfo]:
        """What the pass of each of `own_parts` knows, of a global batch that starts at this sample."""
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
        if not self.grid.pp.is_last and not self.routers.have_losses:
            return [scale] * len(batches)  # only the head, on the last stage, reads it, and routers
        shares = torch.zeros(len(batches), dtype=torch.float64, device=self.device)
        if self.grid.pp.is_last:
            tokens = torch.stack([batch.counts.sum(dtype=torch.float64) for batch in batches]).sum()
            total = all_reduce(tokens, self.grid.replicas).clamp(min=1)
            shares = torch.stack([scale * batch.mean_over.double() / total for batch in batches])
        if self.routers.have_losses:
            all_reduce(shares, self.grid.pp)
        return list(shares.unbind())

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """Sum of the token losses and number of tokens over the batch of all replicas, wide [2]."""
        pp, own = self.grid.pp, self.own_parts(batches)
        infos = [
            PassInfo(microbatch=number, documents=batch.documents, is_training=False)
            for number, batch in enumerate(own)
        ]
        self.executor.run(forward_only(pp.rank, pp.size, len(own)), own, infos)
        return self._summed(infos, ["lm_loss", "tokens"])

    def _summed(self, infos: Sequence[PassInfo], names: Sequence[str]) -> Tensor:
        """Named sums over micro-batches and replicas, from the last stage to all: [names] in fp64."""
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        for info in infos:
            if info.sums:
                sums += torch.stack([info.sums[name].double() for name in names])
        return all_reduce(all_reduce(sums, self.grid.replicas), self.grid.pp)


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
        context_ways=plan.derived.context_communication or ("p2p",),
        recompute=recompute_of(plan),
        dispatcher="alltoall" if config.experts.moe_token_dispatcher_type == "alltoall" else "allgather",  # noqa: S105
    )


def recompute_of(plan: Plan) -> Recompute:
    """What a plan computes twice."""
    training = plan.config.training
    if training.recompute_granularity == "full":
        assert training.recompute_method is not None, "a rule asks for it"
        return Recompute(kind=training.recompute_method, num_layers=training.recompute_num_layers or 1)
    is_selective = training.recompute_granularity == "selective" or training.recompute_activations
    parts = (training.recompute_modules or ("core_attn",)) if is_selective else ()
    if training.recompute_norms:
        parts += ("layernorm",)
    return Recompute(kind="parts", parts=parts) if parts else Recompute()


def mean_losses(sums: Tensor) -> Tensor:
    """Losses a token from sums of which the last is the number of tokens, as `Engine.evaluate` returns them."""
    return sums[:-1] / sums[-1].clamp(min=1)
