"""`megatrain parity`: the same model under every layout, against one process.

A tiny model in fp64 trains three steps on batches with an uneven loss mask. Compared are the loss and the gradient
norm of each step, every gradient of the first, and every weight of the last: the largest difference over the
tensor's largest value must stay within 1e-10. A layout that passes computes the same mathematics.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatrain.config import ConfigError, Facts, Plan, parse, resolve
from megatrain.parallel.batch import Batch, Documents
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.groups import make_group
from megatrain.parallel.layout import Box
from megatrain.tools.parity_faults import FAULTS, planted
from megatrain.tools.parity_models import MODELS, RECOMPUTE
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.engine import Engine, schedules_of
from megatrain.training.launch import grid_shape

TOLERANCE = 1e-10
NUM_STEPS = 3
_VOCAB, _SEQ, _MICRO_BATCH = 101, 24, 2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One row of the table."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    sp: bool = False
    is_tied: bool = False
    is_zero1: bool = True
    has_overlap: bool = True
    """Whether gradients and weights travel beside the computation."""
    global_batch: int = 16
    """Samples a step, in micro-batches of two."""
    has_documents: bool = False
    """Whether attention stays inside of documents, and positions count within them, as with --reset-attention-mask and
    --reset-position-ids."""
    is_per_token: bool = False
    """Whether every token counts alike, as with --calculate-per-token-loss."""
    optimizer: str = "adam"
    loss_scale: float | None = None
    model: str = "llama"
    """One of `parity_models.MODELS`."""
    has_z_loss: bool = False
    has_ignored_labels: bool = False
    """Whether some labels say that their tokens do not count, and others are no ids where the mask is 0."""
    vocab_multiple: int = 1
    """To which the vocabulary is padded, times tp."""
    groups: int | None = None
    """Query groups, in place of the model's."""
    recompute: str = ""
    """One of `parity_models.RECOMPUTE`; the one process that it is compared with computes nothing twice."""

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def name(self) -> str:
        """As a user would say it: `tp2 sp dp2 tied zero1`."""
        parts = [
            f"{axis}{size}" for axis, size in (("tp", self.tp), ("dp", self.dp), ("pp", self.pp)) if size > 1
        ]
        parts += ["sp"] if self.sp else []
        parts += ["tied" if self.is_tied else "untied", "zero1" if self.is_zero1 else "zero0"]
        parts += [] if self.has_overlap else ["no-overlap"]
        parts += [self.model] if self.model != "llama" else []
        parts += [f"groups{self.groups}"] if self.groups is not None else []
        parts += [self.recompute] if self.recompute else []
        parts += ["documents"] if self.has_documents else []
        parts += ["tokens"] if self.is_per_token else []
        parts += ["z-loss"] if self.has_z_loss else []
        parts += ["ignored"] if self.has_ignored_labels else []
        parts += [f"padded{self.vocab_multiple}"] if self.vocab_multiple != 1 else []
        parts += [self.optimizer] if self.optimizer != "adam" else []
        parts += [f"scale{self.loss_scale:g}"] if self.loss_scale is not None else []
        parts += [f"batch{self.global_batch}"] if self.global_batch != 16 else []
        return " ".join(parts)

    def flags(self) -> list[str]:
        flags = [
            *("--optimizer", self.optimizer),
            *("--tensor-model-parallel-size", str(self.tp), "--pipeline-model-parallel-size", str(self.pp)),
            *(["--sequence-parallel"] if self.sp else []),
            *([] if self.is_tied else ["--untie-embeddings-and-output-weights"]),
            *(["--reset-attention-mask", "--reset-position-ids"] if self.has_documents else []),
            *(["--calculate-per-token-loss"] if self.is_per_token else []),
            *(["--z-loss-coeff", "0.01"] if self.has_z_loss else []),
            *("--make-vocab-size-divisible-by", str(self.vocab_multiple)),
            *(["--loss-scale", str(self.loss_scale)] if self.loss_scale is not None else []),
            *(["--group-query-attention", "--num-query-groups", str(self.groups)] if self.groups else []),
            *([] if self.has_overlap else ["--no-overlap-grad-reduce", "--no-overlap-param-gather"]),
            *RECOMPUTE[self.recompute].split(),
            "--use-distributed-optimizer" if self.is_zero1 else "--no-use-distributed-optimizer",
        ]
        return flags


