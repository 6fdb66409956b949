"""Continues a prompt token by token with a checkpoint's weights, in one process.

    checkpoint ─> config, tokenizer, weights ─> [ tokens ─> logits of the last place ─> next token ] ...

Each token runs the whole window again (no key-value cache): a way to look at a model, not a server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatrain.checkpoint.find import newest_valid
from megatrain.checkpoint.load import load_weights_only, restore_expert_biases
from megatrain.checkpoint.manifest import read_manifest
from megatrain.config.errors import ConfigError, NoCheckpointError
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.build import Tokenizer, load_tokenizer
from megatrain.model.custom_layers import apply_custom_layers
from megatrain.model.gpt import Model, build_model
from megatrain.model.head import Head
from megatrain.model.specs import gpt_spec
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.rank_lists import GridShape


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. Temperature 0 takes the most likely one."""

    max_new_tokens: int = 64
    temperature: float = 0.8
    top_k: int = 40
    """Draw among this many most likely tokens; 0: among all."""
    seed: int = 0


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint's model, ready to be asked."""

    model: Model
    tokenizer: Tokenizer
    window: int
    """Tokens that the model sees at most: the sequence length of its training."""
    path: Path
    iteration: int


def load_model(folder: Path, *, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """The newest valid checkpoint below `folder`.

    Raises:
        NoCheckpointError: there is none.
        ConfigError: its tokenizer has changed since.
    """
    newest = newest_valid(folder)
    if newest is None:
        raise NoCheckpointError(
            f"--load {folder} holds no valid checkpoint",
            fix="name the folder that --save of pretrain.py named",
        )
    path, manifest = newest.path, read_manifest(newest.path)
    tokenizer = _tokenizer(
        TokenizerConfig(**manifest.config["tokenizer"]), manifest.state["tokenizer_fingerprint"]
    )
    window = manifest.config["data"]["seq_length"]
    config = ModelConfig(**manifest.config["model"])
    experts = ExpertsConfig(**manifest.config.get("experts", {}))  # checkpoints from before there were any
    model = build_model(
        apply_custom_layers(gpt_spec(config, experts, vocab_size=tokenizer.vocab_size), config),
        (grid := build_grid(GridShape(), 0)),
        seq_length=window,
        sequence_parallel=False,
        dtype=dtype,
        device=device,
    )
    buffers = allocate_buffers(
        model.registry,
        grid=grid,
        weight_dtype=dtype,
        grad_dtype=dtype,
        device=device,
        has_gradients=False,
    )
    load_weights_only(path, buffers)
    restore_expert_biases(model, manifest.state, path)
    return LoadedModel(model, tokenizer, window, path, manifest.iteration)


def continued(loaded: LoadedModel, prompt: str, sampling: Sampling) -> Iterator[str]:
    """The text that follows `prompt`, piece by piece, up to the end of document or `max_new_tokens`."""
    device = next(loaded.model.segments[0].parameters()).device
    generator = torch.Generator(device).manual_seed(sampling.seed)
    ids = loaded.tokenizer.encode(prompt) or _beginning(loaded.tokenizer)
    shown = len(loaded.tokenizer.decode(ids))
    for _ in range(sampling.max_new_tokens):
        window = torch.tensor([ids[-loaded.window :]], device=device)
        ids.append(_draw(last_logits(loaded.model, window), sampling, generator))
        if ids[-1] == loaded.tokenizer.eod:
            return
        text = loaded.tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # a character may take several tokens
            yield text[shown:]
            shown = len(text)


def last_logits(model: Model, tokens: Tensor) -> Tensor:
    """Logits of what follows `tokens` [1, s]: [v]."""
    return all_logits(model, tokens, last=1)[-1, 0]


@torch.no_grad()
def all_logits(model: Model, tokens: Tensor, *, last: int | None = None) -> Tensor:
    """Logits of what follows each of `tokens` [b, s], or the last of them: [s, b, v]."""
    info = PassInfo(is_training=False)
    unused = torch.zeros_like(tokens)
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    batch = Batch(tokens=tokens, labels=unused, loss_mask=unused.float(), position_ids=places)
    hidden = None
    for segment in model.segments[:-1]:
        hidden = segment(hidden, batch, info)
    assert hidden is not None
    head = model.segments[-1]
    assert isinstance(head, Head)
    return head.logits(hidden if last is None else hidden[-last:], info)


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.numel():
        smallest = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def _beginning(tokenizer: Tokenizer) -> list[int]:
    """What stands for an empty prompt: the end of a document before."""
    if tokenizer.eod is None:
        raise ConfigError(
            "an empty prompt needs an end-of-document token, and the tokenizer names none",
            fix="give a prompt of a word or more",
        )
    return [tokenizer.eod]


def _tokenizer(config: TokenizerConfig, fingerprint: str | None) -> Tokenizer:
    kind = config.tokenizer_type or "NullTokenizer"
    tokenizer = load_tokenizer(dataclasses.replace(config, tokenizer_type=kind))
    if fingerprint is not None and tokenizer.fingerprint != fingerprint:
        raise ConfigError(
            f"--tokenizer-model {config.tokenizer_model}: not the tokenizer that the model was trained with",
            fix="put the former file back in its place",
        )
    return tokenizer
