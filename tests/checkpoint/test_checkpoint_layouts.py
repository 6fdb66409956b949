"""Saved state is restored bit for bit, for all layouts that save and load it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from canonical_weights import hash_tensors
from checkpoint_helpers import (
    CPU,
    assert_same,
    build_rank,
    build_ranks,
    fill_all,
    load,
    one_rank,
    run_ranks,
    save,
    save_all,
    small_spec,
    training_state,
)
from everyday import one_in
from safetensors import safe_open

from megatrain.checkpoint.chunks import plan_chunks, split_box
from megatrain.checkpoint.errors import MismatchError
from megatrain.checkpoint.find import newest_valid
from megatrain.checkpoint.manifest import tiling_problem
from megatrain.checkpoint.parts import read_manifest
from megatrain.checkpoint.reader import CheckpointReader, CheckpointSource, verify
from megatrain.model.gpt import build_model
from megatrain.optim.sharded import fill_weights
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.layout import box_shape
from megatrain.parallel.rank_lists import GridShape

torch.set_num_threads(1)

ONE = GridShape()
EIGHT = GridShape(tp=2, dp=2, pp=2)
SHAPES = [ONE, EIGHT, GridShape(tp=4, kv_copies=2), GridShape(dp=3), GridShape(tp=2, pp=2)]


@pytest.mark.parametrize(
    ("dtype", "master_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_a_round_trip_is_exact(tmp_path: Path, dtype: torch.dtype, master_dtype: torch.dtype) -> None:
    saved = one_rank(seed=7, dtype=dtype, master_dtype=master_dtype)
    path = save(
        tmp_path, saved, 100, state={"rng": [1, 2.5, None], "\xfc": True}, config={"model": {"a": [1]}}
    )
    fresh = one_rank(seed=8, dtype=dtype, master_dtype=master_dtype)
    loaded = load(tmp_path, fresh)
    assert_same(saved.values(), fresh.values())
    assert (loaded.iteration, loaded.consumed_train_samples, loaded.path) == (100, 800, path)
    assert loaded.state == training_state(100) | {"rng": [1, 2.5, None], "\xfc": True}
    assert loaded.config == {"model": {"a": [1]}}
    assert (loaded.skipped, fresh.optimizer.step_count) == ((), 7)
    main = torch.cat(fresh.optimizer.master_weights)
    assert torch.equal(torch.cat(fresh.optimizer.buffers.weights.full), main.to(dtype))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "100"
    assert verify(path) == []


@pytest.mark.parametrize(
    ("vocab", "tied", "num_depths", "soap"),
    one_in(2, [(15, True, 0, False), (29, False, 0, False), (15, True, 0, True), (29, False, 2, False)]),
)
def test_any_layout_loads_any_other(
    tmp_path: Path, vocab: int, *, tied: bool, num_depths: int, soap: bool
) -> None:
    """A vocabulary of 15 leaves the second of two tensor ranks nothing but padding."""
    layouts = []
    for shape in (dataclasses.replace(one, has_matrices=soap) for one in SHAPES):
        padded = 32 if shape.tp > 1 else vocab
        spec = small_spec(tied=tied, vocab=vocab, padded=padded, num_depths=num_depths)
        layouts.append(build_ranks(shape, spec))
    for rank in (rank for ranks in layouts for rank in ranks):
        rank.set_values(3)
    wanted = [[rank.values() for rank in ranks] for ranks in layouts]
    hashes = []
    for number, ranks in enumerate(layouts):
        path = save_all(tmp_path, ranks, number + 1, chunk_bytes=700, file_bytes=5000)
        assert verify(path) == []
        assert read_manifest(path).tensors["embedding.word_embeddings.weight"].shape == (vocab, 16)
        hashes.append([hash_tensors(path, kind) for kind in layouts[0][0].optimizer.kinds])
    assert len(hashes[0]) == (5 if soap else 3)
    assert all(found == hashes[0] for found in hashes)
    for number in range(len(layouts)):
        for ranks, values in zip(layouts, wanted, strict=True):
            for rank in ranks:
                rank.clear()
            fill_all(tmp_path / f"iter_{number + 1:07d}", ranks)
            for rank, expected in zip(ranks, values, strict=True):
                assert_same(rank.values(), expected)


def test_replicas_with_copies_share_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.checkpoint.chunks._MIN_CHUNK_BYTES", 64)
    spec = small_spec(tied=False, vocab=29, padded=32)
    ranks = build_ranks(GridShape(dp=2, tp=2), spec, is_sharded=False)
    for rank in ranks:
        rank.set_values(3)
    path = save_all(tmp_path, ranks, 100)
    sizes = [sum(chunk.num_bytes for chunk in plan_chunks(rank.optimizer, rank.grid)) for rank in ranks]
    assert sizes[0] == pytest.approx(sizes[2], rel=0.1)
    assert sizes[1] == pytest.approx(sizes[3], rel=0.1)
    assert len(list(path.glob("shard*"))) == 4
    alone = build_rank(ONE, 0, spec)
    load(tmp_path, alone)
    wanted = build_rank(ONE, 0, spec)
    wanted.set_values(3)
    assert_same(alone.values(), wanted.values())


@pytest.mark.parametrize("shape", [GridShape(tp=4), GridShape(tp=2, pp=2), GridShape(tp=2, dp=2)])
def test_ranks_with_copies_of_a_box_share_its_rows(shape: GridShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms have copies on tensor ranks, keys and values on some of them, the tied embedding on two stages."""
    monkeypatch.setattr("megatrain.checkpoint.chunks._BLOCK_BYTES", 64)
    ranks = build_ranks(shape, small_spec(tied=True, vocab=29, padded=32))
    writers: dict[tuple[str, str], set[int]] = {}
    for rank in ranks:
        for chunk in plan_chunks(rank.optimizer, rank.grid):
            writers.setdefault((chunk.kind, chunk.name), set()).add(rank.grid.rank)
    embedding = writers["weight", "embedding.word_embeddings.weight"]
    assert len(embedding) == len(ranks)
    norms = [found for (_, name), found in writers.items() if "norm" in name]
    assert all(len(found) == 1 for found in norms)
    assert len(set.union(*norms)) > 1


