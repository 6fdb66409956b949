"""Time our attention kernel as BERT and T5 use it: padding, a bias of distances, dropout 0.1, 64 channels a head, bf16.

    python scripts/benchmarks/masked_attention.py           one GPU: the tiles of `attention.TILES`
    python scripts/benchmarks/masked_attention.py --tune    each tile of TUNED too (kernels are compiled first, by all cores)

Results of each tile are compared with those of TILES. Times are milliseconds a layer and micro-batch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timing import gpu, milliseconds
from torch import Tensor

from megatrain.kernels.attention.dropout import Dropout
from megatrain.kernels.attention.interface import DistanceBias, MaskSpec
from megatrain.kernels.fused import attention
from megatrain.kernels.fused.attention import Tile

REACH, BUCKETS = 128, 32


@dataclass(frozen=True)
class Case:
    name: str
    b: int
    sq: int
    sk: int
    heads: int
    is_causal: bool = False
    has_bias: bool = False


CASES = (
    Case("E1", 32, 512, 512, 16),
    Case("E2, encoder", 8, 1024, 1024, 32, has_bias=True),
    Case("E2, decoder", 8, 256, 256, 32, is_causal=True, has_bias=True),
    Case("E2, cross-attention", 8, 256, 1024, 32),
)
TUNED = {
    "forward": ((64, 64, 4, 2, 168), (64, 64, 4, 2, 128), (64, 64, 4, 3)),
    "dq": ((64, 64, 4, 2, 168), (64, 64, 4, 2)),
    "dkdv": ((64, 64, 4, 2, 168), (32, 64, 4, 2, 168)),
}
"""Tiles (queries, keys, warps, stages, most registers) of each kernel."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="time each tile of TUNED")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__} on {gpu()}", flush=True)
    works: list[tuple[Case, str, Tile | None]] = [(case, "TILES", None) for case in CASES]
    if arguments.tune:
        works += [(case, name, Tile(*tile)) for case in CASES for name in TUNED for tile in TUNED[name]]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        errors = pool.starmap(compiles, works, chunksize=1)
    for (case, name, tile), error in zip(works, errors, strict=True):
        label = name if tile is None else f"{name} {tuple(tile)}"
        print(f"{case.name:<22}{label:<28}{error or times(case, name, tile)}", flush=True)


def compiles(case: Case, name: str, tile: Tile | None) -> str:
    """Compile the kernels and compare gradients with those of TILES; return an error or ""."""
    try:
        found, expected = results(case, name, tile), results(case, "TILES", None)
    except Exception as error:  # noqa: BLE001  (Triton: too much shared memory, or a tile that it cannot compile)
        return str(error).splitlines()[0][:80]
    worst = [
        ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()
        for a, b in zip(found, expected, strict=True)
    ]
    return "" if max(worst) < 0.02 else f"differs by {worst}"


def inputs(case: Case) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    of_queries = torch.randn(case.sq, case.b, case.heads, 2, 64, **options)
    k, v = torch.randn(case.sk, case.b, case.heads, 2, 64, **options).unbind(-2)
    q, dout = of_queries.unbind(-2)
    table = torch.randn(BUCKETS, case.heads, **options)
    return q * 0.125, k, v, dout.contiguous(), table


def results(case: Case, name: str, tile: Tile | None) -> list[Tensor]:
    """Return the output and the gradients."""
    forward, backward = passes(case, name, tile)
    out, lse = forward()
    found = backward(out, lse)
    return [out, *(one for one in found if one is not None)]


def times(case: Case, name: str, tile: Tile | None) -> str:
    forward, backward = passes(case, name, tile)
    out, lse = forward()
    return f"forward {as_graph(forward):7.3f}  backward {as_graph(partial(backward, out, lse)):7.3f}"


def as_graph(run: Callable[[], object]) -> float:
    """Return the milliseconds of a run without launches from the host."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return milliseconds(graph.replay)


def passes(case: Case, name: str, tile: Tile | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return both passes; the backward pass takes the results of the forward pass."""
    q, k, v, dout, table = inputs(case)
    lengths = torch.full((case.b, 1), case.sk, device="cuda")
    lengths[0] = case.sk * 5 // 8
    is_token = torch.arange(case.sk, device="cuda") < lengths
    rows, keys = (range(case.sq),), (range(case.sk),)
    rule = Dropout(p=0.1, key=1234567890123456789, num_heads=case.heads, queries=rows, keys=keys)
    spec = MaskSpec(is_causal=case.is_causal, is_token=None if case.is_causal else is_token, dropout=rule)
    bias = DistanceBias(table, buckets(case), REACH) if case.has_bias else None
    tiles = attention.tiles_of(q, bias)
    options: dict[str, Any] = {"scale": 1.0, "softcap": None, "bias": bias}
    options["tiles"] = tiles if tile is None else tiles._replace(**{name: tile})
    options["kept"], options["masks"] = (
        attention.memory_for_mask(q, k, rule),
        attention.prepared(q, k, spec, bias),
    )
    forward = partial(attention.forward, q, k, v, spec, **options)
    return forward, lambda out, lse: attention.backward(dout, q, k, v, out, lse, spec, **options)


def buckets(case: Case) -> Tensor:
    """Return the bucket of each distance: of as many distances each, up to the reach."""
    distances = torch.arange(1 - case.sq, case.sk, device="cuda").clamp(-REACH, REACH) + REACH
    return (distances * (BUCKETS - 1) // (2 * REACH)).int()


if __name__ == "__main__":
    main()
