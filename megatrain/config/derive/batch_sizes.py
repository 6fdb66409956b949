"""Samples per iteration, and tokens of their pieces, as functions of the samples consumed before it.

    constant   --global-batch-size
    ramp       --rampup-batch-size START INCREMENT SAMPLES: from START to --global-batch-size in equal steps
    steps      --step-batch-size-schedule "0:768 250B:1536": each from a given number of tokens on
    pieces     --seq-length-schedule "0:2048 50B:4096": samples of --seq-length tokens are cut, from a given number of tokens on

The sizes are Megatron-LM's. They depend on the consumed samples only, so a run can resume within a ramp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from megatrain.config.errors import ConfigError
from megatrain.config.schema.tree import Config

_POWERS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
LARGEST_RAMP: Final = 10**6
"""Largest number of sizes in a ramp; a larger one is a typing error."""


class RampMisfitError(ConfigError):
    """A ramp that does not lead to the global batch size."""

    ramp: tuple[int, int, int]
    """Start, increment and samples."""

    @classmethod
    def because(cls, problem: str, *ramp: int) -> RampMisfitError:
        """Return the error; the rule that reports it knows which setting the user typed."""
        error = cls(problem, fix="leave --rampup-batch-size out")
        start, increment, samples = ramp
        error.ramp = start, increment, samples
        return error


@dataclass(frozen=True)
class RampedBatch:
    """Sizes from `start` to `target` in steps of `increment`, spread evenly over `samples`."""

    start: int
    increment: int
    samples: int
    target: int

    def at(self, consumed: int) -> int:
        """Return the size. Both divisions are in double precision, as in Megatron-LM: the last size may start late."""
        if consumed > self.samples:
            return self.target
        samples_per_step = self.samples / ((self.target - self.start) // self.increment)
        return self.start + int(consumed / samples_per_step) * self.increment

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(range(self.start, self.target + 1, self.increment))

    @property
    def constant_from(self) -> int:
        return self.samples + 1


@dataclass(frozen=True)
class SteppedBatch:
    """The size, or the length, of the last threshold reached; one threshold: it is constant."""

    steps: tuple[tuple[int, int], ...]
    """Pairs of consumed samples and size; the first is at 0."""

    def at(self, consumed: int) -> int:
        return [size for threshold, size in self.steps if threshold <= consumed][-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.steps)

    @property
    def constant_from(self) -> int:
        return self.steps[-1][0]


BatchRule = RampedBatch | SteppedBatch
"""Batch sizes that the user asks for: the samples of the iteration that starts `at` a number of consumed samples, all `sizes` in
order, and the number of consumed samples that they are `constant_from`."""


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Samples of each iteration, in whole micro-batches of all replicas."""

    rule: BatchRule
    pass_size: int
    """Samples of one micro-batch on all replicas: micro-batch size * data-parallel size."""

    def at(self, consumed: int) -> int:
        """Return the samples of the iteration that starts after `consumed` samples, rounded down to whole passes."""
        return self.num_microbatches(consumed) * self.pass_size

    def num_microbatches(self, consumed: int) -> int:
        """Return the micro-batches of each rank in that iteration."""
        return self.rule.at(consumed) // self.pass_size

    def misfits(self, *, is_decreased: bool) -> list[int]:
        """Return the invalid sizes: smaller than a pass, or (unless sizes are decreased) not a multiple of one."""
        return [
            size
            for size in self.rule.sizes
            if size < self.pass_size or (size % self.pass_size and not is_decreased)
        ]

    def iterations_to(self, samples: int, *, consumed: int, fills_up: bool) -> int:
        """Count iterations from `consumed` samples to `samples`. `fills_up`: the last one may exceed `samples`; otherwise it is left out."""

        def has_more(consumed: int) -> bool:
            return consumed < samples if fills_up else consumed + self.at(consumed) <= samples

        count, consumed = self._walk(consumed, lambda _, consumed: has_more(consumed))
        left, size = samples - consumed, self.at(consumed)
        if not has_more(consumed):
            return count
        return count + (-(-left // size) if fills_up else left // size)

    def samples_after(self, iterations: int, *, consumed: int) -> int:
        """Return the consumed samples after this many further iterations."""
        count, consumed = self._walk(consumed, lambda count, _: count < iterations)
        return consumed + (iterations - count) * self.at(consumed)

    def _walk(self, consumed: int, has_next: Callable[[int, int], bool]) -> tuple[int, int]:
        """Count iterations and consumed samples until the size is constant or `has_next` is false."""
        count = 0
        while consumed < self.rule.constant_from and has_next(count, consumed):
            consumed += self.at(consumed)
            count += 1
        return count, consumed


def micro_batches(count: int) -> str:
    """Return a number of micro-batches in words."""
    return f"{count} micro-batch{'' if count == 1 else 'es'}"


def batch_rule(config: Config) -> BatchRule:
    """Return the batch sizes that a configuration asks for.

    Raises:
        ConfigError: the ramp or the steps are not valid.
    """
    training = config.training
    if training.rampup_batch_size:
        return parse_ramp(training.rampup_batch_size, target=training.global_batch_size)
    if training.step_batch_size_schedule is not None:
        return parse_steps(training.step_batch_size_schedule, seq_length=config.data.seq_length)
    return SteppedBatch(((0, training.global_batch_size),))


def batch_sizes(config: Config, *, data_parallel_size: int) -> BatchSizes:
    """Return the batch sizes of a configuration on this many replicas."""
    return BatchSizes(
        rule=batch_rule(config), pass_size=config.training.micro_batch_size * data_parallel_size
    )


def parse_ramp(words: Iterable[str], *, target: int) -> RampedBatch:
    """Parse --rampup-batch-size."""
    texts = " ".join(words).split()
    given = f"--rampup-batch-size {' '.join(texts)}"
    if len(texts) != 3 or not all(re.fullmatch(r"[0-9]{1,18}", text) for text in texts):
        raise ConfigError(
            f"{given}: not three whole numbers",
            fix="give start, increment and samples, such as --rampup-batch-size 32 32 1000000",
        )
    start, increment, samples = map(int, texts)
    if not (start and increment and samples):
        raise ConfigError(f"{given}: a number is 0", fix="use numbers above 0")
    if start >= target:
        problem = f"{given} starts at --global-batch-size {target} or above"
        raise RampMisfitError.because(problem, start, increment, samples)
    if (target - start) % increment or (target - start) // increment > LARGEST_RAMP:
        problem = f"{given}: steps of {increment} do not lead from {start} to --global-batch-size {target}"
        raise RampMisfitError.because(problem, start, increment, samples)
    return RampedBatch(start, increment, samples, target)


def length_steps(config: Config) -> SteppedBatch | None:
    """Return the lengths of pieces; None: samples are not cut.

    Raises:
        ConfigError: the schedule is not valid, or has a length that does not divide --seq-length.
    """
    text, longest = config.data.seq_length_schedule, config.data.seq_length
    if text is None:
        return None
    steps = parse_steps(text, seq_length=longest, flag="--seq-length-schedule", value="length", example=2048)
    for length in steps.sizes:
        if longest % length:
            raise ConfigError(
                f"--seq-length-schedule '{text}': a sample of --seq-length {longest} has no whole number of pieces of"
                f" {length} tokens",
                fix=f"use --seq-length-schedule '{with_fitting_lengths(text, longest, 1)}'",
            )
    return steps


def with_fitting_lengths(text: str, longest: int, unit: int) -> str:
    """Return a schedule whose lengths divide `longest` and are multiples of `unit`, which divides it: the next longer ones."""

    def fitting(entry: re.Match[str]) -> str:
        length = _number(entry[2], text)
        counts = range(longest // max(length, unit), 0, -1)
        pieces = next((one for one in counts if longest % one == 0 and longest // one % unit == 0), 1)
        return f"{entry[1]}:{longest // pieces}"

    return re.sub(r"([^\s,:]+):([^\s,]+)", fitting, text.strip())


def num_pieces(steps: SteppedBatch | None, config: Config, consumed: int) -> int:
    """Return the pieces of each sample in the iteration that starts after `consumed` samples."""
    return 1 if steps is None else config.data.seq_length // steps.at(consumed)


def parse_steps(
    text: str,
    *,
    seq_length: int | None,
    flag: str = "--step-batch-size-schedule",
    value: str = "batch",
    example: int = 768,
) -> SteppedBatch:
    """Parse --step-batch-size-schedule, or another flag of its form. Thresholds count tokens; without `seq_length`, samples."""
    given = f"{flag} '{text}'"
    steps: dict[int, int] = {}
    for entry in re.split(r"[\s,]+", text.strip()):
        threshold, colon, size = entry.partition(":")
        if not colon:
            raise ConfigError(
                f"{given}: '{entry}' has no colon",
                fix=f"write threshold:{value}, such as '0:{example} 250B:{2 * example}'",
            )
        start = _number(threshold, given) // (seq_length or 1)
        if start in steps:
            raise ConfigError(f"{given}: two thresholds fall on sample {start}", fix="leave one of them out")
        steps[start] = _number(size, given)
    if not all(steps.values()):
        raise ConfigError(f"{given}: a {value} is 0", fix=f"use a {value} above 0")
    if 0 not in steps:
        raise ConfigError(
            f"{given}: no threshold is 0",
            fix=f"start with a {value} at 0: use {flag} '0:{min(steps.values())} {text.strip()}'",
        )
    return SteppedBatch(tuple(sorted(steps.items())))


def _number(text: str, given: str) -> int:
    """Parse a number with a suffix: `2.5k` is 2500."""
    match = re.fullmatch(r"([0-9]{1,18})(\.[0-9]{1,18})?([kmbt]?)", text.lower())
    if match is None:
        raise ConfigError(f"{given}: '{text}' is not a number", fix="use numbers such as 768, 2.5K or 250B")
    whole, fraction, suffix = match.groups()
    power = _POWERS[suffix]
    digits = (fraction or ".")[1:]
    parts: int = 10 ** len(digits)
    return int(whole) * power + int(digits or 0) * power // parts
