"""Logits with a cache equal those of the whole sequence, for every kind of layer and any order of passes."""

import random

import pytest
import torch
from tiny_cached_models import MODELS, SEQ, VOCAB, cached, tiny_model
from torch import Tensor

from megatrain.inference import cached_attention
from megatrain.inference.cache import Reservation
from megatrain.inference.cached_model import CachedModel, NewTokens
from megatrain.inference.decoding import Decoder, num_slots
from megatrain.kernels.attention.eager import EagerAttention
from megatrain.kernels.attention.interface import MaskSpec
from megatrain.tools.compare_logits import logits_of_heads

LENGTHS = (SEQ, 11, 23)


def sequences() -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def logits_by_parts(model: CachedModel, rows: list[list[int]]) -> list[Tensor]:
    """Return the logits of each sequence, extended by a random number of tokens in each pass, some by none."""
    rng = random.Random(5)
    memories = [row[::-1] if model.cache.plan.max_memory else [] for row in rows]
    reservations = [model.cache.reserve(len(row), len(one)) for row, one in zip(rows, memories, strict=True)]
    done, found = [0] * len(rows), [[] for _ in rows]
    while any(count < len(row) for count, row in zip(done, rows, strict=True)):
        parts = []
        for number in rng.sample(range(len(rows)), len(rows)):
            count = min(rng.choice([0, 1, 1, 2, 7]), len(rows[number]) - done[number])
            if count:
                reservation = reservations[number]
                assert isinstance(reservation, Reservation)
                tokens = rows[number][done[number] : done[number] + count]
                memory = [] if done[number] else memories[number]
                new = NewTokens(reservation, tokens, done[number], wants_all=True, memory=memory)
                parts.append((number, new))
                done[number] += count
        if parts:
            for (number, _), logits in zip(parts, model.logits([part for _, part in parts]), strict=True):
                found[number].append(logits)
    for reservation in reservations:
        model.cache.release(reservation)
    assert model.cache.is_empty
    return [torch.cat(one) for one in found]


def assert_same_as_whole(name: str, found: list[Tensor]) -> None:
    model = tiny_model(name)
    for row, logits in zip(sequences(), found, strict=True):
        whole = logits_of_heads(model, torch.tensor([row]))[0].squeeze(0)
        assert float((logits - whole).abs().max()) <= 1e-11 * float(whole.abs().max())


ALWAYS = ("gemma2", "gpt-oss", "mla with a window", "mlav2", "dsa", "qwen3-next", "hybrid", "experts", "t5 with RoPE",
          "t5 with relative positions")  # fmt: skip
"""Models of every test run: each kind of cache. Nightly runs have all."""


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in ALWAYS else pytest.mark.nightly) for one in MODELS]
)
def test_logits_are_those_of_the_whole_sequence(name: str) -> None:
    model = cached(name)
    rows = sequences()
    assert_same_as_whole(name, logits_by_parts(model, rows))
    found = logits_by_parts(model, rows)  # in memory that was used before
    assert_same_as_whole(name, found)
    before, after = (
        logits_of_heads(one, torch.tensor(rows[:1])) for one in (tiny_model(name), model.give_back())
    )
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("wrong", [None, 0, 7, 19])
def test_a_wrong_key_of_the_indexer_changes_logits(wrong: int | None) -> None:
    """Of one of 20 positions, in one layer."""
    row, start = sequences()[0], 20
    model = cached("dsa", sequences=1, per_pass=SEQ)
    reservation = model.cache.reserve(SEQ)
    assert reservation is not None
    model.logits([NewTokens(reservation, row[:start], 0)])
    if wrong is not None:
        model.cache.rows[0][1][wrong] *= -1
    (found,) = model.logits([NewTokens(reservation, row[start:], start, wants_all=True)])
    whole = logits_of_heads(tiny_model("dsa"), torch.tensor([row]))[0].squeeze(0)[start:]
    is_same = float((found - whole).abs().max()) <= 1e-11 * float(whole.abs().max())
    assert is_same == (wrong is None)


