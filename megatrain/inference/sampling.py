"""Sampling of the next token of each sequence from its logits.

    logits ─ repetition penalty ─ temperature ─ top-k ─ top-p ─> probabilities, sorted ─> the token at a uniform number

A sequence has a random generator of its own, so that its text does not depend on other sequences. The order of the steps is
that of `transformers`.

Sources: CTRL, arXiv:1909.05858 (repetition penalty); Holtzman et al., arXiv:1904.09751 (top-p).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.config.errors import MegatrainError, Problem

MAX_LOG_PROBS = 100
MIN_TEMPERATURE = 1e-4
"""Lower ones, except 0, overflow in fp32."""
MAX_PENALTY = 100.0
_MAX_SEED = 1 << 63


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens of a completion are chosen, and how it ends."""

    max_new_tokens: int = 64
    temperature: float = 1.0
    """Divisor of the logits; 0: the most likely token (greedy)."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0: all."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens whose probabilities sum to this; 1: all."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in prompt and text are divided by it, negative ones multiplied; 1: none."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Texts that end the completion; they are left out."""
    ends_at_eod: bool = True
    """The end-of-document token ends the completion."""
    num_log_probs: int | None = None
    """Most likely tokens to report with each token; None: no log-probabilities, 0: that of the token alone."""
    wants_prompt_log_probs: bool = False
    """Report log-probabilities of the prompt's tokens too."""

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Yield the name of each setting with a wrong value, and its problem."""
        checks = {
            "max_new_tokens": (self.max_new_tokens >= 0, "a whole number of 0 or more"),
            "temperature": (
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf,
                f"0, or a number of {MIN_TEMPERATURE} or more",
            ),
            "top_k": (self.top_k >= 0, "a whole number of 0 or more; 0 samples from all tokens"),
            "top_p": (0 < self.top_p <= 1, "a number above 0, up to 1"),
            "repetition_penalty": (
                1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY,
                f"a number from {1 / MAX_PENALTY} to {MAX_PENALTY}; 1 is none",
            ),
            "seed": (0 <= self.seed < _MAX_SEED, "a whole number from 0 to 2^63 - 1"),
            "num_log_probs": (
                0 <= (self.num_log_probs or 0) <= MAX_LOG_PROBS,
                f"a whole number from 0 to {MAX_LOG_PROBS}",
            ),
            "stop": (all(self.stop), "texts of at least one character"),
        }
        for name, (is_right, wanted) in checks.items():
            if not is_right:
                yield name, Problem(f"{getattr(self, name)!r} is no possible value", f"use {wanted}")


def penalize_repetition(logits: Tensor, ids: Sequence[int], penalty: float) -> Tensor:
    """Return logits [v] in which those of `ids` are lower, once each."""
    if penalty == 1:
        return logits
    found = torch.tensor(sorted(set(ids)), dtype=torch.int64, device=logits.device)
    values = logits[found]
    return logits.index_copy(0, found, torch.where(values > 0, values / penalty, values * penalty))


def kept_probabilities(logits: Tensor, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """Return the probabilities to sample from, in decreasing order, and their ids; both [n, v]. Excluded tokens have 0.

    Args:
        logits: [n, v], fp32 or fp64, after penalties.
        samplings: one per row, with temperatures above 0.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)[:, None]

    # The largest logit becomes 0 first: a tiny temperature would overflow the others.
    shifted = logits - logits.amax(-1, keepdim=True)
    scaled = shifted / column([one.temperature for one in samplings])
    ordered, ids = scaled.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(ordered.shape[1], device=logits.device)
    top_k = column([float(one.top_k or ordered.shape[1]) for one in samplings])
    probs = ordered.masked_fill(rank >= top_k, float("-inf")).softmax(-1)
    before = probs.cumsum(-1) - probs
    # Sums of rounded probabilities reach 1 before the last token.
    top_p = column([one.top_p if one.top_p < 1 else math.inf for one in samplings])
    probs = probs.masked_fill((before >= top_p) & (rank > 0), 0)
    return probs / probs.sum(-1, keepdim=True), ids


class Sampler:
    """Chooses tokens for sequences; each has its generator."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def uniform(self) -> float:
        """Return the next uniform number, below 1."""
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))


def choose(logits: Tensor, samplers: Sequence[Sampler], seen: Sequence[Sequence[int]]) -> list[int]:
    """Return the next token of each sequence.

    Args:
        logits: [n, v].
        samplers: one per sequence.
        seen: tokens of prompt and text of each sequence.

    Raises:
        MegatrainError: a sequence's logits are not finite.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    penalties = [one.sampling.repetition_penalty for one in samplers]
    if any(penalty != 1 for penalty in penalties):
        rows = zip(wide, seen, penalties, strict=True)
        wide = torch.stack([penalize_repetition(*row) for row in rows])
    best = wide.max(-1)
    if not bool(best.values.isfinite().all()):
        raise MegatrainError(
            "the model's logits are not finite",
            fix="generate with --dtype fp32; if they still are not, the weights are damaged",
        )
    chosen = best.indices
    drawn = [number for number, one in enumerate(samplers) if one.sampling.temperature > 0]
    if drawn:
        probs, ids = kept_probabilities(wide[drawn], [samplers[number].sampling for number in drawn])
        uniform = torch.tensor([[samplers[number].uniform()] for number in drawn], dtype=torch.float64)
        sums = probs.double().cumsum(-1)
        # A uniform number near 1 may exceed the sum of rounded probabilities: it selects the last token that is kept.
        kept = (probs > 0).sum(-1, keepdim=True)
        ranks = torch.searchsorted(sums, uniform.to(sums.device) * sums[:, -1:], right=True)
        chosen[drawn] = ids.gather(1, ranks.minimum(kept - 1)).squeeze(1)
    return [int(token) for token in chosen.tolist()]


@dataclass(frozen=True)
class LogProb:
    """Log-probability of a token under the model, before penalties and temperature."""

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens, the first one first."""


def log_probs(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[LogProb]:
    """Return the log-probabilities of `tokens` [n] from logits [n, v]."""
    values = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    own = values.gather(1, torch.tensor(tokens, device=values.device)[:, None]).squeeze(1).tolist()
    top = values.topk(min(num_top, values.shape[1]), dim=-1)
    tops = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        LogProb(token, log_prob, tuple(zip(*best, strict=True)))
        for token, log_prob, best in zip(tokens, own, tops, strict=True)
    ]
