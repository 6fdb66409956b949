"""A request of OpenAI's completions API: its fields, checked and with bounded sizes.

JSON ─> fields of the table, no others ─> prompts as tokens ─> one sampling per choice
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from megatrain.data.tokenizers.build import Tokenizer
from megatrain.inference.sampling import Sampling
from megatrain.inference.texts import encode_prompt
from megatrain.storage.untrusted_json import (
    Check,
    InvalidError,
    flag,
    integer,
    list_of,
    number,
    optional,
    text,
)

_MAX_PROMPTS: Final = 64
_MAX_CHOICES: Final = 64
_MAX_CHARACTERS: Final = 1 << 24
_TEXT: Final = text(max_characters=_MAX_CHARACTERS)
_STOP: Final = text(max_characters=200)


class RequestError(Exception):
    """A wrong request. `param`: the field; `code`: a word for programs."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """One request; its choices are in the order of the response."""

    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[Sampling, ...]
    """One per choice: `n` for each prompt."""
    choices_per_prompt: int
    streams: bool
    echoes: bool = False
    """The text starts with the prompt."""
    images: Tensor | None = None
    """Images of the prompt, [k, 3, height, width]."""
    is_chat: bool = False
    """The answer is a message."""

    @property
    def choices(self) -> list[tuple[tuple[int, ...], Sampling]]:
        """Return prompt and sampling of each choice."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.choices_per_prompt)]
        return list(zip(prompts, self.samplings, strict=True))


def _nothing(value: Any, name: str) -> None:
    if value not in (None, 0, 0.0, "", {}, []):
        raise InvalidError(f"{name} is not supported")


def _one_or_list(check: Check, most: int) -> Check:
    items = list_of(check, most=most)
    return lambda value, name: (items if isinstance(value, list) else check)(value, name)


def _ignored(value: Any, name: str) -> None:
    """Accept any value."""


COMMON: Final[Mapping[str, Check]] = {
    "model": optional(text(max_characters=1000)),
    "max_tokens": optional(integer(0, 1 << 30)),
    "temperature": optional(number()),
    "top_p": optional(number()),
    "top_k": optional(integer(-1, 1 << 30)),
    "repetition_penalty": optional(number()),
    "n": optional(integer(1, _MAX_CHOICES)),
    "stream": optional(flag),
    "stop": optional(_one_or_list(_STOP, 16)),
    "seed": optional(integer()),
    "ignore_eos": optional(flag),
    "presence_penalty": _nothing,
    "frequency_penalty": _nothing,
    "logit_bias": _nothing,
    "user": _ignored,  # it changes nothing here
}
"""Fields of every request; fields of Sampling beyond OpenAI's have the names of other servers with this API."""
OF_CHAT: Final[Mapping[str, Check]] = {
    **COMMON,
    "messages": _ignored,  # the reader of conversations checks them
    "max_completion_tokens": optional(integer(0, 1 << 30)),
}
"""Fields of a request of the chat API."""
_FIELDS: Final[Mapping[str, Check]] = {
    **COMMON,
    "prompt": _ignored,  # see `_prompts`
    "best_of": optional(integer(1, _MAX_CHOICES)),
    "logprobs": optional(integer(0, 100)),
    "echo": optional(flag),
    "suffix": _nothing,
}


def read_request(
    body: bytes,
    tokenizer: Tokenizer,
    *,
    model: str,
    vocab_size: int,
    max_tokens: int,
    max_prompt: int | None = None,
) -> CompletionRequest:
    """Check a request.

    Args:
        model: name of the model that is served.
        max_tokens: most tokens of a prompt and its text together, or of the text alone.
        max_prompt: most tokens of a prompt that an encoder reads; None: the text continues the prompt.

    Raises:
        RequestError: with the field that is wrong.
    """
    fields = read_fields(body, _FIELDS, model)
    prompts = tuple(_prompts(fields.get("prompt", ""), tokenizer, vocab_size))
    count, best_of = fields.get("n") or 1, fields.get("best_of")
    if best_of not in (None, count):
        raise RequestError("best_of differs from n", param="best_of", code="unsupported_value")
    if count * len(prompts) > _MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with {count} choices each: more than {_MAX_CHOICES}", param="n"
        )
    sampling = read_sampling(fields)
    for prompt in prompts:
        check_length(prompt, sampling, max_tokens, "prompt", max_prompt)
    streams, echoes = bool(fields.get("stream")), bool(fields.get("echo"))
    if echoes and max_prompt is not None:
        raise RequestError(
            "echo is not supported: the text does not continue the prompt",
            param="echo",
            code="unsupported_value",
        )
    if streams and sampling.num_log_probs is not None:
        raise RequestError(
            "logprobs is not supported together with stream", param="logprobs", code="unsupported_value"
        )
    sampling = dataclasses.replace(
        sampling, wants_prompt_log_probs=echoes and sampling.num_log_probs is not None
    )
    return CompletionRequest(
        prompts=prompts, samplings=with_seeds(sampling, count * len(prompts)), choices_per_prompt=count,
        streams=streams, echoes=echoes,
    )  # fmt: skip


