"""Sampling of the next token of each sequence from its logits.

    logits ─ repetition penalty ─ temperature ─ top-k ─ top-p ─> probabilities, sorted ─> the token at a uniform number

A sequence has a random generator of its own, so that its text does not depend on other sequences. The order of the steps is
the order in `transformers`.

Sources: CTRL, arXiv:1909.05858 (repetition penalty); Holtzman et al., arXiv:1904.09751 (top-p).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.config.errors import MegatrainError, Problem
from megatrain.kernels.host_copy import copy_to_device

MAX_LOG_PROBS = 100
MIN_TEMPERATURE = 1e-4
"""Lower ones, except 0, overflow in fp32."""
MAX_PENALTY = 100.0
_MAX_SEED = 1 << 63
_MOST_SELECTED = 1024
"""Up to so many tokens, selecting them takes less time than sorting all."""


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
    """Most likely tokens to report with each token; None: no log-probabilities, 0: only the log-probability of the token."""
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


def penalize_repetition(logits: Tensor, seen: Tensor, penalties: Tensor) -> Tensor:
    """Return logits [n, v] in which the logits of `seen` tokens, bool [n, v], are lower by penalties [n, 1], once each."""
    lower = torch.where(logits > 0, logits / penalties, logits * penalties)
    return torch.where(seen, lower, logits)


class SamplingColumns(NamedTuple):
    """Settings of sequences, each [n, 1] on the device. Greedy sequences have temperature 1."""

    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    penalties: Tensor
    is_drawn: Tensor
    """1: the temperature is above 0."""
    most: int
    """Tokens that may be chosen, all others are excluded; the size of the vocabulary if there is no such limit."""

    @staticmethod
    def of(samplings: Sequence[Sampling], like: Tensor) -> SamplingColumns:
        """Return the settings for logits like these, [n, v]."""
        size = like.shape[1]
        rows = [
            # Sums of rounded probabilities reach 1 before the last token: a top-p of 1 has no limit.
            (one.temperature or 1.0, (one.top_k or size) if one.temperature else 1, one.top_p if one.top_p < 1 else math.inf,
             one.repetition_penalty, one.temperature > 0)
            for one in samplings
        ]  # fmt: skip
        temperatures, top_k, top_p, penalties, is_drawn = copy_to_device(rows, like.dtype, like.device).t()[
            :, :, None
        ]
        most = min(size, max(int(row[1]) for row in rows))
        return SamplingColumns(temperatures, top_k, top_p, penalties, is_drawn, most)


def kept_probabilities(logits: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor]:
    """Return the probabilities to sample from, in decreasing order, and their ids; both [n, `columns.most`]. Excluded tokens have 0.

    Args:
        logits: [n, v], fp32 or fp64, after penalties.
    """
    # The largest logit becomes 0 first: a tiny temperature would overflow the others.
    shifted = logits - logits.amax(-1, keepdim=True)
    ordered, ids = _largest(shifted / columns.temperatures, columns.most)
    rank = torch.arange(ordered.shape[1], device=logits.device)
    probs = ordered.masked_fill(rank >= columns.top_k, float("-inf")).softmax(-1)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill((before >= columns.top_p) & (rank > 0), 0)
    return probs / probs.sum(-1, keepdim=True), ids


def _largest(logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits in decreasing order and their ids; of equal ones that with the lowest id first."""
    if logits.dtype is not torch.float32 or most > _MOST_SELECTED:
        ordered, ids = logits.sort(stable=True, dim=-1, descending=True)
        return ordered[:, :most], ids[:, :most]
    # Integers in the order of the logits, with the ids below them: no two are equal, so that a selection is a stable sort.
    bits = (logits + 0.0).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    id_after = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    ids = logits.shape[1] - 1 - ((keys | id_after).topk(most, dim=-1).values & 0xFFFFFFFF)
    return logits.gather(1, ids), ids


class Sampler:
    """Chooses tokens for sequences; each has its generator."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def uniform(self) -> float:
        """Return the next uniform number, below 1."""
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))


class BatchSampler:
    """Chooses the next token of each of some sequences, on the device of the logits and without waiting for it.

    Args:
        samplers: one per sequence.
        seen: tokens of prompt and text of each sequence; chosen ones are added.
        like: logits [n, v] of the same shape, dtype and device.
    """

    def __init__(self, samplers: Sequence[Sampler], seen: Sequence[Sequence[int]], like: Tensor) -> None:
        dtype = torch.promote_types(like.dtype, torch.float32)
        samplings = [one.sampling for one in samplers]
        self._drawn = [one for one in samplers if one.sampling.temperature > 0]
        self._columns = SamplingColumns.of(samplings, like.new_empty(0, like.shape[1], dtype=dtype))
        places = copy_to_device([one.temperature > 0 for one in samplings], torch.int64, like.device)
        self._order = (places.cumsum(0) - 1).clamp(min=0)
        """Number of each sequence among those that are drawn."""
        self._seen: Tensor | None = None
        if any(one.repetition_penalty != 1 for one in samplings):
            flat = [
                row * like.shape[1] + token
                for row, ids in enumerate(seen)
                for token in set(ids)
                if token >= 0
            ]
            self._seen = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
            self._seen.view(-1)[copy_to_device(flat, torch.int64, like.device)] = True

    def choose(self, logits: Tensor) -> Tensor:
        """Return the next tokens, then 1 if all logits are finite, else 0: int64 [n + 1]. `chosen_tokens` checks them."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._seen is not None:
            wide = penalize_repetition(wide, self._seen, self._columns.penalties)
        best = wide.max(-1)
        chosen = (
            torch.where(self._columns.is_drawn[:, 0] > 0, self._draw(wide), best.indices)
            if self._drawn
            else best.indices
        )
        if self._seen is not None:
            self._seen.scatter_(1, chosen[:, None], True)
        return torch.cat((chosen, best.values.isfinite().all().long()[None]))

    def _draw(self, logits: Tensor) -> Tensor:
        """Return a token of each sequence, with the next uniform number of those that are drawn."""
        numbers = copy_to_device([one.uniform() for one in self._drawn], torch.float64, logits.device)
        probs, ids = kept_probabilities(logits, self._columns)
        sums = probs.double().cumsum(-1)
        # A uniform number near 1 may exceed the sum of rounded probabilities: it selects the last token that is kept.
        kept = (probs > 0).sum(-1, keepdim=True)
        ranks = torch.searchsorted(sums, numbers[self._order][:, None] * sums[:, -1:], right=True)
        # Probabilities that are not finite keep no token.
        return ids.gather(1, ranks.minimum(kept - 1).clamp(min=0)).squeeze(1)


def chosen_tokens(chosen: Sequence[int]) -> list[int]:
    """Return the tokens that `BatchSampler.choose` has chosen.

    Raises:
        MegatrainError: logits are not finite.
    """
    if not chosen[-1]:
        raise MegatrainError(
            "the model's logits are not finite",
            fix="generate with --dtype fp32; if they still are not, the weights are damaged",
        )
    return list(chosen[:-1])


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
