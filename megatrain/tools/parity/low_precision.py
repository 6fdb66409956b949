"""Parity in fp32, bf16 and fp16: a layout must not differ from one process by more than rounding noise.

Two comparisons, each a distance and a measured noise; a distance of at most four times the noise passes.

    exact   distance to one process in fp64  noise: distance of one process in the row's precision to fp64;
            (norms: first step only)         more initial weights are drawn if one draw is not enough
    order   distance to the same split of    noise: distance between accumulation orders: micro-batches of half and
            layers (tp, sp, cp, ep, etp) on  twice the size
            the fewest ranks, after the
            first step

Splitting a layer, attention's keys or the experts rounds the partial sums, which in bf16 is as large as all other rounding:
only `exact` can judge this, loosely. All other parallelism only changes the order of sums over the batch: `order` detects one
part in a million there.
A norm, or a loss of few tokens, is a single number, and one draw can underestimate its noise; a row that fails is therefore
compared with the maximum over up to `NUM_DRAWS` initial weights. More draws never fail a row that passed with fewer.
These rows weight tokens equally (BERT's samples have as many labels each), and their experts have neither balancing losses nor a capacity, because otherwise another
micro-batch size is another step. In bf16 and fp16 experts are chosen by token number instead of scores, because rounding
would change some choices.
The noise is measured in the row's number formats. If gradients are reduced in bf16, the noise runs round them to bf16 too;
the fewest-ranks run of `order` reduces in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from megatrain.model.implementations.transformer_engine import library
from megatrain.tools.parity.compare import Distance, distance, first_step, judge, without_gradient
from megatrain.tools.parity.measure import Implementation, Job, Measured, Precision, RunOfRank, measure
from megatrain.tools.parity.rows import MAX_RANKS, MICRO_BATCH, WITHOUT_FORMATS, Layout
from megatrain.tools.parity.tables import is_row
from megatrain.tools.worker_pool import WorkerPool

TIMES: Final = 4.0
NUM_DRAWS: Final = 8
"""Draws of initial weights. One Gaussian error in 8,000 exceeds four times the maximum of eight others."""
FLOOR: Final = 2.0**-22
"""Smallest noise: two roundings of fp32, the accumulation dtype."""
_LOSS_FLOORS: Final[dict[Precision, float]] = {"fp32": FLOOR, "bf16": 2.0**-11, "fp16": 2.0**-13}
"""Smallest noise of the loss in `exact`: a quarter of one rounding, except in fp32."""

_ROWS: Final = (
    "tp2 groups1 sp tied ignored gpt2",
    "dp2 zero2 overlap scale muon muonfp32",
    "dp4 zero3 instances2 overlapweights documents momentsbf16",
    "pp4 tied gemma2",
    "tp8 groups2 sp documents",
    "dp2 pp2 ppfirst zero1 overlapgrads tied sgd sumsbf16",
    "tp2 sp dp2 pp2 zero1 overlap offload tied zloss sumsbf16",
    "cp2 dp2 zero3 overlap tied gpt2 ema",
    "cp2 heads pp2 documents hollow",
    "dp2 zero1 overlap mixtral ep2 alltoall",
    "dp2 zero2 overlapgrads deepseek ep2 routersfp64",
    "tp2 sp qwenmoe etp2 uniform routersfp32",
    "tp2 sp dp2 pp2 zero1 bert attentiondropout",
    "cp2 dp2 zero3 overlap tied mlm",
    "tp2 sp dp2 pp2 zero2 overlap t5",
)
_ROWS_OF_FP8: Final = (
    "tp2 sp fp8tensorwise",
    "dp2 pp2 zero2 zbh1 fp8tensorwise",
    "dp2 fp8delayed",
    "tp2 sp dp2 pp2 zero1 overlap fp8tensorwise gpt2",
    "tp2 sp cp2 pp2 fp8delayed tied",
    "dp2 pp2 zero3 overlap fp8delayed mtp1",
    "tp2 sp dp2 mixtral ep2 auxloss fp8tensorwise",
    "tp2 sp cp2 mla recomputelatents fp8tensorwise",
    "tp2 sp pp2 zbv deepseek fp8delayed",
    "tp4 uniform qwen fp8e4m3",
    "cp2 allgather recomputenorms muon fp8delayed",
    "tp2 sp qwen3-next fp8e4m3",
    "tp2 sp pp2 zbh1 gemma2 fp8e4m3",
    "pp2 dualpipev fp8delayed",
    "tp2 sp dp2 recomputenorms fp8bf16wgrad",
    "tp2 zero3 dp2 selective gpt2 fp8bf16wgrad",
    "tp2 sp fp8blockwise",
    "tp2 sp cp2 pp2 recomputenorms fp8blockwise",
    "tp2 dp2 zero3 overlap gpt2 fp8blockwise",
    "tp2 sp pp2 zbv mixtral fp8blockwise",
    "tp2 sp mixtral etp2 fp8delayed",
    "tp2 sp dp2 qwenmoe ep2 etp2 alltoall fp8blockwise",
    "tp2 sp dp2 pp2 zero1 overlap mixtral ep2 alltoall fp8dispatch",
    "dp4 zero1 deepseek ep4 hosts moeoverlap batch16 fp8dispatch",
    "tp2 sp dp2 qwenmoe ep2 etp2 alltoall fp8dispatch",
    "dp2 latentexperts ep2 scarce fp8dispatch",
    "tp2 sp dp2 pp2 zero1 overlap nvfp4",
    "tp2 dp2 zero3 gpt2 nvfp4",
    "tp2 dp2 uniform qwen nvfp4",
    "tp2 sp dp2 zero1 overlap fp8gather",
    "dp4 zero3 instances2 overlapweights fp8gather gpt2",
    "tp2 dp2 pp2 zero2 overlap offload tied fp8delayedgather",
    "dp2 zero3 cp2 mixtral ep2 fp8delayedgather",
    "tp2 sp pp2 zbv dp2 mtp1 fp8modules",
    "tp2 sp cp2 mla fp8modules",
    "dp2 pp2 zero3 overlap mixtral ep2 fp8modules",
)
"""FP8 rows are in fp64, where a split gives the codes of one process: rounding decides few of them differently in bf16."""
_ROWS_OF_FP16: Final = (
    "dp2 zero1 overlap",
    "pp2 tied",
    "dp2 zero2 overlap muon muontf32",
)


_FORMATS: Final = {"fp32": "sumsfp32 momentsfp32", "bf16": "muonbf16"}
"""Number formats that replace the number formats of the rows in a precision."""


def rows_in(precision: Precision, max_ranks: int = MAX_RANKS) -> tuple[Layout, ...]:
    """Return the default rows with number formats in a precision."""
    texts = {"fp64": _ROWS_OF_FP8, "fp16": _ROWS_OF_FP16}.get(precision, _ROWS)
    rows = [Layout.of(text).but(_FORMATS.get(precision, "")) for text in texts]
    rows = rows if precision == "fp64" else [of_any_micro_batch(row) for row in rows]
    return tuple(layout for layout in rows if is_row(layout.words, max_ranks=max_ranks))


def is_supported_in(precision: Precision, layout: Layout) -> bool:
    """Return whether a precision supports the layout's number formats and a measurable noise."""
    if precision == "fp64":
        return layout.but("nofp8") == layout.but(WITHOUT_FORMATS)
    if not layout.has("nofp8") or layout.has_packs:
        return False  # another micro-batch has other scales, and other packs
    return layout == of_any_micro_batch(layout) and (precision == "bf16" or not layout.has("sumsbf16"))