LAYOUTS = (
    Layout(tp=2),
    Layout(tp=2, is_tied=True),
    Layout(tp=2, sp=True),
    Layout(tp=2, sp=True, is_tied=True),
    Layout(tp=3, sp=True, is_tied=True),
    Layout(tp=4, sp=True),
    Layout(dp=2),
    Layout(dp=2, is_zero1=False, is_tied=True),
    Layout(dp=3, global_batch=12),
    Layout(dp=4),
    Layout(dp=8, is_tied=True),
    Layout(pp=2),
    Layout(pp=2, is_tied=True),
    Layout(pp=4, is_tied=True),
    Layout(pp=4, global_batch=2),
    Layout(pp=4, global_batch=4, is_tied=True),
    Layout(tp=2, dp=2),
    Layout(tp=2, dp=2, sp=True, is_zero1=False),
    Layout(tp=2, dp=2, sp=True, is_tied=True),
    Layout(tp=2, pp=2, is_tied=True),
    Layout(tp=2, pp=2, sp=True),
    Layout(dp=2, pp=2, is_tied=True),
    Layout(dp=2, pp=2, is_zero1=False),
    Layout(tp=2, dp=2, pp=2),
    Layout(tp=2, dp=2, pp=2, sp=True, is_tied=True),
    Layout(tp=2, dp=2, pp=2, sp=True, is_zero1=False),
    Layout(dp=2, is_tied=True, has_overlap=False),
    Layout(tp=2, dp=2, pp=2, sp=True, is_tied=True, has_overlap=False),
    Layout(tp=2, sp=True, has_documents=True),
    Layout(dp=2, pp=4, is_tied=True, has_documents=True),
    Layout(tp=2, dp=2, pp=2, sp=True, has_documents=True),
    Layout(dp=2, is_per_token=True),
    Layout(pp=4, is_tied=True, is_per_token=True),
    Layout(tp=2, dp=2, pp=2, sp=True, is_per_token=True),
    Layout(tp=2, dp=2, sp=True, optimizer="sgd"),
    Layout(dp=2, pp=2, is_zero1=False, is_tied=True, optimizer="sgd"),
    Layout(tp=2, dp=2, pp=2, sp=True, is_tied=True, loss_scale=3e4),
    Layout(tp=2, is_tied=True, model="gpt2"),
    Layout(tp=3, sp=True, is_tied=True, model="gpt2"),
    Layout(dp=4, is_tied=True, model="gpt2"),
    Layout(tp=2, dp=2, pp=2, sp=True, is_tied=True, model="gpt2", has_documents=True),
    Layout(tp=2, model="gemma2"),
    Layout(tp=4, sp=True, is_tied=True, model="gemma2"),
    Layout(dp=2, pp=2, is_zero1=False, model="gemma2"),
    Layout(tp=2, dp=2, pp=2, sp=True, model="gemma2", has_documents=True),
    Layout(tp=2, model="olmo2"),
    Layout(tp=3, sp=True, model="olmo2"),
    Layout(dp=2, pp=2, model="olmo2", has_documents=True),
    Layout(tp=2, dp=2, pp=2, sp=True, is_tied=True, model="olmo2"),
    Layout(tp=2, dp=2, model="qwen"),
    Layout(tp=2, sp=True, is_tied=True, model="qwen"),
    Layout(tp=4, pp=2, sp=True, model="qwen"),
    Layout(dp=2, pp=4, is_tied=True, model="qwen"),
    Layout(tp=2, model="gpt-oss", has_documents=True),
    Layout(tp=4, sp=True, model="gpt-oss"),
    Layout(tp=2, dp=2, pp=2, sp=True, model="gpt-oss"),
    Layout(dp=3, global_batch=12, model="gpt-oss"),
    Layout(tp=2, is_tied=True, model="nemotron"),
    Layout(tp=2, sp=True, model="nemotron", has_documents=True),
    Layout(tp=2, pp=2, dp=2, is_zero1=False, model="nemotron"),
    Layout(tp=2, sp=True, model="neox"),
    Layout(tp=2, dp=2, pp=2, is_tied=True, model="neox"),
    Layout(tp=3, has_z_loss=True, has_ignored_labels=True),
    Layout(tp=4, sp=True, is_tied=True, model="gemma2", has_z_loss=True),
    Layout(tp=4, is_tied=True, has_z_loss=True, has_ignored_labels=True, vocab_multiple=40),
    Layout(tp=2, dp=2, pp=2, sp=True, is_per_token=True, has_z_loss=True, has_ignored_labels=True),
    Layout(dp=4, is_per_token=True, has_ignored_labels=True),
    Layout(tp=4, groups=2),
    Layout(tp=8, sp=True, is_tied=True, groups=4),
    Layout(tp=4, dp=2, sp=True, is_tied=True, model="qwen", groups=2),
    Layout(tp=4, dp=2, sp=True, is_zero1=False, model="gpt2", groups=1),
    Layout(tp=8, sp=True, model="olmo2", groups=2),
    Layout(tp=2, dp=2, pp=2, sp=True, is_tied=True, model="nemotron", groups=1),
    Layout(tp=8, is_tied=True, model="gpt-oss", groups=1),
    Layout(tp=2, model="mup"),
    Layout(tp=3, sp=True, is_tied=True, model="mup"),
    Layout(tp=2, dp=2, pp=2, sp=True, is_tied=True, model="mup"),
    Layout(dp=2, pp=2, is_zero1=False, model="mup", optimizer="sgd"),
    Layout(tp=2, sp=True, recompute="uniform"),
    Layout(tp=2, dp=2, pp=2, sp=True, is_tied=True, model="gpt2", recompute="block"),
    Layout(tp=2, pp=2, model="gpt-oss", recompute="selective"),
)
"""What the command checks by default."""


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


