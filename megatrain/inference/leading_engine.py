"""Text engines on several tensor ranks that run the same passes: rank 0 receives requests, the others repeat what it does.

    rank 0    submit, remove ... step ─> message ─> own pass
    others                               message ─> submit, remove ... ─> own pass

All ranks hold a part of the model and sample the same tokens from the same logits. Stop words end a text on every rank.
"""

from __future__ import annotations

import dataclasses
import itertools
from base64 import b64decode, b64encode
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.data.tokenizers.build import Tokenizer
from megatrain.inference.cache import CachePlan
from megatrain.inference.sampling import Sampling
from megatrain.inference.texts import TextCompletion, TextEngine
from megatrain.model.gpt import Model
from megatrain.parallel.messages import Messages

_MESSAGES_KEPT = 256
"""Messages after which rank 0 waits until all ranks have read them, and removes them from the store."""


class LeadingEngine(TextEngine):
    """The engine of rank 0; `follow` runs on the other ranks."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        plan: CachePlan,
        device: torch.device,
        end_ids: Collection[int],
        messages: Messages,
        start_id: int | None = None,
    ) -> None:
        super().__init__(model, tokenizer, plan, device, end_ids, start_id)
        self._messages = messages
        self._actions: list[Any] = []
        self._numbers = itertools.count()
        self._running: dict[TextCompletion, int] = {}

    def submit(
        self, prompt: Sequence[int], sampling: Sampling, images: Tensor | None = None
    ) -> TextCompletion:
        """Add a completion on all ranks, before the next pass."""
        text = super().submit(prompt, sampling, images)
        self._running[text] = number = next(self._numbers)
        fields = dataclasses.asdict(sampling)
        self._actions.append(["submit", number, list(prompt), fields, _packed(images)])
        return text

    def remove(self, text: TextCompletion) -> None:
        """End a completion on all ranks, before the next pass."""
        super().remove(text)
        if text in self._running:
            self._actions.append(["remove", self._running.pop(text)])

    def step(self) -> list[tuple[TextCompletion, str]]:
        """Run one pass on all ranks."""
        self._send("step")
        found = super().step()
        for text, _ in found:
            if text.completion.finish_reason is not None:
                del self._running[text]
        return found

    def keep_alive(self) -> None:
        """Send the other ranks a message, for which they wait a limited time."""
        self._send("wait")

    def close(self) -> None:
        """End `follow` on the other ranks."""
        self._send("end")

    def _send(self, then: str) -> None:
        _exchange(self._messages, [*self._actions, [then]])
        self._actions = []


def follow(engine: TextEngine, messages: Messages) -> None:
    """Repeat what rank 0 does, until it closes its engine."""
    running: dict[int, TextCompletion] = {}
    while True:
        for kind, *values in _exchange(messages, None):
            match kind:
                case "submit":
                    number, prompt, sampling, images = values
                    fields = {**sampling, "stop": tuple(sampling["stop"])}
                    running[number] = engine.submit(prompt, Sampling(**fields), _unpacked(images))
                case "remove":
                    if values[0] in running:
                        engine.remove(running.pop(values[0]))
                case "step":
                    engine.step()
                    running = {n: one for n, one in running.items() if one.completion.finish_reason is None}
                case "end":
                    return


def _packed(images: Tensor | None) -> list[Any] | None:
    """Return images as a value of JSON: shape, and fp32 numbers in base64."""
    return None if images is None else [list(images.shape), b64encode(images.numpy().tobytes()).decode()]


def _unpacked(value: list[Any] | None) -> Tensor | None:
    if value is None:
        return None
    shape, text = value
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.float32).view(shape)


def _exchange(messages: Messages, actions: Any) -> Any:
    """Return the actions of rank 0."""
    found = messages.broadcast(actions)
    if messages.count % _MESSAGES_KEPT == 0:
        messages.gather(None)
    return found
