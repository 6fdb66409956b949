"""The gate of attention's output against its formula, differentiated by autograd."""

import torch

from megatrain.kernels.output_gate import gate_output, gate_output_backward


def test_the_gate_and_its_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate, dy = torch.randn(3, 5, 2, 12, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    gate.requires_grad_()
    expected = x / (1 + torch.exp(-gate))
    expected.backward(dy)
    torch.testing.assert_close(gate_output(x.detach(), gate.detach()), expected.detach())
    dx, dgate = gate_output_backward(dy, x.detach(), gate.detach())
    torch.testing.assert_close(dx, x.grad)
    torch.testing.assert_close(dgate, gate.grad)


def test_the_sigmoid_is_not_rounded_before_the_product() -> None:
    x = torch.full((1, 1, 1), 3.0, dtype=torch.bfloat16)
    gate = torch.full((1, 1, 1), 0.01, dtype=torch.bfloat16)
    expected = (x.double() * gate.double().sigmoid()).bfloat16()
    assert torch.equal(gate_output(x, gate), expected)
    assert not torch.equal(x * gate.sigmoid(), expected)