@dataclass(frozen=True)
class Verdict:
    """How far a layout is from one process: relative to the largest value of each tensor."""

    loss: float
    norm: float
    gradient: float
    gradient_name: str
    weight: float
    weight_name: str

    @property
    def is_good(self) -> bool:
        return max(self.loss, self.norm, self.gradient, self.weight) <= TOLERANCE


def run(arguments: argparse.Namespace) -> int:
    """The subcommand: prints the table; 0 if every row passes."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    with WorkerPool(8) as pool:
        if arguments.self_test:
            is_good = _self_test(pool)
        else:
            chosen = [
                layout for layout in LAYOUTS if all(word in layout.name.split() for word in arguments.layouts)
            ]
            if not chosen:
                known = sorted({word for layout in LAYOUTS for word in layout.name.split()})
                raise ConfigError(
                    f"--layouts {' '.join(arguments.layouts)}: no layout has all of these words",
                    fix=f"the words are {', '.join(known)}",
                )
            print(f"{len(chosen)} of {len(LAYOUTS)} layouts")
            is_good = _print_table(pool, chosen)
    print(f"{'passed' if is_good else 'FAILED'} in {time.perf_counter() - began:.0f} s")
    return 0 if is_good else 1


def compare(pool: WorkerPool, layout: Layout, *, fault: str | None = None) -> Verdict:
    """Run a layout, and one process beside it; with a planted fault in the layout's ranks, if one is named."""
    alone = dataclasses.replace(layout, tp=1, dp=1, pp=1, sp=False, is_zero1=True, recompute="")
    (reference,) = pool.run(1, measure, alone, None)
    answers = pool.run(layout.world_size, measure, layout, fault)
    return judge(reference, answers)


