"""Measure one rank of a layout: losses, norms, gradients and weights of two steps of the tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from megatrain.config import Facts, Plan, parse, resolve
from megatrain.config.facts import TeacherFacts
from megatrain.config.model_spec.vision import CHANNELS, NEWLINE
from megatrain.config.subjects.fp8 import gathers_codes
from megatrain.data.samples.dataset import Sample, TokenSpan
from megatrain.data.samples.pack_loader import PackLoader
from megatrain.model import head
from megatrain.optim.update_rules import LionRule
from megatrain.parallel.batch import Batch
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.data_parallel import GradientReduction
from megatrain.parallel.documents import Documents
from megatrain.parallel.family_batch import family_batch
from megatrain.parallel.initialize import InitialWeights
from megatrain.parallel.layout import Box
from megatrain.parallel.packs.schedule import PackCosts
from megatrain.tools.parity.features import FP8_MODULES
from megatrain.tools.parity.models import IMAGE_SIZE, IMAGES
from megatrain.tools.parity.rows import MICRO_BATCH, Layout
from megatrain.tools.worker_pool import kept_group
from megatrain.training.build import build_schedules
from megatrain.training.distillation.teacher import RunTeacher
from megatrain.training.engine import Engine
from megatrain.training.launch.facts import library_versions
from megatrain.training.launch.ranks import grid_shape
from megatrain.training.launch.user_files import add_user_files
from megatrain.training.losses import Losses
from megatrain.training.planning.packs import pack_settings
from megatrain.training.step_report import StepReport

NUM_STEPS = 2
_LION_START = 1e-9
_VOCAB, _SEQ, _END, _START = 101, 24, 7, 2
_DECODER = 16
"""Tokens of a sample of T5's decoder."""
_PADDING = 3
"""Token of the end of a sample that does not count."""
_CHUNK_ROWS = 7
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Part:
    """A box of a canonical tensor, as one rank holds it."""

    name: str
    box: Box
    values: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """The answer of one rank."""

    losses: list[float]
    """All losses of each step: lm loss, z-loss, and the nonzero metrics of the routers."""
    norms: list[float]
    gradients: list[Part]
    """Gradients of the first step."""
    weights: list[Part]
    """Weights after the last step, as the model computes with them."""
    first_weights: list[Part] = field(default_factory=list)
    """Master weights after the first step, as this rank's optimizer holds them; only if rounding is measured."""


Precision = Literal["fp64", "fp32", "bf16", "fp16"]
LOW_PRECISIONS: Final[tuple[Precision, ...]] = ("fp32", "bf16", "fp16")
"""Precisions compared with measured noise."""
Implementation = Literal["local", "transformer_engine"]
PRECISION_FLAGS: dict[Precision, str] = {
    "fp64": "--params-dtype float64",
    "fp32": "--params-dtype float32",
    "bf16": "--bf16 --params-dtype bfloat16",
    "fp16": "--fp16 --params-dtype float16 --initial-loss-scale 4096",  # the default initial scale would skip both steps
}


@dataclass(frozen=True)
class Job:
    """One run of the tiny model."""

    layout: Layout
    precision: Precision = "fp64"
    device: Device = "cpu"
    implementation: Implementation = "local"
    micro_batch: int = MICRO_BATCH
    is_rounding_measured: bool = False
    """True: record the first step's weights. Adam's eps is then large, so that elements with a small gradient do not move by
    a multiple of its rounding error."""
    has_routes_of_numbers: bool = False
    """True: experts are chosen by token number only, because rounding would change some choices."""
    are_sums_rounded: bool = False
    """True: gradients are rounded to the reduction dtype in one process too, which measures the noise of sums over replicas."""
    spec: tuple[str, ...] = ()
    """Words of --spec: layers of the user's own."""
    draw: int = 0
    """Seed of the initial weights; 0: the default seed."""


RunOfRank: TypeAlias = "Callable[[int, int, Job], Measured]"
"""Runs a job on one rank: rank, world size, job."""


def measure(rank: int, world_size: int, job: Job) -> Measured:
    """Run two steps of the tiny model on one rank of a layout."""
    plan = plan_of(job, world_size)
    layout = job.layout
    with (
        _rounded_sums() if job.are_sums_rounded else nullcontext(),
        chunked_loss() if layout.has("chunkedloss") else nullcontext(),
    ):
        engine = engine_of(plan, rank)
        batches = [_batches_of(job, step, engine) for step in range(NUM_STEPS)]
        gradients = _noted_gradients(engine)
        hyperparams = build_schedules(plan).at(0)
        reports, first_weights = [], []
        for step in range(NUM_STEPS):
            reports.append(engine.step(batches[step], hyperparams, first_sample=step * layout.global_batch))
            if step == 0 and job.is_rounding_measured:
                first_weights = master_weights_of(engine)
        weights = weights_of(engine)
    losses = [loss for report in reports for loss in _losses_of(report)]
    return Measured(losses, [r.grad_norm for r in reports], gradients, weights, first_weights)