def test_ranks_save_and_load_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec(tied=True, vocab=29, padded=32)
    ranks = build_ranks(GridShape(tp=2, pp=2), spec)
    for rank in ranks:
        rank.set_values(3)
    paths = run_ranks(ranks, lambda rank: save(tmp_path, rank, 4))
    assert paths == [tmp_path / "iter_0000004"] * 4
    wanted = [rank.values() for rank in ranks]
    for rank in ranks:
        rank.set_values(5)
    answers = run_ranks(ranks, lambda rank: load(tmp_path, rank))
    assert {loaded.iteration for loaded in answers} == {4}
    for rank, values in zip(ranks, wanted, strict=True):
        assert_same(rank.values(), values)


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    rank = one_rank()
    path = save(tmp_path, rank, 1)
    content = json.loads((path / "manifest.json").read_text())
    name = "embedding.word_embeddings.weight"
    (chunk,) = content["tensors"][name]["kinds"]["weight"]["chunks"]
    with safe_open(path / chunk["file"], "pt") as file:
        first = file.get_tensor(chunk["key"])
    embedding = next(iter(rank.optimizer.buffers.shards))
    assert torch.equal(first.view(-1), rank.optimizer.master_weights[0][: 29 * 16])
    assert embedding.start == 0


def test_weights_alone_leave_the_moments(tmp_path: Path) -> None:
    saved, fresh = one_rank(seed=3), one_rank(seed=4)
    save(tmp_path, saved, 1)
    load(tmp_path, fresh, with_optimizer=False)
    expected = one_rank(seed=4)
    assert_same(fresh.optimizer.master_weights, saved.optimizer.master_weights)
    assert_same(fresh.optimizer.state("exp_avg"), expected.optimizer.state("exp_avg"))
    assert fresh.optimizer.step_count == 4


