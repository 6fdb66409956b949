"""Flags of Megatron-LM that are ignored with a note: megatrain always does what they ask for, or they have no meaning here.

`flags.py` defines the notation.
"""

from typing import Final

from megatrain.config.megatron.answer import accepted

ACCEPTED_FLAGS: Final = (
    # The model
    accepted("no program of Megatron-LM reads this flag", "--titles-data-path=*"),
    accepted("megatrain has one model definition", "--use-mcore-models"),
    accepted(
        "T5 always has the 100 sentinels of its tokenizer, as in Megatron-LM",
        "--vocab-extra-ids=*",
    ),
    accepted(
        "--attention-backend selects the attention kernel, and auto is the fastest available one",
        "--use-flash-attn",
    ),
    accepted("the attention softmax is always computed in fp32", "--attention-softmax-in-fp32"),
    accepted(
        "attention scores are always kept in fp32, so only rounding would differ",
        "--apply-query-key-layer-scaling",
    ),
    accepted(
        "the output layer and its loss are always computed together, in chunks", "--cross-entropy-loss-fusion"
    ),
    accepted("there is one implementation of the loss", "--cross-entropy-fusion-impl=native"),
    accepted("the loss is always computed in fp32", "--output-logit-dtype=fp32 --fp16-lm-cross-entropy"),
    accepted(
        "the implementation decides which operations are fused; only rounding may differ",
        "--no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion"
        " --no-persist-layer-norm --no-gradient-accumulation-fusion --no-gradient-reduce-div-fusion"
        " --no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding --disable-jit-fuser",
    ),
    accepted(
        "the down-projections of multi-latent attention are always one product", "--mla-down-proj-fusion"
    ),
    accepted(
        "initial weights depend on --seed only, not on the device or the layout",
        "--use-cpu-initialization --init-model-with-meta-device",
    ),
    accepted(
        "the random number generators have no state to track", "--te-rng-tracker --inference-rng-tracker"
    ),
    accepted(
        "m in --pipeline-model-parallel-layout alone decides the stage of multi-token prediction",
        "--mtp-standalone",
    ),
    accepted("every feature has its own flag", "--enable-experimental"),
    accepted(
        "--position-embedding-type alone names the position embedding (none: there is none)",
        "--no-position-embedding",
    ),
    accepted(
        "the scan of Mamba-2 saves the states that its backward pass reads", "--disable-mamba-mem-eff-path"
    ),
    accepted("the states of Mamba-2 are in fp32", "--mamba-training-ssm-states-dtype=fp32|float32"),
    accepted(
        "the indexer of sparse attention is not rotated: an orthogonal matrix changes none of its scores, so only rounding differs",
        "--no-dsa-indexer-rotate-activation --disable-dsa-indexer-rotate-activation",
    ),
    accepted("norms are always computed in fp32", "--dsa-indexer-k-norm-fp32"),
    # Experts
    accepted(
        "expert GEMMs are always grouped in bf16, and run one by one in other dtypes",
        "--moe-grouped-gemm --moe-single-grouped-weight --moe-single-grouped-bias --moe-use-grouped-tensor"
        " --use-grouped-gemm-for-shared-expert",
    ),
    accepted(
        "the implementation decides which expert operations are fused; only rounding may differ",
        "--moe-permute-fusion --moe-router-fusion --use-fused-weighted-squared-relu",
    ),
    accepted(
        "DeepEP and HybridEP are not used: the all-to-all of megatrain sends a token once to each rank with some of its experts,"
        " or where it saves time once to each host (--moe-alltoall-ranks-per-host), and receives one sum from it",
        "--moe-flex-dispatcher-backend=* --moe-flex-dispatcher-num-sms=* --moe-enable-deepep --moe-deepep-num-sms=*"
        " --moe-hybridep-num-sms=* --moe-hybridep-num-sms-preprocessing=* --moe-hybridep-num-blocks-permute=*"
        " --moe-hybridep-num-blocks-unpermute=* --moe-hybridep-pad-uneven-dispatch-inputs"
        " --moe-permute-fusion-into-hybridep --moe-ncclep-zero-copy",
    ),
    accepted(
        "weight gradients of experts always overlap the communication of their inputs' gradients",
        "--overlap-dispatch-backward-with-experts-wgrad",
    ),
    accepted("Megatron-LM does not read it either", "--fp8-interval=*"),
    accepted(
        "the transposed casts of weights stay in memory for an iteration, unless weights are sharded",
        "--keep-fp8-transpose-cache",
    ),
    accepted(
        "grouped products of experts take any number of rows",
        "--moe-router-padding-for-quantization --moe-router-padding-for-fp8",
    ),
    # Parallelism
    accepted(
        "the all-gather and the reduction in the backward pass of a column-parallel layer always overlap with its"
        " GEMMs",
        "--no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad"
        " --disable-tp-comm-bulk-wgrad",
    ),
    accepted(
        "NCCL is configured by its own environment variables (NCCL_ALGO, NCCL_NVLS_ENABLE, NCCL_COLLNET_ENABLE)",
        "--use-sharp --sharp-enabled-group=* --disable-symmetric-registration --create-all-gather-group"
        " --symmetric-ar-type=* --ddp-pad-buckets-for-high-nccl-busbw --pipeline-model-parallel-comm-backend=*"
        " --use-ring-exchange-p2p",
        grade="cost",
    ),
    accepted("the model is always built after the process groups", "--lazy-mpu-init"),
    accepted(
        "the PyTorch allocator keeps freed memory for the next step (PYTORCH_CUDA_ALLOC_CONF configures it)",
        "--empty-unused-memory-level=*",
    ),
    accepted(
        "Muon always gathers whole matrices on one rank, under any layout",
        "--muon-tp-mode=duplicated|distributed",
        instead="remove the flag; orthogonalizing blocks of a matrix would be a different optimizer for each layout",
    ),
    accepted(
        "inference and reinforcement learning choose what is recorded and replayed; training, with recomputed layers too, is the"
        " same without it",
        "--moe-enable-routing-replay",
    ),
    accepted("it changes how a product is computed, not its result", "--muon-use-syrk"),
    accepted("optimizer shards have the same layout for all optimizers", "--no-use-layer-wise-param-layout"),
    accepted(
        "--exp-avg-dtype and --exp-avg-sq-dtype work without it, and without the distributed optimizer",
        "--use-precision-aware-optimizer",
    ),
    accepted(
        "transfers of --optimizer-cpu-offload always overlap with its updates",
        "--overlap-cpu-optimizer-d2h-h2d",
    ),
    accepted(
        "--optimizer-cpu-offload pins memory for two buckets in flight, never for all",
        "--no-pin-cpu-grads --no-pin-cpu-params",
    ),
    accepted(
        "offloaded activations always keep their pinned buffers, and one copy to the host is in flight when the next begins",
        "--cpu-offloading-retain-pinned-cpu-buffers --fine-grained-offloading-max-inflight-offloads=*",
    ),
    accepted(
        "--optimizer-cpu-offload always uses PyTorch operations", "--use-torch-optimizer-for-cpu-offload"
    ),
    accepted(
        "gradients are always accumulated in fp32 or fp64, and reduced in the same dtype without"
        " --grad-reduce-in-bf16",
        "--accumulate-allreduce-grads-in-fp32 --megatron-fsdp-main-grads-dtype=auto|fp32"
        " --megatron-fsdp-main-params-dtype=auto|fp32",
        instead="remove the flag",
    ),
    accepted(
        "gradients are reduced in fp32, their accumulation dtype, without --grad-reduce-in-bf16",
        "--megatron-fsdp-grad-comm-dtype=auto|fp32",
        instead="use --grad-reduce-in-bf16 for bf16",
    ),
    accepted(
        "losses are scaled beforehand, so a sum over replicas is an average", "--ddp-average-in-collective"
    ),
    accepted(
        "megatrain shards layer by layer, with memory for two layers in flight",
        "--megatron-fsdp-version=1|2 --fsdp-double-buffer --fsdp-manual-registration"
        " --fsdp-db-use-persist-buf-on-alloc-fail --megatron-fsdp-max-pool-double-buffer"
        " --megatron-fsdp-enable-fine-grained-param-gather --suggested-communication-unit-size=*"
        " --outer-dp-sharding-strategy=no_shard",
        instead="use --num-distributed-optimizer-instances; state is not sharded across instances",
    ),
    accepted("a bucket holds the gradients of one layer", "--ddp-bucket-size=* --ddp-num-buckets=*"),
    accepted(
        "each pipeline stage reduces gradients and gathers weights as soon as it can",
        "--no-align-grad-reduce --disable-align-grad-reduce --no-align-param-gather",
    ),
    accepted(
        "--overlap-param-gather, on by default, starts as soon as a layer is updated",
        "--overlap-param-gather-with-optimizer-step",
    ),
    accepted(
        "--overlap-p2p-communication, on by default, posts all receives ahead, also at the start and the end of a step",
        "--overlap-p2p-communication-warmup-flush",
    ),
    accepted("process groups use only the backend of --distributed-backend", "--disable-gloo-process-groups"),
    accepted(
        "the head maps the files of a teacher's outputs into memory, and reads the records of its micro-batch",
        "--logits-load-decode-threads=* --logits-load-prefetch-factor=* --logits-load-msc-prefetch-depth=*",
    ),
    accepted("--profile always uses the PyTorch profiler", "--use-pytorch-profiler"),
    accepted("the launcher sets LOCAL_RANK", "--local-rank=*"),
    # Data and tokenizers
    accepted("the data loader never builds an attention mask", "--no-create-attention-mask-in-dataloader"),
    accepted("one thread per rank builds the datasets", "--num-dataset-builder-threads=1"),
    accepted(
        "the code that comes with a tokenizer is never run, only its files are read", "--trust-remote-code"
    ),
    accepted("Multi-Storage Client is not used", "--disable-msc"),
    # Checkpoints
    accepted(
        "--load recognises checkpoints of Megatron-LM by their files; checkpoints are saved in megatrain's own format"
        " (safetensors and a JSON manifest), which every layout can load; --also-save torch_dist copies them for Megatron-LM",
        "--ckpt-format=torch_dist|torch|torch_dcp|fsdp_dtensor --dist-ckpt-format=torch_dist|torch|torch_dcp|zarr"
        " --use-dist-ckpt --auto-detect-ckpt-format --dist-ckpt-optim-fully-reshardable"
        " --distrib-optim-fully-reshardable-mem-efficient --ckpt-fully-parallel-load-exchange-algo=*"
        " --ckpt-fully-parallel-load-per-rank-objects --ckpt-fully-parallel-load-process-group=*"
        " --ckpt-fully-parallel-save-process-group=* --ckpt-pg-tensors-cache-create --ckpt-pg-tensors-cache-path=*"
        " --ckpt-drop-redundant-extra-state --dist-ckpt-workers=* --no-ckpt-load-validate-sharding-integrity"
        " --disable-ckpt-load-validate-sharding-integrity",
        instead="remove the flag, or use torch_dist",
    ),
    accepted(
        "each rank always writes only its own shards and reads only what it needs",
        "--ckpt-fully-parallel-save --no-ckpt-fully-parallel-save --ckpt-fully-parallel-load",
    ),
    accepted(
        "the layout determines what each rank saves, and there is no plan to cache",
        "--ckpt-assume-constant-structure",
    ),
    accepted(
        "a checkpoint must hold exactly the tensors of the model, as with raise_all",
        "--dist-ckpt-strictness=assume_ok_unexpected|log_unexpected|log_all|raise_unexpected|raise_all",
    ),
    accepted(
        "checkpoints have the fp32 master weights, which are always loaded", "--load-main-params-from-ckpt"
    ),
    accepted("every rank always writes its own shards", "--non-persistent-local-ckpt-algo=*"),
    accepted(
        "--async-save always copies the state to shared host memory, and one process per rank writes it during the"
        " whole run",
        "--use-persistent-ckpt-worker --async-strategy=nvrx|mcore --async-ckpt-use-cpu-shm",
    ),
    accepted("checksums are always written, and verified on load", "--verify-integrity"),
    accepted(
        "a checkpoint has no RNG state: random numbers follow from --seed and the iteration",
        "--no-load-rng --no-save-rng",
    ),
    accepted(
        "a checkpoint stores the settings and the fingerprint of its tokenizer, not the files, and flags take precedence",
        "--no-use-tokenizer-model-from-checkpoint-args --disable-use-tokenizer-model-from-checkpoint-args"
        " --no-save-tokenizer-assets --disable-save-tokenizer-assets",
    ),
    # The run
    accepted("messages have no levels", "--logging-level=*"),
    accepted(
        "metrics.jsonl and status.json in --save always have progress and memory of every iteration",
        "--log-progress --log-memory-interval=* --log-device-memory-used",
    ),
    accepted(
        "the plan printed at start and config.yaml in --save have the whole configuration",
        "--dump-param-to-param-group-map=* --config-logger-dir=*",
    ),
    accepted("it is for Megatron-LM's own tests", "--test-mode"),
    accepted(
        "SIGTERM, SIGINT, SIGUSR1 and SIGHUP always save a checkpoint and exit",
        "--exit-signal-handler --exit-signal-handler-for-training",
    ),
    accepted(
        "data is prefetched by threads, which end with their rank", "--exit-signal-handler-for-dataloader"
    ),
    accepted(
        "--log-straggler reports slow ranks during the whole run, and no port is opened to switch it",
        "--disable-straggler-on-startup --straggler-ctrlr-port=*",
    ),
    accepted(
        "--inprocess-restart needs no other intervals: the end of a connection reports the end of a process",
        "--inprocess-granularity= --inprocess-heartbeat-interval= --inprocess-heartbeat-timeout="
        " --inprocess-last-call-wait= --inprocess-monitor-process-interval= --inprocess-monitor-thread-interval="
        " --inprocess-progress-watchdog-interval= --inprocess-completion-timeout= --inprocess-termination-grace-time=",
    ),
    accepted(
        "--inprocess-restart always frees cached GPU memory before it continues",
        "--inprocess-empty-cuda-cache",
    ),
    accepted("no barrier is used for timing", "--no-barrier-with-level-1-timing"),
    accepted("nothing is sent to NVIDIA one-logger", "--no-one-logger"),
    accepted(
        "Megatron-LM does not read it either",
        "--max-tokens-to-oom=* --dist-ckpt-save-pre-mcore-014 --onnx-safe=*",
    ),
)
