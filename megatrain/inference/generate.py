"""Generate text from a prompt with the weights of a checkpoint, in one process.

    checkpoint ─> config, tokenizer, weights ─> [ tokens ─> logits of the last position ─> next token ] ...

Each token runs the whole context again, without a key-value cache: meant to inspect a model, not to serve it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.config.errors import ConfigError
from megatrain.data.tokenizers.build import Tokenizer
from megatrain.inference.stored_model import LoadedModel
from megatrain.model.gpt import Model
from megatrain.model.head import Head
from megatrain.parallel.batch import Batch, PassInfo


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling of the next token. Temperature 0 is greedy."""

    max_new_tokens: int = 64
    temperature: float = 0.8
    top_k: int = 40
    """Number of most likely tokens to sample from; 0: all."""
    seed: int = 0


def generate(loaded: LoadedModel, prompt: str, sampling: Sampling) -> Iterator[str]:
    """Yield the text that follows `prompt`, piece by piece, up to the end-of-document token or `max_new_tokens`."""
    device = next(loaded.model.segments[0].parameters()).device
    generator = torch.Generator(device).manual_seed(sampling.seed)
    ids = loaded.tokenizer.encode(prompt) or _empty_prompt(loaded.tokenizer)
    shown = len(loaded.tokenizer.decode(ids))
    for _ in range(sampling.max_new_tokens):
        context = torch.tensor([ids[-loaded.max_context :]], device=device)
        ids.append(_sample(last_logits(loaded.model, context), sampling, generator))
        if ids[-1] == loaded.tokenizer.eod:
            return
        text = loaded.tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # a character may take several tokens
            yield text[shown:]
            shown = len(text)


def last_logits(model: Model, tokens: Tensor) -> Tensor:
    """Return the logits of the token after `tokens` [1, s]: [v]."""
    return all_logits(model, tokens, last=1)[-1, 0]


@torch.no_grad()
def all_logits(model: Model, tokens: Tensor, *, last: int | None = None) -> Tensor:
    """Return the logits of the next token at each position of `tokens` [b, s], or at the `last` ones: [s, b, v]."""
    info = PassInfo(is_training=False)
    unused = torch.zeros_like(tokens)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    batch = Batch(tokens=tokens, labels=unused, loss_mask=unused.float(), position_ids=positions)
    hidden = None
    for segment in model.segments[:-1]:
        hidden = segment(hidden, batch, info)
    assert hidden is not None
    head = model.segments[-1]
    assert isinstance(head, Head)
    return head.logits(hidden if last is None else hidden[-last:], info)


def _sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.numel():
        threshold = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def _empty_prompt(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of an empty prompt: the end-of-document token of a previous document."""
    if tokenizer.eod is None:
        raise ConfigError(
            "an empty prompt needs an end-of-document token, which the tokenizer lacks",
            fix="use a prompt of at least one token",
        )
    return [tokenizer.eod]
