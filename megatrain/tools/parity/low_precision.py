"""Parity in fp32, bf16 and fp16: no layout is further off than rounding makes one process.

Two questions, each answered by a distance and by a noise that is measured; a distance of at most four times the noise
passes.

    exact   from one process in fp64        noise: what one process in the row's own precision has, with
            (of norms, the first step's)    other initial weights too where the row's are not enough
    order   from the same split of layers   noise: what other orders of accumulation have: micro-batches of half and of
            (tp, sp, cp, ep, etp) on the    twice the size
            fewest ranks, after the first
            step

Splitting a layer, the keys of attention and the experts too, rounds its partial sums, which in bf16 is as much as all other
rounding: only `exact` can judge that, loosely.
Whatever else ranks share out changes nothing but the order of sums of the batch: `order` sees a part in a million there.
A norm, and a loss of few tokens, is one number: what rounding makes of it in one process is now and then next to nothing, by
chance. So a row that is too far is held to the noise of up to `NUM_DRAWS` initial weights. More cannot fail what passed with fewer.
Tokens count alike in these rows, and experts have neither balancing losses nor a capacity, since micro-batches of another
size are another step otherwise. In bf16 and fp16 routes follow from tokens' numbers, not from scores: rounding would send some
elsewhere.
Noise has the row's number formats. Gradients that travel in bf16 are rounded, as on their way, in what the noise of both is
measured with; the fewest ranks that `order` is held to sum in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from megatrain.model.implementations.transformer_engine import library
from megatrain.tools.parity.compare import Distance, judge, judge_first_step, without_gradient
from megatrain.tools.parity.measure import Implementation, Job, Measured, Precision, measure
from megatrain.tools.parity.rows import MAX_RANKS, MICRO_BATCH, WITHOUT_FORMATS, Layout, is_row
from megatrain.tools.worker_pool import WorkerPool

TIMES: Final = 4.0
NUM_DRAWS: Final = 8
"""Of initial weights. Of Gaussian errors, one in 8,000 is more than four times as large as the largest of eight others."""
FLOOR: Final = 2.0**-22
"""Below this nothing is told apart: two roundings of fp32, in which sums are formed."""
_LOSS_FLOORS: Final[dict[Precision, float]] = {"fp32": FLOOR, "bf16": 2.0**-11, "fp16": 2.0**-13}
"""Of the loss, in `exact`: four times as much is one rounding, but in fp32."""

_ROWS: Final = (
    "tp2 groups1 sp tied ignored gpt2",
    "dp2 zero2 overlap scale muon muonfp32",
    "dp4 zero3 instances2 overlapweights documents momentsbf16",
    "pp4 tied gemma2",
    "tp8 groups2 sp documents",
    "dp2 pp2 ppfirst zero1 overlapgrads tied sgd sumsbf16",
    "tp2 sp dp2 pp2 zero1 overlap offload tied zloss sumsbf16",
    "cp2 dp2 zero3 overlap tied gpt2",
    "cp2 heads pp2 documents hollow",
    "dp2 zero1 overlap mixtral ep2 alltoall",
    "dp2 zero2 overlapgrads deepseek ep2 routersfp64",
    "tp2 sp qwenmoe etp2 uniform",
)
_ROWS_OF_FP16: Final = (
    "dp2 zero1 overlap",
    "pp2 tied",
)


_FORMATS: Final = {"fp32": "sumsfp32 momentsfp32", "bf16": "muonbf16"}
"""The formats that the rows have in a precision, where not all that they name."""


def rows_in(precision: Precision, max_ranks: int = MAX_RANKS) -> tuple[Layout, ...]:
    """What is run in fp32, bf16 or fp16 where no precision is asked for."""
    texts = _ROWS_OF_FP16 if precision == "fp16" else _ROWS
    rows = [Layout.of(f"tokens {text}").but(_FORMATS.get(precision, "")) for text in texts]
    return tuple(layout for layout in rows if is_row(layout.words, max_ranks=max_ranks))


def goes_with(precision: Precision, layout: Layout) -> bool:
    """Whether this precision has a layout's number formats, and noise that can be measured."""
    if precision == "fp64":
        return layout == layout.but(WITHOUT_FORMATS)
    return layout == of_any_micro_batch(layout) and (precision == "bf16" or not layout.has("sumsbf16"))


_SPLITS = (
    "tensor parallelism",
    "copies of keys and values",
    "sequence parallelism",
    "context parallelism",
    "context communication",
    "expert parallelism",
    "expert tensor parallelism",
    "dispatcher",
)
"""Options that split what is summed in a layer."""


