"""Losses of a step: names of the sums that the head writes to `PassInfo.sums`, and the means of these sums.

lm_loss  sop_loss  z_loss  kd_loss  kd_pair_0  tokens    mtp_1_lm_loss  mtp_2_lm_loss  mtp_1_tokens  mtp_2_tokens      sums over the global batch, fp64
lm_loss  sop_loss  sop_hits  hits    tokens  tokens  samples  labels                               sums over an evaluation, fp64
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.config.model_spec.stack import HeadSpec
from megatrain.model.gpt import Model
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGrid


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Losses per token of the global batch (BERT: means over micro-batches), fp64 scalars, equal on all ranks."""

    lm_loss: Tensor
    sop_loss: Tensor | None = None
    """Loss of the next-sentence head; None without one."""
    z_loss: Tensor | None = None
    """None without --z-loss-coeff."""
    distillation: Tensor | None = None
    """Divergence from a teacher's logits, then the distance of each layer pair, without their weights, [1 + pairs]."""
    indexer_loss: Tensor | None = None
    """Mean over layers, micro-batches and replicas of the losses of indexers; None without any."""
    mtp: Tensor | None = None
    """Losses of multi-token prediction by depth, without their factor, [depths]; None without --mtp-num-layers."""


def loss_names(model: Model) -> tuple[str, ...]:
    """Return the names of the sums of a training step."""
    spec, pairs = model.spec, [] if model.distillation is None else model.distillation.sum_names
    depths = range(1, spec.num_depths + 1)
    more = (*(["sop_loss"] if spec.head.is_binary else []), *(["z_loss"] if spec.z_loss_coeff else []))
    of_model = ("lm_loss", *more, *pairs, "tokens")
    return (*of_model, *(f"mtp_{k}_{kind}" for kind in ("lm_loss", "tokens") for k in depths))


def evaluation_sums(head: HeadSpec, *, has_bytes: bool = False) -> dict[str, tuple[str, str]]:
    """Return the sums whose quotient is each value of an evaluation, by the value's name in `metrics.jsonl`.

    Args:
        has_bytes: the bytes of labels are known. The quotient of `bits_per_byte` is in nats.
    """
    found = {"loss": ("lm_loss", "tokens")}
    if has_bytes:
        found["bits_per_byte"] = ("lm_loss", "bytes")
    if head.is_binary:
        found |= {"sop_loss": ("sop_loss", "tokens"), "sop_accuracy": ("sop_hits", "samples")}
    if head.has_accuracy:
        found["token_accuracy"] = ("hits", "labels")
    return found


def quotients(sums: Tensor) -> Tensor:
    """Divide the first half of the sums by the second half; `evaluate` of evaluation.py returns such sums."""
    dividends, divisors = sums.chunk(2)
    return dividends / divisors.clamp(min=1)


def mean_losses(sums: Tensor) -> Tensor:
    """Divide sums of losses by the last sum, the number of tokens."""
    return sums[:-1] / sums[-1].clamp(min=1)


def mean_indexer_loss(
    num_indexers: int, infos: Sequence[PassInfo], grid: RankGrid, device: torch.device
) -> Tensor | None:
    """Return the mean of the losses of all indexers of the model in a step's passes, on all ranks; None without indexers.

    All ranks call it. Tensor ranks have equal losses, and a stage those of its layers.
    """
    if not num_indexers:
        return None
    own = [loss.double() for info in infos for loss in info.indexer_losses.values()]
    total = torch.stack(own).sum() if own else torch.zeros((), dtype=torch.float64, device=device)
    total = all_reduce(all_reduce(total, grid.replicas), grid.pp)
    return total / (num_indexers * len(infos) * grid.replicas.size)


def losses_of(names: Sequence[str], sums: Tensor, indexer_loss: Tensor | None) -> Losses:
    """Return the means of the sums of these names, with the mean loss of indexers."""
    count = names.index("tokens")
    losses = dict(zip(names[:count], mean_losses(sums[: count + 1]), strict=True))
    of_depths = sums[count + 1 :]
    of_teacher = [losses.pop(name) for name in names if name.startswith("kd_")]
    return Losses(
        **losses,
        indexer_loss=indexer_loss,
        distillation=torch.stack(of_teacher) if of_teacher else None,
        mtp=quotients(of_depths) if len(of_depths) else None,
    )
