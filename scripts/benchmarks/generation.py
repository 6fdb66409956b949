"""Time text generation with random weights on one GPU, and `generate` of transformers with the same weights.

    python scripts/benchmarks/generation.py                     Llama-3-8B shape; prompts of 512 tokens, 128 new tokens
    python scripts/benchmarks/generation.py --profile           also the kernels of one pass
    python scripts/benchmarks/generation.py --tiny --device cpu a model that a CPU computes at once

    prompt         seconds until every sequence has its first token
    ms a token     median time of a pass that adds one token to each sequence
    share          bytes of weights (without the embedding table) and cache that a pass reads, of what 4.2 TB/s would read
    tokens/s       of the whole call, with the prompts

A first table has the products of one row with the weights of all layers, which limit a batch of 1, in a CUDA graph. A part that fails is
reported, the others run, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.config import Facts, parse, resolve
from megatrain.config.subjects.model_spec import describe_model
from megatrain.inference.cached_model import CachedModel
from megatrain.inference.engine import Engine
from megatrain.inference.sampling import Sampling
from megatrain.inference.texts import plan_cache
from megatrain.kernels.fused.matrix_vector import TILE, matrix_vector
from megatrain.model.gpt import Model, build_model
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.rank_lists import GridShape

BYTES_PER_SECOND = 4.2e12
CONFIG = Path(__file__).parents[2] / "configs/benchmarks/b1.yaml"
TINY = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --num-query-groups 2 --vocab-size 300"
TILES = [TILE, (1, 2048), (4, 1024), (2, 1024), (1, 1024)]
"""Tiles of the kernel for one row; the first one is in use."""
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of one measurement."""

    batch: int
    prompt: int
    new: int


@dataclass(frozen=True)
class Row:
    """Times of one program, in seconds."""

    prompt: float
    token: float
    whole: float


def random_model(arguments: argparse.Namespace) -> Model:
    """Return a model with normal weights, in bf16 on a GPU."""
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    words = ["--config", str(CONFIG), "--seq-length", "1024", *(TINY.split() if arguments.tiny else [])]
    request = parse([*words, "--device", "cpu", "--no-bf16"])
    vocab_size = 300 if arguments.tiny else 128256
    config = resolve(request, Facts(vocab_size=vocab_size, eod_id=0)).config
    spec = describe_model(config.model, config.experts, vocab_size=vocab_size)
    grid = build_grid(GridShape(), 0)
    model = build_model(spec, grid, seq_length=1024, sequence_parallel=False, dtype=dtype, device=device)
    allocate_buffers(model.registry, grid=grid, weight_dtype=dtype, device=device)
    torch.manual_seed(1)
    for segment in model.segments:
        for weight in segment.parameters():
            weight.data.normal_(std=0.02) if weight.dim() > 1 else weight.data.fill_(1)
    return model


def build_engine(model: Model, arguments: argparse.Namespace) -> Engine:
    """Return an engine with a cache for the largest batch."""
    plan = plan_cache(
        model,
        dtype=next(model.segments[0].parameters()).dtype,
        max_tokens=arguments.prompt + arguments.new + max(arguments.batches),
        num_sequences=max(arguments.batches),
        limit_bytes=1 << 40,
    )
    return Engine(CachedModel(model, plan, torch.device(arguments.device)), None)


def run_ours(engine: Engine, prompts: list[list[int]], shape: Shape) -> tuple[Row, list[list[int]]]:
    """Generate with the engine."""
    sampling = Sampling(max_new_tokens=shape.new, temperature=0, ends_at_eod=False)
    start = time.perf_counter()
    completions = [engine.submit(prompt, sampling) for prompt in prompts]
    prompt, before, passes = 0.0, 0.0, []
    while not engine.is_idle:
        engine.step()
        now = time.perf_counter()
        if not prompt and all(one.num_new for one in completions):
            prompt = now - start
        is_whole = len(engine.decoded) == shape.batch
        if is_whole and before:
            passes.append(now - before)
        before = now if is_whole else 0.0
    whole = time.perf_counter() - start
    return Row(prompt, statistics.median(passes), whole), [one.tokens for one in completions]


