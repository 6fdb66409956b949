"""Tiny models with random weights: those of parity, with experts and multi-token prediction too."""

import copy
import functools

import torch

from megatrain.config import Facts, parse, resolve
from megatrain.config.subjects.model_spec import describe_model
from megatrain.inference.cache import CachePlan, layer_caches
from megatrain.inference.cached_model import CachedModel
from megatrain.inference.tensor_split import without_capacity
from megatrain.model.custom_layers import apply_custom_layers
from megatrain.model.gpt import Model, build_model
from megatrain.optim.sharded import fill_weights
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.initialize import InitialWeights
from megatrain.parallel.rank_lists import GridShape
from megatrain.tools.parity.models import MODELS as PARITY_MODELS
from megatrain.training.launch.user_files import add_user_files

VOCAB, SEQ = 97, 30
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.01"
_WITHOUT = "--model-family bert", "--model-family vlm"
_TEXT_MODELS = {
    name: flags for name, flags in PARITY_MODELS.items() if not any(words in flags for words in _WITHOUT)
}
"""Models of parity that generate text from text."""
MODELS = _TEXT_MODELS | {
    "experts": f"{PARITY_MODELS['llama']} {_EXPERTS} --moe-shared-expert-intermediate-size 16",
    "experts with capacity": f"{PARITY_MODELS['llama']} {_EXPERTS} --moe-expert-capacity-factor 0.5",
    "mtp": f"{PARITY_MODELS['llama']} --mtp-num-layers 1",
    "window": f"{PARITY_MODELS['llama']} --window-size 3,0",
    "mla with a window": f"{PARITY_MODELS['mla']} --window-size 4,0",
    **{name: f"--model-family t5 --decoder-seq-length {SEQ} {flags}" for name, flags in {
        "t5": f"--position-embedding-type learned_absolute --max-position-embeddings {SEQ}",
        "t5 with RoPE": "--position-embedding-type rope",
        "t5 with relative positions": "--position-embedding-type relative --swiglu",
    }.items()},
}  # fmt: skip
"""Models with an encoder read each sequence from its last token to its first, then the sequence itself."""


@functools.cache
def _model(name: str) -> Model:
    flags = (
        "--num-layers 4 --num-attention-heads 48 --hidden-size 48 --kv-channels 4 --ffn-hidden-size 96 --init-method-std 0.1"
        f" --mock-data --seq-length {SEQ} --tokenizer-type NullTokenizer --vocab-size {VOCAB} --micro-batch-size 1"
        " --train-iters 1 --lr 1e-2 --params-dtype float64 --device cpu"
    )
    request = parse([*flags.split(), *MODELS[name].split()])
    facts = Facts(vocab_size=VOCAB, eod_id=VOCAB - 1)
    config = resolve(request, add_user_files(request, facts)).config
    spec = apply_custom_layers(describe_model(config.model, config.experts, vocab_size=VOCAB), config.model)
    spec = without_capacity(spec)
    kind = {"dtype": torch.float64, "device": torch.device("cpu")}
    grid = build_grid(GridShape(), 0)
    model = build_model(spec, grid, seq_length=SEQ, sequence_parallel=False, **kind)
    buffers = allocate_buffers(model.registry, grid=grid, weight_dtype=kind["dtype"], device=kind["device"])
    fill_weights(buffers, InitialWeights(3))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for segment in model.segments:
            for weight in segment.parameters():
                weight += 0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


def tiny_model(name: str) -> Model:
    """Return a copy of a model: a cache takes it over."""
    return copy.deepcopy(_model(name))


def cached(name: str, *, sequences: int = 3, tokens: int = SEQ, per_pass: int = 8) -> CachedModel:
    model = tiny_model(name)
    has_encoder = len(model.spec.stacks) > 1
    plan = CachePlan(
        layer_caches(model.spec, 1), torch.float64, per_pass, tokens, sequences, max_sequences=sequences,
        max_memory=tokens if has_encoder else 0,
    )  # fmt: skip
    return CachedModel(model, plan, torch.device("cpu"))
