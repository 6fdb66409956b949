"""Checkpoints of a model with experts move between any two of twelve layouts, which use all axes together."""

from pathlib import Path

import pytest
import torch
from canonical_weights import hash_tensors
from checkpoint_helpers import STATE_KINDS, assert_same, build_ranks, fill_all, save_all, small_spec
from everyday import one_in

from megatrain.checkpoint.parts import read_manifest
from megatrain.config.model_spec.experts import ExpertsSpec, RouterSpec
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.model import ModelSpec
from megatrain.parallel.rank_lists import STAGES_BEFORE_REPLICAS, GridShape

torch.set_num_threads(1)

NUM_EXPERTS = 8
LAYOUTS = (
    GridShape(etp=1),
    GridShape(dp=3, etp=1),
    GridShape(dp=8, ep=8, etp=1),
    GridShape(dp=4, ep=2, etp=1, dp_copies=4, expert_copies=2),  # nothing is spread
    GridShape(tp=2, dp=4, ep=2, etp=2, dp_copies=2, expert_copies=2),  # two instances
    GridShape(tp=4, cp=2, kv_copies=2, etp=4),
    GridShape(cp=4, dp=2, ep=4, etp=1),
    GridShape(tp=2, cp=2, pp=2, ep=2, etp=1),
    GridShape(tp=2, dp=2, pp=2, ep=2, etp=1),
    GridShape(tp=2, dp=2, pp=2, ep=2, etp=1, order=STAGES_BEFORE_REPLICAS),
    GridShape(tp=2, cp=2, dp=2, ep=4, etp=2),
    GridShape(cp=2, dp=2, pp=2, ep=4, etp=1),
)


def spec_of(shape: GridShape) -> ModelSpec:
    """A dense layer, and one with experts; padded as this layout needs it."""
    spec = small_spec(tied=False, vocab=29, padded=32 if shape.tp > 1 else 29)
    (dense, _), mlp = spec.layers, MlpSpec(ffn_hidden_size=8)
    experts = ExpertsSpec(router=RouterSpec(num_experts=NUM_EXPERTS, top_k=2), expert=mlp, shared=mlp)
    layer = dense.with_part(experts)
    return spec.with_layers((dense, layer))


@pytest.mark.parametrize("step", one_in(2, [9, 1]))
@pytest.mark.nightly
def test_experts_and_all_else_move_between_any_two_layouts(tmp_path: Path, step: int) -> None:
    """Each layout is loaded from every `step`-th other."""
    layouts = [build_ranks(shape, spec_of(shape)) for shape in LAYOUTS]
    wanted = []
    for number, ranks in enumerate(layouts):
        for rank in ranks:
            rank.set_values(3)
        wanted.append([rank.values() for rank in ranks])
        path = save_all(tmp_path, ranks, number + 1, chunk_bytes=700, file_bytes=5000)
        names = [name for name in read_manifest(path).tensors if ".experts." in name]
        assert len(names) == 3 * NUM_EXPERTS
    folders = sorted(tmp_path.glob("iter_*"))
    hashes = [[hash_tensors(folder, kind) for kind in STATE_KINDS] for folder in folders]
    assert all(found == hashes[0] for found in hashes)
    for number, folder in enumerate(folders):
        for ranks, values in list(zip(layouts, wanted, strict=True))[number % step :: step]:
            for rank in ranks:
                rank.clear()
            fill_all(folder, ranks)
            for rank, expected in zip(ranks, values, strict=True):
                assert_same(rank.values(), expected)
