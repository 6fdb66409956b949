"""A linear layer that recomputes the activation before it has the bits of one that saves its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatrain.config.model_spec.lora import LoraSpec
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.norm import NormSpec
from megatrain.config.schema.quantization import QUANTIZATION_FORMATS
from megatrain.kernels.activations import GELU, SILU, Activation
from megatrain.model.implementations.fake_quantized import fake_quantized_builder
from megatrain.model.implementations.local_builder import LocalBuilder
from megatrain.model.implementations.lora import lora_builder
from megatrain.model.layouts import LinearLayout, rows_layout
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import Init, ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel, column_linear, row_linear

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
ACTIVATIONS = [Activation(fn=GELU), Activation(fn=SILU, is_gated=True)]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def found(activation: Activation, device: str) -> tuple[list[Tensor], int]:
    """Return output and gradients, and the number of saved elements."""
    torch.manual_seed(0)
    x = torch.randn(6, 2, 32 if activation.is_gated else 16).to(device).requires_grad_()
    weight = torch.randn(8, 16).to(device)
    weight_grad, saved = torch.zeros_like(weight), []
    alone = RankGroup("alone", (0,), 0)
    tp = TensorParallel(alone, alone, sequence_parallel=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        y = row_linear(x.clone(), weight, weight_grad, tp, PassInfo(), activation=activation)
    y.backward(torch.randn(6, 2, 8).to(device))
    return [y.detach(), x.grad, weight_grad], sum(saved)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=["plain", "gated"])
def test_the_bits_are_the_same(activation: Activation, device: str) -> None:
    kept, num_kept = found(activation, device)
    again, num_again = found(replace(activation, is_recomputed=True), device)
    assert all(torch.equal(x, y) for x, y in zip(kept, again, strict=True))
    assert num_kept - num_again == 6 * 2 * 16


ALONE = RankGroup("alone", (0,), 0)
BUILDERS = {
    "adapter": lora_builder(LoraSpec(rank=3, alpha=6, modules=("down_proj",))),
    "adapter with dropout": lora_builder(LoraSpec(rank=3, alpha=6, modules=("down_proj",), dropout=0.5)),
    "no adapter": lora_builder(LoraSpec(rank=3, alpha=6, modules=("q_proj",))),
    "rounded inputs": fake_quantized_builder(QUANTIZATION_FORMATS["int8"]),
    "rounded weights": fake_quantized_builder(QUANTIZATION_FORMATS["int8-weights"]),
}


def found_in_layer(make: Callable[..., LocalBuilder], *, recompute: bool) -> tuple[list[Tensor], int]:
    """Return output and gradients of a layer, and the floating-point elements that it saves, each storage counted once."""
    torch.manual_seed(0)
    tp, dtype = TensorParallel(ALONE, ALONE, sequence_parallel=False), torch.float64
    builder = make(tp, ContextParallel(ALONE), dtype, NormSpec(), 0)
    weight = LinearLayout(rows_layout("decoder.layers.0.mlp.down.weight", 8, 16, Init(), tp))
    layer = builder.activation_row_linear(MlpSpec(ffn_hidden_size=16), weight, recompute_activation=recompute)
    layer.to_empty(device="cpu")
    modules = [one for one in layer.modules() if isinstance(one, ShardedModule)]
    for module in modules:
        for name, value in module.named_parameters(recurse=False):
            torch.nn.init.normal_(value.data)
            module.weight_grads[name] = torch.zeros_like(value)
    x, saved = torch.randn(6, 2, 32, dtype=dtype, requires_grad=True), {}

    def save(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        y = layer(x.clone(), PassInfo())
    count = sum(t.numel() for t in saved.values() if t.is_floating_point())
    y.backward(torch.randn(6, 2, 8, dtype=dtype))
    grads = [grad for module in modules for grad in module.weight_grads.values()]
    return [y.detach(), x.grad, *grads], count


@pytest.mark.parametrize("name", BUILDERS)
def test_layers_of_adapters_and_rounded_ones_recompute_too(name: str) -> None:
    kept, num_kept = found_in_layer(BUILDERS[name], recompute=False)
    again, num_again = found_in_layer(BUILDERS[name], recompute=True)
    assert all(torch.equal(x, y) for x, y in zip(kept, again, strict=True))
    # A frozen weight saves no input.
    assert num_kept - num_again == (0 if name == "no adapter" else 6 * 2 * 16)


@pytest.mark.parametrize("linear", [column_linear, row_linear])
def test_layers_with_frozen_weights_save_no_input(linear: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    tp = TensorParallel(ALONE, ALONE, sequence_parallel=False)
    x, weight, saved = torch.randn(6, 2, 16, requires_grad=True), torch.randn(8, 16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = linear(x, weight, None, tp, PassInfo())
    assert [tuple(t.shape) for t in saved] == [(8, 16)]
    dy = torch.randn(6, 2, 8)
    y.backward(dy)
    assert torch.equal(x.grad, dy @ weight)
