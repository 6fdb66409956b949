"""Sampling: masks as a plain reference computes them, penalties, seeds, log-probabilities."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatrain.config import MegatrainError
from megatrain.inference.sampling import (
    BatchSampler,
    Sampler,
    Sampling,
    SamplingColumns,
    _largest,
    chosen_tokens,
    kept_probabilities,
    log_probs,
    penalize_repetition,
)

VOCAB = 50


def logits(rows: int = 1) -> Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def plain_probabilities(row: list[float], sampling: Sampling) -> dict[int, float]:
    """Return the probability of each token that may be sampled, without tensors."""
    largest = max(row)
    weights = {token: math.exp((value - largest) / sampling.temperature) for token, value in enumerate(row)}
    ordered = sorted(weights, key=lambda token: -weights[token])[: sampling.top_k or None]
    total = sum(weights[token] for token in ordered)
    kept, share = [], 0.0
    for token in ordered:
        if share >= sampling.top_p < 1:
            break
        kept.append(token)
        share += weights[token] / total
    return {token: weights[token] / sum(weights[one] for one in kept) for token in kept}


SAMPLINGS = [
    Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    for temperature, top_k, top_p in itertools.product((0.3, 1.0, 4.0), (0, 1, 7, 80), (1e-9, 0.5, 0.9, 1.0))
]
SAMPLINGS += [Sampling(top_p=share / 200) for share in range(1, 200)]


def test_the_tokens_that_are_kept_and_their_probabilities() -> None:
    rows = logits(len(SAMPLINGS))
    probs, ids = kept_probabilities(rows, SamplingColumns.of(SAMPLINGS, rows))
    for row, sampling, values, tokens in zip(logits(len(SAMPLINGS)), SAMPLINGS, probs, ids, strict=True):
        expected = plain_probabilities(row.tolist(), sampling)
        found = {int(token): float(value) for token, value in zip(tokens, values, strict=True) if value > 0}
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.nightly
def test_masks_are_those_of_transformers() -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    for sampling in SAMPLINGS:
        scores = process.TemperatureLogitsWarper(sampling.temperature)(None, logits())
        if sampling.top_k:
            scores = process.TopKLogitsWarper(sampling.top_k)(None, scores)
        scores = process.TopPLogitsWarper(sampling.top_p)(None, scores) if sampling.top_p < 1 else scores
        probs, ids = kept_probabilities(logits(), SamplingColumns.of([sampling], logits()))
        found = torch.zeros(1, VOCAB, dtype=torch.float64).scatter(1, ids, probs)
        assert torch.allclose(found, scores.softmax(-1), rtol=1e-9, atol=0)


def test_repetition_is_penalized_once_per_token() -> None:
    rows = torch.tensor([[2.0, -2.0, 1.0, -1.0]] * 2)
    seen, penalties = torch.tensor([[True, True, False, False]] * 2), torch.tensor([[4.0], [1.0]])
    found = penalize_repetition(rows, seen, penalties)
    assert found.tolist() == [[0.5, -8.0, 1.0, -1.0], rows[1].tolist()]


def choose(rows: torch.Tensor, samplers: Sequence[Sampler], seen: Sequence[Sequence[int]]) -> list[int]:
    return chosen_tokens(BatchSampler(samplers, seen, rows).choose(rows).tolist())


class Grid(Sampler):
    """A sampler whose uniform numbers are evenly spaced."""

    numbers: list[float]

    def uniform(self) -> float:
        return self.numbers.pop()


def test_tokens_are_sampled_with_their_probabilities() -> None:
    sampling, count = Sampling(temperature=1.5, top_k=6, top_p=0.95), 2000
    sampler = Grid(sampling)
    sampler.numbers = [(number + 0.5) / count for number in range(count)]
    drawn = Counter(
        token
        for _ in range(count // 100)
        for token in choose(logits().expand(100, -1), [sampler] * 100, [[]] * 100)
    )
    expected = plain_probabilities(logits()[0].tolist(), sampling)
    assert drawn.keys() == expected.keys()
    assert all(abs(drawn[token] / count - expected[token]) < 2 / count for token in expected)


def test_a_seed_gives_the_same_tokens_with_any_others() -> None:
    sampling = Sampling(seed=7)
    alone = [choose(logits(), [sampler], [[]]) for sampler in [Sampler(sampling)] for _ in range(20)]
    one, other, greedy = Sampler(sampling), Sampler(Sampling(seed=8)), Sampler(Sampling(temperature=0))
    rows = logits().expand(3, -1)
    together = [choose(rows, [greedy, other, one], [[], [], []]) for _ in range(20)]
    assert [[row[2]] for row in together] == alone
    assert [[row[1]] for row in together] != alone
    assert {row[0] for row in together} == {int(logits().argmax())}


def test_penalties_apply_to_their_sequence() -> None:
    best = int(logits().argmax())
    one = Sampling(temperature=0, repetition_penalty=1e9)
    found = choose(logits().expand(2, -1), [Sampler(one), Sampler(one)], [[best], []])
    assert found[0] != best
    assert found[1] == best


def test_log_probabilities() -> None:
    found = log_probs(logits(2), [3, 4], 2)
    expected = logits(2).log_softmax(-1)
    assert [one.log_prob for one in found] == pytest.approx([float(expected[0, 3]), float(expected[1, 4])])
    assert [token for token, _ in found[1].top] == expected[1].topk(2).indices.tolist()
    assert log_probs(logits(2), [3, 4], 0)[0].top == ()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(value: float) -> None:
    row = logits()
    row[0, 5] = value
    with pytest.raises(MegatrainError, match="not finite"):
        choose(row, [Sampler(Sampling())], [[]])


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": -1}, {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1},
        {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": math.nan}, {"repetition_penalty": 0.0}, {"seed": -1},
        {"seed": 1 << 63}, {"num_log_probs": 101}, {"num_log_probs": -1}, {"stop": ("a", "")},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_settings_are_named(wrong: dict[str, object]) -> None:
    assert [name for name, _ in Sampling(**wrong).problems()] == list(wrong)  # type: ignore[arg-type]


def test_defaults_are_right() -> None:
    assert list(Sampling().problems()) == []


def test_selected_tokens_are_the_first_of_a_stable_sort() -> None:
    """fp32 logits with many ties, zeros of both signs and values that are not finite."""
    rows = (4 * torch.randn(5, 300, generator=torch.Generator().manual_seed(2))).round() / 2
    rows[1, 7], rows[2, 9], rows[3, :] = float("inf"), float("-inf"), -0.0
    for most in (1, 5, 300):
        values, ids = _largest(rows, most)
        expected = rows.double().sort(stable=True, dim=-1, descending=True)
        assert torch.equal(ids, expected.indices[:, :most])
        assert torch.equal(values.double(), expected.values[:, :most])