def _rounded_sums() -> AbstractContextManager[Any]:
    """Round each micro-batch's gradients and their running sums, as if each micro-batch had its own replica."""
    mark_ready = GradientReduction.mark_ready
    before: dict[tuple[int, int], torch.Tensor] = {}

    def rounded(self: GradientReduction, number: int, *, is_last: bool) -> None:
        whole = self.memory.full[number]
        key = (id(self), number)
        sums = before.pop(key, torch.zeros_like(whole))
        whole.copy_((sums + (whole - sums).to(self.dtype)).to(self.dtype))
        if not is_last:
            before[key] = whole.clone()
        mark_ready(self, number, is_last=is_last)

    return mock.patch.object(GradientReduction, "mark_ready", rounded)


def chunked_loss() -> AbstractContextManager[Any]:
    """Compute the loss in chunks of a few tokens, as with a large vocabulary."""
    return mock.patch.object(
        head, "chunk_rows", lambda tokens, _columns, _itemsize: min(max(tokens, 1), _CHUNK_ROWS)
    )


def _losses_of(report: StepReport) -> Iterator[float]:
    """Yield the losses of a step and its router metrics."""
    known = (report.lm_loss, report.sop_loss, report.z_loss, report.indexer_loss)
    yield from (loss for loss in known if loss is not None)
    yield from (*report.mtp_losses, *report.distillation_losses)
    if report.max_attention_logit is not None:
        yield report.max_attention_logit
    if report.routers is not None:
        yield from report.routers.losses.values()
        for layer in report.routers.layers:
            yield from (layer.max_load, 1 + layer.dropped, layer.entropy)


def _noted_gradients(engine: Engine) -> list[Part]:
    """Return a list that receives the reduced, unscaled gradients of the first step."""
    found: list[Part] = []
    accumulate = engine.accumulate_gradients

    def noting(batches: Sequence[Batch], *, first_sample: int = 0) -> Losses:
        losses = accumulate(batches, first_sample=first_sample)
        if not found:
            scale = engine.loss_scaler.scale
            found.extend(replace(part, values=part.values / scale) for part in gradients_of(engine))
        return losses

    engine.accumulate_gradients = noting  # type: ignore[method-assign]
    return found


def engine_of(plan: Plan, rank: int) -> Engine:
    """Build a rank's engine with initial weights. The process group exists; on GPUs, rank k uses GPU k."""
    device = torch.device("cuda", rank) if plan.config.training.device == "cuda" else torch.device("cpu")
    grid = build_grid(grid_shape(plan), rank, kept_group)
    engine = Engine(plan, grid, device)
    engine.initialize()
    start_lion(engine)
    draw_teacher(engine)
    return engine


def start_lion(engine: Engine) -> None:
    """Let Lion's momentum start above the rounding error of gradients, if an engine has Lion.

    It moves weights by the sign of the momentum, which would be chance where a gradient is only rounding error.
    """
    if isinstance(engine.optimizer.rule, LionRule):
        for _, _, momentum in engine.optimizer.owned("exp_avg"):
            momentum.fill_(_LION_START)


def plan_of(job: Job, world_size: int) -> Plan:
    """Resolve the plan of a job."""
    flags = PRECISION_FLAGS[job.precision].split()
    flags += [] if job.layout.has_packs else ["--micro-batch-size", str(job.micro_batch)]
    flags += ["--adam-eps", "1e-3"] if job.is_rounding_measured else []
    if job.has_routes_of_numbers and "--num-experts" in job.layout.flags():
        flags += ["--moe-router-force-load-balancing"]
        # Scores in bf16 are often equal.
        flags += ["--moe-router-dtype", "fp32"] if job.layout.has("routersdefault") else []
    flags += ["--seed", str(job.draw)] if job.draw else []
    flags += ["--spec", *job.spec] if job.spec else []
    flags += ["--transformer-impl", job.implementation] if job.implementation != "local" else []
    return tiny_plan(job.layout, world_size, *flags, device=job.device)


