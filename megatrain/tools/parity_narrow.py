"""Parity in fp32 and bf16: no layout is further off than rounding makes one process.

Two questions, each answered by a distance and by a noise that is measured; a distance of at most four times the noise
passes.

    exact   from one process in fp64        noise: what one process in the row's own precision has
    order   from the same split of layers   noise: what other orders of accumulation have: micro-batches of half and of
            (tp and sp) on the fewest       twice the size
            ranks, after the first step

Splitting a layer rounds its partial sums, which in bf16 is as much as all other rounding: only `exact` can judge that,
loosely. Whatever else ranks share out changes nothing but the order of sums of the batch: `order` sees a part in a
million there. Tokens count alike in these rows, since micro-batches of another size are another step otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from megatrain.tools.parity_judge import Distance, judge, judge_first_step, without_gradient
from megatrain.tools.parity_measure import Implementation, Job, Measured, Precision, measure
from megatrain.tools.parity_rows import MICRO_BATCH, Layout
from megatrain.tools.worker_pool import WorkerPool

TIMES: Final = 4.0
FLOOR: Final = 2.0**-22
"""Below this nothing is told apart: two roundings of fp32, in which sums are formed."""

ROWS: Final = tuple(
    Layout.of(f"tokens {text}")
    for text in (
        "block tied gpt2",
        "tp2",
        "tp2 sp tied gpt2",
        "dp2 zero1 overlap scale",
        "dp2 documents",
        "pp2 tied gemma2",
        "tp4 sp gemma2 documents",
        "tp2 sp dp2 zero1 overlap uniform",
        "dp2 zero1 pp2 tied sgd",
        "dp8 zero1 overlap batch16",
        "tp2 sp dp2 zero1 overlap pp2 tied zloss",
    )
)
"""What is run in fp32 and in bf16 where no precision is asked for."""

_SPLIT_WORDS = ("tensor parallelism", "sequence parallelism")


@dataclass(frozen=True)
class NarrowVerdict:
    """The two distances with the noise of each; `order` is None where a row is its own fewest ranks."""

    exact: Distance
    exact_noise: tuple[float, ...]
    order: Distance | None
    order_noise: tuple[float, ...]

    @property
    def is_good(self) -> bool:
        is_near = within(self.exact.numbers, self.exact_noise)
        return is_near and (self.order is None or within(self.order.numbers, self.order_noise))


def within(distances: Sequence[float], noises: Sequence[float]) -> bool:
    """Whether each distance is at most so many times its noise. NaN never is."""
    return all(far <= TIMES * max(noise, FLOOR) for far, noise in zip(distances, noises, strict=True))


@dataclass
class NarrowComparer:
    """Compares layouts in a precision; what one process and the fewest ranks find is kept."""

    pool: WorkerPool
    precision: Precision
    implementation: Implementation = "local"
    """Of the rows. What is exact, and the noise of one process, is always `local`'s."""
    answers: dict[Job, list[Measured]] = field(default_factory=dict)

    def compare(self, layout: Layout, *, fault: str | None = None) -> NarrowVerdict:
        """Run a layout, one process and the fewest ranks; with a planted fault in the layout's ranks, if one is named."""
        layout = layout.but("tokens")
        alone, fewest = layout.alone, layout.alone.but(" ".join(layout.words_of(*_SPLIT_WORDS)))
        found = self.pool.run(layout.world_size, measure, replace(self._job(layout), fault=fault))
        local = replace(self._job(alone), implementation="local")
        (truth,) = self._run(replace(local, precision="fp64"))
        own = [judge(truth, self._run(job)) for job in _orders(local)]
        order: Distance | None = None
        order_noise: tuple[float, ...] = ()
        if fewest != layout:
            idle, usual = without_gradient(truth), self._run(self._job(fewest))
            order = judge_first_step(usual, found, idle)
            others = [judge_first_step(usual, self._run(job), idle) for job in _orders(self._job(fewest))]
            order_noise = _largest(others)
        return NarrowVerdict(judge(truth, found), _largest(own), order, order_noise)

    def _job(self, layout: Layout) -> Job:
        return Job(layout, self.precision, self.pool.device, self.implementation, is_rounding_measured=True)

    def _run(self, job: Job) -> list[Measured]:
        if job not in self.answers:
            self.answers[job] = self.pool.run(job.layout.world_size, measure, job)
        return self.answers[job]


def _orders(usual: Job) -> list[Job]:
    """The usual order of accumulation, and others."""
    jobs = [usual, replace(usual, micro_batch=MICRO_BATCH // 2)]
    if usual.layout.global_batch % (2 * MICRO_BATCH) == 0:
        jobs.append(replace(usual, micro_batch=2 * MICRO_BATCH))
    return jobs


def _largest(distances: Sequence[Distance]) -> tuple[float, ...]:
    return tuple(max(numbers) for numbers in zip(*(one.numbers for one in distances), strict=True))