def judge(reference: Measured, answers: Sequence[Measured]) -> Verdict:
    """Compare what the ranks found with what one process found. Every element must be held by some rank."""
    idle = _without_gradient(reference.gradients)
    gradient, gradient_name = _furthest(reference.gradients, [p for a in answers for p in a.gradients], idle)
    weight, weight_name = _furthest(reference.weights, [p for a in answers for p in a.weights], idle)
    return Verdict(
        loss=_relative([a.losses for a in answers], reference.losses),
        norm=_relative([a.norms for a in answers], reference.norms),
        gradient=gradient,
        gradient_name=gradient_name,
        weight=weight,
        weight_name=weight_name,
    )


def measure(rank: int, world_size: int, layout: Layout, fault: str | None) -> Measured:
    """Three steps of the tiny model, as one rank of a layout sees them."""
    plan = tiny_plan(layout, world_size)
    grid = RankGrid.build(grid_shape(plan), rank, make_group)
    with planted(fault):
        engine = Engine(plan, grid, torch.device("cpu"))
        engine.initialize()
        batches = [list(own_batches(step, layout, grid.dp.rank)) for step in range(NUM_STEPS)]
        engine.accumulate_gradients(batches[0])
        gradients = _gradients(engine)
        engine.buffers.clear_gradients()
        rates = schedules_of(plan).at(0)
        reports = [
            engine.step(batches[step], rates, first_sample=step * layout.global_batch)
            for step in range(NUM_STEPS)
        ]
    losses = [loss for r in reports for loss in (r.lm_loss, r.z_loss) if loss is not None]
    return Measured(losses, [r.grad_norm for r in reports], gradients, _weights(engine))


def tiny_plan(layout: Layout, world_size: int, *more_flags: str) -> Plan:
    """Four layers, a vocabulary that no tensor-parallel size divides, and clipping at work.

    The vocabulary is padded no more than it must be, so that its real ids are spread over all tensor ranks.
    """
    flags = (
        "--num-layers 4 --hidden-size 48 --num-attention-heads 24 --kv-channels 4 --ffn-hidden-size 96 "
        f"{MODELS[layout.model]} --init-method-std 0.1 --mock-data "
        f"--seq-length {_SEQ} --tokenizer-type NullTokenizer --vocab-size {_VOCAB} "
        f"--micro-batch-size {_MICRO_BATCH} --global-batch-size {layout.global_batch} --train-iters {NUM_STEPS} "
        "--lr 1e-2 --weight-decay 0.1 --clip-grad 0.5 --params-dtype float64 --device cpu"
    )
    request = parse([*flags.split(), *layout.flags(), *more_flags])
    return resolve(request, Facts(world_size=world_size, vocab_size=_VOCAB, eod_id=_VOCAB - 1))


def own_batches(step: int, layout: Layout, dp_rank: int) -> Iterator[Batch]:
    """This replica's micro-batches of a global batch that is the same under every layout; a third of the mask is 0."""
    rng = np.random.default_rng(step)
    tokens = torch.from_numpy(rng.integers(0, _VOCAB, (layout.global_batch, _SEQ + 1)))
    mask = torch.from_numpy((rng.random((layout.global_batch, _SEQ)) < 0.67).astype(np.float32))
    labels = tokens[:, 1:].clone()
    if layout.has_ignored_labels:
        labels[mask == 0] = 10 * _VOCAB
        labels[torch.from_numpy(rng.random(labels.shape) < 0.2)] = -100
    for first in range(dp_rank * _MICRO_BATCH, layout.global_batch, layout.dp * _MICRO_BATCH):
        rows = slice(first, first + _MICRO_BATCH)
        documents = _documents(tokens[rows, :-1]) if layout.has_documents else None
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
    return Documents(borders, int(borders.diff().max()), len(tokens))


def _positions(documents: Documents | None) -> torch.Tensor:
    """Place of each token in its sample, or its document."""
    places = torch.arange(_MICRO_BATCH * _SEQ)
    starts = torch.arange(0, len(places), _SEQ) if documents is None else documents.cu_seqlens[:-1].long()
    own = starts[torch.bucketize(places, starts, right=True) - 1]
    return (places - own).view(_MICRO_BATCH, _SEQ)


