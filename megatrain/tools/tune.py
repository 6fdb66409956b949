"""`megatrain tune`: measure cuBLASLt's algorithms for the matrix products of a run, and write those that beat torch's choice.

    flags ─> a step on the meta device ─> its products ─> all algorithms, a few rounds ─> finalists, many rounds ─> file

A round runs torch's choice and every candidate in turn, each long enough for events to time it, so that all run at the same
clocks; a gain is the median over rounds of the quotient of both times in a round.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from megatrain.config import parse
from megatrain.config.environment import read_environment
from megatrain.config.errors import ConfigError
from megatrain.config.product_algorithms import MeasuredAlgorithm, Product, ProductAlgorithms
from megatrain.kernels.chosen_products import prepared, problem_of, recorded_products
from megatrain.kernels.cublaslt import ProductError, algorithms_of, library_version, variants_of
from megatrain.kernels.linear import product
from megatrain.kernels.wgrad import accumulate_weight_gradient
from megatrain.training.planning.dry_run import examine

_SCREENING_ROUNDS, _NUM_PARENTS, _NUM_FINALISTS = 3, 3, 4
_MIN_MS: Final = 1.5
"""Least time of a measurement: a product that takes less is repeated."""
_ROUNDING: Final = {torch.bfloat16: 2**-7, torch.float32: 2**-11}
"""Largest difference from torch's result, relative to its largest value."""
_TORCH: Final = b"torch"


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code."""
    if not torch.cuda.is_available():
        raise ConfigError("megatrain tune requires a GPU, and torch finds none", fix="check `nvidia-smi`")
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds {arguments.rounds} is below 1", fix="give --rounds a positive number")
    folder = Path(arguments.output).parent
    if not os.access(folder, os.W_OK):
        raise ConfigError(
            f"--output {arguments.output}: there is no folder {folder} that can be written to",
            fix="name a file in a folder that exists",
        )
    device = torch.device("cuda", torch.cuda.current_device())
    products = products_of(arguments.run_flags)
    print(f"{len(products)} products on {torch.cuda.get_device_name(device)}, cuBLASLt {library_version()}")
    entries = []
    for one in products:
        candidates = Candidates(one, device)
        entry = fastest(candidates, num_rounds=arguments.rounds, num_variants=arguments.variants)
        is_kept = entry is not None and entry.torch_ms / entry.ms >= 1 + arguments.min_gain / 100
        print(_row(one, entry, len(candidates.runs) - 1, is_kept=is_kept), flush=True)
        if entry is not None and is_kept:
            entries.append(entry)
    found = ProductAlgorithms(
        gpu=torch.cuda.get_device_name(device), cublaslt=library_version(), entries=tuple(entries)
    )
    Path(arguments.output).write_text(found.to_json(), encoding="utf-8")
    print(f"{arguments.output}: {found}")
    return 0


def products_of(run_flags: Sequence[str]) -> list[Product]:
    """Return the distinct products of a run that an algorithm can be chosen for, of all pipeline stages."""
    request = parse([*run_flags, "--dry-run"], program="megatrain tune")
    with recorded_products() as found:
        plan = examine(request, read_environment()).plan
    if not found:
        raise ConfigError(
            f"this run has no bf16 products of `local` on {plan.config.training.device}",
            fix="add --bf16, and run on a GPU",
        )
    return list(dict.fromkeys(found))


class Candidates:
    """The matrices of a product, random, and the ways to compute it."""

    def __init__(self, one: Product, device: torch.device) -> None:
        self.product, self.device = one, device
        m, n, k, transposes_a, transposes_b, accumulates = one
        generator = torch.Generator(device).manual_seed(0)

        def drawn(rows: int, columns: int) -> Tensor:
            x = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
            return x.normal_(generator=generator)

        self.a, self.b = (
            drawn(k, m) if transposes_a else drawn(m, k),
            drawn(n, k) if transposes_b else drawn(k, n),
        )
        self.out = torch.zeros(m, n, dtype=torch.float32 if accumulates else torch.bfloat16, device=device)
        self.runs: dict[bytes, Callable[[], object]] = {_TORCH: self._torch}
        self.add(algorithms_of(problem_of(one, device)))

    def _torch(self) -> None:
        if self.product.accumulates:
            accumulate_weight_gradient(self.out, self.a, self.b)
        else:
            product(self.a, self.b.t() if self.product.transposes_b else self.b, out=self.out)

    def add(self, algorithms: Sequence[bytes]) -> None:
        """Add those of the algorithms that run: a launch may refuse what the library's check accepts."""
        for algorithm in algorithms:
            one = prepared(self.product, algorithm, self.device)
            run = functools.partial(one.run, self.out, self.a, self.b)
            with contextlib.suppress(ProductError):
                run()
                self.runs.setdefault(algorithm, run)

    def add_variants(self, algorithms: Sequence[bytes], limit: int) -> None:
        """Add up to `limit` variants of algorithms, drawn at random."""
        problem = problem_of(self.product, self.device)
        found = dict.fromkeys(other for one in algorithms for other in variants_of(problem, one))
        new = [one for one in found if one not in self.runs]
        random.Random(0).shuffle(new)  # noqa: S311 (no secret)
        self.add(new[:limit])

    def is_right(self, algorithm: bytes) -> bool:
        """Return whether an algorithm has torch's result within rounding, and the same bits twice."""
        first, second, expected = (self._result(one) for one in (algorithm, algorithm, _TORCH))
        error = (first.float() - expected.float()).abs().max() / expected.abs().max()
        return torch.equal(first, second) and error.item() <= _ROUNDING[self.out.dtype]

    def _result(self, algorithm: bytes) -> Tensor:
        self.out.zero_()
        self.runs[algorithm]()
        return self.out.clone()


