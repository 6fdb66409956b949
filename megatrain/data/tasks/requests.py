"""Tokens of the answers of tasks, their micro-batches, and the metrics of their scores.

    Task ─> one row of tokens an answer, sorted by length ─> micro-batches ─> log-likelihood, is greedy ─> accuracy ...

Tokens are those of lm-evaluation-harness: context and answer are tokenized together, and spaces at the end of the context
belong to the answer. A row longer than the model's context loses its first tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.config.errors import InputError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tasks.files import Task
from megatrain.data.tokenizers.build import Tokenizer, load_tokenizer
from megatrain.parallel.batch import Batch

_SHORTEST = 128
"""Rows are padded to at least this many tokens, unless the context is shorter."""


@dataclass(frozen=True)
class Request:
    """A row of tokens; the last ones are scored."""

    tokens: tuple[int, ...]
    num_scored: int


@dataclass(frozen=True)
class Score:
    """The score of a request."""

    log_likelihood: float
    """Sum over the scored tokens, in nats."""
    is_greedy: bool
    """Each scored token has the largest logit."""


@dataclass(frozen=True)
class Round:
    """Micro-batches of one length that are computed together."""

    length: int
    """Tokens of a row, s."""
    microbatches: tuple[tuple[int, ...], ...]
    """Numbers of the requests of each micro-batch."""


def requests_of(tasks: Sequence[Task], tokenizer: Tokenizer) -> list[Request]:
    """Tokenize the answers of all documents, in their order."""
    pairs = [
        (one.context, task.delimiter + answer)
        for task in tasks
        for one in task.documents
        for answer in one.answers
    ]
    return encode_pairs(pairs, tokenizer)


@functools.lru_cache(maxsize=1)
def requests_of_run(tasks: tuple[Task, ...], tokenizer: TokenizerConfig) -> tuple[Request, ...]:
    """Tokenize the answers with the tokenizer of a run, once for the check of its start and for its evaluations."""
    return tuple(requests_of(tasks, load_tokenizer(tokenizer)))


def encode_pairs(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[Request]:
    """Tokenize contexts with the texts that follow them.

    Raises:
        InputError: a text is none of the tokenizer, or an empty context has no token to begin with.
    """
    try:
        wholes = tokenizer.encode_batch([context + text for context, text in pairs])
        starts = tokenizer.encode_batch([context.rstrip() for context, _ in pairs])
    except ValueError as error:
        raise InputError(
            f"a document of a task: {error}", fix="write text that the tokenizer reads"
        ) from error
    ends = tokenizer.encode("0")[-1:] == [tokenizer.eod]
    found = []
    for whole, start in zip(wholes, starts, strict=True):
        tokens, first = whole[: len(whole) - ends], len(start) - ends
        if first == 0:
            if tokenizer.eod is None:
                raise InputError(
                    "a document of a task has an empty context, and the tokenizer has no end-of-document token before it",
                    fix="write a context in each document, or name an eos_token in the tokenizer's files",
                )
            tokens, first = [tokenizer.eod, *tokens], 1
        found.append(Request(tuple(tokens), max(1, len(tokens) - first)))
    return found


def rounds(
    requests: Sequence[Request], *, max_length: int, batch_size: int, per_round: int, divisor: int = 1
) -> Iterator[Round]:
    """Yield micro-batches of similar lengths, the longest first.

    Args:
        max_length: tokens of the model's context.
        per_round: micro-batches of a round, at most.
        divisor: of each length but `max_length`.
    """
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens))
    batches = [tuple(order[first : first + batch_size]) for first in range(0, len(order), batch_size)]
    lengths = [_padded(len(requests[batch[0]].tokens) - 1, max_length, divisor) for batch in batches]
    first = 0
    while first < len(batches):
        count = min(per_round, lengths.count(lengths[first]) - (first - lengths.index(lengths[first])))
        yield Round(lengths[first], tuple(batches[first : first + count]))
        first += count


def _padded(length: int, max_length: int, divisor: int) -> int:
    """Return the shortest length, from a half of a half ... of the context, that holds a row."""
    found = max_length
    while found % (2 * divisor) == 0 and found // 2 >= max(length, _SHORTEST):
        found //= 2
    return found


def batch_of(requests: Sequence[Request], *, length: int, size: int, device: torch.device) -> Batch:
    """Return a micro-batch of these requests, filled up with rows that do not count: [size, length]."""
    tokens = torch.zeros(size, length + 1, dtype=torch.int64)
    mask = torch.zeros(size, length)
    for row, request in enumerate(requests):
        ids = request.tokens[-(length + 1) :]
        tokens[row, : len(ids)] = torch.tensor(ids)
        mask[row, max(0, len(ids) - 1 - request.num_scored) : len(ids) - 1] = 1
    return Batch(
        tokens=tokens[:, :-1].contiguous().to(device),
        labels=tokens[:, 1:].contiguous().to(device),
        loss_mask=mask.to(device),
        position_ids=torch.arange(length, device=device).expand(size, -1),
    )


def round_scores(requests: Sequence[Request], one: Round, values: Tensor) -> dict[int, Score]:
    """Return the scores of the requests of a round by their number.

    A sum covers the scored tokens alone, in order, so that it does not depend on how rows are padded or split.

    Args:
        values: each label's loss, and 1 if it has the largest logit: [micro-batches, 2, b, s].
    """
    found = {}
    for numbers, (losses, hits) in zip(one.microbatches, values, strict=True):
        for row, number in enumerate(numbers):
            stop = min(len(requests[number].tokens) - 1, one.length)
            part = slice(max(0, stop - requests[number].num_scored), stop)
            found[number] = Score(-math.fsum(losses[row, part].tolist()), bool((hits[row, part] > 0).all()))
    return found


def task_metrics(tasks: Sequence[Task], scores: Sequence[Score]) -> dict[str, dict[str, float]]:
    """Return the metrics of each task, by its name, from the scores of `requests_of`.

    `accuracy`: the share of documents whose right answer has the largest log-likelihood (cloze: all its tokens are greedy),
    `accuracy_norm`: after division by the answer's characters; `log_likelihood`: mean of the right answer's, in nats.
    """
    found, rest = {}, iter(scores)
    for task in tasks:
        values: dict[str, list[float]] = {}
        for document in task.documents:
            of_answers = [next(rest) for _ in document.answers]
            sums = [one.log_likelihood for one in of_answers]
            values.setdefault("log_likelihood", []).append(sums[document.gold])
            if not task.has_choices:
                values.setdefault("accuracy", []).append(of_answers[0].is_greedy)
                continue
            norms = [x / max(1, len(answer)) for x, answer in zip(sums, document.answers, strict=True)]
            for name, of_document in (("accuracy", sums), ("accuracy_norm", norms)):
                values.setdefault(name, []).append(of_document.index(max(of_document)) == document.gold)
        found[task.name] = {
            name: math.fsum(values[name]) / len(values[name]) for name in METRICS if name in values
        }
    return found


METRICS = ("accuracy", "accuracy_norm", "log_likelihood")
"""Names of the metrics of a task; a cloze task has no second one."""