_SPLITS = (
    "tensor parallelism",
    "key-value replication",
    "sequence parallelism",
    "context parallelism",
    "context communication",
    "expert parallelism",
    "expert tensor parallelism",
    "dispatcher",
)
"""Options that split the sums within a layer."""


@dataclass(frozen=True)
class LowPrecisionVerdict:
    """Both distances with their noise; `order` is None if the row already runs on the fewest ranks."""

    precision: Precision
    exact: Distance
    exact_noise: tuple[float, ...]
    order: Distance | None
    order_noise: tuple[float, ...]

    @property
    def is_near(self) -> bool:
        """True if the exact distance passes."""
        loss_noise, *others = self.exact_noise
        return within(self.exact.numbers, (max(loss_noise, _LOSS_FLOORS[self.precision]), *others))

    @property
    def is_good(self) -> bool:
        return self.is_near and (self.order is None or within(self.order.numbers, self.order_noise))


def within(distances: Sequence[float], noises: Sequence[float]) -> bool:
    """Return whether each distance is at most TIMES its noise; NaN and infinity never are."""
    return all(
        math.isfinite(far) and far <= TIMES * max(noise, FLOOR)
        for far, noise in zip(distances, noises, strict=True)
    )


@dataclass
class LowPrecisionComparer:
    """Compares layouts in one precision; keeps the answers of one process and of the fewest ranks."""

    pool: WorkerPool
    precision: Precision
    implementation: Implementation = "local"
    """Implementation of the rows; the exact answer and the noise of one process always use `local`."""
    answers: dict[Job, list[Measured]] = field(default_factory=dict)
    """Answers of past jobs. Comparers may share them: the exact answer is the same in all precisions."""

    def __post_init__(self) -> None:
        if self.implementation == "transformer_engine":
            self.pool.run(1, _load_transformer_engine)

    def compare(self, layout: Layout, *, run: RunOfRank = measure) -> LowPrecisionVerdict:
        """Run a layout, one process and the fewest ranks; the layout's ranks call `run`."""
        layout = of_any_micro_batch(layout)
        fewest = fewest_ranks(layout)
        found = self.pool.run(layout.world_size, run, self._job(layout))
        truth = self._truth(layout)
        order: Distance | None = None
        order_noise: tuple[float, ...] = ()
        usual = fewest.but("sumsfp32")
        if usual != layout:
            idle, first = without_gradient(truth), first_step(self._run(self._job(usual)))
            order = distance(first, first_step(found), idle)
            others = [first_step(self._run(job)) for job in orders(self._noisy_job(fewest))]
            order_noise = _largest([distance(first, other, idle) for other in others])
        exact = judge(truth, _to_first_norm(found))
        verdict = LowPrecisionVerdict(self.precision, exact, self._noise(layout), order, order_noise)
        for draw in range(1, NUM_DRAWS):
            if not verdict.is_near:
                both = zip(verdict.exact_noise, self._noise(layout, draw), strict=True)
                verdict = replace(verdict, exact_noise=tuple(max(pair) for pair in both))
        return verdict

    def _truth(self, layout: Layout, draw: int = 0) -> Measured:
        """Return the answer of one process in fp64 with these initial weights."""
        alone = self._alone(self._job(layout.but(WITHOUT_FORMATS).alone), draw)
        (truth,) = _to_first_norm(self._run(replace(alone, precision="fp64")))
        return truth

    def _noise(self, layout: Layout, draw: int = 0) -> tuple[float, ...]:
        """Return the distance of one process in the row's precision to fp64."""
        alone = self._alone(self._noisy_job(layout.alone), draw)
        own = [_to_first_norm(self._run(job)) for job in orders(alone)]
        return _largest([judge(self._truth(layout, draw), one) for one in own])

    def _alone(self, job: Job, draw: int) -> Job:
        return replace(job, implementation="local", draw=draw)

    def _noisy_job(self, layout: Layout) -> Job:
        return replace(self._job(layout), are_sums_rounded=layout.has("sumsbf16"))

    def _job(self, layout: Layout) -> Job:
        return Job(
            layout,
            self.precision,
            self.pool.device,
            self.implementation,
            is_rounding_measured=True,
            has_routes_of_numbers=self.precision in ("bf16", "fp16") and not layout.has("dense"),
        )

    def _run(self, job: Job) -> list[Measured]:
        if job not in self.answers:
            self.answers[job] = self.pool.run(job.layout.world_size, measure, job)
        return self.answers[job]


