"""Engine of text generation: sequences join and leave between passes of the model.

    submitted ─> waiting ─ memory is reserved for all its tokens ─> running ─> finished, memory returns
                           pass: one token of each sequence that has its prompt in the cache, then parts of prompts

Passes that add one token to each sequence (decoding.py) do not wait for the tokens before: the host reads the tokens of a pass after it
has started the next one. A sequence that has ended by then has one token too many, which is left out.

A pass has a limited number of tokens, so that a long prompt delays others by one pass at most, and memory of activations is
bounded. A sequence that is running has memory for its last token, so that none fails later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megatrain.inference.cache import Reservation
from megatrain.inference.cached_model import CachedModel, NewTokens
from megatrain.inference.decoding import Decoder, can_capture
from megatrain.inference.sampling import BatchSampler, LogProb, Sampler, Sampling, chosen_tokens, log_probs
from megatrain.kernels.host_copy import HostCopy

FinishReason = Literal["stop", "length"]


@dataclass(eq=False)
class Completion:
    """One prompt, and the tokens that follow it so far."""

    prompt: tuple[int, ...]
    sampling: Sampling
    memory: tuple[int, ...] = ()
    """Tokens of the encoder; the prompt is the decoder's then."""
    images: Tensor | None = None
    """Images [k, 3, height, width], whose vectors stand where the prompt's tokens are below 0."""
    ids: list[int] = field(init=False)
    """The prompt and the tokens after it."""
    log_probs: list[LogProb] = field(default_factory=list)
    """Log-probabilities of `tokens`."""
    prompt_log_probs: list[LogProb] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens from the second one on."""
    finish_reason: FinishReason | None = None
    """`stop`: a token that ends a text; `length`: number of tokens. None: not finished."""
    num_cached: int = 0
    num_unread: int = 0
    """Tokens that are sampled on the device and not read yet, at most 1."""
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
        return len(self.ids) + self.num_unread - self.num_cached

    @property
    def has_all(self) -> bool:
        """Return whether all tokens up to the maximum number are sampled."""
        return self.num_new + self.num_unread >= self.sampling.max_new_tokens


@dataclass(frozen=True)
class Unread:
    """A pass whose tokens the host has not read."""

    completions: list[Completion]
    chosen: HostCopy
    logits: Tensor | None
    """[n, v], if a completion wants log-probabilities."""


class Engine:
    """Runs completions.

    Args:
        end_ids: tokens that end a completion, checked against the vocabulary.
    """

    def __init__(self, model: CachedModel, end_ids: Collection[int]) -> None:
        assert all(0 <= number < model.model.spec.vocab_size for number in end_ids)
        plan = model.cache.plan
        assert plan.max_sequences <= plan.tokens_per_pass, "each sequence has a token in every pass"
        self.model, self.end_ids = model, frozenset(end_ids)
        self._decoder = Decoder(model, has_graphs=can_capture(model)) if model.can_decode else None
        self.decoded: list[Completion] = []
        """Completions that the decoder extends."""
        self._sampler: BatchSampler | None = None
        self._unread: Unread | None = None
        self.waiting: deque[Completion] = deque()
        self.running: list[Completion] = []

    @property
    def is_idle(self) -> bool:
        """Return whether no completion waits or runs."""
        return not self.waiting and not self.running

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        memory: Sequence[int] = (),
        images: Tensor | None = None,
    ) -> Completion:
        """Add a completion, which `fits`."""
        completion = Completion(tuple(prompt), sampling, tuple(memory), images)
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
        batch = self._decodable()
        if batch and batch == self.decoded:
            before, self._unread = self._unread, self._decode()
            return self._read(before)
        before, self._unread, self.decoded = self._unread, None, []
        ready = self._read(before)
        if ready:
            return ready  # some may have ended: the next pass is another one
        if not batch or self._decoder is None:
            return self._run()
        self.decoded, self._sampler = batch, None
        reservations = [one.reservation for one in batch if one.reservation is not None]
        self._decoder.begin(reservations, [one.ids[-1] for one in batch], [one.num_cached for one in batch])
        self._unread = self._decode()
        return []

    def _decodable(self) -> list[Completion]:
        """Return the completions of a pass that adds one token to each; none if there is no such pass now."""
        needed = [one for one in self.running if not one.has_all or not one.num_new]
        is_single = all(one.num_pending == 1 and not one.has_all for one in needed)
        return needed if self._decoder is not None and is_single else []

    def _decode(self) -> Unread:
        """Run a pass of the decoder and sample its tokens, without waiting for them."""
        assert self._decoder is not None
        logits = self._decoder.run()
        if self._sampler is None:
            samplers = [one.sampler for one in self.decoded]
            self._sampler = BatchSampler(samplers, [one.ids for one in self.decoded], logits)
        chosen = self._sampler.choose(logits)
        self._decoder.add(chosen[:-1])
        for one in self.decoded:
            one.num_cached += 1
            one.num_unread += 1
        has_log_probs = any(one.sampling.num_log_probs is not None for one in self.decoded)
        return Unread(self.decoded, HostCopy(chosen), logits.clone() if has_log_probs else None)

    def _read(self, unread: Unread | None) -> list[Completion]:
        """Wait for the tokens of a pass and add them to the completions that have not ended; return these."""
        if unread is None:
            return []
        ready = []
        for row, (one, token) in enumerate(
            zip(unread.completions, chosen_tokens(unread.chosen.read()), strict=True)
        ):
            one.num_unread -= 1
            if one.reservation is not None:
                self._add(one, token, None if unread.logits is None else unread.logits[row])
                ready.append(one)
        return ready

    def _run(self) -> list[Completion]:
        """Run a pass with parts of prompts, and wait for its tokens."""
        parts = self._parts()
        if not parts:
            return []
        new_tokens = [
            NewTokens(
                one.reservation,
                one.ids[one.num_cached : one.num_cached + count],
                one.num_cached,
                one.sampling.wants_prompt_log_probs and one.num_cached < len(one.prompt),
                () if one.num_cached else one.memory,
                one.images,
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
            reservation = self.model.cache.reserve(self.waiting[0].num_total, len(self.waiting[0].memory))
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
            count = min(one.num_pending, max(left, 0))
            if count:
                parts.append((one, count))
                left -= count if one.num_cached else count + len(one.memory)  # which is computed whole
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
        """Sample the next tokens from logits [n, v] and wait for them."""
        sampler = BatchSampler([one.sampler for one in ready], [one.ids for one in ready], logits)
        tokens = chosen_tokens(sampler.choose(logits).tolist())
        for one, token, row in zip(ready, tokens, logits, strict=True):
            if one.sampling.max_new_tokens:
                self._add(one, token, row)
            else:
                self.finish(one, "length")

    def _add(self, one: Completion, token: int, logits: Tensor | None) -> None:
        """Add a token, sampled from logits [v], and end the completion if it is the last one."""
        one.ids.append(token)
        if one.sampling.num_log_probs is not None:
            assert logits is not None
            one.log_probs += log_probs(logits[None], [token], one.sampling.num_log_probs)
        if one.sampling.ends_at_eod and token in self.end_ids:
            self.finish(one, "stop")
        elif one.num_new >= one.sampling.max_new_tokens:
            self.finish(one, "length")

    def finish(self, completion: Completion, reason: FinishReason) -> None:
        """End a completion with a reason; its memory returns."""
        self.remove(completion)
        completion.finish_reason = reason