def transformers_model(model: Model) -> Any:
    """Return a model of transformers whose weights are views of ours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    spec, attention, mlp = model.spec, model.spec.layers[0].mixer, model.spec.layers[0].mlp
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=mlp.ffn_hidden_size,
        num_hidden_layers=len(spec.layers),
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_query_groups,
        rms_norm_eps=spec.norm.epsilon,
        rope_theta=attention.rotary.base,
        max_position_embeddings=1024,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config).eval()
    embedding, *layers, head = model.segments
    weights = {
        "model.embed_tokens.weight": embedding.weight[: spec.vocab_size],
        "model.norm.weight": head.norm.weight,
        "lm_head.weight": head.weight[: spec.vocab_size],
    }
    d, n, g = attention.head_dim, attention.num_heads, attention.num_query_groups
    for number, layer in enumerate(layers):
        prefix, (ours, dense) = f"model.layers.{number}.", layer.branches
        q, k, v = ours.qkv.weight.split([n * d, g * d, g * d])
        gate, up = dense.fc1.weight.chunk(2)
        weights |= {
            f"{prefix}input_layernorm.weight": ours.qkv.norm.weight,
            f"{prefix}post_attention_layernorm.weight": dense.fc1.norm.weight,
            f"{prefix}self_attn.q_proj.weight": q,
            f"{prefix}self_attn.k_proj.weight": k,
            f"{prefix}self_attn.v_proj.weight": v,
            f"{prefix}self_attn.o_proj.weight": ours.proj.weight,
            f"{prefix}mlp.gate_proj.weight": gate,
            f"{prefix}mlp.up_proj.weight": up,
            f"{prefix}mlp.down_proj.weight": dense.fc2.weight,
        }
    theirs.load_state_dict({name: weight.data for name, weight in weights.items()}, assign=True)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config).to(head.weight.device)
    return theirs


def run_theirs(theirs: Any, prompts: list[list[int]], shape: Shape) -> tuple[Row, list[list[int]]]:
    """Generate with transformers; the time of a token is that of a call with many minus that of a call with one."""
    ids = torch.tensor(prompts, device=theirs.device)

    def call(new: int) -> tuple[float, Tensor]:
        synchronize(theirs.device)
        start = time.perf_counter()
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        synchronize(theirs.device)
        return time.perf_counter() - start, out

    call(3)
    prompt, _ = call(1)
    whole, out = call(shape.new)
    return Row(prompt, (whole - prompt) / (shape.new - 1), whole), out[:, shape.prompt :].tolist()


def bytes_of_pass(model: Model, shape: Shape, plan: Any) -> int:
    """Return the bytes that a pass reads in the middle of the new tokens."""
    weights = sum(weight.nbytes for segment in model.segments[1:] for weight in segment.parameters())
    return weights + shape.batch * int(plan.bytes_of(shape.prompt + shape.new // 2))


def products(model: Model) -> None:
    """Print the rates of products of one row with each kind of weight."""
    _, *layers, head = model.segments
    kinds = {
        "qkv": [layer.branches[0].qkv.weight for layer in layers],
        "projection": [layer.branches[0].proj.weight for layer in layers],
        "fc1": [layer.branches[1].fc1.weight for layer in layers],
        "fc2": [layer.branches[1].fc2.weight for layer in layers],
        "head": [head.weight],
    }
    ways: dict[str, Product] = {"cuBLAS": lambda x, w: x @ w.t()}
    for tile in TILES:
        ways["{} x {}".format(*tile)] = functools.partial(matrix_vector, bias=None, tile=tile)
    print(f"one row, TB/s    | {' | '.join(f'{name:>9}' for name in ways)}")
    for kind, weights in kinds.items():
        x = torch.randn(1, weights[0].shape[1], device="cuda", dtype=torch.bfloat16)
        size = sum(weight.nbytes for weight in weights)
        rates = [
            size / seconds_in_graph(functools.partial(run_all, way, x, weights)) for way in ways.values()
        ]
        print(f"{kind:<16} | {' | '.join(f'{rate / 1e12:9.2f}' for rate in rates)}", flush=True)


def run_all(product: Product, x: Tensor, weights: list[Tensor]) -> None:
    """Multiply with all weights."""
    for weight in weights:
        product(x, weight)


def seconds_in_graph(run: Callable[[], object]) -> float:
    """Return the median time of a captured run."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def profile(engine: Engine, prompts: list[list[int]]) -> None:
    """Print the kernels that take the most time in passes."""
    for prompt in prompts:
        engine.submit(prompt[:32], Sampling(max_new_tokens=24, temperature=0, ends_at_eod=False))
    while len(engine.decoded) < len(prompts):
        engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(4):
            engine.step()
        torch.cuda.synchronize()
    while not engine.is_idle:
        engine.step()
    events = sorted(found.key_averages(), key=lambda one: -one.device_time_total)[:14]
    print(f"kernels of a pass, batch {len(prompts)}: us, calls, us a call")
    for one in events:
        total, calls = one.device_time_total / 4, one.count / 4
        print(f"  {total:8.1f} {calls:6.1f} {total / max(calls, 1):7.2f}  {one.key[:90]}", flush=True)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def show(shape: Shape, name: str, row: Row, size: int) -> None:
    """Print a row of the table."""
    share = size / row.token / BYTES_PER_SECOND
    print(
        f"{shape.batch:5} | {name:<22} | {row.prompt:8.3f} | {row.token * 1e3:10.2f} | {share:6.1%} |"
        f" {shape.batch * shape.new / row.whole:8.0f} | {shape.batch / row.token:8.0f}",
        flush=True,
    )


