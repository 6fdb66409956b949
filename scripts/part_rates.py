#!/usr/bin/env python3
"""Measure the rates of the GEMMs and the attention of a benchmark case on one GPU, for `scripts/roofline.py`.

    python3 scripts/part_rates.py S1 A1

Products are those of a layer and of the head: forward, input gradient, and weight gradient accumulated in fp32. Their rate
is total FLOPs over total time, each counted as often as a step runs it. Attention is causal, with the kernel of a run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from benchmarks.optimizer import milliseconds
from roofline import active_width, plan_of

from megatrain.config import Plan
from megatrain.kernels.attention.backends import attention_kernel
from megatrain.kernels.attention.interface import MaskSpec
from megatrain.kernels.linear import accumulate_weight_gradient

WARM_UP, REPEATS = 5, 20


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("error: rates are measured on a GPU, and torch finds none\n  fix: check `nvidia-smi`")
    for name in sys.argv[1:] or ["S1"]:
        plan = plan_of(name)
        print(f"{name}: products {products(plan):.0f} TFLOP/s")
        forward, backward = attention(plan)
        print(
            f"{name}: attention {forward:.0f} forward, {backward:.0f} backward ({plan.derived.attention_backend})"
        )


def products(plan: Plan) -> float:
    """Return the TFLOP/s of all GEMMs of a step."""
    model, layers = plan.config.model, plan.derived.model_spec.layers
    tokens, h = plan.config.training.micro_batch_size * plan.config.data.seq_length, model.hidden_size
    layer, mlp = layers[0].attention, layers[0].dense or layers[0].experts
    inner, keys = layer.num_heads * layer.head_dim, layer.num_query_groups * layer.head_dim
    width = active_width(mlp)
    num_layers = len(layers)
    shapes = [
        (inner + 2 * keys, h, num_layers),
        (h, inner, num_layers),
        (width * (2 if mlp.is_gated else 1), h, num_layers),
        (h, width, num_layers),
        (plan.config.model.padded_vocab_size, h, 1),
    ]
    flops = seconds = 0.0
    for outputs, inputs, times in shapes:
        rows = tokens if times > 1 else min(tokens, 2**30 // outputs)  # the head processes chunks of 2 GB
        x, dy = (torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) for n in (inputs, outputs))
        weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        sums = torch.zeros(outputs, inputs, device="cuda")
        runs: list[Callable[[], object]] = [
            lambda x=x, weight=weight: x @ weight.t(),
            lambda dy=dy, weight=weight: dy @ weight,
            lambda sums=sums, dy=dy, x=x: accumulate_weight_gradient(sums, dy, x),
        ]
        rates = []
        for run in runs:
            duration = seconds_of(run)
            run_flops = 2 * rows * outputs * inputs
            rates.append(run_flops / duration / 1e12)
            flops += run_flops * times * tokens / rows
            seconds += duration * times * tokens / rows
        print(f"   {rows} x {inputs} -> {outputs}: {', '.join(f'{rate:.0f}' for rate in rates)}")
    return flops / seconds / 1e12


def attention(plan: Plan) -> tuple[float, float]:
    """Return the TFLOP/s of attention, forward and backward."""
    layer = plan.derived.model_spec.layers[0].attention
    s, b, d = plan.config.data.seq_length, plan.config.training.micro_batch_size, layer.head_dim
    q, dout = (torch.randn(s, b, layer.num_heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (
        torch.randn(s, b, layer.num_query_groups, d, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    kernel, spec = (
        attention_kernel(plan.derived.attention_backend, 1 / math.sqrt(d)),
        MaskSpec(is_causal=True),
    )
    out, lse = kernel.forward(q, k, v, spec)
    flops = 2 * s * s * b * layer.num_heads * d
    forward = seconds_of(lambda: kernel.forward(q, k, v, spec))
    backward = seconds_of(lambda: kernel.backward(dout, q, k, v, out, lse, spec))
    return flops / forward / 1e12, 2.5 * flops / backward / 1e12


def seconds_of(run: Callable[[], object]) -> float:
    """Return the median time of a run on the device."""
    return milliseconds(run, torch.device("cuda"), warm_up=WARM_UP, repeats=REPEATS) * 1e-3


if __name__ == "__main__":
    main()
