"""State that is not finite is never committed, and the message names tensor, count, rank and the way back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import Rank, build_ranks, one_rank, run_ranks, save, small_spec

from megatrain.checkpoint.errors import CheckpointError, NotFiniteStateError
from megatrain.checkpoint.find import newest_valid
from megatrain.checkpoint.finite import check_finite, check_finite_values
from megatrain.parallel.rank_lists import GridShape

torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ["weight", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_value_is_enough(kind: str, value: float, dtype: torch.dtype) -> None:
    values = torch.rand(1000, dtype=dtype)
    values[777] = value
    if value == -1.0 and kind != "exp_avg_sq":
        check_finite([("a", kind, values)])
        return
    with pytest.raises(NotFiniteStateError, match=rf"{kind} of a has 1 value.*\n  fix: .*--ckpt-step"):
        check_finite([("a", kind, values)])


def test_largest_and_smallest_values_are_valid() -> None:
    limits = torch.finfo(torch.float32)
    values = torch.tensor([limits.max, limits.max, 0.0, -0.0, limits.smallest_normal / 2])
    check_finite([("a", "exp_avg_sq", values), ("b", "weight", -values), ("c", "weight", values[:0])])


def test_parts_of_a_tensor_are_counted_together() -> None:
    bad = torch.tensor([math.nan, 1.0, math.inf])
    parts = [("a", "weight", bad), ("a", "weight", bad), ("b", "weight", bad[1:2]), ("c", "exp_avg", bad)]
    with pytest.raises(NotFiniteStateError, match=r"weight of a has 4 .*exp_avg of c has 2 "):
        check_finite(parts)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("weight", math.nan), ("exp_avg", math.nan), ("exp_avg_sq", -1.0), ("exp_avg_sq", math.inf)],
)
def test_poisoned_state_is_not_committed(tmp_path: Path, kind: str, value: float) -> None:
    rank = one_rank(seed=1)
    save(tmp_path, rank, 1)
    rank.optimizer.state(kind)[0][3] = value
    with pytest.raises(
        CheckpointError, match=rf"iteration 2 .*{kind} of .* has 1 value(.|\n)*fix: .*--ckpt-step"
    ):
        save(tmp_path, rank, 2)
    newest = newest_valid(tmp_path)
    assert newest is not None
    assert newest.iteration == 1
    assert not list(tmp_path.glob("*tmp*"))


def test_all_ranks_fail_and_name_the_rank(tmp_path: Path) -> None:
    ranks = build_ranks(GridShape(tp=2), small_spec(tied=False, vocab=32, padded=32))
    for rank in ranks:
        rank.set_values(1)
    ranks[1].optimizer.state("exp_avg")[0][:2] = math.nan

    def attempt(rank: Rank) -> str:
        with pytest.raises(NotFiniteStateError) as caught:
            save(tmp_path, rank, 1)
        return str(caught.value)

    for message in run_ranks(ranks, attempt):
        assert "rank 1: exp_avg of" in message
        assert "has 2 values" in message


def test_values_of_the_manifest_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    check_finite_values({"a": [1.0, {"b": 2}], "c": None, "d": "nan"}, "state")
    biases = {"layer 0": [0.0, math.inf]}
    with pytest.raises(
        NotFiniteStateError, match=r"state.expert_biases.layer 0\[1\] is inf(.|\n)*fix: .*--ckpt-step"
    ):
        save(tmp_path, one_rank(), 1, state={"expert_biases": biases})
    assert not list(tmp_path.glob("iter_*"))
