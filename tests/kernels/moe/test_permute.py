"""Permutation of rows into expert order and back, against loops over tokens."""

import pytest
import torch

from megatrain.kernels.moe.permute import (
    permute_rows,
    permute_values,
    sort_by_expert,
    unpermute_rows,
    unpermute_values,
)

EXPERTS = torch.tensor([[2, 0], [0, 1], [4, 2], [0, 2]])


def test_assignments_of_an_expert_keep_the_order_of_tokens() -> None:
    permutation = sort_by_expert(EXPERTS, num_experts=5, num_rows=8)
    assert permutation.tokens.tolist() == [0, 1, 3, 1, 0, 2, 3, 2]
    assert permutation.ends.tolist() == [3, 4, 7, 7, 8]
    assert permutation.ends.dtype == torch.int32
    assert permutation.rows.tolist() == [[4, 0], [1, 3], [7, 5], [2, 6]]


def test_assignments_to_other_experts_and_dropped_ones_get_no_row() -> None:
    kept = torch.ones_like(EXPERTS, dtype=torch.bool)
    kept[2, 1] = False
    permutation = sort_by_expert(EXPERTS, num_experts=2, num_rows=6, first_expert=1, kept=kept)
    assert permutation.tokens.tolist() == [1, 0, 3, -1, -1, -1]
    assert permutation.ends.tolist() == [1, 3]
    assert permutation.rows.tolist() == [[1, -1], [-1, 0], [-1, -1], [-1, 2]]


def test_padded_experts_have_empty_rows() -> None:
    permutation = sort_by_expert(EXPERTS, num_experts=3, num_rows=12, rows_per_expert=4)
    assert permutation.tokens.tolist() == [0, 1, 3, -1, 1, -1, -1, -1, 0, 2, 3, -1]
    assert permutation.ends.tolist() == [4, 8, 12]
    assert permutation.rows.tolist() == [[8, 0], [1, 4], [-1, 9], [2, 10]]


def test_assignments_beyond_the_rows_have_none_and_are_counted() -> None:
    permutation = sort_by_expert(EXPERTS, num_experts=5, num_rows=5)
    assert permutation.tokens.tolist() == [0, 1, 3, 1, 0]
    assert permutation.ends.tolist() == [3, 4, 5, 5, 5]
    assert permutation.rows.tolist() == [[4, 0], [1, 3], [-1, -1], [2, -1]]
    assert permutation.load.item() == 8
    of_one = sort_by_expert(EXPERTS, num_experts=1, num_rows=8, first_expert=2)
    assert of_one.load.item() == 3


@pytest.mark.parametrize("rows_per_expert", [None, 5])
def test_rows_are_permuted_and_summed_back(rows_per_expert: int | None) -> None:
    num_rows = 8 if rows_per_expert is None else 3 * rows_per_expert
    permutation = sort_by_expert(EXPERTS, num_experts=3, num_rows=num_rows, rows_per_expert=rows_per_expert)
    x = torch.arange(8.0, dtype=torch.float64).view(4, 2)
    rows = permute_rows(x, permutation)
    for row, token in zip(rows, permutation.tokens.tolist(), strict=True):
        assert torch.equal(row, x[token] if token >= 0 else torch.zeros(2, dtype=torch.float64))
    rows[permutation.assignments < 0] = float("nan")  # never read
    num_here = (EXPERTS < 3).sum(1, keepdim=True)
    assert torch.equal(unpermute_rows(rows, permutation), x * num_here)
    rows = permute_rows(x.fill_(float("nan")), permutation)
    assert torch.equal(rows.isnan().all(1), permutation.tokens >= 0)
    assert torch.equal(rows.isnan().any(1), permutation.tokens >= 0)


def test_values_are_permuted_and_unpermuted() -> None:
    permutation = sort_by_expert(EXPERTS, num_experts=3, num_rows=12, rows_per_expert=4)
    numbers = torch.arange(1.0, 9.0).view(4, 2)
    at_rows = permute_values(numbers, permutation)
    assert at_rows.tolist() == [2, 3, 7, 0, 4, 0, 0, 0, 1, 6, 8, 0]
    at_rows[permutation.assignments < 0] = float("nan")
    assert torch.equal(unpermute_values(at_rows, permutation), numbers.masked_fill(EXPERTS >= 3, 0))
    at_rows.fill_(float("nan"))
    assert torch.equal(unpermute_values(at_rows, permutation).isnan(), EXPERTS < 3)
    at_rows = permute_values(numbers.fill_(float("nan")), permutation)
    assert torch.equal(at_rows.isnan(), permutation.assignments >= 0)


def test_sums_of_bf16_rows_accumulate_in_fp32() -> None:
    """A sum in bf16 would lose the small rows."""
    permutation = sort_by_expert(torch.arange(17)[None], num_experts=17, num_rows=17)
    rows = torch.full((17, 1), 1.0, dtype=torch.bfloat16)
    rows[0] = 256
    assert unpermute_rows(rows, permutation).item() == 272
