"""Time our attention kernel with and without dropout, and FlashAttention-2 of torch without dropout.

    python scripts/benchmarks/attention.py            one GPU; a minute, and half a minute of compilation
    python scripts/benchmarks/attention.py --tune     every tile of TUNED for each kernel: choose the constants of attention.TILES
                                                      (kernels are compiled first, by as many processes as there are cores)

TFLOP/s count the products of causal attention: 2 * 2 * s^2 / 2 * d a head and sample forward, 5/2 of it backward (7/2 are
computed: two kernels each recompute the scores and their gradients).
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from timing import REPEATS, gpu, milliseconds
from torch import Tensor

from megatrain.kernels.attention.backends import Flash2, TritonAttention
from megatrain.kernels.attention.dropout import Dropout
from megatrain.kernels.attention.interface import MaskSpec
from megatrain.kernels.fused import attention
from megatrain.kernels.fused.attention import Tile, Tiles
from megatrain.kernels.fused.launching import power_of_two

Pass = Callable[..., Any]
P = 0.1
TUNED = {
    "forward": tuple(itertools.product((64, 128), (64, 128), (4, 8), (2, 3))),
    "dq": tuple(itertools.product((64, 128), (64, 128), (4, 8), (2, 3))),
    "dkdv": tuple(itertools.product((32, 64, 128), (64, 128), (4, 8), (1, 2, 3))),
}
"""Tiles (queries, keys, warps, stages) of each kernel."""


@dataclass(frozen=True)
class Shape:
    b: int
    s: int
    heads: int
    groups: int
    d: int

    @property
    def flops(self) -> float:
        """Operations of the forward pass, causal."""
        return 2 * self.b * self.heads * self.s**2 * self.d

    def __str__(self) -> str:
        return f"b{self.b} s{self.s} n{self.heads} g{self.groups} d{self.d}"


SHAPES = (Shape(2, 8192, 16, 4, 128), Shape(4, 4096, 32, 8, 128), Shape(8, 2048, 16, 16, 64))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="time each kernel with many tiles")
    parser.add_argument("--head-width", type=int, help="only shapes with this head width")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__} on {gpu()}; bf16, causal, medians of {REPEATS}; TFLOP/s")
    for shape in SHAPES:
        if arguments.head_width in (None, shape.d):
            tune(shape) if arguments.tune else compare(shape)


def inputs(shape: Shape) -> list[Tensor]:
    """Return q, k and v as views of a projection, and the gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    qkv = torch.randn(shape.s, shape.b, shape.heads + 2 * shape.groups, shape.d, **options)
    dout = torch.randn(shape.s, shape.b, shape.heads, shape.d, **options)
    return [*qkv.split((shape.heads, shape.groups, shape.groups), dim=2), dout]


def mask(shape: Shape, p: float) -> MaskSpec:
    whole = (range(shape.s),)
    rule = Dropout(p=p, key=1234567890123456789, num_heads=shape.heads, queries=whole, keys=whole)
    return MaskSpec(is_causal=True, dropout=rule if p else None)


def compare(shape: Shape) -> None:
    """Print a line per kernel and dropout probability."""
    x, scale = inputs(shape), 1 / math.sqrt(shape.d)
    plain = None
    for name, kernel, p in (
        ("FlashAttention-2", Flash2(scale), 0.0),
        ("ours, dropout 0", TritonAttention(scale), 0.0),
        (f"ours, dropout {P}", TritonAttention(scale), P),
    ):
        forward, backward = times(kernel.forward, kernel.backward, x, mask(shape, p))
        rates = (
            shape.flops / forward,
            2.5 * shape.flops / backward,
            3.5 * shape.flops / (forward + backward),
        )
        words = "forward {:6.1f}  backward {:6.1f}  both {:6.1f}".format(*(rate / 1e9 for rate in rates))
        ratios = "  of dropout 0: {:.2f} {:.2f} {:.2f}".format(
            *(a / b for a, b in zip(rates, plain or rates, strict=True))
        )
        print(f"{shape!s:<24}{name:<20}{words}{ratios if p else ''}", flush=True)
        plain = rates


def tune(shape: Shape) -> None:
    """Print the times of each kernel's pass with each tile, the fastest with dropout first."""
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        works = dict(pool.map(partial(compiles, replace(shape, b=1, s=1024)), candidates(shape), chunksize=1))
    x, chosen = inputs(shape), attention.tiles_of(inputs(shape)[0])
    found: dict[str, list[tuple[float, float, Tile]]] = {kernel: [] for kernel in TUNED}
    for candidate in candidates(shape):
        kernel, tiles = candidate
        place = list(TUNED).index(kernel)
        if works[candidate]:
            print(f"{shape!s:<24}{kernel:<8}{tuple(tiles[place])!s:<20}left out: {works[candidate]}")
            continue
        both = [tuned_times(shape, x, tiles, p)[min(place, 1)] for p in (0.0, P)]
        found[kernel].append((both[1], both[0], tiles[place]))
    for place, (kernel, rows) in enumerate(found.items()):
        for with_dropout, without, tile in sorted(rows):
            mark = "  (in TILES)" if tile == chosen[place] else ""
            line = f"{without:8.3f} ms, with dropout {with_dropout:8.3f} ms{mark}"
            print(f"{shape!s:<24}{kernel:<8}{tuple(tile)!s:<20}{line}", flush=True)


def candidates(shape: Shape) -> Iterator[tuple[str, Tiles]]:
    """Yield (kernel, tiles): each tile of TUNED for one kernel, those of TILES for the others."""
    chosen = attention.TILES[max(power_of_two(shape.d), min(attention.TILES))]
    for place, (kernel, tiles) in enumerate(TUNED.items()):
        for tile in itertools.starmap(Tile, tiles):
            yield kernel, Tiles(*(tile if number == place else one for number, one in enumerate(chosen)))


def compiles(shape: Shape, candidate: tuple[str, Tiles]) -> tuple[tuple[str, Tiles], str]:
    """Compile the kernels into Triton's cache; return the candidate and the error, or ""."""
    try:
        for p in (0.0, P):
            tuned_times(shape, inputs(shape), candidate[1], p)
    except Exception as error:  # noqa: BLE001  (Triton: too much shared memory, or a tile that it cannot compile)
        return candidate, str(error).splitlines()[0][:80]
    return candidate, ""


def tuned_times(shape: Shape, x: list[Tensor], tiles: Tiles, p: float) -> tuple[float, float]:
    options = {"scale": 1 / math.sqrt(shape.d), "softcap": None, "tiles": tiles}
    forward, backward = (partial(one, **options) for one in (attention.forward, attention.backward))
    return times(forward, backward, x, mask(shape, p))


def times(forward: Pass, backward: Pass, x: list[Tensor], spec: MaskSpec) -> tuple[float, float]:
    """Return the milliseconds of both passes."""
    q, k, v, dout = x
    out, lse = forward(q, k, v, spec)
    return (
        milliseconds(partial(forward, q, k, v, spec)),
        milliseconds(partial(backward, dout, q, k, v, out, lse, spec)),
    )


if __name__ == "__main__":
    main()
