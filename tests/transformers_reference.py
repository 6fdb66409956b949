"""Losses and greedy texts that `transformers` computes, as the reference of tests."""

from __future__ import annotations

import copy
import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB
from torch import Tensor
from torch.nn import functional as F

from megatrain.tools.main import main

END = 2
"""Token that ends documents."""
LEARNING_RATE = 1e-3
TRAINING = (
    f"--seq-length 16 --mock-data --train-iters 5 --lr {LEARNING_RATE} --lr-decay-style constant --weight-decay 0"
    " --adam-beta2 0.95 --clip-grad 0 --eval-iters 0 --device cpu --log-interval 1 --hidden-dropout 0 --attention-dropout 0"
    " --no-calculate-per-token-loss --moe-router-bias-update-rate 0"
).split()
"""Five iterations that `training_losses` repeats."""


def global_batches(flags: list[str], *, num_samples: int) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and labels [b, s] of the five iterations of a run with `num_samples` a batch."""
    found = []
    for iteration in range(5):
        samples = []
        for number in range(iteration * num_samples, (iteration + 1) * num_samples):
            with redirect_stdout(StringIO()) as printed:
                assert (
                    main(["data", "sample", *flags, "--of", "train", "--index", str(number), "--json"]) == 0
                )
            samples.append(json.loads(printed.getvalue()))
        tokens, labels = (torch.tensor([sample[key] for sample in samples]) for key in ("tokens", "labels"))
        found.append((tokens, labels))
    return found


def training_losses(model: Any, batches: list[tuple[Tensor, Tensor]], *, lr: float) -> list[float]:
    """Train a copy of a model of transformers with batches of tokens and labels [b, s]; return the losses.

    In fp64: in fp32 the losses of Qwen3-Next are off by up to 4.5e-5 after five updates of Adam, ours by 2e-6.
    """
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # grouped GEMMs have no fp64
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for tokens, labels in batches:
        loss = F.cross_entropy(model(tokens, use_cache=False).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def greedy_tokens(model: Any, prompt: list[int], *, repetition_penalty: float = 1.0) -> list[int]:
    """Return the tokens after a prompt, most likely first: 15, or up to the end of the document."""
    ids = torch.tensor([prompt])
    whole = model.generate(
        ids,
        do_sample=False,
        max_new_tokens=15,
        repetition_penalty=repetition_penalty,
        eos_token_id=END,
        pad_token_id=0,
    )
    found: list[int] = whole[0, len(prompt) :].tolist()
    return found


def write_tokenizer(folder: Path, *, size: int = VOCAB) -> None:
    """Write a tokenizer of characters."""
    texts = ["<unk>", "<s>", "</s>", *map(chr, range(32, 32 + size - 3))]
    model = {
        "type": "BPE",
        "vocab": {text: number for number, text in enumerate(texts)},
        "merges": [],
        "unk_token": "<unk>",
    }
    content = {"version": "1.0", "added_tokens": [], "model": model, "decoder": {"type": "Fuse"}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": texts[END]}))


def ids_of(prompt: str) -> list[int]:
    """Return the tokens of this tokenizer."""
    return [ord(character) - 29 for character in prompt]
