#!/usr/bin/env python3
"""Compute the minimum iteration time of a benchmark case: each part at the rate that it reaches alone, everything else hidden.

    python3 scripts/roofline.py A1 S1 E1

    products        6 FLOPs per token and active weight of linear layers and head, of BERT's only for tokens with a label
    attention       2 s n d FLOPs per token and layer forward (causal; else 4), 2.5 times that backward
    element-wise    bytes of norms, RoPE, activation, loss and convolution, at the memory bandwidth
    scans           the FLOPs that Megatron-LM counts, among the products
    gradients       8 bytes per weight and micro-batch for fp32 accumulation, half of them hidden in the products
    optimizer       38 bytes per weight, with the gradient norm and zeroing

Communication is assumed hidden, pipelines without bubbles, and expert loads balanced; copies of tokens are not counted. Rates are those of one H200:
products of 8,192 rows at 750 of 790 TFLOP/s, cuDNN's attention at s 8192 and 128 channels (cudnn-frontend's tables), 4.0 of
4.3 TB/s. The rates of S1, with heads of 64 channels, were measured by `scripts/part_rates.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain.config import Facts, Plan, parse, resolve
from megatrain.config.derive.vision import sample_length
from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.delta_rule import LinearAttentionSpec
from megatrain.config.model_spec.experts import ExpertsSpec
from megatrain.config.model_spec.mamba import MambaSpec
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.part import Part
from megatrain.config.model_spec.vision import CHANNELS
from megatrain.training.launch.facts import library_versions

ROOT = Path(__file__).resolve().parents[1]
BYTES_PER_SECOND = 4.0e12
WORDS = 30_522
"""BERT's vocabulary, of the cases of BERT and T5."""


@dataclass(frozen=True)
class Rates:
    """TFLOP/s of one H200, in bf16 unless noted."""

    products: float = 750
    attention: float = 644
    attention_backward: float = 541


RATES = {
    "S1": Rates(products=674, attention=208, attention_backward=290),
    "E1": Rates(attention=365, attention_backward=270),  # cuDNN's without a mask, 64 channels, s 512
    "E2": Rates(attention=414, attention_backward=359),  # the same, s 1024
    "A2": Rates(products=1166),  # 1,300 in FP8, and 690 in bf16 for the head's 13 % of the FLOPs
}


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Milliseconds per iteration and GPU."""

    products: float
    attention: float
    element_wise: float
    gradients: float
    optimizer: float
    tokens: float
    """Tokens per iteration and GPU."""

    @property
    def total(self) -> float:
        return self.products + self.attention + self.element_wise + self.gradients + self.optimizer

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total * 1e3


def roofline_of(name: str, flags: Sequence[str] = (), *, world_size: int | None = None) -> Roofline:
    """Return the roofline of `configs/benchmarks/<name>.yaml` with flags, by default on the case's own number of GPUs."""
    return _roofline(plan_of(name, flags, world_size=world_size), RATES.get(name, Rates()))


def plan_of(name: str, flags: Sequence[str] = (), *, world_size: int | None = None) -> Plan:
    """Resolve the plan of a case, on any machine."""
    data = ["--data-path", "sentences", "--vocab-file", "vocabulary.txt"] if name[0] == "E" else []
    request = parse(["--config", str(ROOT / f"configs/benchmarks/{name.lower()}.yaml"), *data, *flags])
    world_size = world_size or (4 if name[0] == "B" else 1)
    vocabulary = request.config.tokenizer.vocab_size or WORDS
    facts = Facts(
        device="cuda", world_size=world_size, vocab_size=vocabulary, eod_id=0, libraries=library_versions()
    )
    return resolve(request, facts)


def active_width(mlp: MlpSpec | ExpertsSpec) -> int:
    """Return the total width that a token uses."""
    if isinstance(mlp, MlpSpec):
        return mlp.ffn_hidden_size
    return mlp.top_k * mlp.ffn_hidden_size + mlp.shared_ffn_hidden_size