@dataclass(frozen=True)
class NarrowVerdict:
    """The two distances with the noise of each; `order` is None where a row is its own fewest ranks."""

    precision: Precision
    exact: Distance
    exact_noise: tuple[float, ...]
    order: Distance | None
    order_noise: tuple[float, ...]

    @property
    def is_near(self) -> bool:
        """Whether what is exact is near enough."""
        loss_noise, *others = self.exact_noise
        return within(self.exact.numbers, (max(loss_noise, _LOSS_FLOORS[self.precision]), *others))

    @property
    def is_good(self) -> bool:
        return self.is_near and (self.order is None or within(self.order.numbers, self.order_noise))


def within(distances: Sequence[float], noises: Sequence[float]) -> bool:
    """Whether each distance is at most so many times its noise. NaN never is, nor what is infinitely far."""
    return all(
        math.isfinite(far) and far <= TIMES * max(noise, FLOOR)
        for far, noise in zip(distances, noises, strict=True)
    )


@dataclass
class NarrowComparer:
    """Compares layouts in a precision; what one process and the fewest ranks find is kept."""

    pool: WorkerPool
    precision: Precision
    implementation: Implementation = "local"
    """Of the rows. What is exact, and the noise of one process, is always `local`'s."""
    answers: dict[Job, list[Measured]] = field(default_factory=dict)
    """Of jobs that were run. Comparers may share them: what is exact is the same in all precisions."""

    def __post_init__(self) -> None:
        if self.implementation == "transformer_engine":
            self.pool.run(1, _load_transformer_engine)

    def compare(self, layout: Layout, *, fault: str | None = None) -> NarrowVerdict:
        """Run a layout, one process and the fewest ranks; with a planted fault in the layout's ranks, if one is named."""
        layout = of_any_micro_batch(layout)
        fewest = fewest_ranks(layout)
        found = self.pool.run(layout.world_size, measure, replace(self._job(layout), fault=fault))
        truth = self._truth(layout)
        order: Distance | None = None
        order_noise: tuple[float, ...] = ()
        usual = fewest.but("sumsfp32")
        if usual != layout:
            idle, first = without_gradient(truth), self._run(self._job(usual))
            order = judge_first_step(first, found, idle)
            others = [
                judge_first_step(first, self._run(job), idle) for job in orders(self._noisy_job(fewest))
            ]
            order_noise = _largest(others)
        exact = judge(truth, _to_first_norm(found))
        verdict = NarrowVerdict(self.precision, exact, self._noise(layout), order, order_noise)
        for draw in range(1, NUM_DRAWS):
            if not verdict.is_near:
                both = zip(verdict.exact_noise, self._noise(layout, draw), strict=True)
                verdict = replace(verdict, exact_noise=tuple(max(pair) for pair in both))
        return verdict

    def _truth(self, layout: Layout, draw: int = 0) -> Measured:
        """What one process finds in fp64, with these initial weights."""
        alone = self._alone(self._job(layout.but(WITHOUT_FORMATS).alone), draw)
        (truth,) = _to_first_norm(self._run(replace(alone, precision="fp64")))
        return truth

    def _noise(self, layout: Layout, draw: int = 0) -> tuple[float, ...]:
        """How far one process in the row's precision is from that."""
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
    """Before `local` computes in the same process: where PyTorch and the system have a cuDNN each, only the first is loaded."""
    library()


def _to_first_norm(answers: Sequence[Measured]) -> list[Measured]:
    """Without the norms of later steps: Muon makes 3 % of them of the rounding of the first."""
    return [replace(one, norms=one.norms[:1]) for one in answers]


def of_any_micro_batch(layout: Layout) -> Layout:
    """The same without what makes micro-batches of another size another step."""
    return layout.but("tokens dropless unbalanced")


def fewest_ranks(layout: Layout) -> Layout:
    """The same split of layers on the fewest ranks; replicas are needed where experts are split over them."""
    fewest = layout.alone.but(" ".join(layout.words_of(*_SPLITS)))
    of_experts = fewest.size("expert parallelism") * fewest.size("expert tensor parallelism")
    replicas = next(n for n in range(1, of_experts + 1) if fewest.tp * fewest.cp * n % of_experts == 0)
    return fewest.but(f"dp{replicas}")


def orders(usual: Job) -> list[Job]:
    """The usual order of accumulation, and others."""
    jobs = [usual, replace(usual, micro_batch=MICRO_BATCH // 2)]
    if usual.layout.global_batch % (2 * MICRO_BATCH * usual.layout.size("data parallelism")) == 0:
        jobs.append(replace(usual, micro_batch=2 * MICRO_BATCH))
    return jobs


def _largest(distances: Sequence[Distance]) -> tuple[float, ...]:
    """The noise of each number. The norms of two runs may agree by chance, those of all their parts do not."""
    loss, norm, *others = (max(numbers) for numbers in zip(*(one.numbers for one in distances), strict=True))
    return loss, max(norm, *(one.parts_norm for one in distances)), *others
