"""Time the linear layers of Llama-3-8B under tensor and sequence parallelism, with and without overlapped communication.

    python -m torch.distributed.run --nproc-per-node 2 scripts/benchmarks/tensor_overlap.py       one process per GPU

`alone` has the same products and no communication; `overlapped` is --tp-comm-overlap.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatrain.parallel.batch import PassInfo
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.process_groups import make_group
from megatrain.parallel.rank_lists import GridShape
from megatrain.parallel.tensor_overlap.copies import peer_memory
from megatrain.parallel.tensor_parallel import TensorParallel, column_linear, row_linear

TOKENS = 8192
WARM_UP, REPEATS = 5, 20


@dataclass(frozen=True)
class Layer:
    """A linear layer of the whole model, split by the columns of its output or the rows of its input."""

    name: str
    is_column: bool
    inputs: int
    outputs: int

    def passes(self, tp: TensorParallel, split: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return functions that run this rank's forward pass, and both passes."""
        inputs, outputs = (
            (self.inputs, self.outputs // split) if self.is_column else (self.inputs // split, self.outputs)
        )
        split_rows, whole_rows = tp.sequence_rows(TOKENS), TOKENS
        rows_in, rows_out = (split_rows, whole_rows) if self.is_column else (whole_rows, split_rows)
        x, dy = random(rows_in, 1, inputs).requires_grad_(), random(rows_out, 1, outputs)
        weight, grad = random(outputs, inputs).requires_grad_(), torch.zeros(outputs, inputs, device="cuda")
        layer = column_linear if self.is_column else row_linear

        def forward() -> Tensor:
            return layer(x, weight, grad, tp, PassInfo())

        def both() -> None:
            x.grad = None
            forward().backward(dy)

        return forward, both


LAYERS = (
    Layer("qkv", True, 4096, 6144),
    Layer("attention output", False, 4096, 4096),
    Layer("fc1", True, 4096, 28672),
    Layer("fc2", False, 14336, 4096),
)


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    grid = build_grid(GridShape(tp=world_size), rank, make_group)
    alone = RankGroup("tp", (rank,), 0)
    kinds = {
        "alone": TensorParallel(alone, alone, sequence_parallel=False),
        "collectives": TensorParallel(grid.tp, grid.kv, sequence_parallel=True),
        "overlapped": TensorParallel(
            grid.tp, grid.kv, sequence_parallel=True, peers=peer_memory(grid.tp, torch.device("cuda"))
        ),
    }
    if rank == 0:
        print(f"{world_size} ranks, {torch.cuda.get_device_name()}, {TOKENS} tokens; ms, forward + backward")
        print(f"{'':18}" + "".join(f"{kind:>18}" for kind in kinds))
    totals = dict.fromkeys(kinds, 0.0)
    for layer in LAYERS:
        shown = ""
        for kind, tp in kinds.items():
            forward, both = map(milliseconds, layer.passes(tp, world_size))
            totals[kind] += both
            shown += f"{forward:9.3f}{both - forward:9.3f}"
        if rank == 0:
            print(f"{layer.name:18}{shown}", flush=True)
    if rank == 0:
        print(f"{'sum':18}" + "".join(f"{total:18.3f}" for total in totals.values()))
    dist.destroy_process_group()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def milliseconds(run: Callable[[], object]) -> float:
    """Return the GPU time per run, the median of three. A product runs first, so that the host's launches are hidden."""
    filler = random(16384, 16384)
    times = []
    for _ in range(3):
        dist.barrier()
        for number in range(WARM_UP + REPEATS):
            if number == WARM_UP:
                for _ in range(2):
                    filler @ filler
                start = torch.cuda.Event(enable_timing=True)
                start.record()
            run()
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / REPEATS)
    return float(statistics.median(times))


if __name__ == "__main__":
    main()
