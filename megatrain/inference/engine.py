"""Engine of text generation: sequences join and leave between passes of the model.

    submitted ─> waiting ─ memory is reserved for all its tokens ─> running ─> finished, memory returns
                           pass: one token of each sequence that has its prompt in the cache, then parts of prompts

A pass has a limited number of tokens, so that a long prompt delays others by one pass at most, and memory of activations is
bounded. A sequence that is running has memory for its last token, so that none fails later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megatrain.inference.cache import Reservation
from megatrain.inference.cached_model import CachedModel, NewTokens
from megatrain.inference.sampling import LogProb, Sampler, Sampling, choose, log_probs

FinishReason = Literal["stop", "length"]


@dataclass(eq=False)
class Completion:
    """One prompt, and the tokens that follow it so far."""

    prompt: tuple[int, ...]
    sampling: Sampling
    ids: list[int] = field(init=False)
    """The prompt and the tokens after it."""
    log_probs: list[LogProb] = field(default_factory=list)
    """Log-probabilities of `tokens`."""
    prompt_log_probs: list[LogProb] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens from the second one on."""
    finish_reason: FinishReason | None = None
    """`stop`: end-of-document token; `length`: number of tokens. None: not finished."""
    num_cached: int = 0
    reservation: Reservation | None = None
    sampler: Sampler = field(init=False)

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)
        self.sampler = Sampler(self.sampling)

    @property
    def num_total(self) -> int:
        """Return the tokens for which memory is reserved. The last one is never an input."""
        return len(self.prompt) + max(0, self.sampling.max_new_tokens - 1)

    @property
    def tokens(self) -> list[int]:
        """Return the tokens after the prompt."""
        return self.ids[len(self.prompt) :]

    @property
    def num_new(self) -> int:
        """Return their number."""
        return len(self.ids) - len(self.prompt)

    @property
    def num_pending(self) -> int:
        """Return the tokens that are not in the cache yet."""
        return len(self.ids) - self.num_cached


class Engine:
    """Runs completions.

    Args:
        eod: end-of-document token, checked against the vocabulary; None: there is none.
    """

    def __init__(self, model: CachedModel, eod: int | None) -> None:
        assert eod is None or 0 <= eod < model.model.spec.vocab_size
        plan = model.cache.plan
        assert plan.max_sequences <= plan.tokens_per_pass, "each sequence has a token in every pass"
        self.model, self.eod = model, eod
        self.waiting: deque[Completion] = deque()
        self.running: list[Completion] = []

    @property
    def is_idle(self) -> bool:
        """Return whether no completion waits or runs."""
        return not self.waiting and not self.running

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        """Add a completion, which `fits`."""
        completion = Completion(tuple(prompt), sampling)
        assert prompt, "a prompt has at least one token"
        assert completion.num_total <= self.model.cache.plan.max_tokens
        self.waiting.append(completion)
        return completion

    def remove(self, completion: Completion) -> None:
        """End a completion, finished or not; its memory returns."""
        if completion in self.waiting:
            self.waiting.remove(completion)
        if completion.reservation is not None:
            self.running.remove(completion)
            self.model.cache.release(completion.reservation)
            completion.reservation = None

    def step(self) -> list[Completion]:
        """Admit completions and run one pass; return those with a new token, or that have finished."""
        self._admit()
        parts = self._parts()
        if not parts:
            return []
        new_tokens = [
            NewTokens(
                one.reservation,
                one.ids[one.num_cached : one.num_cached + count],
                one.num_cached,
                one.sampling.wants_prompt_log_probs and one.num_cached < len(one.prompt),
            )
            for one, count in parts
            if one.reservation is not None
        ]
        ready, rows = [], []
        for (one, count), logits in zip(parts, self.model.logits(new_tokens), strict=True):
            self._report_prompt(one, logits, count)
            one.num_cached += count
            if not one.num_pending:
                ready.append(one)
                rows.append(logits[-1])
        if ready:
            self._choose(ready, torch.stack(rows))
        return ready

    def _admit(self) -> None:
        """Reserve memory for waiting completions, in order: a large one is not overtaken for ever."""
        while self.waiting:
            reservation = self.model.cache.reserve(self.waiting[0].num_total)
            if reservation is None:
                return
            completion = self.waiting.popleft()
            completion.reservation = reservation
            self.running.append(completion)

    def _parts(self) -> list[tuple[Completion, int]]:
        """Return the number of tokens that each completion adds in the next pass: single ones first."""
        left = self.model.cache.plan.tokens_per_pass
        parts = []
        for one in sorted(self.running, key=lambda one: one.num_pending > 1):
            count = min(one.num_pending, left)
            if count:
                parts.append((one, count))
                left -= count
        return parts

    @staticmethod
    def _report_prompt(one: Completion, logits: Tensor, count: int) -> None:
        """Record the log-probabilities of the prompt's tokens that this pass predicts."""
        if not one.sampling.wants_prompt_log_probs:
            return
        following = one.prompt[one.num_cached + 1 : one.num_cached + 1 + count]
        if following:
            num_top = one.sampling.num_log_probs or 0
            one.prompt_log_probs += log_probs(logits[: len(following)], following, num_top)

    def _choose(self, ready: list[Completion], logits: Tensor) -> None:
        wanted = [one for one in ready if one.sampling.max_new_tokens]
        if wanted:
            rows = logits[[number for number, one in enumerate(ready) if one.sampling.max_new_tokens]]
            tokens = choose(rows, [one.sampler for one in wanted], [one.ids for one in wanted])
            for one, token, row in zip(wanted, tokens, rows, strict=True):
                one.ids.append(token)
                if one.sampling.num_log_probs is not None:
                    one.log_probs += log_probs(row[None], [token], one.sampling.num_log_probs)
        for one in ready:
            if one.sampling.ends_at_eod and one.num_new and one.ids[-1] == self.eod:
                self.finish(one, "stop")
            elif one.num_new >= one.sampling.max_new_tokens:
                self.finish(one, "length")

    def finish(self, completion: Completion, reason: FinishReason) -> None:
        """End a completion with a reason; its memory returns."""
        self.remove(completion)
        completion.finish_reason = reason
