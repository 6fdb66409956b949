"""The tree of a model with experts: equal experts share a line; parameters active per token."""

import torch

from megatrain.config import Facts, parse, resolve
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.rank_lists import GridShape
from megatrain.training.build import build_model_from_plan
from megatrain.training.planning.model_tree import ModelTree, model_tree, part_of

FLAGS = (
    "--num-layers 3 --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 24 --normalization RMSNorm --swiglu"
    " --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 8"
    " --micro-batch-size 1 --train-iters 1 --lr 1e-2 --mock-data --vocab-size 50 --device cpu --num-experts 4"
    " --moe-layer-freq [0,1,1] --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 12"
)


def tree_of(top_k: int) -> ModelTree:
    return tree_of_flags(f"{FLAGS} --moe-router-topk {top_k}")


def tree_of_flags(flags: str) -> ModelTree:
    plan = resolve(parse(flags.split()), Facts())
    model = build_model_from_plan(plan, build_grid(GridShape(), 0), torch.device("cpu"))
    return model_tree([model.registry], model.spec.routers_by_name)


def test_active_parameters_leave_out_unselected_experts() -> None:
    tree = tree_of(top_k=3)
    assert tree.by_part["experts"] == 2 * 4 * 3 * 8 * 16
    assert tree.by_part["router"] == 2 * 4 * 8
    assert tree.by_part["mlp"] == 3 * 8 * 24 + 2 * 3 * 8 * 12
    assert tree.parameters - tree.active_parameters == tree.by_part["experts"] // 4
    assert tree_of(top_k=4).active_parameters == tree.parameters


def test_scales_of_rounded_weights_are_no_parameters() -> None:
    """The line that a run prints leaves them out, too."""
    dense = FLAGS.partition(" --num-experts")[0]
    assert tree_of_flags(f"{dense} --qat int8") == tree_of_flags(dense)


def test_equal_experts_have_one_line() -> None:
    (stage,) = tree_of(top_k=2).stages
    experts = next(block for block in stage.blocks if 1 in block.layers)
    names = [tensors.name for tensors in experts.tensors if "experts" in tensors.name]
    assert experts.layers == (1, 2)
    assert names == [f"mlp.experts.0 to 3.{name}.weight" for name in ("gate", "up", "down")]


def test_linear_attention_is_attention_and_the_projection_of_mtp_is_neither() -> None:
    names = ("decoder.layers.0.linear_attention.gate.weight", "mtp.layers.0.projection.weight")
    assert [part_of(name) for name in names] == ["attention", "other"]
