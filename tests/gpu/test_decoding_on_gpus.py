"""Decode passes on a GPU: graphs equal eager passes bit for bit, split attention equals its reference, and the engine its own texts."""

import pytest
import torch
from kernel_reference import reference
from torch import Tensor

from megatrain.config import Facts, parse, resolve
from megatrain.config.subjects.model_spec import describe_model
from megatrain.inference.cache import CachePlan, layer_caches
from megatrain.inference.cached_model import CachedModel, NewTokens
from megatrain.inference.decoding import Decoder, can_capture
from megatrain.inference.engine import Engine
from megatrain.inference.sampling import Sampling
from megatrain.inference.tensor_split import without_capacity
from megatrain.kernels.attention.decode import decode_attention
from megatrain.kernels.linear import linear
from megatrain.model.gpt import build_model
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.rank_lists import GridShape

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]
VOCAB, SEQ, LENGTHS = 1000, 200, (40, 3, 90, 17, 61)
DENSE = (
    "--group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu --position-embedding-type rope"
    " --disable-bias-linear --untie-embeddings-and-output-weights"
)
MODELS = {
    "llama": DENSE,
    "windows": f"{DENSE} --window-size 30,0",
    "gpt2": f"--position-embedding-type learned_absolute --max-position-embeddings {SEQ}",
    "experts": f"{DENSE} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 0.01",
}


def cached(name: str) -> CachedModel:
    flags = (
        "--num-layers 3 --num-attention-heads 8 --hidden-size 512 --ffn-hidden-size 1024 --init-method-std 0.1 --mock-data"
        f" --seq-length {SEQ} --tokenizer-type NullTokenizer --vocab-size {VOCAB} --micro-batch-size 1 --train-iters 1 --lr 1e-2"
        " --device cpu --hidden-dropout 0 --attention-dropout 0"
    )
    config = resolve(parse([*flags.split(), *MODELS[name].split()]), Facts(vocab_size=VOCAB, eod_id=0)).config
    spec = without_capacity(describe_model(config.model, config.experts, vocab_size=VOCAB))
    grid, device = build_grid(GridShape(), 0), torch.device("cuda")
    model = build_model(
        spec, grid, seq_length=SEQ, sequence_parallel=False, dtype=torch.bfloat16, device=device
    )
    allocate_buffers(model.registry, grid=grid, weight_dtype=torch.bfloat16, device=device)
    torch.manual_seed(1)
    for segment in model.segments:
        for weight in segment.parameters():
            weight.data.normal_(std=0.1) if weight.dim() > 1 else weight.data.fill_(1)
    plan = CachePlan(layer_caches(model.spec, 1), torch.bfloat16, 64, SEQ, len(LENGTHS), len(LENGTHS))
    return CachedModel(model, plan, device)


def prompts() -> list[list[int]]:
    return [
        [(7 * number + 13 * place) % VOCAB for place in range(length)]
        for number, length in enumerate(LENGTHS)
    ]


def decoded(name: str, count: int, *, has_graphs: bool) -> list[Tensor]:
    """Return the logits of greedy passes that extend `count` sequences."""
    model = cached(name)
    assert can_capture(model)
    rows = prompts()[:count]
    reservations = [model.cache.reserve(SEQ) for _ in rows]
    for memory, row in zip(reservations, rows, strict=True):
        for first in range(0, len(row), 64):
            model.logits([NewTokens(memory, row[first : first + 64], first)])
    decoder = Decoder(model, has_graphs=has_graphs)
    decoder.begin(reservations, [5] * count, [len(row) for row in rows])
    found = []
    for _ in range(80):  # windows are full once
        logits = decoder.run().clone()
        decoder.add(logits.argmax(-1))
        found.append(logits)
    return found


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("name", MODELS)
def test_graphs_equal_eager_passes_bit_for_bit(name: str, count: int) -> None:
    eager, graphs = (decoded(name, count, has_graphs=has_graphs) for has_graphs in (False, True))
    assert all(bool(one.isfinite().all()) for one in eager)
    for number, (expected, found) in enumerate(zip(eager, graphs, strict=True)):
        assert torch.equal(expected, found), number


@pytest.mark.parametrize("name", ["llama", "windows"])
def test_texts_of_the_engine_are_those_of_prompts_alone_up_to_rounding(name: str) -> None:
    """Sequences join and leave, with the graphs of several numbers of slots; random samples have seeds."""
    engine = Engine(cached(name), ())
    samplings = [
        Sampling(
            max_new_tokens=20 + 9 * n, temperature=n % 2, top_k=4, seed=n, num_log_probs=0, ends_at_eod=False
        )
        for n in range(len(LENGTHS))
    ]
    found = []
    for is_together in (True, False):
        batches = [range(len(LENGTHS))] if is_together else [[n] for n in range(len(LENGTHS))]
        texts = []
        for batch in batches:
            texts += [engine.submit(prompts()[n], samplings[n]) for n in batch]
            while not engine.is_idle:
                engine.step()
        found.append(texts)
    assert engine.model.cache.is_empty
    for together, alone, sampling in zip(*found, samplings, strict=True):
        assert together.num_new == alone.num_new == sampling.max_new_tokens
        assert together.log_probs[0].log_prob == pytest.approx(alone.log_probs[0].log_prob, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("b", "n", "g", "d"), [(1, 32, 8, 128), (64, 32, 8, 128), (3, 8, 8, 64), (2, 16, 1, 256)]
)
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 5.0}], ids=str)
def test_split_attention_equals_its_reference(
    dtype: torch.dtype, b: int, n: int, g: int, d: int, options: dict[str, float]
) -> None:
    generator = torch.Generator(device="cuda").manual_seed(b)
    counts = torch.randint(1, 3000, (b,), generator=generator, device="cuda")
    counts[0] = 3000
    first = counts.cumsum(0) - counts
    rows = int(counts.sum())
    q, k, v = (
        torch.randn(*shape, d, generator=generator, device="cuda").to(dtype)
        for shape in ((b, n), (rows, g), (rows, g))
    )
    found = decode_attention(q, k, v, first, counts, scale=d**-0.5, **options)
    expected = reference(decode_attention)(
        q.double(), k.double(), v.double(), first, counts, scale=d**-0.5, **options
    )
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert torch.equal(found, decode_attention(q, k, v, first, counts, scale=d**-0.5, **options))


@pytest.mark.parametrize(("rows", "columns"), [(6144, 4096), (4096, 14336), (1000, 1000), (128256, 4096)])
def test_products_with_one_row(rows: int, columns: int) -> None:
    x, weight = (torch.randn(*shape, columns, device="cuda").bfloat16() for shape in ((1, 1), (rows,)))
    found = linear(x, weight)
    expected = x.float() @ weight.float().t()
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-2