def chat_request(
    fields: Mapping[str, Any], ids: Sequence[int], *, max_tokens: int, images: Tensor | None = None
) -> CompletionRequest:
    """Return the request that answers a conversation with these tokens. Raises RequestError."""
    sampling = read_sampling(fields)
    check_length(ids, sampling, max_tokens, "messages")
    count = fields.get("n") or 1
    return CompletionRequest(
        prompts=(tuple(ids),), samplings=with_seeds(sampling, count), choices_per_prompt=count,
        streams=bool(fields.get("stream")), images=images, is_chat=True,
    )  # fmt: skip


def check_length(
    prompt: Sequence[int], sampling: Sampling, max_tokens: int, param: str, max_prompt: int | None = None
) -> None:
    """Check that a prompt and its text fit into a sequence, or into those of an encoder and a decoder."""
    text = max(0, sampling.max_new_tokens - 1)
    if max_prompt is None:
        fits, limit = len(prompt) + text <= max_tokens, f"a sequence has at most {max_tokens} tokens here"
    else:
        fits = len(prompt) <= max_prompt and text < max_tokens
        limit = f"the encoder reads at most {max_prompt} tokens here, and the decoder writes {max_tokens}"
    if not fits:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_new_tokens}: {limit}",
            param=param, code="context_length_exceeded",
        )  # fmt: skip


def with_seeds(sampling: Sampling, count: int) -> tuple[Sampling, ...]:
    """Return the sampling of each choice."""
    return tuple(
        dataclasses.replace(sampling, seed=(sampling.seed + number) % (1 << 63)) for number in range(count)
    )


def read_fields(body: bytes, known: Mapping[str, Check], model: str) -> dict[str, Any]:
    """Return the fields of a request to this model, checked.

    Raises:
        RequestError: the body is no JSON object, or a field is wrong or unknown.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise RequestError("the body is not a JSON object", code="invalid_json")
    for name, value in fields.items():
        if name not in known:
            raise RequestError(f"unknown field {name[:100]!r}", param=name[:100], code="unknown_field")
        try:
            known[name](value, name)
        except InvalidError as error:
            raise RequestError(str(error), param=name) from error
    if fields.get("model") not in (None, model):
        raise RequestError(
            f"the model {fields['model']!r} does not exist; this server has {model!r}",
            param="model", code="model_not_found", status=404,
        )  # fmt: skip
    return fields


def read_sampling(fields: Mapping[str, Any]) -> Sampling:
    """Return the sampling that a request's fields describe. Raises RequestError."""

    def value(name: str, default: Any) -> Any:
        given = fields.get(name)
        return default if given is None else given

    stop = value("stop", [])
    sampling = Sampling(
        max_new_tokens=value("max_tokens", 16),
        temperature=value("temperature", 1.0),
        top_p=value("top_p", 1.0),
        top_k=max(0, value("top_k", 0)),
        repetition_penalty=value("repetition_penalty", 1.0),
        seed=value("seed", random.SystemRandom().randrange(1 << 62)),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ends_at_eod=not value("ignore_eos", False),
        num_log_probs=fields.get("logprobs"),
    )
    names = {"max_new_tokens": "max_tokens", "num_log_probs": "logprobs"}
    for name, problem in sampling.problems():
        raise RequestError(f"{problem.text}; {problem.fix}", param=names.get(name, name))
    return sampling


def _prompts(value: Any, tokenizer: Tokenizer, vocab_size: int) -> list[tuple[int, ...]]:
    """Return the tokens of a text, a list of texts, a list of ids, or a list of lists of ids."""
    ids = list_of(integer(0, vocab_size - 1), most=_MAX_CHARACTERS)
    try:
        if isinstance(value, list) and value and all(isinstance(one, int) for one in value):
            ids(value, "prompt")
            return [tuple(value)]
        one_of = value if isinstance(value, list) else [value]
        if not 1 <= len(one_of) <= _MAX_PROMPTS:
            raise InvalidError(f"prompt has {len(one_of)} entries, not 1 to {_MAX_PROMPTS}")
        for one in one_of:
            (ids if isinstance(one, list) else _TEXT)(one, "prompt")
        if any(one == [] for one in one_of):
            raise InvalidError("prompt has a list without ids")
        return [
            tuple(one) if isinstance(one, list) else tuple(encode_prompt(tokenizer, one)) for one in one_of
        ]
    except ValueError as error:
        raise RequestError(str(error), param="prompt") from error