def test_weights_load_for_inference(tmp_path: Path) -> None:
    saved = one_rank()
    path = save(tmp_path, saved, 1)
    model = build_model(
        small_spec(tied=False, vocab=29, padded=32, num_layers=1),
        build_grid(ONE, 0),
        seq_length=8,
        sequence_parallel=False,
        dtype=torch.bfloat16,
        device=CPU,
    )
    grid = build_grid(ONE, 0)
    buffers = allocate_buffers(model.registry, grid=grid, weight_dtype=torch.bfloat16, device=CPU)
    with CheckpointReader(path) as reader:
        fill_weights(buffers, CheckpointSource(reader, "weight"))
        reader.finish()
    assert torch.equal(
        torch.cat(buffers.weights.full), torch.cat(saved.optimizer.master_weights).to(torch.bfloat16)
    )


def test_a_model_with_more_tensors_is_named(tmp_path: Path) -> None:
    save(tmp_path, one_rank(), 1)
    with pytest.raises(MismatchError, match=r"has no tensor decoder\.layers\.1\."):
        load(tmp_path, one_rank(num_layers=2))


def test_a_model_with_fewer_tensors_is_named(tmp_path: Path) -> None:
    save(tmp_path, one_rank(num_layers=2), 1)
    with pytest.raises(
        MismatchError, match=r"has the tensor decoder\.layers\.1\..* and \d+ more, which the model lacks"
    ):
        load(tmp_path, one_rank())


def test_another_shape_is_named(tmp_path: Path) -> None:
    save(tmp_path, one_rank(), 1)
    other = build_rank(ONE, 0, small_spec(tied=False, vocab=31, padded=32, num_layers=1))
    with pytest.raises(
        MismatchError, match=r"word_embeddings\.weight has shape \[29, 16\], the model's has \[31, 16\]"
    ):
        load(tmp_path, other)


def test_a_mismatch_does_not_fall_back(tmp_path: Path) -> None:
    """The older checkpoint would fit, but the user must learn that the newer one does not."""
    save(tmp_path, one_rank(), 1)
    save(tmp_path, one_rank(num_layers=2), 2)
    with pytest.raises(MismatchError):
        load(tmp_path, one_rank())


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, one_rank(seed=1), 5)
    save(tmp_path, one_rank(seed=2), 5)
    rank = one_rank(seed=9)
    load(tmp_path, rank)
    assert_same(rank.values(), one_rank(seed=2).values())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000005",
        "latest_checkpointed_iteration.txt",
    ]


def test_newest_valid_is_none_where_nothing_is(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("box", "most"),
    [(((2, 9),), 3), (((0, 5), (3, 10)), 20), (((1, 4), (0, 6), (2, 5)), 7), (((0, 2), (0, 9)), 4)],
)
def test_cut_boxes_tile_and_are_small(box: tuple[tuple[int, int], ...], most: int) -> None:
    parts = list(split_box(box, most))
    moved = [tuple((a - s, b - s) for (a, b), (s, _) in zip(part, box, strict=True)) for part in parts]
    assert tiling_problem(box_shape(box), moved) is None
    assert parts == sorted(parts)
    assert all(torch.zeros(box_shape(part)).numel() <= most for part in parts)


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([((0, 4), (0, 4))], None),
        ([((0, 2), (0, 4)), ((2, 4), (0, 1)), ((2, 4), (1, 4))], None),
        ([((0, 2), (0, 4))], "have 8 elements, the tensor has 16"),
        ([((0, 4), (0, 2)), ((0, 2), (1, 3)), ((2, 4), (2, 4))], "overlap"),
    ],
)
def test_boxes_that_do_not_tile_are_found(
    boxes: list[tuple[tuple[int, int], ...]], problem: str | None
) -> None:
    found = tiling_problem((4, 4), boxes)
    assert found is None if problem is None else problem in str(found)
