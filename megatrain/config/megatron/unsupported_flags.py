"""Flags of Megatron-LM whose features megatrain does not support.

`flags.py` defines the notation. Remove a flag here when a setting of its name is added.
"""

from typing import Final

from megatrain.config.megatron.answer import missing

UNSUPPORTED_FLAGS: Final = (
    # Parallelism
    missing(
        "interleaved gates of experts, and probabilities applied to their inputs, are not supported",
        "--moe-apply-probs-on-input --moe-mlp-glu-interleave-size= --moe-shared-expert-glu-interleave-size=",
    ),
    missing(
        "other dtypes of dispatched tokens are not supported",
        "--moe-dispatch-fwd-dtype=bf16 --moe-combine-bwd-dtype=bf16",
    ),
    missing(
        "recording or forcing routing decisions is not supported",
        "--moe-router-force-biased="
        " --moe-routing-trace-capture-hidden-states --moe-routing-trace-capture-logits"
        " --moe-routing-trace-dump-weights --moe-routing-trace-max-training-iters= --moe-routing-trace-path="
        " --save-tokens-per-expert-interval=",
    ),
    missing(
        "this way of splitting work across ranks is not supported",
        "--tensor-parallel-num-weight-shards=1 --expert-tensor-parallel-num-weight-shards=1"
        " --gtp-expert-remat-nccl-ub --gtp-remat-nccl-ub --gtp-remat-opt-in-modules=+"
        " --gtp-remat-reduce-scatter-with-fp32-accumulation",
        instead="remove the flag; use --tensor-model-parallel-size and --pipeline-model-parallel-size",
    ),
    missing(
        "keeping gathered weights between forward and backward, or sharding them across instances, is not"
        " supported",
        "--torch-fsdp2-no-reshard-after-forward --enable-full-sharding-in-hsdp",
        instead="remove the flag, or use --data-parallel-sharding-strategy optim_grads, which does not shard weights",
    ),
    missing(
        "choosing the arithmetic of the gradient reduction is not supported",
        "--ddp-reduce-scatter-with-fp32-accumulation --ddp-param-name-patterns-for-fp32-local-accumulation=+",
        instead="remove the flag; gradients are summed in fp32",
    ),
    # The model
    missing(
        "a cache of latents for text generation is not supported",
        "--cache-mla-latents",
        instead="remove the flag; training does not use it",
    ),
    missing(
        "this kind of multi-token prediction (MTP) is not supported",
        "--mtp-detach-heads --mtp-hsm --mtp-hybrid-override-pattern=",
        instead="remove the flag; a hybrid has the layers of a depth after / in --hybrid-layer-pattern",
    ),
    missing(
        "gated products of Householder matrices are not supported",
        "--gdp-cutedsl-kernel --gdp-num-chunk-states-to-recompute= --gdp-num-householder=",
    ),
    missing(
        "sharing selected keys between layers, and other kernels of sparse attention, are not supported",
        "--dsa-indexer-skip-topk-offset=0 --dsa-indexer-topk-freq=1 --dsa-kernel-backend=none",
        instead="remove the flag; every layer selects its keys, by plain operators",
    ),
    missing(
        "this position embedding is not supported",
        "--mrope-section=+",
        instead="remove the flag, and use --position-embedding-type rope",
    ),
    missing(
        "this kind of MLP is not supported",
        "--openai-gelu --use-te-activation-func --use-grouped-gemm-for-dense-mlp",
        instead="remove the flag, and use --swiglu",
    ),
    missing(
        "this kind of norm or residual connection is not supported",
        "--apply-residual-connection-post-layernorm --fused-residual-rmsnorm --enable-mhc-connections"
        " --mhc-init-gating-factor= --mhc-num-residual-streams= --mhc-recompute-layer-num="
        " --mhc-sinkhorn-iterations=",
    ),
    missing(
        "this weight initialization is not supported",
        "--init-method-xavier-uniform --no-initialization",
        instead="remove the flag, and use --init-method-std",
    ),
    # Data and tokenizers
    missing(
        "this shortcut for faster startup is not supported",
        "--dataloader-defer-npy-index-mmap --dataloader-fast-cache-load --per-dataset-sequences-path=",
        instead="remove the flag; sample indices are cached in --data-cache-path",
    ),
    missing(
        "this tokenizer option is not supported",
        "--tokenizer-sentencepiece-legacy"
        " --no-tokenizer-sentencepiece-ignore-extra-whitespaces"
        " --disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
    ),
    # Precision, memory, speed
    missing(
        "all-gathering weights in FP4 or MXFP8 and recipes of one's own are not supported",
        "--fp4-param-gather --fp4-quantizer-factory= --reuse-grad-buf-for-mxfp8-param-ag",
    ),
    missing(
        "this choice of quantized modules or kernels is not supported",
        "--fp8-output-proj --fp8-quantizer-factory=",
        instead="remove the flag; --te-precision-config-file chooses the FP8 recipe of single linear layers of transformer layers",
    ),
    missing(
        "master weights and gradient sums in a dtype other than fp32 are not supported",
        "--main-grads-dtype=fp32 --main-params-dtype=fp32",
    ),
    missing(
        "sharding saved activations across tensor-parallel ranks is not supported",
        "--distribute-saved-activations",
        instead="use --recompute-granularity; --sequence-parallel shards what is saved anyway",
    ),
    missing(
        "choosing this kernel is not supported",
        "--flash-attention-version= --use-kitchen-attention --kitchen-attention-backend="
        " --disable-bf16-reduced-precision-matmul --batch-invariant-backend="
        " --batch-invariant-mode",
    ),
    # Optimizer and schedule
    missing(
        "a run that trains no weight is not supported",
        "--freeze-all-layers",
        instead="use `megatrain cache-logits`, which stores a teacher's outputs, or --eval-only for losses",
    ),
    # Checkpoints
    missing(
        "overriding the number of the loaded iteration is not supported",
        "--override-ckpt-iteration=",
        instead="remove the flag; --ckpt-step chooses the checkpoint, and --finetune starts at iteration 0",
    ),
    missing(
        "saving gradients, activations or weights separately is not supported",
        "--save-activations-interval= --save-dgrads-interval= --save-params-interval= --save-wgrads-interval=",
    ),
    # The run and its logs
    missing(
        "this TensorBoard option is not supported",
        "--disable-log-loss-scale-to-tensorboard",
        instead="remove the flag; metrics.jsonl in --save (or --metrics-file) has the values",
    ),
    missing(
        "this profiling option is not supported",
        "--pytorch-profiler-collect-chakra",
    ),
    missing("OpenTelemetry is not supported", "--otel-enabled --otel-service-name= --otel-span-groups="),
)
