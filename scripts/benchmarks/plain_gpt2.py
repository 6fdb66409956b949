#!/usr/bin/env python3
"""Train GPT-2 124M in a plain PyTorch loop, the baseline of megatrain's case S1.

    python3 scripts/benchmarks/plain_gpt2.py --iterations 12

Uses torch.nn modules, torch.compile over model and loss, bf16 autocast, fp32 weights and gradients, AdamW(fused=True), clipping.
Prints median milliseconds per iteration, tokens per second and peak memory over all iterations but the first five.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, s, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--micro-batch-size", type=int, default=64)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab-size", type=int, default=50304)
    arguments = parser.parse_args()
    torch.manual_seed(1234)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length, vocabulary = arguments.seq_length, arguments.vocab_size
    model = Gpt(arguments.layers, 768, 12, vocabulary, length).to(device)
    step = torch.compile(model) if device.type == "cuda" else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    times = []
    for _ in range(arguments.iterations):
        began = time.perf_counter()
        for _ in range(arguments.num_microbatches):
            ids = torch.randint(0, vocabulary, (arguments.micro_batch_size, length + 1), device=device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = step(ids[:, :-1], ids[:, 1:]) / arguments.num_microbatches
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times[min(5, len(times) - 1) :])
    tokens = arguments.micro_batch_size * arguments.num_microbatches * length
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    print(
        f"plain PyTorch {torch.__version__}: {seconds * 1e3:.0f} ms, {tokens / seconds:,.0f} tokens/s, {peak:.1f} GB"
    )


if __name__ == "__main__":
    main()
