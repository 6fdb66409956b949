"""`megatrain generate`: continue a prompt with the model of a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from megatrain.inference.generate import Sampling, generate
from megatrain.inference.stored_model import load_model


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand: print the prompt and the generated text as it is sampled; return the exit code."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = load_model(Path(arguments.load), spec=tuple(arguments.spec), device=device, dtype=dtype)
    for line in loaded.skipped:
        print(f"> {line}")
    print(f"> {loaded.path}, iteration {loaded.iteration}")
    sampling = Sampling(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    print(arguments.prompt, end="", flush=True)
    for text in generate(loaded, arguments.prompt, sampling):
        print(text, end="", flush=True)
    print()
    return 0