def measure(engine: Engine, arguments: argparse.Namespace, shape: Shape, theirs: Any) -> None:
    """Print the rows of one batch size. `theirs`: None without transformers."""
    model, plan = engine.model.model, engine.model.cache.plan
    generator = torch.Generator().manual_seed(shape.batch)
    shape_of_ids = (shape.batch, shape.prompt)
    prompts = torch.randint(model.spec.vocab_size, shape_of_ids, generator=generator).tolist()
    size = bytes_of_pass(model, shape, plan)
    if theirs is not None:
        row, texts = run_theirs(theirs, prompts, shape)
        show(shape, "transformers", row, size)
    run_ours(engine, prompts, Shape(shape.batch, shape.prompt, 6 + shape.batch))
    ours, found = run_ours(engine, prompts, shape)
    show(shape, "megatrain", ours, size)
    if theirs is not None:
        pairs = [
            next((n for n, (a, b) in enumerate(zip(*both, strict=True)) if a != b), shape.new)
            for both in zip(found, texts, strict=True)
        ]
        print(
            f"        a token takes transformers {row.token / ours.token:.2f} x as long, the whole call {row.whole / ours.whole:.2f} x;"
            f" equal tokens before the first difference: {statistics.mean(pairs):.1f} of {shape.new}",
            flush=True,
        )
    if arguments.profile:
        profile(engine, prompts)


def parsed() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    return parser.parse_args()


def main() -> int:
    """Run all parts; return the exit code."""
    arguments, failed, start = parsed(), [], time.perf_counter()

    def attempt(name: str, part: Callable[[], Any]) -> Any:
        try:
            return part()
        except Exception:  # noqa: BLE001 (the other parts run)
            traceback.print_exc()
            print(f"FAILED: {name}", flush=True)
            failed.append(name)
            return None

    with torch.no_grad():
        model = random_model(arguments)
        print(f"weights after {time.perf_counter() - start:.0f} s", flush=True)
        if arguments.device == "cuda":
            attempt("products", lambda: products(model))
        try:
            theirs = transformers_model(model)
        except ImportError as error:
            print(f"transformers cannot be imported here: {error}")
            theirs = None
        engine = build_engine(model, arguments)
        print(
            "batch | program                | prompt s | ms a token |  share | tokens/s | tokens/s without prompts"
        )
        for batch in arguments.batches:
            shape = Shape(batch, arguments.prompt, arguments.new)
            attempt(f"batch {batch}", lambda shape=shape: measure(engine, arguments, shape, theirs))
    print(f"{time.perf_counter() - start:.0f} s in all")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