def fastest(candidates: Candidates, *, num_rounds: int, num_variants: int) -> MeasuredAlgorithm | None:
    """Return the fastest algorithm that is right, as measured; None: the library offers none."""
    gains = gains_of(interleaved(candidates.runs, list(candidates.runs), _SCREENING_ROUNDS))
    best = sorted(gains, key=gains.__getitem__, reverse=True)
    if num_variants:
        candidates.add_variants(best[:_NUM_PARENTS], num_variants)
        gains = gains_of(interleaved(candidates.runs, list(candidates.runs), _SCREENING_ROUNDS))
        best = sorted(gains, key=gains.__getitem__, reverse=True)
    finalists = [one for one in best[: 2 * _NUM_FINALISTS] if candidates.is_right(one)][:_NUM_FINALISTS]
    if not finalists:
        return None
    times = interleaved(candidates.runs, [_TORCH, *finalists], num_rounds)
    gains = gains_of(times)
    algorithm = max(gains, key=gains.__getitem__)
    torch_ms = statistics.median(times[_TORCH])
    return MeasuredAlgorithm(
        product=candidates.product,
        algorithm=algorithm.hex(),
        ms=torch_ms / gains[algorithm],
        torch_ms=torch_ms,
    )


def gains_of(times: Mapping[bytes, Sequence[float]]) -> dict[bytes, float]:
    """Return the gain of each algorithm over torch's choice, as a quotient of times."""
    return {
        name: statistics.median(a / b for a, b in zip(times[_TORCH], own, strict=True))
        for name, own in times.items()
        if name != _TORCH
    }


def interleaved(
    runs: Mapping[bytes, Callable[[], object]], names: Sequence[bytes], num_rounds: int
) -> dict[bytes, list[float]]:
    """Return the milliseconds of each run in each round; a round starts with another one each time."""
    times: dict[bytes, list[float]] = {name: [] for name in names}
    repeats = 1
    for number in range(-1, num_rounds):  # the first round warms up
        shift = number % len(names)
        order = [*names[shift:], *names[:shift]]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(names) + 1)]
        runs[order[-1]]()  # the GPU computes while the host launches the first
        events[0].record()
        for name, event in zip(order, events[1:], strict=True):
            for _ in range(repeats):
                runs[name]()
            event.record()
        torch.cuda.synchronize()
        elapsed = [a.elapsed_time(b) / repeats for a, b in itertools.pairwise(events)]
        if number < 0:
            repeats = max(1, round(_MIN_MS / statistics.median(elapsed)))
            continue
        for name, ms in zip(order, elapsed, strict=True):
            times[name].append(ms)
    return times


def _row(one: Product, entry: MeasuredAlgorithm | None, num_algorithms: int, *, is_kept: bool) -> str:
    a, b = "a^T" if one.transposes_a else "a", "b^T" if one.transposes_b else "b"
    name = f"[{one.m}, {one.n}] {'+=' if one.accumulates else '='} {a} {b}, k {one.k}"
    if entry is None:
        return f"{name:<44} no algorithm"
    rates = [2 * one.m * one.n * one.k / ms / 1e9 for ms in (entry.torch_ms, entry.ms)]
    gain = 100 * (entry.torch_ms / entry.ms - 1)
    return (
        f"{name:<44} torch {entry.torch_ms:.3f} ms ({rates[0]:.0f} TFLOP/s), best of {num_algorithms:>3}: {entry.ms:.3f} ms"
        f" ({rates[1]:.0f} TFLOP/s), {gain:+.1f} %{', chosen' if is_kept else ''}"
    )
