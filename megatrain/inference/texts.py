"""Text completions: an engine of tokens with a tokenizer, stop words, and the plan of its memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from megatrain.config.errors import ConfigError
from megatrain.data.tokenizers.build import Tokenizer
from megatrain.inference.cache import CachePlan, layer_caches
from megatrain.inference.cached_model import CachedModel
from megatrain.inference.engine import Completion, Engine
from megatrain.inference.sampling import Sampling
from megatrain.inference.text_stream import TextStream
from megatrain.model.gpt import Model

_TOKENS_PER_PASS = 1024
_FEWEST_TOKENS_PER_PASS = 64
_MOST_SCORES = 1 << 28
"""Attention scores of a prompt's part, for kernels that materialize them."""


@dataclass(eq=False)
class TextCompletion:
    """A completion and its text."""

    completion: Completion
    stream: TextStream


class TextEngine:
    """Runs text completions.

    Args:
        end_ids: tokens that end a completion, checked against the vocabulary.
        start_id: first token of the decoder of a model whose encoder reads the prompt; None: the model has no encoder.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        plan: CachePlan,
        device: torch.device,
        end_ids: Collection[int],
        start_id: int | None = None,
    ) -> None:
        self.tokenizer, self.start_id = tokenizer, start_id
        self.engine = Engine(CachedModel(model, plan, device), end_ids)
        self._texts: dict[Completion, TextCompletion] = {}

    def submit(
        self, prompt: Sequence[int], sampling: Sampling, images: torch.Tensor | None = None
    ) -> TextCompletion:
        """Add a completion; its tokens fit into the plan. `images`: see `Completion`."""
        if self.start_id is None:
            completion = self.engine.submit(prompt, sampling, images=images)
            prompt = [token for token in prompt if token >= 0]
        else:
            completion, prompt = self.engine.submit([self.start_id], sampling, prompt), ()
        text = TextCompletion(completion, TextStream(self.tokenizer, prompt, sampling.stop))
        self._texts[completion] = text
        return text

    def remove(self, text: TextCompletion) -> None:
        """End a completion, finished or not; its memory returns."""
        self.engine.remove(text.completion)
        self._texts.pop(text.completion, None)

    def step(self) -> list[tuple[TextCompletion, str]]:
        """Run one pass; return the completions that have a new token or are finished, with their new text."""
        return [self._advance(self._texts[one]) for one in self.engine.step()]

    def keep_alive(self) -> None:
        """Show other ranks that this one runs; there are none."""

    def close(self) -> None:
        """End; no further pass runs."""

    def _advance(self, text: TextCompletion) -> tuple[TextCompletion, str]:
        one, new = text.completion, ""
        is_end = one.finish_reason == "stop"
        if one.num_new and not is_end:
            new = text.stream.add(one.ids[-1])
            if text.stream.is_stopped:
                self.engine.finish(one, "stop")
        if one.finish_reason is not None:
            new += text.stream.finish()
            del self._texts[one]
        return text, new


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the tokens of a prompt; of an empty one the end-of-document token, which ends a document before.

    Raises:
        ValueError: it is not text of this tokenizer.
    """
    prompt.encode()  # raises ValueError for half of a surrogate pair, which tokenizers answer in different ways
    ids = tokenizer.encode(prompt)
    if not ids and tokenizer.eod is None:
        raise ValueError("an empty prompt needs an end-of-document token, which the tokenizer lacks")
    return ids or [tokenizer.eod or 0]


def plan_cache(
    model: Model,
    *,
    dtype: torch.dtype,
    max_tokens: int,
    num_sequences: int,
    limit_bytes: int,
    max_memory: int = 0,
) -> CachePlan:
    """Plan memory for up to `num_sequences` sequences of `max_tokens` tokens, as many as the limit allows.

    Args:
        max_memory: most tokens of the encoder's part of a sequence.

    Raises:
        ConfigError: not even one sequence has enough.
    """

    def plan(count: int) -> CachePlan:
        fitting = min(_TOKENS_PER_PASS, _MOST_SCORES // (num_heads * max(max_tokens, max_memory)))
        per_pass = max(fitting, _FEWEST_TOKENS_PER_PASS, num_sequences)
        most = num_sequences if not has_states else count
        return CachePlan(layers, dtype, per_pass, max_tokens, count, most, max_memory)

    layers = layer_caches(model.spec, model.tp.size)
    mixers = [layer.attention for layer in model.spec.layers]
    num_heads = max([one.num_heads for one in mixers if one is not None], default=1)
    has_states = any(layer.states for layer in layers)
    one = plan(1).num_bytes
    if one > limit_bytes:
        raise ConfigError(
            f"a sequence of {max_tokens + max_memory} tokens needs a cache of {one / 1e9:.3g} GB, and {limit_bytes / 1e9:.3g} GB are free",
            fix="shorten the prompt, lower --max-new-tokens (--max-context of a server), or raise --cache-gb if it is set",
        )
    return plan(min(num_sequences, limit_bytes // max(1, one)))
