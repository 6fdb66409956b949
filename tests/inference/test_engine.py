"""The engine: sequences join and leave, each has the text that it has alone, and memory returns."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_cached_models import SEQ, VOCAB, cached, tiny_model

from megatrain.config import ConfigError
from megatrain.inference.cache import FreeRanges
from megatrain.inference.engine import Completion, Engine
from megatrain.inference.sampling import Sampling
from megatrain.inference.texts import plan_cache
from megatrain.tools.compare_logits import logits_of_heads

PROMPTS = [
    [(7 * one + place) % VOCAB for place in range(length)] for one, length in enumerate((1, 9, 3, 17, 5, 12))
]
SAMPLINGS = [
    Sampling(
        max_new_tokens=13, temperature=temperature, top_k=20, seed=seed, ends_at_eod=False, num_log_probs=2
    )
    for seed, temperature in enumerate((0.0, 1.0, 1.0, 0.0, 2.0, 1.0))
]


def run(engine: Engine, wanted: Sequence[tuple[list[int], Sampling]]) -> list[Completion]:
    found = [engine.submit(*one) for one in wanted]
    while not engine.is_idle:
        engine.step()
    assert engine.model.cache.is_empty
    return found


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        *(
            pytest.param(one, marks=pytest.mark.nightly)
            for one in ("mla", "dsa", "qwen3-next", "experts with capacity")
        ),
    ],
)
def test_each_text_is_that_of_its_prompt_alone(name: str) -> None:
    wanted = list(zip(PROMPTS, SAMPLINGS, strict=True))
    together = run(Engine(cached(name, sequences=3, tokens=SEQ, per_pass=8), ()), wanted)
    alone = Engine(cached(name, sequences=1, tokens=SEQ, per_pass=32), ())
    for one, prompt_and_sampling in zip(together, wanted, strict=True):
        (other,) = run(alone, [prompt_and_sampling])
        assert one.tokens == other.tokens
        assert len(one.tokens) == 13
        assert one.finish_reason == "length"
        expected = [each.log_prob for each in other.log_probs]
        assert [each.log_prob for each in one.log_probs] == pytest.approx(expected, rel=1e-9)


def test_greedy_tokens_and_log_probabilities_are_those_of_whole_sequences() -> None:
    model = tiny_model("llama")
    sampling = Sampling(
        max_new_tokens=6, temperature=0, num_log_probs=1, wants_prompt_log_probs=True, ends_at_eod=False
    )
    (one,) = run(Engine(cached("llama", per_pass=4), ()), [(PROMPTS[3], sampling)])
    logits = logits_of_heads(model, torch.tensor([one.ids]))[0].squeeze(0).log_softmax(-1)
    first = len(PROMPTS[3]) - 1
    assert one.tokens == logits[first:-1].argmax(-1).tolist()
    found = [each.log_prob for each in one.prompt_log_probs + one.log_probs]
    assert found == pytest.approx(
        [float(row[token]) for row, token in zip(logits[:-1], one.ids[1:], strict=True)]
    )
    assert all(each.top[0][0] == each.token for each in one.log_probs)


def test_no_new_tokens_give_the_log_probabilities_of_the_prompt() -> None:
    sampling = Sampling(max_new_tokens=0, num_log_probs=0, wants_prompt_log_probs=True)
    (one,) = run(Engine(cached("llama", per_pass=4), ()), [(PROMPTS[5], sampling)])
    assert one.tokens == []
    assert len(one.prompt_log_probs) == len(PROMPTS[5]) - 1
    assert one.finish_reason == "length"


def test_the_end_of_a_document_ends_a_completion() -> None:
    sampling = Sampling(max_new_tokens=9, temperature=0)
    (whole,) = run(Engine(cached("llama"), ()), [(PROMPTS[2], sampling)])
    end = whole.tokens[4]
    (one,) = run(Engine(cached("llama"), (end,)), [(PROMPTS[2], sampling)])
    assert one.tokens == whole.tokens[: whole.tokens.index(end) + 1]
    assert one.finish_reason == "stop"


def test_texts_that_end_during_passes_of_others_have_no_token_too_many() -> None:
    """Every third token is the end of documents once: texts end at any pass, while the next one already runs."""
    wanted = [(prompt, Sampling(max_new_tokens=12, temperature=0)) for prompt in PROMPTS]
    whole = [one.tokens for one in run(Engine(cached("llama", per_pass=40), ()), wanted)]
    for end in sorted({token for tokens in whole for token in tokens})[::3]:
        found = run(Engine(cached("llama", per_pass=40), (end,)), wanted)
        for one, tokens in zip(found, whole, strict=True):
            expected = tokens[: tokens.index(end) + 1] if end in tokens else tokens
            assert one.tokens == expected
            assert one.finish_reason == ("stop" if end in tokens else "length")


def test_completions_that_are_removed_return_their_memory() -> None:
    engine = Engine(cached("gemma2", sequences=2, per_pass=4), ())
    found = [engine.submit(*one) for one in zip(PROMPTS, SAMPLINGS, strict=True)]
    rng = random.Random(1)
    while found:
        engine.step()
        engine.remove(found.pop(rng.randrange(len(found))))
    assert engine.is_idle
    assert engine.model.cache.is_empty
    assert engine.step() == []


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=60))
def test_ranges_never_overlap_and_return(actions: list[tuple[int, bool]]) -> None:
    free, taken = FreeRanges(30), {}
    for size, is_return in actions:
        if is_return and taken:
            start = sorted(taken)[size % len(taken)]
            free.give(start, taken.pop(start))
            continue
        start = free.take(size)
        used = {row for first, count in taken.items() for row in range(first, first + count)}
        if start is None:
            runs = "".join("x" if row in used else "." for row in range(30)).split("x")
            assert max(map(len, runs)) < size
        else:
            assert used.isdisjoint(range(start, start + size))
            assert start + size <= 30
            taken[start] = size
    for start, count in taken.items():
        free.give(start, count)
    assert free.spans == [(0, 30)]


def test_a_plan_has_as_many_sequences_as_the_limit_allows() -> None:
    kind = {"dtype": torch.float64, "max_tokens": 20}
    for name in ("llama", "qwen3-next"):
        model = tiny_model(name)
        one = plan_cache(model, **kind, num_sequences=1, limit_bytes=1 << 40)
        plan = plan_cache(model, **kind, num_sequences=9, limit_bytes=5 * one.num_bytes + 1)
        assert plan.num_sequences == 5
        assert plan.num_bytes <= 5 * one.num_bytes
        assert plan.max_sequences == (9 if name == "llama" else 5)
        with pytest.raises(ConfigError, match="a sequence of 20 tokens needs a cache of"):
            plan_cache(model, **kind, num_sequences=9, limit_bytes=one.num_bytes - 1)


def test_memory_is_what_the_plan_says() -> None:
    for name in ("gemma2", "mla", "qwen3-next"):
        cache = cached(name).cache
        tensors = [tensor for layer in (*cache.rows, *cache.states) for tensor in layer]
        assert sum(tensor.nbytes for tensor in tensors) == cache.plan.num_bytes
