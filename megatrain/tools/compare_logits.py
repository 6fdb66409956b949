"""Logits of an exported folder in transformers, compared with the logits of the checkpoint it comes from, in fp32 on the CPU.

checkpoint ─> our model, weights rounded to the dtype of the folder ─┐
folder ─> from_pretrained ─────────────────────────────────────────────┴─> largest difference
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from megatrain.checkpoint.manifest import DTYPES
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.config.errors import MegatrainError
from megatrain.inference.cached_model import hidden_states
from megatrain.inference.stored_model import ModelOptions, build_stored_model
from megatrain.model.gpt import Model
from megatrain.model.head import Head
from megatrain.parallel.batch import PassInfo

_NUM_TOKENS: Final = 64
_LIMIT: Final = 1e-4
"""Largest difference, relative to the largest logit: sums in another order stay below 1e-5 of it."""


def compare_logits(reader: CheckpointReader, folder: Path, *, vocab_size: int, dtype: str | None) -> str:
    """Return a sentence about the largest difference.

    Args:
        dtype: name of the folder's dtype in safetensors; None: the dtype of the checkpoint.

    Raises:
        MegatrainError: it is too large.
    """
    if find_spec("transformers") is None:
        return (
            "logits were not compared: the package transformers is not installed (pip install transformers)"
        )
    num_tokens = min(_NUM_TOKENS, reader.manifest.config["data"]["seq_length"])
    tokens = torch.arange(num_tokens)[None] * 7919 % vocab_size  # a prime: tokens of the whole vocabulary
    theirs = _logits_of_transformers(folder, tokens)
    ours = _our_logits(reader, tokens, vocab_size, dtype).transpose(0, 1)
    error, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    found = f"largest error {error:.3g} of logits up to {largest:.3g}, over {num_tokens} tokens, against transformers"
    if not error <= _LIMIT * max(largest, 1.0):
        raise MegatrainError(
            f"{folder}: {found}",
            fix="do not use the folder; report its config.json, with the configuration of the checkpoint",
        )
    return found


def _our_logits(reader: CheckpointReader, tokens: Tensor, vocab_size: int, dtype: str | None) -> Tensor:
    """Return the logits of the checkpoint, [s, b, v], with weights of `dtype`."""
    options = ModelOptions(device=torch.device("cpu"), dtype=torch.float32)
    model = build_stored_model(reader, options, vocab_size=vocab_size)
    if dtype is not None:
        with torch.no_grad():
            for segment in model.segments:
                for weight in segment.parameters():
                    weight.copy_(weight.to(DTYPES[dtype]))
    return all_logits(model, tokens)


def _logits_of_transformers(folder: Path, tokens: Tensor) -> Tensor:
    """Return the logits of the folder's model, [b, s, v]; no code of the folder runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers  # noqa: PLC0415 (optional)

        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
        with torch.no_grad():
            logits: Tensor = model.eval()(tokens, use_cache=False).logits
    return logits


@torch.no_grad()
def all_logits(model: Model, tokens: Tensor) -> Tensor:
    """Return the logits of the next token at each position of `tokens` [b, s]: [s, b, v]."""
    info = PassInfo(is_training=False)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    head = model.segments[-1]
    assert isinstance(head, Head)
    return head.logits(hidden_states(model, tokens, positions, info), info)