class Packed:
    """A kernel with cumulative lengths: eager attention of each document that has queries."""

    needs_explicit_mask = False

    def __init__(self, kernel: EagerAttention) -> None:
        self.kernel = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> tuple[Tensor, Tensor]:
        lengths = mask.cu_seqlens
        assert lengths is not None
        assert mask.is_causal
        assert lengths.cu_seqlens_q[-1] == len(q)
        assert lengths.cu_seqlens_k[-1] == len(k)
        queries, keys = lengths.cu_seqlens_q.diff(), lengths.cu_seqlens_k.diff()
        assert queries.max() <= lengths.max_seqlen_q
        assert keys.max() <= lengths.max_seqlen_k
        found = []
        parts = zip(q.split(queries.tolist()), k.split(keys.tolist()), v.split(keys.tolist()), strict=True)
        for one_q, one_k, one_v in parts:
            if len(one_q):
                allowed = torch.ones(len(one_q), len(one_k), dtype=torch.bool).tril(len(one_k) - len(one_q))
                if mask.window is not None:
                    allowed = allowed.triu(len(one_k) - len(one_q) - mask.window)
                found.append(self.kernel.forward(one_q, one_k, one_v, MaskSpec(explicit=allowed[None, None])))
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", pytest.param("mla", marks=pytest.mark.nightly)])
def test_kernels_with_cumulative_lengths_get_the_same_documents(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(_: str, scale: float, softcap: float | None = None) -> Packed:
        return Packed(EagerAttention(scale=scale, softcap=softcap))

    monkeypatch.setattr(cached_attention, "attention_kernel", kernel)
    assert_same_as_whole(name, logits_by_parts(cached(name), sequences()))


def test_a_window_keeps_few_rows() -> None:
    whole, window = (cached(name).cache.plan for name in ("llama", "window"))
    assert window.bytes_of(SEQ) * SEQ == whole.bytes_of(SEQ) * (3 + window.tokens_per_pass)
    assert cached("mla").cache.plan.bytes_of(10) == 10 * 4 * 8 * (12 + 4)
    assert cached("dsa").cache.plan.bytes_of(10) == 10 * 4 * 8 * (12 + 4 + 8)


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "experts", "gpt2"])
def test_decoded_logits_are_those_of_the_whole_sequence(name: str) -> None:
    """Sequences of three lengths; the last one leaves, and windows are full several times."""
    model = cached(name)
    rows, starts, count = sorted(sequences(), key=len, reverse=True), (9, 5, 2), 9
    reservations = [model.cache.reserve(len(row)) for row in rows]
    parts = [
        NewTokens(memory, row[:start], 0)
        for memory, row, start in zip(reservations, rows, starts, strict=True)
    ]
    for part in parts:  # a pass has at most 8 tokens of a sequence
        for first in range(0, len(part.tokens), 8):
            model.logits([NewTokens(part.reservation, part.tokens[first : first + 8], first)])
    decoder = Decoder(model, has_graphs=False)
    found = [[] for _ in rows]
    for number in range(12):
        running = 3 if number < count else 2
        if number in (0, count):
            places = [start + number for start in starts[:running]]
            tokens = [row[place] for row, place in zip(rows, places, strict=False)]
            decoder.begin(reservations[:running], tokens, places)
        for one, logits in zip(found, decoder.run(), strict=False):
            one.append(logits)
        following = [
            row[start + number + 1 : start + number + 2] or [0]
            for row, start in zip(rows, starts, strict=True)
        ]
        decoder.add(torch.tensor(following[:running]).flatten())
    plain = tiny_model(name)
    for row, start, logits in zip(rows, starts, found, strict=True):
        whole = logits_of_heads(plain, torch.tensor([row]))[0].squeeze(0)[start : start + len(logits)]
        assert float((torch.stack(logits) - whole).abs().max()) <= 1e-11 * float(whole.abs().max())


def test_numbers_of_slots() -> None:
    found = [num_slots(count) for count in (1, 2, 3, 9, 16, 17, 24, 25, 33, 49, 64, 65, 97)]
    assert found == [1, 2, 4, 16, 16, 24, 24, 32, 48, 64, 64, 96, 128]
