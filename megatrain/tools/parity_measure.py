"""What a rank of a layout finds: losses, norms, gradients and weights of three steps of the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatrain.config import Facts, Plan, parse, resolve
from megatrain.parallel.batch import Batch, Documents
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.groups import make_group
from megatrain.parallel.layout import Box
from megatrain.tools.parity_faults import planted
from megatrain.tools.parity_rows import MICRO_BATCH, Layout
from megatrain.training.engine import Engine, schedules_of
from megatrain.training.launch import grid_shape

NUM_STEPS = 3
_VOCAB, _SEQ = 101, 24


@dataclass(frozen=True)
class Part:
    """A box of a canonical tensor, as one rank holds it."""

    name: str
    box: Box
    values: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """What one rank found."""

    losses: list[float]
    """Of each step, with the z-loss behind it if there is one."""
    norms: list[float]
    gradients: list[Part]
    weights: list[Part]


def measure(rank: int, world_size: int, layout: Layout, fault: str | None) -> Measured:
    """Three steps of the tiny model, as one rank of a layout sees them."""
    plan = tiny_plan(layout, world_size)
    with planted(fault):
        engine = engine_of(plan, rank)
        batches = [list(own_batches(step, layout, engine.grid.dp.rank)) for step in range(NUM_STEPS)]
        engine.accumulate_gradients(batches[0])
        gradients = gradients_of(engine)
        engine.buffers.clear_gradients()
        rates = schedules_of(plan).at(0)
        reports = [
            engine.step(batches[step], rates, first_sample=step * layout.global_batch)
            for step in range(NUM_STEPS)
        ]
    losses = [loss for r in reports for loss in (r.lm_loss, r.z_loss) if loss is not None]
    return Measured(losses, [r.grad_norm for r in reports], gradients, weights_of(engine))


def engine_of(plan: Plan, rank: int) -> Engine:
    """A rank's engine on a CPU, with initial weights. The process has joined its world."""
    grid = RankGrid.build(grid_shape(plan), rank, make_group)
    engine = Engine(plan, grid, torch.device("cpu"))
    engine.initialize()
    return engine


def tiny_plan(layout: Layout, world_size: int, *more_flags: str) -> Plan:
    """Four layers, a vocabulary that no tensor-parallel size divides, and clipping at work.

    Adam's eps is large, so that elements whose gradient is nothing but rounding do not move by a multiple of it.
    """
    flags = (
        "--num-layers 4 --hidden-size 48 --num-attention-heads 48 --kv-channels 4 --ffn-hidden-size 96 "
        "--init-method-std 0.1 --mock-data "
        f"--seq-length {_SEQ} --tokenizer-type NullTokenizer --vocab-size {_VOCAB} "
        f"--micro-batch-size {MICRO_BATCH} --train-iters {NUM_STEPS} "
        "--lr 1e-2 --adam-eps 1e-6 --weight-decay 0.1 --params-dtype float64 --device cpu"
    )
    request = parse([*flags.split(), *layout.flags(), *more_flags])
    return resolve(request, Facts(world_size=world_size, vocab_size=_VOCAB, eod_id=_VOCAB - 1))


def own_batches(step: int, layout: Layout, dp_rank: int) -> Iterator[Batch]:
    """This replica's micro-batches of a global batch that is the same under every layout; a third of the mask is 0."""
    rng = np.random.default_rng(step)
    tokens = torch.from_numpy(rng.integers(0, _VOCAB, (layout.global_batch, _SEQ + 1)))
    mask = torch.from_numpy((rng.random((layout.global_batch, _SEQ)) < 0.67).astype(np.float32))
    labels = tokens[:, 1:].clone()
    if layout.has("ignored"):
        labels[mask == 0] = 10 * _VOCAB
        labels[torch.from_numpy(rng.random(labels.shape) < 0.2)] = -100
    for first in range(dp_rank * MICRO_BATCH, layout.global_batch, layout.dp * MICRO_BATCH):
        rows = slice(first, first + MICRO_BATCH)
        documents = _documents(tokens[rows, :-1]) if layout.has("documents") else None
        yield Batch(
            tokens=tokens[rows, :-1].contiguous(),
            labels=labels[rows],
            loss_mask=mask[rows],
            position_ids=_positions(documents),
            documents=documents,
        )


def _documents(tokens: torch.Tensor) -> Documents:
    """Documents that end behind every seventh id, so that samples hold none to several."""
    flat = torch.cat([torch.nn.functional.pad(row % 7 == 0, (1, 0))[:-1] for row in tokens])
    flat[::_SEQ] = True
    borders = torch.cat([flat.nonzero().flatten(), torch.tensor([len(flat)])]).to(torch.int32)
    return Documents(borders, int(borders.diff().max()), *tokens.shape)


def _positions(documents: Documents | None) -> torch.Tensor:
    """Place of each token in its sample, or its document."""
    places = torch.arange(MICRO_BATCH * _SEQ)
    starts = torch.arange(0, len(places), _SEQ) if documents is None else documents.cu_seqlens[:-1].long()
    own = starts[torch.bucketize(places, starts, right=True) - 1]
    return (places - own).view(MICRO_BATCH, _SEQ)


def gradients_of(engine: Engine) -> list[Part]:
    """The summed gradients, of the shards whose sums this rank has."""
    parts = []
    for shard, flat in zip(engine.buffers.shards, engine.buffers.gradient_shards, strict=True):
        for _, box, place in shard.owned():
            parts.append(Part(box.piece.name, box.box, flat[place].view(box.shape).numpy().copy()))
    return parts


def weights_of(engine: Engine) -> list[Part]:
    """The weights that the model computes with: every copy, not only what this rank's optimizer owns."""
    engine.data_parallel.wait_for_weights()
    parts = []
    for bucket, weights in zip(engine.buffers.buckets, engine.buffers.weights, strict=True):
        for placed in bucket.placed:
            flat = weights[placed.start : placed.stop]
            for box in placed.entry.layout.ranges(0, flat.numel()):
                values = flat[box.offset : box.offset + box.numel].view(box.shape)
                parts.append(Part(box.piece.name, box.box, values.detach().numpy().copy()))
    return parts