def moved_by(part: Part, *, has_rope: bool) -> int:
    """Return the bytes per token that the element-wise operations of a part move in both passes, without its norm and residual."""
    if isinstance(part, MlpSpec | ExpertsSpec):
        return (6 + 10 if part.is_gated else 4 + 6) * active_width(part)
    if isinstance(
        part, MambaSpec
    ):  # the convolution reads and writes once each way, the gated norm twice and once more
        return (4 + 6) * (part.inner_dim + 2 * part.group_dim) + (6 + 10) * part.inner_dim
    if isinstance(part, LinearAttentionSpec):  # the same, and the lengths of queries and keys
        return (4 + 6) * (4 * part.key_dim + part.value_dim) + (6 + 10) * part.value_dim
    if isinstance(part, AttentionSpec) and has_rope:
        return 2 * 4 * part.head_dim * (part.num_heads + part.num_query_groups)
    return 0


def _roofline(plan: Plan, rates: Rates) -> Roofline:
    model, derived, parallel = plan.config.model, plan.derived, plan.config.parallel
    h, s, spec = model.hidden_size, sample_length(plan.config), derived.model_spec
    has_rope = model.position_embedding_type == "rope" or model.multi_latent_attention
    attention = linear = weights = experts = inactive = moved = 0.0
    for stack in spec.stacks:
        own = stack.seq_length or s
        for layer in stack.layers:
            weights += sum(one.active_weights for one in layer.linears(h))
            of_memory = sum(one.active_weights for one in layer.linears(h) if one.reads == "the memory")
            linear += (layer.active_weights(h) - of_memory) * own / s + of_memory
            for one in layer.linears(h):
                experts += one.num_experts * one.inputs * one.outputs
                inactive += (one.num_experts - one.top_k) * one.inputs * one.outputs if one.num_experts else 0
            attention += own / s * (own * layer.pair_channels + s * layer.memory_channels)
            moved += (
                own / s * sum((8 * 2 + 7) * h + moved_by(part, has_rope=has_rope) for part in layer.parts)
            )
    if (vision := spec.vision) is not None:  # patches and layers, then the projector; all of them are trained
        width, of_patch = vision.hidden_size, CHANNELS * vision.patch_size**2
        tower = sum(one.active_weights for layer in vision.layers for one in layer.linears(width))
        projector = sum(one.active_weights for one in vision.projector.linears(h))
        weights += tower + projector + width * of_patch
        in_tower, in_text = (
            vision.images_per_sample * n / s for n in (vision.num_positions, vision.tokens_per_image)
        )
        linear += in_tower * (tower + width * of_patch) + in_text * projector
        attention += in_tower * vision.num_positions * sum(layer.pair_channels for layer in vision.layers)
        of_parts = (
            (8 * 2 + 7) * width + moved_by(part, has_rope=False)
            for layer in vision.layers
            for part in layer.parts
        )
        moved += in_tower * sum(of_parts)
    of_head = (spec.head.max_labels or spec.stacks[-1].seq_length or s) / s
    head = h * model.padded_vocab_size
    moved += of_head * 6 * model.padded_vocab_size
    weights += inactive + head * (2 if model.untie_embeddings_and_output_weights else 1)
    shards = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    expert_shards = (
        parallel.pipeline_model_parallel_size
        * parallel.expert_model_parallel_size
        * derived.expert_tensor_parallel_size
    )
    held = (weights - experts) / shards + experts / expert_shards
    tokens = derived.tokens_per_iteration / derived.world_size
    return Roofline(
        products=6 * (linear + of_head * head) * tokens / (rates.products * 1e9),
        attention=attention * tokens / 1e9 * (1 / rates.attention + 2.5 / rates.attention_backward),
        element_wise=moved * tokens / BYTES_PER_SECOND * 1e3,
        gradients=4 * held * derived.num_microbatches / BYTES_PER_SECOND * 1e3,
        optimizer=38 * weights / derived.world_size / BYTES_PER_SECOND * 1e3,
        tokens=tokens,
    )


def main() -> None:
    names = sys.argv[1:] or [
        "A1",
        "A2",
        "S1",
        "B1",
        "B3",
        "B4",
        "B5",
        "B6",
        "B7",
        "B8",
        "E1",
        "E2",
        "H1",
        "V1",
    ]
    parts = ("products", "attention", "element_wise", "gradients", "optimizer", "total")
    print(
        f"{'case':<5}"
        + "".join(f"{part:>13}" for part in parts)
        + f"{'tokens/s/GPU':>14}   (ms per iteration)"
    )
    for name in names:
        line = roofline_of(name)
        print(
            f"{name:<5}"
            + "".join(f"{getattr(line, part):13.1f}" for part in parts)
            + f"{line.tokens_per_second:14,.0f}"
        )


if __name__ == "__main__":
    main()