def tiny_plan(layout: Layout, world_size: int, *more_flags: str, device: Device = "cpu") -> Plan:
    """Resolve a plan with four layers, a vocabulary that no tensor-parallel size divides, and active clipping.

    Adam's eps is large, so that elements whose gradient is only rounding error do not move by a multiple of it.
    """
    flags = (
        f"--num-layers 4 --num-attention-heads 48 {_WIDTHS[device]} --init-method-std 0.1 --mock-data "
        f"--seq-length {_SEQ} --tokenizer-type NullTokenizer --vocab-size {_VOCAB} "
        f"--micro-batch-size {1 if layout.has_packs else MICRO_BATCH} --train-iters {NUM_STEPS} "
        f"--lr 1e-2 --adam-eps 1e-6 --weight-decay 0.1 --params-dtype float64 --device {device}"
    )
    request = parse([*flags.split(), *layout.flags(), *more_flags])
    libraries = {name: found for name, found in library_versions().items() if name == "transformer_engine"}
    has_teacher = request.known("distillation.export_kd_teacher_load") is not None
    has_modules = request.known("precision.te_precision_config_file") is not None
    facts = Facts(
        world_size=world_size,
        vocab_size=_VOCAB,
        eod_id=_VOCAB - 1,
        device=device,
        libraries=libraries,
        module_precision=FP8_MODULES if has_modules else None,
        teacher=teacher_of(layout, vocab_size=_VOCAB, seq_length=_SEQ) if has_teacher else None,
    )
    return resolve(request, add_user_files(request, facts))


_WIDTHS: dict[Device, str] = {
    "cpu": "--hidden-size 48 --kv-channels 4 --ffn-hidden-size 96",
    "cuda": "--hidden-size 192 --kv-channels 16 --ffn-hidden-size 384",
}
"""Smallest widths; on GPUs, the smallest that their kernels support."""


def _batches_of(job: Job, step: int, engine: Engine) -> list[Batch]:
    layout = job.layout
    if layout.has_packs:
        steps = [local_batches(number, layout.but("dp1"), 0, micro_batch=1) for number in range(NUM_STEPS)]
        documents = CutSamples.of([batch for batches in steps for batch in batches])
        return packed_batches(engine, documents, step * layout.global_batch, layout.global_batch)
    local = local_batches(
        step,
        job.layout,
        engine.grid.dp.rank,
        micro_batch=job.micro_batch,
        has_even_labels=job.is_rounding_measured and job.layout.family == "bert",
    )
    return [on_device(batch, engine.device) for batch in local]


