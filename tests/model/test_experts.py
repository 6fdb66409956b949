"""Experts of a layer against a loop over tokens and experts, in fp64: latents, biases, shared experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.config.model_spec.experts import ExpertsSpec, RouterSpec
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.model_spec.norm import NormSpec
from megatrain.config.model_spec.stack import Stack
from megatrain.model.experts.build import expert_branch
from megatrain.model.experts.experts import ExpertBranch
from megatrain.model.implementations.local_builder import LocalBuilder
from megatrain.model.layer import BranchOutput
from megatrain.model.layer_context import LayerContext, LayerRanks
from megatrain.model.recompute import Recompute
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context_parallel import ContextParallel, TokenSplit
from megatrain.parallel.expert_parallel import ExpertParallel
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel

S, B, H, E, K = 5, 2, 8, 4, 2
NAMES = ("tp", "kv", "cp", "dp", "ep", "etp")
GROUPS = {name: RankGroup(name, (0,), 0) for name in NAMES}
Weights = dict[str, Tensor]

CASES = {
    "plain": ExpertsSpec(
        router=RouterSpec(num_experts=E, top_k=K, is_pre_softmax=True), expert=MlpSpec(ffn_hidden_size=6)
    ),
    "latent": ExpertsSpec(
        router=RouterSpec(num_experts=E, top_k=K, is_pre_softmax=True),
        expert=MlpSpec(ffn_hidden_size=6),
        shared=MlpSpec(ffn_hidden_size=4),
        latent_size=3,
    ),
    "biases": ExpertsSpec(
        router=RouterSpec(num_experts=E, top_k=K, is_pre_softmax=True, has_bias=True),
        expert=MlpSpec(ffn_hidden_size=6, has_bias=True),
        shared=MlpSpec(ffn_hidden_size=4, has_bias=True),
        has_shared_gate=True,
    ),
    "latent with biases": ExpertsSpec(
        router=RouterSpec(num_experts=E, top_k=K, is_pre_softmax=True, has_bias=True),
        expert=MlpSpec(ffn_hidden_size=6, has_bias=True),
        latent_size=5,
    ),
}


def branch_of(spec: ExpertsSpec) -> tuple[ExpertBranch, Weights, Weights]:
    """Return a branch without a norm, its weights and their gradients, by canonical name without the prefix."""
    tp = TensorParallel(GROUPS["tp"], GROUPS["kv"], sequence_parallel=False)
    cp = ContextParallel(GROUPS["cp"])
    builder = LocalBuilder(tp, cp, torch.float64, NormSpec(), seed=0)
    layer = LayerSpec(parts=(spec,), norm_position="post")
    gpt = ModelSpec(
        hidden_size=H, vocab_size=8, padded_vocab_size=8, stacks=(Stack(layers=(layer,)),), is_tied=False, init_std=1,
        output_init_std=1,
    )  # fmt: skip
    ranks = LayerRanks(
        split=TokenSplit(tp, cp), dp=GROUPS["dp"], parallel=ExpertParallel(GROUPS["ep"], GROUPS["etp"], (GROUPS["ep"],)),
        dtype=torch.float64, seed=0,
    )  # fmt: skip
    branch = expert_branch(spec, LayerContext(gpt, 0, builder, ranks, lambda _: None, Recompute()))
    branch.output = BranchOutput([])
    generator = torch.Generator().manual_seed(1)
    weights: Weights = {}
    gradients: Weights = {}
    for module in branch.modules():
        if not isinstance(module, ShardedModule):
            continue
        for attribute, layout in module.layouts.items():
            value = torch.randn(layout.shape, dtype=torch.float64, generator=generator)
            module.register_parameter(attribute, torch.nn.Parameter(value))
            module.weight_grads[attribute] = torch.zeros_like(value)
            for piece in layout.pieces:
                rows, name = slice(piece.row, piece.row + piece.shape[0]), piece.name.split(".mlp.")[1]
                weights[name], gradients[name] = value[rows], module.weight_grads[attribute][rows]
    return branch, weights, gradients


def mlp(x: Tensor, weights: Weights, name: str) -> Tensor:
    gate, up, down = (weights[f"{name}.{part}.weight"] for part in ("gate", "up", "down"))
    biases = [weights.get(f"{name}.{part}.bias", torch.zeros(())) for part in ("gate", "up", "down")]
    return (F.silu(x @ gate.T + biases[0]) * (x @ up.T + biases[1])) @ down.T + biases[2]


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))


def reference(spec: ExpertsSpec, x: Tensor, weights: Weights) -> Tensor:
    """Compute the branch token by token, with latents of a token projected back after the sum over its experts."""
    rows = []
    for token in x.flatten(0, 1):
        scores = linear(token, weights, "router").softmax(-1)
        inner = token if spec.latent_size is None else linear(token, weights, "latent_down")
        out = sum(scores[e] * mlp(inner, weights, f"experts.{e}") for e in scores.topk(K).indices.tolist())
        assert isinstance(out, Tensor)
        if spec.latent_size is not None:
            out = linear(out, weights, "latent_up")
        if spec.shared is not None:
            gate = (token @ weights["shared_gate.weight"].T).sigmoid() if spec.has_shared_gate else 1
            out = out + gate * mlp(token, weights, "shared")
        rows.append(out)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_a_loop_over_tokens(name: str) -> None:
    spec = CASES[name]
    branch, weights, gradients = branch_of(spec)
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(S, B, H, dtype=torch.float64, generator=generator) for _ in range(2))
    own = x.clone().requires_grad_()
    _, out = branch(own, None, PassInfo())
    out.backward(dy)

    copies = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    theirs = x.clone().requires_grad_()
    expected = reference(spec, theirs, copies)
    expected.backward(dy)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-10, atol=1e-10)
    for tensor, copy in copies.items():
        found = copy.grad if copy.grad is not None else torch.zeros_like(copy)
        torch.testing.assert_close(gradients[tensor], found, rtol=1e-10, atol=1e-10, msg=tensor)


def test_names_and_shapes_of_latent_experts() -> None:
    _, weights, _ = branch_of(CASES["latent with biases"])
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    assert shapes["latent_down.weight"] == (5, H)
    assert shapes["latent_up.weight"] == (H, 5)
    assert shapes["latent_up.bias"] == (H,)
    assert shapes["experts.3.gate.weight"] == (6, 5)
    assert shapes["experts.3.down.weight"] == (5, 6)
    assert shapes["experts.3.down.bias"] == (5,)
    assert shapes["router.bias"] == (E,)
