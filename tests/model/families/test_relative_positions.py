"""The buckets of T5's relative positions are those of Megatron-LM and of transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from megatrain.config.model_spec.attention import RelativePositionSpec
from megatrain.model.families.relative_positions import bucket_of


def test_buckets_are_the_recorded_ones(families: Path) -> None:
    tables = json.loads((families / "t5/buckets.json").read_text())
    assert tables
    for table in tables:
        spec = RelativePositionSpec(
            num_buckets=table["buckets"],
            max_distance=table["max_distance"],
            is_bidirectional=table["bidirectional"],
        )
        found = bucket_of(torch.arange(table["from"], table["to"] + 1), spec)
        assert found.tolist() == table["bucket"]


@pytest.mark.parametrize("is_bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (12, 20), (8, 64), (64, 40)])
def test_buckets_are_those_of_transformers(
    num_buckets: int, max_distance: int, *, is_bidirectional: bool
) -> None:
    spec = RelativePositionSpec(
        num_buckets=num_buckets, max_distance=max_distance, is_bidirectional=is_bidirectional
    )
    distances = torch.arange(-200, 201)
    expected = T5Attention._relative_position_bucket(distances, is_bidirectional, num_buckets, max_distance)
    assert torch.equal(bucket_of(distances, spec), expected)