def _load_transformer_engine(_rank: int, _world_size: int) -> None:
    """Load Transformer Engine before `local` computes in the same process: only the first of two cuDNN libraries is loaded."""
    library()


def _to_first_norm(answers: Sequence[Measured]) -> list[Measured]:
    """Drop the norms of later steps: Muon amplifies the rounding of the first step to 3 % there."""
    return [replace(one, norms=one.norms[:1]) for one in answers]


def of_any_micro_batch(layout: Layout) -> Layout:
    """Return the layout with equal token weights and dropless, unbalanced experts, so that the micro-batch size does not matter."""
    return of_equal_tokens(layout).but("dropless unbalanced")


def of_equal_tokens(layout: Layout) -> Layout:
    """Return the layout whose loss weights tokens equally; BERT's is a mean over micro-batches, of samples with as many labels each."""
    return layout.but("means labelled" if layout.family == "bert" else "tokens")


def fewest_ranks(layout: Layout) -> Layout:
    """Return the same split of layers on the fewest ranks; experts split over replicas need those replicas.

    Overlapped copies sum a layer's terms in fp32, a reduce-scatter in the terms' precision: with more than two terms they round differently.
    """
    splits = _SPLITS if layout.tp <= 2 else (*_SPLITS, "tensor communication")
    fewest = layout.alone.but(" ".join(layout.words_of(*splits)))
    of_experts = fewest.size("expert parallelism") * fewest.size("expert tensor parallelism")
    replicas = next(n for n in range(1, of_experts + 1) if fewest.tp * fewest.cp * n % of_experts == 0)
    return fewest.but(f"dp{replicas}")


def orders(usual: Job) -> list[Job]:
    """Return jobs with the usual micro-batch size, half of it, and twice of it."""
    jobs = [usual, replace(usual, micro_batch=MICRO_BATCH // 2)]
    if usual.layout.global_batch % (2 * MICRO_BATCH * usual.layout.size("data parallelism")) == 0:
        jobs.append(replace(usual, micro_batch=2 * MICRO_BATCH))
    return jobs


def _largest(distances: Sequence[Distance]) -> tuple[float, ...]:
    """Return the noise of each number. The norms of two runs can agree by chance, the norms of all their parts do not."""
    loss, norm, *others = (max(numbers) for numbers in zip(*(one.numbers for one in distances), strict=True))
    return loss, max(norm, *(one.parts_norm for one in distances)), *others