def _gradients(engine: Engine) -> list[Part]:
    """The summed gradients, of the shards whose sums this rank has."""
    parts = []
    for shard, flat in zip(engine.buffers.shards, engine.buffers.gradient_shards, strict=True):
        for _, box, place in shard.owned():
            parts.append(Part(box.piece.name, box.box, flat[place].view(box.shape).numpy().copy()))
    return parts


def _weights(engine: Engine) -> list[Part]:
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


def _without_gradient(reference: Sequence[Part]) -> set[str]:
    """Tensors whose gradient is 0 but for rounding, such as biases of keys, which a softmax does not see.

    They are measured against the largest value of all tensors: their own values are nothing but noise.
    """
    largest: dict[str, float] = {}
    for part in reference:
        largest[part.name] = max(largest.get(part.name, 0.0), float(np.max(np.abs(part.values), initial=0.0)))
    return {name for name, value in largest.items() if value <= 1e-12 * max(largest.values())}


def _furthest(reference: Sequence[Part], parts: Sequence[Part], idle: set[str]) -> tuple[float, str]:
    whole: dict[str, npt.NDArray[np.float64]] = {}
    for part in reference:
        shape = tuple(
            max(p.box[d][1] for p in reference if p.name == part.name) for d in range(len(part.box))
        )
        whole.setdefault(part.name, np.full(shape, np.nan))[_slices(part.box)] = part.values
    is_seen = {name: np.zeros(values.shape, dtype=bool) for name, values in whole.items()}
    largest = {name: float(np.nanmax(np.abs(values), initial=0.0)) for name, values in whole.items()}
    largest.update(dict.fromkeys(idle, max(largest.values())))
    worst, worst_name = 0.0, "-"
    for part in parts:
        expected = whole[part.name][_slices(part.box)]
        is_seen[part.name][_slices(part.box)] = True
        error = float(np.max(np.abs(part.values - expected)) / max(largest[part.name], 1e-300))
        if not error <= worst:
            worst, worst_name = _finite(error), part.name
    missing = [name for name, seen in is_seen.items() if not seen.all()]
    return (float("inf"), f"{missing[0]} is not held by any rank") if missing else (worst, worst_name)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _relative(found: Any, expected: Any) -> float:
    error = np.max(np.abs(np.asarray(found) - np.asarray(expected)) / np.abs(np.asarray(expected)))
    return _finite(float(error))


def _finite(error: float) -> float:
    """NaN is as far as can be."""
    return float("inf") if math.isnan(error) else error


def _print_table(pool: WorkerPool, layouts: Sequence[Layout]) -> bool:
    width = max(len(layout.name) for layout in layouts)
    print(
        f"against one process in fp64, {NUM_STEPS} steps; largest relative difference, at most {TOLERANCE:g} passes"
    )
    print(f"{'layout':<{width}}  ranks  loss     norm     gradient weight           seconds")
    is_good = True
    for layout in layouts:
        began = time.perf_counter()
        verdict = compare(pool, layout)
        is_good &= verdict.is_good
        seconds = time.perf_counter() - began
        words = (
            "pass"
            if verdict.is_good
            else f"FAIL  gradient {verdict.gradient_name}, weight {verdict.weight_name}"
        )
        print(
            f"{layout.name:<{width}}  {layout.world_size:5d}  {verdict.loss:.1e}  {verdict.norm:.1e}  "
            f"{verdict.gradient:.1e}  {verdict.weight:.1e}  {seconds:7.1f}  {words}",
            flush=True,
        )
    return is_good


def _self_test(pool: WorkerPool) -> bool:
    """Plant each known fault, which the comparison must find."""
    print("planted faults: each must be found")
    is_good = True
    for name, fault in FAULTS.items():
        layout = Layout(**fault.layout)
        verdict = compare(pool, layout, fault=name)
        is_good &= not verdict.is_good
        print(f"{name:<44} {layout.name:<24} {'found' if not verdict.is_good else 'MISSED'}", flush=True)
    return is_good
