"""The tiny models that parity runs: together they use every part of a layer spec."""

from __future__ import annotations

_GQA = "--group-query-attention --num-query-groups 24"
_NO_DROPOUT = "--hidden-dropout 0"
_LATENTS = "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 4"
_ROPE = "--position-embedding-type rope"

MODELS = {
    "llama": f"{_GQA} --normalization RMSNorm --swiglu {_ROPE} --disable-bias-linear {_NO_DROPOUT}",
    # Megatron-LM's defaults: LayerNorm, biases, tanh GELU, learned positions, dropout.
    "gpt2": "--max-position-embeddings 30 --hidden-dropout 0.1",
    "gemma2": (
        f"{_GQA} --normalization RMSNorm --geglu {_ROPE} --disable-bias-linear {_NO_DROPOUT} --apply-layernorm-1p "
        "--norm-position both --embedding-multiplier 7 --window-size 5,0 --window-attn-skip-freq 2 --softmax-scale 0.4 "
        "--attn-logit-softcapping 2 --final-logit-softcapping 3"
    ),
    "olmo2": (
        f"{_GQA} --normalization RMSNorm --swiglu {_ROPE} --disable-bias-linear {_NO_DROPOUT} --norm-position post "
        "--qk-layernorm --qk-layernorm-width all_heads --no-rope-freq 3 --window-size 9,0"
    ),
    "qwen": (
        f"{_GQA} --normalization RMSNorm --swiglu {_ROPE} --disable-bias-linear --add-qkv-bias --qk-layernorm "
        "--use-rope-scaling --hidden-dropout 0.2 --fp32-residual-connection --attention-output-gate"
    ),
    "gpt-oss": (
        f"{_GQA} --normalization RMSNorm --quick-geglu --activation-func-clamp-value 1 --glu-linear-offset 1 {_NO_DROPOUT} "
        "--qk-l2-norm --softmax-type learnable --window-size 6,0 --window-attn-skip-freq [1,0]*2 --position-embedding-type yarn "
        "--rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8 --no-yarn-correction-range-round-to-int"
    ),
    "nemotron": (
        f"--squared-relu --apply-layernorm-1p --disable-bias-linear {_ROPE} --rotary-percent 0.5 --rotary-interleaved "
        f"--rotary-seq-len-interpolation-factor 2 --softmax-type off-by-one --qk-layernorm {_NO_DROPOUT}"
    ),
    # muP at four times the base width, with every kind of parameter that has its own learning rate.
    "mup": (
        "--max-position-embeddings 30 --hidden-dropout 0 --use-mup --mup-base-hidden-size 12 "
        "--mup-base-head-dim 2 --mup-embedding-mult 3 --qk-layernorm --apply-wd-to-qk-layernorm --adam-eps 1e-4"
    ),
    # Layers of different sizes, with linear layers in place of an MLP and of attention, without an MLP, and without both.
    "puzzle": (
        f"--normalization RMSNorm --swiglu {_ROPE} --hidden-dropout 0.2 --attention-output-gate "
        "--heterogeneous-layers-config-encoded-json "
        '{"block_configs":['
        '{"attention":{"num_query_groups":1},"mlp":{"replace_with_linear":true}},'
        '{"attention":{"replace_with_linear":true},"ffn":{"ffn_hidden_size":192}},'
        '{"attention":{"n_heads_in_group":1},"ffn":{"no_op":true}},'
        '{"attention":{"no_op":true},"mlp":{"no_op":true}}]}'
    ),
    # Custom layers from a function, as `--spec` loads it from a user's file.
    "own": (
        f"{_GQA} --normalization RMSNorm --swiglu {_ROPE} --hidden-dropout 0.1 "
        "--spec megatrain.tools.parity.layers:mixed_layers"
    ),
    # Multi-latent attention: DeepSeek-V3's; and without a latent of queries and without norms, as variants of DeepSeek-V2.
    "mla": (
        f"--normalization RMSNorm --swiglu {_ROPE} --disable-bias-linear {_NO_DROPOUT} --qk-layernorm "
        f"{_LATENTS} --q-lora-rank 20 --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8 "
        "--mscale 0.7 --mscale-all-dim 1.3"
    ),
    "mlav2": f"--position-embedding-type none --hidden-dropout 0.1 {_LATENTS} --rope-type rope --rotary-percent 0.5",
    # Sparse attention: the indexer, which learns, selects few of the 24 keys; and with its other choices.
    "dsa": (
        f"--normalization RMSNorm --swiglu {_ROPE} --disable-bias-linear --hidden-dropout 0.1 --qk-layernorm "
        f"{_LATENTS} --q-lora-rank 20 --rope-type rope --experimental-attention-variant dsa --dsa-indexer-n-heads 3 "
        "--dsa-indexer-head-dim 8 --dsa-indexer-topk 5 --dsa-indexer-loss-coeff 0.5"
    ),
    "dsafull": (
        f"--position-embedding-type none --hidden-dropout 0 {_LATENTS} --rope-type rope --experimental-attention-variant dsa "
        "--dsa-indexer-n-heads 2 --dsa-indexer-head-dim 6 --dsa-indexer-topk 9 --dsa-indexer-loss-coeff 0.5 "
        "--dsa-indexer-use-sparse-loss --dsa-indexer-rope-interleaved --no-dsa-indexer-scoring-relu"
    ),
    # Linear attention in every other layer.
    "qwen3-next": (
        f"{_GQA} --normalization RMSNorm --swiglu {_ROPE} --disable-bias-linear {_NO_DROPOUT} --apply-layernorm-1p "
        "--rotary-percent 0.5 --attention-output-gate --init-method-std 0.1 "
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-conv-kernel-dim 3 "
        "--linear-num-key-heads 24 --linear-key-head-dim 8 --linear-num-value-heads 48 --linear-value-head-dim 4"
    ),
    # Layers of one part: Mamba-2, a delta net of the second variant, attention, an MLP or experts.
    "hybrid": (
        f"--model-family hybrid --hybrid-layer-pattern MG*- --normalization RMSNorm --swiglu --disable-bias-linear {_GQA} "
        f"{_NO_DROPOUT} --position-embedding-type none --init-method-std 0.1 --mamba-num-heads 48 --mamba-head-dim 2 "
        "--mamba-num-groups 24 --mamba-state-dim 3 --experimental-attention-variant gdn2 --linear-num-key-heads 24 "
        "--linear-key-head-dim 8 --linear-num-value-heads 48 --linear-value-head-dim 4"
    ),
    # Mamba-2 without its norm and attention, both after one norm.
    "falcon-h1": (
        f"--model-family hybrid --hybrid-layer-pattern P-P- --normalization RMSNorm --swiglu --disable-bias-linear {_GQA} {_ROPE} "
        f"{_NO_DROPOUT} --init-method-std 0.1 --mamba-num-heads 24 --mamba-head-dim 2 --mamba-num-groups 24 --mamba-state-dim 3 "
        "--mamba-without-rmsnorm"
    ),
    "neox": (
        f"--no-bias-gelu-fusion --position-embedding-type none {_NO_DROPOUT} --embedding-init-method-std 0.3 "
        "--use-parallel-residual"
    ),
    # Attention to all tokens, padding, token types; the head's transform and bias, with and without a next-sentence head.
    "bert": "--model-family bert --max-position-embeddings 30 --hidden-dropout 0.1 --mask-prob 0.3",
    "mlm": f"--model-family bert --bert-no-binary-head --mask-prob 0.3 {_GQA} --normalization RMSNorm --swiglu {_ROPE} {_NO_DROPOUT}",
    # Two stacks of two layers each.
    "t5": "--model-family t5 --encoder-num-layers 2 --decoder-seq-length 16 --max-position-embeddings 30 --hidden-dropout 0.1",
    "t5relative": (
        "--model-family t5 --encoder-num-layers 2 --decoder-seq-length 16 --position-embedding-type relative "
        "--relative-attention-num-buckets 8 --relative-attention-max-distance 12 --normalization RMSNorm --swiglu "
        f"--disable-bias-linear {_NO_DROPOUT}"
    ),
    # A tower like the language model, with two images a sample; a frozen tower; a projector alone that is trained.
    "vlm": (
        "--model-family vlm --vision-num-layers 3 --max-position-embeddings 30 --hidden-dropout 0 --img-h 8 --img-w 12 "
        "--patch-dim 4 --images-per-sample 2 --disable-vision-class-token --dataloader-seq-length 12"
    ),
    # Packed conversations with three tiles a sample, whose patches are joined to squares, and a newline in place of the last; a tower that tensor ranks hold whole.
    "tiles": (
        f"--model-family vlm {_GQA} --normalization RMSNorm --swiglu {_ROPE} --disable-bias-linear {_NO_DROPOUT} "
        "--vision-num-layers 4 --vision-model-type internvit300M --vision-hidden-size 24 --vision-num-attention-heads 3 --img-h 8 "
        "--img-w 12 --patch-dim 2 --disable-vision-class-token --pixel-shuffle --images-per-sample 3 "
        "--image-grid-pinpoints 8x24 --dataloader-seq-length 3 --use-packed-sequence --spread-images"
    ),
    "llava": (
        f"--model-family vlm --normalization RMSNorm --swiglu {_ROPE} --disable-bias-linear {_NO_DROPOUT} --vision-num-layers 2 "
        "--vision-model-type clip --vision-hidden-size 48 --vision-num-attention-heads 24 --vision-ffn-hidden-size 72 "
        "--img-h 8 --img-w 12 --patch-dim 4 --dataloader-seq-length 17 --vision-final-norm --freeze-vit"
    ),
    "projector": (
        f"--model-family vlm {_GQA} {_ROPE} {_NO_DROPOUT} --vision-num-layers 1 --vision-model-type siglip "
        "--vision-hidden-size 24 --vision-num-attention-heads 24 --vision-projection-type affine --vision-projection-norm "
        "--img-h 8 --img-w 12 --patch-dim 4 --dataloader-seq-length 18 --freeze-vit --freeze-lm"
    ),
}
"""Flags by model name; all models have the same sizes."""

OF_FAMILIES = {
    "bert": "bert", "mlm": "bert", "t5": "t5", "t5relative": "t5",
    "vlm": "vlm", "tiles": "vlm", "llava": "vlm", "projector": "vlm",
}  # fmt: skip
"""Models of other families than GPT, with the family."""
OF_FOUR_LAYERS = ("deepseek", "latentexperts")
"""Experts in a list of four layers, which a model with another number of layers in one of its stacks (T5) cannot have."""
IMAGES = {"vlm": (2, 6), "tiles": (3, 6), "llava": (1, 7), "projector": (1, 6)}
"""Images of a sample, and the tokens of an image."""
IMAGE_SIZE = (8, 12)


def flags_of_hybrid(flags: str, *, has_experts: bool, num_depths: int) -> str:
    """Return the flags of a hybrid whose pattern has experts in place of MLPs, and heads of an attention layer and that one."""
    if "--hybrid-layer-pattern " not in flags:
        return flags
    last, (before, flag, after) = "E" if has_experts else "-", flags.partition("--hybrid-layer-pattern ")
    pattern, *others = after.split(" ")
    return " ".join((before + flag + pattern.replace("-", last) + f"/*{last}" * num_depths, *others))
