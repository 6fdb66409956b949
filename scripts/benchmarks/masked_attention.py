"""Time our attention kernel as BERT and T5 use it: padding, a bias of distances, dropout 0.1, 64 channels a head, bf16.

    python scripts/benchmarks/masked_attention.py           one GPU: the kernels of TILES
    python scripts/benchmarks/masked_attention.py --tune    each tile of TUNED too (kernels are compiled first, by all cores)

Each result of a tile is compared with that of the first. Times are milliseconds a layer and micro-batch.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from timing import milliseconds
from torch import Tensor

from megatrain.kernels.attention.dropout import Dropout
from megatrain.kernels.attention.interface import DistanceBias, MaskSpec
from megatrain.kernels.fused import attention
from megatrain.kernels.fused.attention import Tile, Tiles

REACH = 128


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
    "forward": ((128, 64, 8, 3), (128, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2)),
    "heads": ((64, 64, 4, 1), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 1)),
    "dkdv": ((64, 64, 4, 2),),
}
"""Tiles of the forward pass, of the backward pass in one kernel, and of its third kernel in place of that."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="time each tile of TUNED")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}", flush=True)
    chosen = attention.TILES[64]
    kinds = [("TILES", chosen, 1), ("three kernels", chosen, 10**9)]
    if arguments.tune:
        kinds += [
            (f"{name} {tile}", chosen._replace(**{name: Tile(*tile)}), 10**9 if name == "dkdv" else 1)
            for name, tiles in TUNED.items()
            for tile in tiles
        ]
    works = [(case, kind) for case in CASES for kind in kinds]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        errors = pool.starmap(compiles, works, chunksize=1)
    for (case, kind), error in zip(works, errors, strict=True):
        print(f"{case.name:<22}{kind[0]:<28}{error or times(case, kind)}", flush=True)


def compiles(case: Case, kind: tuple[str, Tiles, int]) -> str:
    """Compile the kernels and compare gradients with those of the first kind; return an error or ""."""
    try:
        x = inputs(case)
        found, expected = results(case, kind, x), results(case, ("", attention.TILES[64], 10**9), x)
    except Exception as error:  # noqa: BLE001  (Triton: too much shared memory, or a tile that it cannot compile)
        return str(error).splitlines()[0][:80]
    worst = [
        ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()
        for a, b in zip(found, expected, strict=True)
    ]
    return "" if max(worst) < 0.02 else f"differs by {worst}"


def inputs(case: Case) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(case.sq, case.b, case.heads, 3, 64, **options)
    k = torch.randn(case.sk, case.b, case.heads, 2, 64, **options)
    q, k, v, dout = q[..., 0, :], k[..., 0, :], k[..., 1, :], q[..., 2, :].contiguous()
    table = torch.randn(case.heads, 2 * REACH + 1, **options)
    return q * 0.125, k, v, dout, table


def results(case: Case, kind: tuple[str, Tiles, int], x: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the output and the gradients."""
    forward, backward = passes(case, kind, x)
    out, lse = forward()
    attention._MIN_HEADS = kind[2]  # noqa: SLF001
    found = backward(out, lse)
    if found.bias is not None:  # the single far distances have no gradients of their own
        distances = torch.arange(1 - case.sq, case.sk, device="cuda").clamp(-REACH, REACH) + REACH
        table = found.bias.new_zeros(case.heads, 2 * REACH + 1).float()
        found = found._replace(bias=table.index_add_(1, distances, found.bias.float()))
    return [out, *(one for one in found if one is not None)]


def times(case: Case, kind: tuple[str, Tiles, int]) -> str:
    x = inputs(case)
    forward, backward = passes(case, kind, x)
    out, lse = forward()
    attention._MIN_HEADS = kind[2]  # noqa: SLF001
    return f"forward {as_graph(forward):7.3f}  backward {as_graph(partial(backward, out, lse)):7.3f}"


def as_graph(run: Callable[[], object]) -> float:
    """Return the milliseconds of a run without launches from the host."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return milliseconds(graph.replay)


def passes(case: Case, kind: tuple[str, Tiles, int], x: tuple[Tensor, ...]) -> tuple[partial, partial]:
    q, k, v, dout, table = x
    lengths = torch.full((case.b, 1), case.sk, device="cuda")
    lengths[0] = case.sk * 5 // 8
    spec = MaskSpec(
        is_causal=case.is_causal,
        is_token=None if case.is_causal else torch.arange(case.sk, device="cuda") < lengths,
        dropout=Dropout(
            p=0.1,
            key=1234567890123456789,
            num_heads=case.heads,
            queries=(range(case.sq),),
            keys=(range(case.sk),),
        ),
    )
    bias = None
    if case.has_bias:
        distances = torch.arange(1 - case.sq, case.sk, device="cuda").clamp(-REACH, REACH) + REACH
        bias = DistanceBias(table[:, distances], REACH)
    options = {"scale": 1.0, "softcap": None, "bias": bias, "tiles": kind[1]}
    forward = partial(attention.forward, q, k, v, spec, **options)

    def backward(out: Tensor, lse: Tensor) -> attention.Gradients:
        return attention.backward(dout, q, k, v, out, lse, spec, **options)

    return forward, partial(backward)


if __name__ == "__main__":
    main()
