"""Known models, with weights copied by canonical name: logits and gradients are those of the `transformers` library, in fp32."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from canonical_weights import CopiedWeights
from split_schedules import one_rank
from tiny_models import ROPE3, YARN
from torch import Tensor
from torch.nn import functional as F
from transformers_weights import (
    GEMMA2_NORMS,
    LATENTS,
    LLAMA4_NORMS,
    OLMO2_NORMS,
    PRE_NORMS,
    QK_NORMS,
    Weights,
    gpt2,
    gpt_neox,
    gpt_oss,
    llama_like,
    perturb,
    qwen3_next,
    with_experts,
)

from megatrain.config import Facts, parse, resolve
from megatrain.config.subjects.model_spec import describe_model
from megatrain.model.experts.router import ROUTER_METRICS
from megatrain.model.gpt import build_model
from megatrain.optim.sharded import fill_weights
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.data_parallel import DataParallel
from megatrain.parallel.pipeline.executor import Executor
from megatrain.parallel.rank_lists import GridShape
from megatrain.tools.compare_logits import logits_of_heads

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

VOCAB, SEQ, LAYERS = 97, 40, 4
TINY = (
    f"--num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 80 --seq-length {SEQ} --lr 1e-3 "
    f"--micro-batch-size 1 --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB} "
    f"--hidden-dropout 0 --attention-dropout 0 --params-dtype float32 --device cpu"
)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
LLAMA = "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear"
GQA = "--group-query-attention --num-query-groups 2"
UNTIED = "--untie-embeddings-and-output-weights"


class Ours:
    """Our model with the weights of theirs."""

    def __init__(self, flags: str, weights: Weights) -> None:
        plan = resolve(parse([*TINY.split(), *flags.split()]), Facts(vocab_size=VOCAB, eod_id=VOCAB - 1))
        self.grid = build_grid(GridShape(), 0)
        spec = describe_model(plan.config.model, plan.config.experts, vocab_size=VOCAB)
        kind = {"dtype": torch.float32, "device": torch.device("cpu")}
        self.model = build_model(spec, self.grid, seq_length=SEQ, sequence_parallel=False, **kind)
        self.buffers = allocate_buffers(
            self.model.registry, grid=self.grid, weight_dtype=torch.float32, grad_dtype=torch.float32,
            device=torch.device("cpu"),
        )  # fmt: skip
        # Qwen3-Next stores this norm as it is, and all others as their difference from 1; --apply-layernorm-1p covers all.
        source = CopiedWeights(
            {name: one - 1 if name.endswith("out_norm.weight") else one for name, one in weights.items()}
        )
        fill_weights(self.buffers, source)
        left = source.unused - {"output_layer.weight"}
        assert not left, f"not used: {left}"

        self.info = PassInfo()

    def gradients(self, tokens: Tensor, labels: Tensor) -> Weights:
        """Return the gradients of the mean loss, by canonical name."""
        positions = torch.arange(SEQ).expand_as(tokens)
        batch = Batch(
            tokens=tokens, labels=labels, loss_mask=torch.ones(tokens.shape), position_ids=positions
        )
        executor = Executor(
            self.model.segments, self.grid, hidden_shape=(SEQ, len(tokens), 32), dtype=torch.float32,
            device=torch.device("cpu"), hooks=DataParallel(self.buffers, self.grid),
        )  # fmt: skip
        executor.run(one_rank(1), [batch], [self.info])
        found: Weights = {}
        for bucket, gradients in zip(self.buffers.buckets, self.buffers.gradients.full, strict=True):
            for param in bucket.params:
                flat = gradients[param.start : param.stop]
                for box in param.entry.layout.ranges(0, flat.numel()):
                    whole = found.setdefault(box.piece.name, torch.full(box.piece.shape, math.nan))
                    part = flat[box.offset : box.offset + box.numel].view(box.shape)
                    whole[tuple(slice(*edge) for edge in box.box)] = part
        return found


def with_norms(norms: dict[str, str]) -> Callable[[Weights], Weights]:
    return lambda theirs: llama_like(theirs, LAYERS, norms)


MODELS: dict[str, tuple[str, dict[str, Any], str, Callable[[Weights], Weights]]] = {
    "GPT-2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_inner": 80, "n_positions": 64,
         "activation_function": "gelu_new", "attn_implementation": "eager"},
        "--max-position-embeddings 64",
        lambda theirs: gpt2(theirs, LAYERS),
    ),
    "GPT-2 with exact GELU": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_inner": 80, "n_positions": 64,
         "activation_function": "gelu", "attn_implementation": "eager"},
        "--max-position-embeddings 64 --no-bias-gelu-fusion",
        lambda theirs: gpt2(theirs, LAYERS),
    ),
    "Llama 3": (
        "LlamaForCausalLM",
        {**SHAPE, "num_key_value_heads": 2, "rope_parameters": ROPE3, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
        f"{LLAMA} {GQA} {UNTIED} --rotary-base 500000 --use-rope-scaling",
        with_norms(PRE_NORMS),
    ),
    "Llama with YaRN": (
        "LlamaForCausalLM",
        {**SHAPE, "num_key_value_heads": 1, "rope_parameters": YARN, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
        (f"{LLAMA} --group-query-attention --num-query-groups 1 {UNTIED} --position-embedding-type yarn"
        " --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"),
        with_norms(PRE_NORMS),
    ),
    "Qwen2": (
        "Qwen2ForCausalLM",
        {**SHAPE, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
        f"{LLAMA} {GQA} --add-qkv-bias --norm-epsilon 1e-6",
        with_norms(PRE_NORMS),
    ),
    "Qwen3": (
        "Qwen3ForCausalLM",
        {**SHAPE, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        f"{LLAMA} {GQA} --kv-channels 16 --qk-layernorm --norm-epsilon 1e-6 --rotary-base 1000000",
        with_norms({**PRE_NORMS, **QK_NORMS}),
    ),
    "Llama 4": (
        "Llama4ForCausalLM",
        {**SHAPE, "intermediate_size_mlp": 80, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-3, "moe_layers": [],
         "no_rope_layers": [1] * LAYERS, "attn_temperature_tuning": False, "use_qk_norm": True, "tie_word_embeddings": False,
         "pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        (f"{LLAMA} {GQA} {UNTIED} --kv-channels 16 --qk-l2-norm --norm-epsilon 1e-3 --rotary-base 500000"
         " --rotary-interleaved"),
        with_norms(LLAMA4_NORMS),
    ),
    "Gemma 2": (
        "Gemma2ForCausalLM",
        {**SHAPE, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "sliding_window": 7,
         "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
         "hidden_activation": "gelu_pytorch_tanh"},
        (f"--normalization RMSNorm --geglu --position-embedding-type rope --disable-bias-linear {GQA} --kv-channels 16"
        " --norm-epsilon 1e-6 --apply-layernorm-1p --norm-position both --embedding-multiplier 5.656854249492381"
        " --window-size 6,0 --window-attn-skip-freq 2 --softmax-scale 0.20412414523193154"
        " --attn-logit-softcapping 5 --final-logit-softcapping 3"),
        with_norms(GEMMA2_NORMS),
    ),
    "OLMo 2": (
        "Olmo2ForCausalLM",
        {**SHAPE, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        (f"{LLAMA} {GQA} {UNTIED} --norm-epsilon 1e-6 --norm-position post --qk-layernorm --qk-layernorm-width all_heads"
        " --rotary-base 500000"),
        with_norms(OLMO2_NORMS),
    ),
    "Nemotron": (
        "NemotronForCausalLM",
        {**SHAPE, "num_key_value_heads": 2, "hidden_act": "relu2", "norm_eps": 1e-5, "tie_word_embeddings": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        (f"{GQA} {UNTIED} --squared-relu --apply-layernorm-1p --disable-bias-linear --position-embedding-type rope"
        " --rotary-percent 0.5"),
        with_norms(PRE_NORMS),
    ),
    "SmolLM3": (
        "SmolLM3ForCausalLM",
        {**SHAPE, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "no_rope_layer_interval": 2, "pad_token_id": None,
         "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        f"{LLAMA} {GQA} --norm-epsilon 1e-6 --no-rope-freq 2",
        with_norms(PRE_NORMS),
    ),
    "Mistral": (
        "MistralForCausalLM",
        {**SHAPE, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "sliding_window": 5, "tie_word_embeddings": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        f"{LLAMA} {GQA} {UNTIED} --norm-epsilon 1e-6 --window-size 4,0",
        with_norms(PRE_NORMS),
    ),
    "Pythia": (
        "GPTNeoXForCausalLM",
        {**SHAPE, "hidden_act": "gelu", "tie_word_embeddings": False, "layer_norm_eps": 1e-5,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
        f"--use-parallel-residual --position-embedding-type rope --rotary-percent 0.25 --no-bias-gelu-fusion {UNTIED}",
        lambda theirs: gpt_neox(theirs, LAYERS, 4),
    ),
    "GPT-NeoX": (
        "GPTNeoXForCausalLM",
        {**SHAPE, "hidden_act": "gelu", "use_parallel_residual": False, "tie_word_embeddings": False,
         "layer_norm_eps": 1e-5,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
        f"--position-embedding-type rope --rotary-percent 0.25 --no-bias-gelu-fusion {UNTIED}",
        lambda theirs: gpt_neox(theirs, LAYERS, 4),
    ),
}  # fmt: skip


def with_norms_and_experts(norms: dict[str, str]) -> Callable[[Weights], Weights]:
    return lambda theirs: with_experts(theirs, LAYERS, norms)


EXPERTS = "--num-experts 6 --moe-router-topk 2 --moe-ffn-hidden-size 24"
MODELS_WITH_EXPERTS: dict[str, tuple[str, dict[str, Any], str, Callable[[Weights], Weights]]] = {
    "Mixtral": (
        "MixtralForCausalLM",
        {**SHAPE, "intermediate_size": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "num_local_experts": 6},
        f"{LLAMA} {GQA} {UNTIED} {EXPERTS} --rotary-base 1000000",
        with_norms_and_experts(PRE_NORMS),
    ),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        {**SHAPE, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "num_local_experts": 6,
         "moe_intermediate_size": 24, "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [0, 2],
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        (f"{LLAMA} {GQA} {UNTIED} {EXPERTS} --moe-layer-freq [0,1]*2 --kv-channels 16 --qk-layernorm --norm-epsilon 1e-6"
        " --rotary-base 1000000"),
        with_norms_and_experts({**PRE_NORMS, **QK_NORMS}),
    ),
    "Qwen2-MoE": (
        "Qwen2MoeForCausalLM",
        {**SHAPE, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "num_experts": 6, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 40, "num_experts_per_tok": 2, "norm_topk_prob": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        (f"{LLAMA} {GQA} {UNTIED} {EXPERTS} --add-qkv-bias --norm-epsilon 1e-6 --rotary-base 1000000"
        " --moe-router-pre-softmax --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate"),
        with_norms_and_experts(PRE_NORMS),
    ),
    "OLMoE": (
        "OlmoeForCausalLM",
        {**SHAPE, "intermediate_size": 24, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "num_experts": 6,
         "num_experts_per_tok": 2, "norm_topk_prob": False, "pad_token_id": None, "eos_token_id": None},
        f"{LLAMA} {UNTIED} {EXPERTS} --moe-router-pre-softmax --qk-layernorm --qk-layernorm-width all_heads",
        with_norms_and_experts({**PRE_NORMS, **QK_NORMS}),
    ),
    "Qwen3-Next": (
        "Qwen3NextForCausalLM",
        {**SHAPE, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "num_experts": 6,
         "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts_per_tok": 2,
         "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
         "linear_conv_kernel_dim": 3, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
         "linear_num_value_heads": 4, "linear_value_head_dim": 6,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}},
        (f"{LLAMA} {GQA} {UNTIED} {EXPERTS} --kv-channels 16 --qk-layernorm --apply-layernorm-1p --norm-epsilon 1e-6"
        " --attention-output-gate --rotary-base 10000000 --rotary-percent 0.25"
        " --experimental-attention-variant gated_delta_net --linear-attention-freq [1,1,0,1]"
        " --linear-conv-kernel-dim 3 --linear-num-key-heads 2 --linear-key-head-dim 8"
        " --linear-num-value-heads 4 --linear-value-head-dim 6"
        " --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate"),
        lambda theirs: qwen3_next(theirs, LAYERS, 4, 2),
    ),
    "GPT-OSS": (
        "GptOssForCausalLM",
        {**SHAPE, "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 6,
         "num_experts_per_tok": 2, "sliding_window": 8, "swiglu_limit": 0.3,
         "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False}},
        (f"{GQA} {UNTIED} {EXPERTS} --normalization RMSNorm --kv-channels 16"
        " --softmax-type learnable --window-size 7,0 --window-attn-skip-freq 2 --quick-geglu --glu-linear-offset 1"
        " --activation-func-clamp-value 0.3 --position-embedding-type yarn --rotary-base 150000"
        " --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16 --no-yarn-correction-range-round-to-int"),
        lambda theirs: gpt_oss(theirs, LAYERS),
    ),
}  # fmt: skip
MODELS |= MODELS_WITH_EXPERTS

LATENT_SIZES = {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
                "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}  # fmt: skip
LATENT_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}
LATENT_FLAGS = (
    f"{LLAMA} {UNTIED} --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 12 --qk-pos-emb-head-dim 8"
    " --v-head-dim 10 --qk-layernorm --norm-epsilon 1e-6"
)
DEEPSEEK_EXPERTS = "--num-experts 12 --moe-ffn-hidden-size 24 --moe-layer-freq [0]+[1]*3 --moe-router-topk 4"
MODELS |= {
    "DeepSeek-V2": (
        "DeepseekV2ForCausalLM",
        {**SHAPE, **LATENT_SIZES, "q_lora_rank": None, "n_routed_experts": 12, "moe_intermediate_size": 24,
         "n_shared_experts": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "topk_method": "greedy",
         "routed_scaling_factor": 1.5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        (f"{LATENT_FLAGS} --rope-type rope {DEEPSEEK_EXPERTS} --moe-router-pre-softmax"
         " --moe-router-topk-scaling-factor 1.5 --moe-shared-expert-intermediate-size 48"),
        with_norms_and_experts({**PRE_NORMS, **LATENTS}),
    ),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        {**SHAPE, **LATENT_SIZES, "q_lora_rank": 20, "n_routed_experts": 12, "moe_intermediate_size": 24,
         "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2,
         "num_mtp_layers": 0, "rope_parameters": LATENT_YARN},
        (f"{LATENT_FLAGS} --q-lora-rank 20 --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"
         f" --mscale 0.7 --mscale-all-dim 1.3 {DEEPSEEK_EXPERTS} --moe-router-score-function sigmoid"
         " --moe-router-num-groups 3 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5"
         " --moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 24"),
        with_norms_and_experts({**PRE_NORMS, **LATENTS}),
    ),
}  # fmt: skip


def reference(kind: str, settings: dict[str, Any]) -> tuple[Any, Tensor, Tensor]:
    """Build a model of transformers with random weights; return it with tokens and labels, [b, s]."""
    torch.manual_seed(0)
    config = getattr(transformers, kind).config_class(**settings)
    config._attn_implementation = settings["attn_implementation"]
    theirs = getattr(transformers, kind)(config).eval().float()
    tokens, labels = torch.randint(0, VOCAB, (2, 2, SEQ))
    with torch.no_grad():
        perturb(dict(theirs.named_parameters()))
    return theirs, tokens, labels


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_logits_and_gradients_are_those_of_the_reference(name: str) -> None:
    kind, settings, flags, renamed = MODELS[name]
    theirs, tokens, labels = reference(kind, settings)
    logits = theirs(tokens).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    ours = Ours(flags, renamed({k: v.detach() for k, v in theirs.state_dict().items()}))
    found = logits_of_heads(ours.model, tokens)[0]
    assert logits.std() > 0.1
    assert (found - logits).abs().max() < 1e-5 * max(1.0, logits.abs().max().item())
    expected = renamed(
        {k: v.grad for k, v in theirs.state_dict(keep_vars=True).items() if v.grad is not None}
    )
    largest = max(gradient.abs().max() for gradient in expected.values())
    for tensor, gradient in ours.gradients(tokens, labels).items():
        difference = (gradient - expected[tensor]).abs().max()
        assert difference <= 1e-4 * expected[tensor].abs().max() + 1e-6 * largest, tensor


@pytest.mark.parametrize("name", MODELS_WITH_EXPERTS)
@pytest.mark.filterwarnings("ignore")
def test_losses_of_routers_are_those_of_the_reference(name: str) -> None:
    """Compare losses layer by layer: theirs, over the tokens of all layers, is k times ours."""
    kind, settings, flags, renamed = MODELS_WITH_EXPERTS[name]
    theirs, tokens, labels = reference(kind, settings)
    out = theirs(tokens, output_router_logits=True)
    balance = import_module(theirs.__module__).load_balancing_loss_func
    expected = [balance((logits,), 6, 2) for logits in out.router_logits]
    loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
    (loss + 0.3 * sum(expected)).backward()
    gradients = renamed(
        {k: v.grad for k, v in theirs.state_dict(keep_vars=True).items() if v.grad is not None}
    )
    ours = Ours(
        f"{flags} --moe-aux-loss-coeff 0.6", renamed({k: v.detach() for k, v in theirs.state_dict().items()})
    )
    found = ours.gradients(tokens, labels)
    assert (ours.info.sums["lm_loss"] / ours.info.sums["tokens"] - loss).abs() < 1e-5
    aux_losses = [
        sums[ROUTER_METRICS.index("aux_loss")] for _, sums in sorted(ours.info.router_metrics.items())
    ]
    assert len(aux_losses) == len(expected)
    assert max(abs(2 * one - other) for one, other in zip(aux_losses, expected, strict=True)) < 1e-5
    routers = [tensor for tensor in found if "router" in tensor]
    assert sum(tensor.endswith("router.weight") for tensor in routers) == len(expected)
    for tensor in routers:
        difference = (found[tensor] - gradients[tensor]).abs().max()
        assert difference <= 1e-4 * gradients[tensor].abs().max(), tensor
