"""Layouts: flat ranges of local tensors as boxes of canonical tensors, shards and buffers."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.model.layouts import (
    Columns,
    columns_bias_layout,
    columns_layout,
    rows_layout,
    stream_layout,
    vocab_layout,
)
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.layout import Init, ParamLayout, ParamRegistry, ShardedModule, flat_boxes, intersect
from megatrain.parallel.rank_lists import GridShape
from megatrain.parallel.tensor_parallel import TensorParallel


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_flat_boxes_cover_a_range_in_order_and_are_few(shape: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, math.prod(shape)))
    stop = data.draw(st.integers(start, math.prod(shape)))
    indices = np.arange(math.prod(shape)).reshape(shape)
    boxes = list(flat_boxes(tuple(shape), start, stop))
    covered = [int(p) for box in boxes for p in indices[tuple(slice(*edge) for edge in box)].ravel()]
    assert covered == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


def test_boxes_intersect() -> None:
    assert intersect(((0, 4), (2, 6)), ((3, 9), (0, 3))) == ((3, 4), (2, 3))
    assert intersect(((0, 4), (2, 6)), ((4, 9), (0, 3))) is None


def _grid(rank: int, size: int, kv_copies: int = 1) -> RankGrid:
    return build_grid(GridShape(tp=size, kv_copies=kv_copies), rank)


def _tp(grid: RankGrid) -> TensorParallel:
    return TensorParallel(grid.tp, grid.kv, sequence_parallel=False)


def _layouts(tp: TensorParallel) -> list[ParamLayout]:
    init = Init(std=1.0)
    return [
        columns_layout([Columns("q", 8), Columns("k", 4, tp.kv), Columns("v", 4, tp.kv)], 6, init, tp),
        columns_bias_layout([Columns("k bias", 4, tp.kv)], tp),
        rows_layout("proj", 6, 8, init, tp),
        stream_layout("norm", 6, Init(mean=1.0), tp),
        vocab_layout("embedding", 11, 16, 6, init, tp, is_shared=False, kind="embedding"),
    ]


@given(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]), st.sampled_from([1, 2, 3]))
def test_shards_of_all_ranks_cover_every_element_once(tp_and_copies: tuple[int, int], dp_size: int) -> None:
    tp_size, kv_copies = tp_and_copies
    seen: dict[str, np.ndarray] = {}
    shape = GridShape(tp=tp_size, dp=dp_size, kv_copies=kv_copies)
    for rank in range(shape.world_size):
        module, grid = ShardedModule(), build_grid(shape, rank)
        for number, layout in enumerate(_layouts(_tp(grid))):
            module.add_weight(f"w{number}", layout, torch.float32)
        registry = ParamRegistry.of([module])
        buffers = allocate_buffers(
            registry,
            grid=grid,
            weight_dtype=torch.float32,
            grad_dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for shard in buffers.shards:
            owned = list(shard.owned())
            num_elements = sum(part.stop - part.start for _, part in shard.pieces())
            assert num_elements == sum(box.numel for _, box, _ in owned)
            for _, box, part in owned:
                assert part.stop - part.start == box.numel
                if not grid.is_first_of(box.piece.copies):
                    continue
                counts = seen.setdefault(box.piece.name, np.zeros(box.piece.shape, dtype=int))
                counts[tuple(slice(*edge) for edge in box.box)] += 1
    assert {name: counts.shape for name, counts in seen.items()} == {
        "q": (8, 6), "k": (4, 6), "v": (4, 6), "k bias": (4,), "proj": (6, 8), "norm": (6,), "embedding": (11, 6),
    }  # fmt: skip
    assert all((counts == 1).all() for counts in seen.values())


def test_parameters_are_views_of_buckets_and_decaying_ones_come_first() -> None:
    module = ShardedModule()
    for number, layout in enumerate(reversed(_layouts(_tp(_grid(0, 1))))):
        module.add_weight(f"w{number}", layout, torch.float32)
    registry = ParamRegistry.of([module])
    grid = build_grid(GridShape(), 0)
    buffers = allocate_buffers(
        registry,
        grid=grid,
        weight_dtype=torch.float32,
        grad_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    (bucket,) = buffers.buckets
    decays = [param.entry.layout.decays for param in bucket.params]
    assert decays == sorted(decays, reverse=True)
    module.w0.data.fill_(3.0)
    assert (buffers.weights.full[0] == 3.0).sum() == module.w0.numel()
    module.weight_grads["w0"].fill_(2.0)
    assert (buffers.gradients.full[0] == 2.0).sum() == module.w0.numel()
