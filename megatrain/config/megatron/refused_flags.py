"""Flags of Megatron-LM that megatrain refuses by design, and flags of tasks that are not part of it.

`flags.py` defines the notation.
"""

from typing import Final

from megatrain.config.megatron.answer import refused

REFUSED_FLAGS: Final = (
    # Other names and old names
    refused(
        "this is an old name",
        "--checkpoint-activations",
        instead=(
            "use --recompute-activations, or --recompute-granularity full --recompute-method uniform"
            " --recompute-num-layers 1, which is equivalent"
        ),
    ),
    refused(
        "this is an old name",
        "--no-weight-decay-cond-type=",
        instead="remove the flag; norms and biases have no weight decay",
    ),
    # Different by design
    refused(
        "--load reads checkpoints of Megatron-LM as they are, and a command without GPUs converts them",
        "--ckpt-convert-format= --ckpt-convert-save=",
        instead="use `megatrain convert megatrain-to-megatron`, which writes the format torch_dist, after"
        " `megatrain convert megatron-to-megatrain` for a checkpoint of Megatron-LM; or --also-save torch_dist in a run",
    ),
    refused(
        "optimizer state in buckets, whose order only a model in the same layout knows, is not read",
        "--ckpt-convert-update-legacy-dist-opt-format",
        instead="remove the flag, and load the weights alone (--no-load-optim)",
    ),
    refused(
        "all replicas always start from the same weights",
        "--data-parallel-random-init",
        instead="remove the flag, and use --seed for other weights",
    ),
    refused(
        "the vocabulary is always padded",
        "--no-pad-vocab-size --disable-pad-vocab-size",
        instead="use --make-vocab-size-divisible-by 1, or --padded-vocab-size",
    ),
    refused(
        "tokenizers are loaded in another way",
        "--tokenizer-metadata= --tokenizer-hf-no-use-fast --use-gigatoken",
        instead="use --tokenizer-type and --tokenizer-model",
    ),
    refused(
        "nothing is sent to NVIDIA services",
        "--one-logger-async --one-logger-project= --one-logger-run-name= --app-tag-run-name="
        " --app-tag-run-version= --adlr-autoresume --adlr-autoresume-interval= --run-workload-inspector-server",
    ),
    # Not part of megatrain
    refused(
        "fault injection is not supported",
        "--fault-injector-delay-start-iteration="
        " --fault-injector-fault-delay= --fault-injector-fault-probabilities= --fault-injector-fault-types="
        " --fault-injector-mtti-seconds= --fault-injector-num-ranks= --fault-injector-offset-seconds="
        " --fault-injector-ranks= --fault-injector-seed=",
    ),
    refused(
        "the package nvidia-resiliency-ext is not used",
        "--enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters=",
        instead="use --inprocess-restart, or torchrun --max-restarts",
    ),
    refused(
        "a teacher's outputs are written by another command",
        "--logits-save-dir= --logits-save-dtype= --logits-save-top-k= --logits-save-top-p="
        " --logits-save-top-p-min-k=",
        instead="give --logits-save-dir, --logits-save-top-k and --logits-save-dtype to `megatrain cache-logits`",
    ),
    refused(
        "a record of a teacher's outputs that cannot be read ends the run", "--logits-load-ignore-errors"
    ),
    refused(
        "NVIDIA's multi-storage client is not supported",
        "--enable-msc",
        instead="remove the flag; data prefixes may be URLs that fsspec reads, such as s3://bucket/data, with"
        " --object-storage-cache-path",
    ),
    refused(
        "simulating process groups is not supported",
        "--fake-process-group",
        instead="use --dry-run with --world-size",
    ),
    refused(
        "a checkpoint must hold exactly the tensors of the model",
        "--no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load",
    ),
    refused(
        "retrieval models are not part of megatrain",
        "--sample-rate= --bert-load= --biencoder-projection-dim= --biencoder-shared-query-context-model"
        " --block-data-path= --embedding-path= --evidence-data-path= --ict-head-size= --ict-load="
        " --indexer-batch-size= --indexer-log-interval= --query-in-block-prob="
        " --retriever-report-topk-accuracies=+ --retriever-score-scaling --use-one-sent-docs"
        " --bert-embedder-type= --output-bert-embeddings",
    ),
    refused(
        "image classifiers and vision models without text are not part of megatrain",
        "--num-classes= --num-channels= --classes-fraction="
        " --data-per-class-fraction= --dino-bottleneck-size= --dino-freeze-last-layer= --dino-head-hidden-size="
        " --dino-local-crops-number= --dino-local-img-size= --dino-norm-last-layer --dino-teacher-temp="
        " --dino-warmup-teacher-temp= --dino-warmup-teacher-temp-epochs= --head-lr-mult= --iter-per-epoch="
        " --mask-factor= --mask-type= --swin-backbone-type= --vision-backbone-type= --vision-pretraining"
        " --vision-pretraining-type=",
        instead="remove the flag and train a GPT",
    ),
    refused(
        "serving a model is another command",
        "--inference-batch-times-seqlen-threshold= --inference-coordinator-port="
        " --inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens= --inference-cuda-graph-scope="
        " --inference-disable-ep-consensus --no-inference-disable-ep-consensus"
        " --inference-disable-triton-nvls-kernels --inference-dynamic-batching"
        " --inference-dynamic-batching-async-sched-mode= --inference-dynamic-batching-block-size="
        " --inference-dynamic-batching-buffer-size-gb="
        " --inference-dynamic-batching-cuda-graph-mixed-prefill-count="
        " --inference-dynamic-batching-cuda-graph-sizing-distribution= --inference-dynamic-batching-prefix-caching"
        " --no-inference-dynamic-batching-prefix-caching --inference-dynamic-batching-logprobs-mode="
        " --inference-dynamic-batching-mamba-memory-ratio= --inference-dynamic-batching-max-requests="
        " --inference-dynamic-batching-max-tokens= --inference-dynamic-batching-num-cuda-graphs="
        " --inference-dynamic-batching-paused-buffer-size-gb="
        " --inference-dynamic-batching-prefix-caching-coordinator-policy="
        " --inference-dynamic-batching-prefix-caching-eviction-policy="
        " --inference-dynamic-batching-prefix-caching-mamba-gb="
        " --inference-dynamic-batching-prefix-caching-routing-alpha="
        " --inference-dynamic-batching-sampling-backend= --inference-dynamic-batching-track-generated-token-events"
        " --inference-dynamic-batching-track-paused-request-events"
        " --inference-dynamic-batching-unified-memory-level= --inference-fuse-tp-communication"
        " --inference-grouped-gemm-backend= --inference-logging-step-interval= --inference-max-requests="
        " --inference-max-seq-length= --inference-moe-disable-fused-quant-kernels"
        " --inference-moe-token-dispatcher-type= --inference-shards= --inference-text-gen-server-logging"
        " --no-inference-text-gen-server-logging --inference-use-synchronous-zmq-collectives"
        " --no-inference-use-synchronous-zmq-collectives --inference-wandb-logging --no-inference-wandb-logging"
        " --mamba-inference-conv-states-dtype= --mamba-inference-ssm-states-dtype= --num-speculative-tokens="
        " --use-same-sampling-seed-across-dp-ranks --use-legacy-static-engine --decode-only-cuda-graphs"
        " --enable-chunked-prefill --flash-decode --mlp-chunks-for-prefill= --nccl-all-reduce-for-prefill",
        instead="remove the flag; megatrain serve --help lists the flags of the server",
    ),
    refused(
        "reinforcement learning is not part of pretraining",
        "--grpo-clamp-eps-lower= --grpo-clamp-eps-upper= --grpo-entropy-term-weight="
        " --grpo-filter-groups-with-same-reward --grpo-group-size= --grpo-iterations= --grpo-kl-beta="
        " --grpo-prompts-per-step= --langrl-env-config= --perform-rl-step --refit-method="
        " --rl-consumption-granularity= --rl-default-temperature= --rl-default-top-k= --rl-default-top-p="
        " --rl-durable-rollout-bank --rl-generation-lag= --rl-importance-sampling-truncation-coef="
        " --rl-inference-expert-model-parallel-size= --rl-inference-expert-tensor-model-parallel-size="
        " --rl-inference-logprobs-is-correction= --no-rl-inference-logprobs-is-correction="
        " --rl-inference-model-unified-memory-level= --rl-inference-parsers=+"
        " --rl-inference-pipeline-model-parallel-size= --rl-inference-tensor-model-parallel-size="
        " --rl-kv-cache-management-mode= --rl-max-inflight-requests="
        " --rl-offload-inference-model-weights-when-idle --no-rl-offload-inference-model-weights-when-idle"
        " --rl-offload-optimizer-during-inference --rl-partial-rollouts --no-rl-partial-rollouts"
        " --rl-persist-cuda-graphs= --no-rl-persist-cuda-graphs= --rl-profile --rl-profile-dir="
        " --rl-prompts-per-eval= --rl-rollout-bank-dir= --rl-rollout-bank-max-bytes= --rl-sequence-packing-algo="
        " --rl-sequence-packing-max-sequences-per-bin= --rl-skip-bos-token= --no-rl-skip-bos-token="
        " --rl-submission-granularity= --rl-training-cuda-graphs= --no-rl-training-cuda-graphs="
        " --rl-use-sequence-packing= --no-rl-use-sequence-packing= --no-rl-verify-model-weights-swap"
        " --rl-verify-model-weights-swap",
    ),
)