def local_batches(
    step: int,
    layout: Layout,
    dp_rank: int,
    *,
    micro_batch: int = MICRO_BATCH,
    has_even_labels: bool = False,
) -> Iterator[Batch]:
    """Yield this replica's micro-batches of a global batch that is equal under every layout; a third of the mask is 0.

    `has_even_labels`: all samples have as many labels, so that the loss is the same with micro-batches of any size.
    """
    rng = np.random.default_rng(step)
    tokens = torch.from_numpy(_tokens(rng, layout.global_batch))
    mask = torch.from_numpy((rng.random((layout.global_batch, _SEQ)) < 0.67).astype(np.float32))
    labels = tokens[:, 1:].clone()
    if has_even_labels:
        mask[:] = torch.arange(_SEQ) < _SEQ // 2
    if layout.has("hollow"):
        mask[:, _SEQ // 4 : _SEQ - _SEQ // 4] = 0
    if layout.has("tails"):
        padding = torch.arange(_SEQ) >= torch.from_numpy(
            rng.integers(_SEQ // 2, _SEQ, (layout.global_batch, 1))
        )
        tokens[:, :-1][padding] = labels[padding] = _PADDING
        mask[padding] = 0
    if layout.has("ignored"):
        labels[mask == 0] = 10 * _VOCAB
        labels[torch.from_numpy(rng.random(labels.shape) < 0.2)] = -100
    for first in range(dp_rank * micro_batch, layout.global_batch, layout.dp * micro_batch):
        rows = slice(first, first + micro_batch)
        if layout.family == "vlm":
            yield _with_images(layout, tokens[rows], labels[rows], mask[rows], step, first)
            continue
        if layout.family != "gpt":
            yield _family_batch(layout.family, tokens[rows], labels[rows], mask[rows])
            continue
        documents = _documents(tokens[rows, :-1]) if layout.has("documents") else None
        yield Batch(
            tokens=tokens[rows, :-1].contiguous(),
            labels=labels[rows],
            loss_mask=mask[rows],
            position_ids=_positions(documents, micro_batch),
            documents=documents,
        )


def _family_batch(family: str, tokens: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> Batch:
    """Return a micro-batch of BERT or T5 made of a GPT's tokens: each sample ends with other padding."""
    ids, places = tokens[:, :-1], torch.arange(_SEQ)
    # The label of the first token decides, so that a sample has the same padding in any micro-batch.
    lengths = _SEQ // 2 + tokens[:, -1:] % (_SEQ // 2)
    is_token = places < lengths
    if family == "bert":
        arrays = {
            "text": ids,
            "types": (places >= _SEQ // 3).expand_as(ids),
            "labels": labels,
            "is_random": tokens[:, -1] % 2,
            "loss_mask": mask * is_token * (places % 4 == 0),
            "padding_mask": is_token,
        }
    else:
        rows = slice(_DECODER)
        arrays = {
            "text_enc": ids,
            "text_dec": ids.flip(1)[:, rows],
            "labels": labels[:, rows],
            "loss_mask": mask[:, rows],
            "enc_mask": is_token,
        }
    return family_batch(family, arrays)


def _with_images(
    layout: Layout, tokens: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, step: int, first: int
) -> Batch:
    """Return a micro-batch with images among its tokens, at places that its labels decide; `first`: number of its first sample."""
    (model,) = layout.words_of("model")
    count, size = IMAGES[model]
    documents = _documents(tokens[:, :-1]) if model == "tiles" else None
    ids, mask = tokens[:, :-1].clone(), mask.clone()
    starts = tokens[:, -1] % 3
    for image in range(count):
        for row in range(size):
            places = (torch.arange(len(ids)), starts + image * (size + 2) + row)
            ids[places], mask[places] = -1 - image * size - row, 0
        if model == "tiles":
            places = (torch.arange(len(ids)), starts + image * (size + 2) + size - 1)
            ids[places], mask[places] = NEWLINE, 0
    shape = (count, CHANNELS, *IMAGE_SIZE)
    images = [np.random.default_rng([step, first + k]).standard_normal(shape) for k in range(len(ids))]
    return Batch(
        tokens=ids, labels=labels, loss_mask=mask, position_ids=_positions(documents, len(ids)), documents=documents,
        images=torch.from_numpy(np.stack(images)),
    )  # fmt: skip


def _tokens(rng: np.random.Generator, num_samples: int) -> npt.NDArray[np.int64]:
    """Return ids [samples, s + 1] such that samples and documents start alike.

    Equal starts have equal scores up to rounding, which must not decide which token an expert drops.
    """
    tokens = rng.integers(0, _VOCAB, (num_samples, _SEQ + 1))
    tokens[:, : _SEQ // 3] = tokens[0, : _SEQ // 3]
    tokens[:, 1:][tokens[:, :-1] % _END == 0] = _START
    return tokens


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to a device."""
    return batch.mapped(lambda x: x.to(device))


def _documents(tokens: torch.Tensor) -> Documents:
    """End a document after every id divisible by _END, so that samples hold one or several documents."""
    flat = torch.cat([torch.nn.functional.pad(row % _END == 0, (1, 0))[:-1] for row in tokens])
    flat[::_SEQ] = True
    cu_seqlens = torch.cat([flat.nonzero().flatten(), torch.tensor([len(flat)])]).to(torch.int32)
    return Documents(cu_seqlens, int(cu_seqlens.diff().max()), *tokens.shape)


def _positions(documents: Documents | None, micro_batch: int) -> torch.Tensor:
    """Return the position of each token in its sample or document."""
    places = torch.arange(micro_batch * _SEQ)
    starts = torch.arange(0, len(places), _SEQ) if documents is None else documents.cu_seqlens[:-1].long()
    own = starts[torch.bucketize(places, starts, right=True) - 1]
    return (places - own).view(micro_batch, _SEQ)


def gradients_of(engine: Engine) -> list[Part]:
    """Return the reduced gradients of this rank's shards."""
    return _parts_of(engine, engine.buffers.gradients.shards)


def master_weights_of(engine: Engine) -> list[Part]:
    """Return the master weights of this rank's optimizer."""
    return _parts_of(engine, engine.optimizer.state("weight"))


def _parts_of(engine: Engine, flats: Sequence[torch.Tensor]) -> list[Part]:
    """Cut flat tensors, laid out as this rank's shards, into parts."""
    return [
        Part(box.piece.name, box.box, _numbers(flat[place].view(box.shape)))
        for shard, flat in zip(engine.buffers.shards, flats, strict=True)
        for _, box, place in (shard.owned() if flat.numel() else ())  # frozen weights have no gradients
    ]


def weights_of(engine: Engine) -> list[Part]:
    """Return all weights that the model computes with, replicated ones included, and the routers' expert biases."""
    biases = engine.model.expert_biases.state()
    parts = [Part(name, ((0, len(values)),), np.asarray(values)) for name, values in biases.items()]
    if gathers_codes(engine.plan):  # a rank has codes of what the others update
        return [*parts, *master_weights_of(engine)]
    for bucket, weights in engine.data_parallel.gathered_buckets():
        for param in bucket.params:
            flat = weights[param.start : param.stop]
            for box in param.entry.layout.ranges(0, flat.numel()):
                values = flat[box.offset : box.offset + box.numel].view(box.shape)
                parts.append(Part(box.piece.name, box.box, _numbers(values)))
    return parts


def _numbers(values: torch.Tensor) -> npt.NDArray[np.float64]:
    return values.detach().to("cpu", torch.float64, copy=True).numpy()


_TEACHER_FLAGS = (
    "--num-layers 6 --hidden-size 24 --num-attention-heads 24 --kv-channels 4 --ffn-hidden-size 48"
    " --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear --init-method-std 0.3"
    " --hidden-dropout 0.1 --attention-dropout 0.1 --final-logit-softcapping 5"
    " --tokenizer-type NullTokenizer --mock-data --micro-batch-size 1 --train-iters 1 --lr 1 --device cpu"
)
_TEACHER_EXPERTS = " --num-experts 8 --moe-ffn-hidden-size 24 --moe-router-topk 2 --moe-layer-freq 2"
_TEACHER_SEED = 4321


def teacher_of(layout: Layout, *, vocab_size: int, seq_length: int) -> TeacherFacts:
    """Return the teacher of a row, a model of another depth and width: it has experts and copies of keys and values if the student does."""
    flags = _TEACHER_FLAGS + (_TEACHER_EXPERTS if "--num-experts" in layout.flags() else "")
    groups = 1 if layout.has("puzzle") else layout.size("key-value replication")
    flags += f" --group-query-attention --num-query-groups {groups or 24}"
    flags += f" --vocab-size {vocab_size} --seq-length {seq_length}"
    config = resolve(
        parse(flags.split()), Facts(vocab_size=vocab_size, eod_id=vocab_size - 1)
    ).config.to_dict()
    return TeacherFacts(
        path="a drawn teacher",
        iteration=0,
        config={name: config[name] for name in ("model", "experts")},
        num_rows=vocab_size,
        is_ours=True,
        tokenizer_fingerprint=None,
        checksum=0,
    )


def draw_teacher(engine: Engine) -> None:
    """Draw the weights of an engine's teacher, if it has one: the same under every layout."""
    distillation = engine.model.distillation
    if distillation is not None:
        assert isinstance(distillation.teacher, RunTeacher)
        distillation.teacher.draw(InitialWeights(_TEACHER_SEED))


_PACK_COSTS: Final = PackCosts(pair=0.01, sent=0.3)
"""With these, groups of all sizes work in one step; with those of a tiny model, packs of one rank would do."""


@dataclass(frozen=True)
class CutSamples:
    """A dataset of cut samples: each sample, up to its last token that counts, is a document. Implements `SampleDataset`."""

    samples: tuple[Sample, ...]

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> CutSamples:
        """Cut micro-batches of one sample each."""
        return cls(tuple(map(_cut, batches)))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, k: int) -> Sample:
        return self.samples[k]

    def spans(self, k: int) -> list[TokenSpan]:
        return [TokenSpan("parity", k, k, 0, len(self.samples[k].tokens))]


def _cut(batch: Batch) -> Sample:
    length = int(batch.loss_mask[0].nonzero()[-1]) + 1
    arrays = (x[0, :length].numpy() for x in (batch.tokens, batch.labels, batch.loss_mask))
    tokens, labels, mask = arrays
    return Sample(tokens, labels, mask, np.arange(length), np.zeros(1, np.int64))


def packed_batches(engine: Engine, documents: CutSamples, first: int, count: int) -> list[Batch]:
    """Return this rank's packs of `count` documents."""
    settings = replace(pack_settings(engine.plan), costs=_PACK_COSTS)
    rank = engine.grid.replicas.rank
    loader = PackLoader(documents, len(documents), settings, rank=rank, device=engine.device, num_workers=0)
    return loader.microbatches(first, count // settings.documents_per_pass)
